"""Small files of the host that an emulator owns: UEFI variables, the state of a TPM.

Their directories are the emulator's too, so any name in them may lead anywhere, and be another file
a moment later: what is done, is done to a file that is open.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

from snaporch.errors import SnaporchError
from snaporch.model import TpmState


class HostFileError(SnaporchError):
    """It is not what such a file is."""


LIMIT_BYTES = 64 << 20
"""No firmware's variables and no TPM's state come near it."""
PERMANENT = "*.permall"
"""In the directory of a TPM's state, what a cold boot needs."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def read_host_file(path: Path, limit: int = LIMIT_BYTES) -> tuple[bytes, os.stat_result]:
    """What is in a regular file of at most ``limit`` bytes, and its status.

    Raises:
        HostFileError: it is a link, a FIFO or anything else, or too large.
        OSError: it cannot be read.
    """
    try:
        descriptor = os.open(path, _READ)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise HostFileError(str(path), "is not a regular file") from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise HostFileError(str(path), "is not a regular file")
    with os.fdopen(descriptor, "rb") as stream:
        data = b"" if status.st_size > limit else stream.read(limit + 1)
        if status.st_size > limit or len(data) > limit:
            raise HostFileError(str(path), f"is larger than {limit >> 20} MiB")
        return data, status


def tpm_files(state: TpmState | None, pattern: str = "*") -> list[Path]:
    """What there is of a TPM's state: its file, or those in its directory that match ``pattern``.

    Raises:
        OSError: its directory cannot be read.
    """
    if state is None:
        return []
    path = Path(state.path)
    if state.is_file:
        return [path] if os.path.lexists(path) else []
    return sorted(path.glob(pattern)) if path.is_dir() else []


def put_host_file(
    place: Path, data: bytes, uid: int | None, gid: int | None, mode: int | None
) -> None:
    """Have ``data`` at ``place`` and nothing of what was there; the name changes hands at once."""
    directory = os.open(place.parent, _DIRECTORY)
    fresh = f".{place.name}.{secrets.token_hex(8)}"
    try:
        try:
            _make(directory, fresh, data, uid, gid, mode)
        except BaseException:
            os.unlink(fresh, dir_fd=directory)
            raise
        os.replace(fresh, place.name, src_dir_fd=directory, dst_dir_fd=directory)
        os.fsync(directory)
    finally:
        os.close(directory)


def _make(
    directory: int, name: str, data: bytes, uid: int | None, gid: int | None, mode: int | None
) -> None:
    """A new file in an open directory, on stable storage; 0600 and root's unless said otherwise."""
    descriptor = os.open(name, _CREATE, 0o600, dir_fd=directory)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)
        stream.flush()
        if uid is not None and gid is not None and mode is not None:
            os.fchown(descriptor, uid, gid)
            os.fchmod(descriptor, mode)
        os.fsync(descriptor)
