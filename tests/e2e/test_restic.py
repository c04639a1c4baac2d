"""A guest whose copies are in a repository of restic, on a server that permits only additions."""

import shutil
import socket
import subprocess

import pytest
from guests.disks import Disk, destroy
from guests.guest import Guest
from support import (
    BUNDLES,
    accepting,
    assert_clean,
    assert_restored,
    must,
    one_line_error,
    run,
    snaporch,
    wait_for,
)

pytestmark = pytest.mark.timeout(400)

DATASETS = ["tank/stored", "flash/stored"]
DISKS = [Disk("file", DATASETS[0]), Disk("zvol", DATASETS[1])]
PORT = 8410
CONFIG = """
[policy.hourly]
every = "1h"
domains = ["stored"]
replicate = ["cloud"]
keep = {{ last = 5 }}

[replica.cloud]
engine = "restic"
environment_file = "{place}/environment"
password_file = "{place}/password"
chain = 5
"""
WORDS = ("--from", "cloud", "--yes", "--quiet", *accepting("stored"), "--json")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """The directory of the repository, and what restic needs to open it."""
    place = tmp_path_factory.mktemp("there")
    variables = {
        "RESTIC_REPOSITORY": f"rest:http://127.0.0.1:{PORT}/",
        "RESTIC_PASSWORD_FILE": str(place / "password"),
    }
    for name, text in (
        ("password", "open sesame\n"),
        ("environment", f"RESTIC_REPOSITORY={variables['RESTIC_REPOSITORY']}\n"),
        ("snaporch.toml", CONFIG.format(place=place)),
    ):
        (place / name).write_text(text)
        (place / name).chmod(0o600)
    words = ["rclone", "serve", "restic", "--append-only", "--addr", f"127.0.0.1:{PORT}"]
    server = subprocess.Popen([*words, str(place / "repository")], stderr=subprocess.DEVNULL)
    try:
        wait_for(_answers, "the server")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SNAPORCH_CONFIG", str(place / "snaporch.toml"))
            patch.setenv("RESTIC_CACHE_DIR", str(place / "cache"))
            restic(variables, "init")
            yield place / "repository", variables
    finally:
        server.terminate()
        server.wait()


def _answers():
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", PORT)) == 0


def restic(variables, *words):
    done = run("restic", *words, env=variables)
    assert done.status == 0, done.err
    return done.out


def take(guest):
    """A snapshot that was replicated; the guest has counted on since then."""
    outcome = snaporch("snapshot", guest.name, "--policy", "hourly", "--json")
    assert outcome.status == 0, outcome.err
    name = outcome.json["snapshot"]
    guest.wait_count(beyond=guest.snapshot_count(name) + 5)
    outcome = snaporch("replicate", guest.name, "--json")
    assert outcome.status == 0, outcome.err
    assert outcome.json[0]["arrived"][-1:] == [name]
    return name


def damage(place):
    """Flip a bit in the first stream's pack; return what restores it."""
    packs = [path for path in (place / "data").rglob("*") if path.is_file()]
    large = [path for path in packs if path.stat().st_size > 1 << 11]  # the others have trees
    first = min(large, key=lambda path: path.stat().st_mtime_ns)
    data = first.read_bytes()
    first.chmod(0o600)
    first.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
    return lambda: first.write_bytes(data)


def test_a_lost_guest_comes_back_and_damage_is_found_before_anything_is_here(repository):
    place, variables = repository
    guest = Guest.create("stored", disks=DISKS)
    try:
        first, last = take(guest), take(guest)
        assert first != last
        outcome = snaporch("verify", "--on", "cloud", f"{guest.name}@{last}")
        assert outcome.status == 0, outcome.err
        expected, mark = guest.snapshot_count(last), guest.mark()
        uuid = must("virsh", "domuuid", guest.name).strip()
        guest.destroy()
        must("virsh", "undefine", "--nvram", guest.name)
        for dataset in DATASETS:
            destroy(dataset)
        shutil.rmtree(BUNDLES / uuid)
        shutil.rmtree(place.parent / "cache", ignore_errors=True)

        repair = damage(place)
        outcome = snaporch("rebuild", guest.name, *WORDS[:-1])
        one_line_error(outcome, 8, "did not come back", "ciphertext verification failed")
        assert run("virsh", "dominfo", guest.name).status != 0
        assert run("zfs", "list", DATASETS[0]).status != 0
        assert run("zfs", "get", "-Ho", "value", "volmode", DATASETS[1]).out in ("", "none\n")
        assert not (BUNDLES / uuid).exists()
        repair()

        outcome = snaporch("rebuild", guest.name, *WORDS)
        assert outcome.status == 0, outcome.err
        (document,) = outcome.json
        assert (document["snapshot"], document["resumed"]) == (last, True)
        assert_restored(guest, mark, expected)
        assert_clean(guest)
        again = take(guest)
        assert again not in (first, last)

        listed = restic(variables, "snapshots", "--json", "--tag", "kind=stream")
        assert listed.count('"kind=stream"') == 2 * 3
    finally:
        guest.remove()


def test_the_server_keeps_what_restic_would_forget(repository):
    """restic 0.18 exits with 0 although it was not permitted."""
    _, variables = repository
    for tag in ("kept", "kept"):
        words = ("backup", "--quiet", "--tag", tag, "/etc/hostname")
        assert run("restic", *words, env=variables).status == 0
    listed = restic(variables, "snapshots", "--json", "--tag", "kept")
    done = run("restic", "forget", "--tag", "kept", "--keep-last", "1", env=variables)
    assert "unable to remove" in done.out + done.err
    assert restic(variables, "snapshots", "--json", "--tag", "kept") == listed


def test_check_finds_what_restic_lacks(repository, tmp_path):
    place, _ = repository
    password = place.parent / "password"
    password.chmod(0o644)
    try:
        outcome = snaporch("check", "--json")
        assert "may be read or written by others" in outcome.out
        one_line_error(
            snaporch("rebuild", "none", *WORDS), 7, "may be read or written by others", "chmod 600"
        )
    finally:
        password.chmod(0o600)
    outcome = snaporch("check", "--json")
    assert "may be read or written" not in outcome.out
    assert "replica-unreachable" not in outcome.out
