"""Encrypt and decrypt files with the command ``age`` (https://age-encryption.org/v1).

Encrypting needs public keys only. An identity, the private key, is read where it is: ``age`` opens
the file. One that is protected by a passphrase is decrypted once, into memory.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from snaporch.command_log import LoggedCommand
from snaporch.errors import RefusedError, SnaporchError
from snaporch.private_files import sha256_of
from snaporch.remote_host import check_installed, search_path

COMMAND = "age"
_BLOCK = 1 << 20
_MAX_IDENTITY = 1 << 16
"""Bytes of a file of identities; one has about 200."""
_PROTECTED = (b"age-encryption.org/", b"-----BEGIN AGE ENCRYPTED FILE-----")
_ERROR = "age: error: "
_FILE_STEP = "name the file that age-keygen wrote: --identity FILE"
_CHUNK, _TAG = 1 << 16, 16
"""``age`` adds a tag to each chunk (https://c2sp.org/age)."""
_WRITE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class AgeError(SnaporchError):
    """``age`` failed, or what it read or wrote is not what it should be."""


class Digest(NamedTuple):
    """The size and the SHA-256 of a file."""

    bytes: int
    sha256: str


OnBlock = Callable[[int], None]
"""Is called with the bytes of plain text so far; an exception ends ``age``."""


def check_recipients(recipients: Sequence[str]) -> None:
    """Check that ``age`` is installed, and encrypts for these public keys.

    Raises:
        UnavailableError: it is not installed.
        AgeError: it refuses a key.
    """
    check_installed(COMMAND)
    with tempfile.TemporaryFile() as target, _running(_encrypt(recipients), target) as writer:
        writer.flush()


def encrypt(
    source: Path, target: Path, recipients: Sequence[str], on_block: OnBlock
) -> tuple[Digest, Digest]:
    """Encrypt a file; the result is on stable storage.

    Args:
        source: the plain text.
        target: does not exist; root alone may read it.
        recipients: public keys, of which each identity decrypts.
        on_block: see :data:`OnBlock`.

    Returns:
        What the plain text was, and what the result is.

    Raises:
        AgeError: it failed.
        OSError: a file cannot be read or written.
    """
    digest, done = hashlib.sha256(), 0
    with (
        source.open("rb") as stream,
        os.fdopen(os.open(target, _WRITE, 0o600), "r+b") as output,
    ):
        with _running(_encrypt(recipients), output) as writer:
            while block := stream.read(_BLOCK):
                writer.write(block)
                digest.update(block)
                done += len(block)
                on_block(done)
        os.fsync(output.fileno())
    size = target.stat().st_size
    if size < done + _TAG * max(-(-done // _CHUNK), 1):
        raise AgeError(source.name, "is not whole when it is encrypted")
    return Digest(done, digest.hexdigest()), Digest(size, sha256_of(target))


class Identity:
    """The private keys that decrypt bundles, in a file that is read where it is.

    Args:
        path: the file, as ``age-keygen`` wrote it, or a private key of ssh.

    Raises:
        UnavailableError: ``age`` is not installed.
        RefusedError: the file cannot be read, or its passphrase is wrong.
    """

    def __init__(self, path: Path) -> None:
        check_installed(COMMAND)
        self._path = path
        self._memory: int | None = None
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as stream:
                begin = stream.read(_MAX_IDENTITY + 1)
        except OSError as error:
            raise self._refused(error.strerror or "cannot be read") from error
        if not begin or len(begin) > _MAX_IDENTITY:
            raise self._refused("is no file of identities")
        if begin.startswith(_PROTECTED):
            self._memory = self._opened()

    def _refused(self, reason: str, step: str = _FILE_STEP) -> RefusedError:
        return RefusedError(str(self._path), reason, step)

    def _opened(self) -> int:
        """The identities of a protected file, in memory; ``age`` asks for the passphrase."""
        words = [COMMAND, "--decrypt", str(self._path)]
        done = subprocess.run(  # it asks on the terminal, /dev/tty
            words, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=_environment()
        )
        if done.returncode != 0:
            step = "run the command again at a terminal, and type the passphrase of this file"
            raise self._refused(_reason(done.stderr), step)
        memory = os.memfd_create("identity")
        os.write(memory, done.stdout[: _MAX_IDENTITY + 1])
        return memory

    def close(self) -> None:
        """Forget what was decrypted."""
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None

    def decrypt(self, source: Path, target: Path, plain: Digest, on_block: OnBlock) -> None:
        """Decrypt a file; the result is on stable storage, and is what it should be.

        Args:
            source: the encrypted file.
            target: does not exist; root alone may read it.
            plain: what the result must be.
            on_block: see :data:`OnBlock`.

        Raises:
            AgeError: no identity decrypts it, it was changed, or the result is something else.
            OSError: a file cannot be read or written.
        """
        digest = hashlib.sha256()
        with (
            source.open("rb") as stream,
            os.fdopen(os.open(target, _WRITE, 0o600), "r+b") as output,
        ):
            done = 0
            for block in self._blocks(stream, source.name):
                done += len(block)
                if done > plain.bytes:
                    break
                digest.update(block)
                output.write(block)
                on_block(done)
            output.flush()
            os.fsync(output.fileno())
        if (done, digest.hexdigest()) != plain:
            raise AgeError(source.name, "is not what the manifest says, when it is decrypted")

    def decrypt_small(self, data: bytes, name: str, plain: Digest) -> bytes:
        """Decrypt the content of a small file.

        Args:
            data: the encrypted content.
            name: of the file, for errors.
            plain: what the result must be.

        Raises:
            AgeError: no identity decrypts it, it was changed, or the result is something else.
        """
        with tempfile.TemporaryFile() as stream:  # of what is encrypted
            stream.write(data)
            stream.seek(0)
            found = b""
            for block in self._blocks(stream, name):
                found += block
                if len(found) > plain.bytes:
                    break
        if (len(found), hashlib.sha256(found).hexdigest()) != plain:
            raise AgeError(name, "is not what the manifest says, when it is decrypted")
        return found

    def _blocks(self, stream: IO[bytes], name: str) -> Iterator[bytes]:
        """The plain text of a stream; it counts only if this ends without an error."""
        memory = self._memory
        file = f"/proc/self/fd/{memory}" if memory is not None else str(self._path)
        words = [COMMAND, "--decrypt", "--identity", file]
        kept = () if memory is None else (memory,)

        def failure(reason: str) -> AgeError:
            step = "name the file of the identity that it was encrypted for: --identity FILE"
            return AgeError(name, f"cannot be decrypted: {reason}", step)

        with (
            _started(words, failure, stream, subprocess.PIPE, kept) as process,
            process.stdout as output,  # type: ignore[union-attr]
        ):
            while block := output.read(_BLOCK):
                yield block


def _encrypt(recipients: Sequence[str]) -> list[str]:
    return [COMMAND, "--encrypt", *(word for each in recipients for word in ("-r", each))]


@contextmanager
def _running(words: Sequence[str], output: IO[bytes]) -> Iterator[IO[bytes]]:
    """What ``age`` reads; its end is waited for.

    Raises:
        AgeError: it failed.
    """

    def failure(reason: str) -> AgeError:
        return AgeError(COMMAND, f"cannot encrypt: {reason}")

    with (
        _started(words, failure, subprocess.PIPE, output) as process,
        suppress(BrokenPipeError),  # its status says why
    ):
        try:
            yield process.stdin  # type: ignore[misc]
        finally:
            process.stdin.close()  # type: ignore[union-attr]


@contextmanager
def _started(
    words: Sequence[str],
    failure: Callable[[str], AgeError],
    stdin: IO[bytes] | int,
    stdout: IO[bytes] | int,
    kept: Sequence[int] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """``age``, whose end is waited for; an error in the block ends it.

    Args:
        words: the command.
        failure: the error, by the reason that it prints.
        stdin: what it reads.
        stdout: what it writes to.
        kept: file descriptors that it inherits.
    """
    with LoggedCommand(*words) as log, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            words, stdin=stdin, stdout=stdout, stderr=errors, pass_fds=kept, env=_environment()
        )
        try:
            yield process
            status = process.wait()
        finally:
            process.kill()
            process.wait()
        log.exited(status)
        errors.seek(0)
        if status != 0:
            raise failure(_reason(errors.read(_BLOCK)))


def _environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C", "PATH": search_path()}


def _reason(errors: bytes) -> str:
    lines = errors.decode("utf-8", "replace").splitlines()
    own = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
    return (own or lines or ["no output"])[0][:300]
