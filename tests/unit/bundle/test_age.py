"""Both the fake command and the real one, where it is installed, do what the module relies on."""

import hashlib
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import age_command

from snaporch.bundle.age import AgeError, Digest, Identity, check_recipients, encrypt
from snaporch.errors import RefusedError, UnavailableError

NONE = {"on_block": lambda _done: None}
REAL = shutil.which("age")


def digest(data):
    return Digest(len(data), hashlib.sha256(data).hexdigest())


@pytest.fixture(
    params=[
        "fake",
        pytest.param("real", marks=pytest.mark.skipif(not REAL, reason="age is not installed")),
    ]
)
def keys(request, tmp_path, monkeypatch):
    """A function that writes an identity into a file, and returns its recipient."""
    if request.param == "fake":
        place = tmp_path / "bin"
        place.mkdir()
        monkeypatch.setenv("PATH", f"{age_command.install(place)}:{os.environ['PATH']}")
        numbers = iter(range(99))
        return lambda path: age_command.write_identity(path, next(numbers))

    def generate(path):
        subprocess.run(["age-keygen", "-o", path], check=True, capture_output=True)
        text = path.read_text()
        return text.partition("# public key: ")[2].split()[0]

    return generate


@pytest.fixture
def made(keys, tmp_path):
    """Two identities, and an encrypted file for the first."""
    first, second = tmp_path / "first", tmp_path / "second"
    recipient = keys(first)
    keys(second)
    plain, target = tmp_path / "plain", tmp_path / "plain.age"
    data = os.urandom(200_000)
    plain.write_bytes(data)
    assert encrypt(plain, target, [recipient], **NONE) == (
        digest(data),
        digest(target.read_bytes()),
    )
    return first, second, target, data


def test_what_is_encrypted_comes_back(made, tmp_path):
    identity, _, target, data = made
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    back = tmp_path / "back"
    seen = []
    Identity(identity).decrypt(target, back, digest(data), seen.append)
    assert back.read_bytes() == data
    assert stat.S_IMODE(back.stat().st_mode) == 0o600
    assert seen[-1] == len(data)


def test_each_of_several_recipients_decrypts(keys, tmp_path):
    files = [tmp_path / name for name in ("a", "b")]
    recipients = [keys(each) for each in files]
    (tmp_path / "plain").write_bytes(b"secret")
    encrypt(tmp_path / "plain", tmp_path / "x.age", recipients, **NONE)
    encrypted = (tmp_path / "x.age").read_bytes()
    for file in files:
        assert Identity(file).decrypt_small(encrypted, "x.age", digest(b"secret")) == b"secret"


def test_it_is_different_each_time(made, keys, tmp_path):
    recipient = keys(tmp_path / "third")
    results = [
        encrypt(tmp_path / "plain", tmp_path / name, [recipient], **NONE)[1] for name in ("a", "b")
    ]
    assert results[0].bytes == results[1].bytes
    assert results[0].sha256 != results[1].sha256


def test_another_identity_decrypts_nothing(made, tmp_path):
    _, other, target, data = made
    with pytest.raises(AgeError, match=r"no identity matched.*--identity FILE"):
        Identity(other).decrypt(target, tmp_path / "back", digest(data), lambda _done: None)
    with pytest.raises(AgeError, match="no identity matched"):
        Identity(other).decrypt_small(target.read_bytes(), target.name, digest(data))


@pytest.mark.parametrize("place", [-1, 100_000, 0])
def test_a_changed_byte_is_an_error(made, tmp_path, place):
    identity, _, target, data = made
    changed = bytearray(target.read_bytes())
    changed[place] ^= 1
    target.write_bytes(changed)
    with pytest.raises(AgeError, match="cannot be decrypted"):
        Identity(identity).decrypt(target, tmp_path / "back", digest(data), lambda _done: None)


@pytest.mark.parametrize("expected", [b"other", b""])
def test_something_else_than_expected_is_an_error(made, tmp_path, expected):
    identity, _, target, _ = made
    with pytest.raises(AgeError, match="not what the manifest says"):
        Identity(identity).decrypt(target, tmp_path / "back", digest(expected), lambda _done: None)
    assert (tmp_path / "back").stat().st_size <= len(expected)
    with pytest.raises(AgeError, match="not what the manifest says"):
        Identity(identity).decrypt_small(target.read_bytes(), target.name, digest(expected))


def test_a_target_that_exists_is_not_written(made, tmp_path):
    _, _, target, _ = made
    before = target.read_bytes()
    with pytest.raises(FileExistsError):
        encrypt(tmp_path / "plain", target, ["age1" + "q" * 58], **NONE)
    assert target.read_bytes() == before


def test_a_signal_ends_it(made, keys, tmp_path):
    def stop(_done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encrypt(tmp_path / "plain", tmp_path / "x.age", [keys(tmp_path / "third")], stop)


def test_a_key_with_a_mistake_is_refused(keys, tmp_path):
    good = keys(tmp_path / "third")
    check_recipients([good])
    with pytest.raises(AgeError, match="cannot encrypt: "):
        check_recipients([f"{good[:-1]}b"])


def test_without_the_command_the_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="apt install age"):
        check_recipients(["age1" + "q" * 58])


@pytest.mark.parametrize("content", [None, b"", b"x" * 70_000])
def test_what_is_no_file_of_identities_is_refused(keys, tmp_path, content):
    path = tmp_path / "identity"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RefusedError, match="--identity FILE"):
        Identity(path)
    with pytest.raises(RefusedError):
        Identity(Path("/"))


def at_a_terminal(words, *answers):
    """Run a command that asks on the terminal; return its exit status."""
    script = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    text = "".join(f"{each}\n" for each in answers).encode()
    command = [sys.executable, "-c", script, *map(str, words)]
    return subprocess.run(command, input=text, capture_output=True, check=False).returncode


@pytest.mark.skipif(not REAL, reason="age is not installed")
def test_an_identity_with_a_passphrase_is_asked_for_once(tmp_path):
    key, protected, plain = (tmp_path / name for name in ("key", "key.age", "plain"))
    subprocess.run(["age-keygen", "-o", key], check=True, capture_output=True)
    plain.write_bytes(b"secret")
    recipient = key.read_text().partition("# public key: ")[2].split()[0]
    encrypt(plain, tmp_path / "x.age", [recipient], **NONE)
    words = ["age", "--passphrase", "--output", str(protected), str(key)]
    assert at_a_terminal(words, "open sesame", "open sesame") == 0
    key.unlink()
    script = (
        "import sys; from pathlib import Path; from snaporch.bundle.age import Digest, Identity;"
        "key = Identity(Path(sys.argv[1])); data = Path(sys.argv[2]).read_bytes();"
        "plain = Digest(6, sys.argv[3]);"
        "assert key.decrypt_small(data, 'x', plain) == key.decrypt_small(data, 'x', plain)"
    )
    words = [sys.executable, "-c", script, protected, tmp_path / "x.age", digest(b"secret").sha256]
    assert at_a_terminal(words, "open sesame") == 0
    assert at_a_terminal(words, "wrong") == 1


@pytest.mark.skipif(not REAL, reason="age is not installed")
def test_without_a_terminal_the_next_step_is_to_use_one(tmp_path):
    key, protected = tmp_path / "key", tmp_path / "key.age"
    subprocess.run(["age-keygen", "-o", key], check=True, capture_output=True)
    words = ["age", "--passphrase", "--output", str(protected), str(key)]
    assert at_a_terminal(words, "open sesame", "open sesame") == 0
    script = (
        "import sys; from pathlib import Path; from snaporch.bundle.age import Identity;"
        "from snaporch.errors import RefusedError\n"
        "try: Identity(Path(sys.argv[1]))\n"
        "except RefusedError as error: print(error.line())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, protected],
        capture_output=True,
        check=True,
        text=True,
        start_new_session=True,
    )
    assert done.stdout.startswith(f"{protected}: ")
    assert (
        "run the command again at a terminal, and type the passphrase of this file" in done.stdout
    )
