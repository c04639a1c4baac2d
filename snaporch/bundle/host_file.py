"""Small files of the host that an emulator owns: UEFI variables, the state of a TPM.

Their directories are the emulator's too, and so may be those above, so any name on the way may lead
anywhere, and be another file a moment later: what is done, is done to a file that is open, in a
directory that was reached through no link but root's.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from snaporch.errors import SnaporchError
from snaporch.model import TpmState


class HostFileError(SnaporchError):
    """It is not what such a file is."""


LIMIT_BYTES = 64 << 20
"""No firmware's variables and no TPM's state come near it."""
PERMANENT = ".permall"
"""How the name of that part of a TPM's state ends that a cold boot needs."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WAY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_LINKS = 40
"""As the kernel (path_resolution(7))."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SWTPM = re.compile(r"tpm2?-00\.(permall|volatilestate|savestate)")
"""What swtpm calls its files; whatever else is in its directory is not the TPM's."""


@contextmanager
def trusted_directory(path: Path, *, make: bool = False) -> Iterator[int]:
    """A descriptor of a directory, reached through no link that an emulator could have planted.

    Args:
        make: what is missing of it is made.

    Raises:
        HostFileError: a link on the way is not root's, or in a directory that others write to.
        OSError: it is not there.
    """
    todo = list(reversed(path.parts[1:]))
    here = os.open("/", _WAY)
    links = 0
    try:
        while todo:
            name = todo.pop()
            try:
                there = _step(here, name, make=make)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR) or not _is_link(here, name):
                    raise
                links += 1
                if links > _MAX_LINKS or not _is_trusted(here):
                    raise HostFileError(str(path), f"{name} on the way to it is a link") from error
                target = Path(os.readlink(name, dir_fd=here))
                there = os.open("/", _WAY) if target.is_absolute() else os.dup(here)
                todo += reversed([part for part in target.parts if part != "/"])
            os.close(here)
            here = there
        descriptor = os.open(".", _DIRECTORY, dir_fd=here)
    finally:
        os.close(here)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _step(here: int, name: str, *, make: bool) -> int:
    try:
        return os.open(name, _WAY, dir_fd=here)
    except FileNotFoundError:
        if not make:
            raise
    os.mkdir(name, 0o755, dir_fd=here)
    return os.open(name, _WAY, dir_fd=here)


def _is_link(here: int, name: str) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode)


def _is_trusted(descriptor: int) -> bool:
    """Whether root alone, or we, put names into a directory."""
    status = os.fstat(descriptor)
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & _OTHERS_WRITE


def open_unmarked(path: str, flags: int, *, dir_fd: int | None = None) -> int:
    """Open a file to read, without a new access time: that is a write to its dataset.

    Raises:
        OSError: it cannot be opened.
    """
    try:
        return os.open(path, flags | os.O_NOATIME, dir_fd=dir_fd)
    except PermissionError:  # its owner alone may, and CAP_FOWNER: open(2)
        return os.open(path, flags, dir_fd=dir_fd)


def read_host_file(path: Path, limit: int = LIMIT_BYTES) -> tuple[bytes, os.stat_result]:
    """What is in a regular file of at most ``limit`` bytes and one name, and its status.

    Raises:
        HostFileError: it is a link, a FIFO or anything else, or too large, or another name of some
            file, which may be root's (without ``fs.protected_hardlinks``).
        OSError: it cannot be read.
    """
    try:
        with trusted_directory(path.parent) as directory:
            descriptor = open_unmarked(path.name, _READ, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise HostFileError(str(path), "is not a regular file") from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise HostFileError(str(path), "is not a regular file")
    if status.st_nlink > 1:
        os.close(descriptor)
        raise HostFileError(str(path), "has more than one name")
    with os.fdopen(descriptor, "rb") as stream:
        data = b"" if status.st_size > limit else stream.read(limit + 1)
        if status.st_size > limit or len(data) > limit:
            raise HostFileError(str(path), f"is larger than {limit >> 20} MiB")
        return data, status


def tpm_files(state: TpmState | None, suffix: str = "") -> list[Path]:
    """What there is of a TPM's state: its file, or swtpm's in its directory that end in ``suffix``.

    Raises:
        HostFileError: see :func:`trusted_directory`.
        OSError: its directory cannot be read.
    """
    if state is None:
        return []
    try:
        with trusted_directory(state.directory) as directory:
            names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    path = Path(state.path)
    if state.is_file:
        return [path] if path.name in names else []
    return [path / name for name in names if _SWTPM.fullmatch(name) and name.endswith(suffix)]


def put_host_file(
    place: Path, data: bytes, uid: int | None, gid: int | None, mode: int | None
) -> None:
    """Have ``data`` at ``place`` and nothing of what was there; the name changes hands at once.

    Directories that are missing are made.

    Raises:
        HostFileError: see :func:`trusted_directory`; or a directory is in its place.
        OSError: it cannot be written; what was there is there.
    """
    fresh = f".snaporch.{secrets.token_hex(8)}"
    with trusted_directory(place.parent, make=True) as directory:
        _make(directory, fresh, data, uid, gid, mode)
        try:
            os.replace(fresh, place.name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError as error:
            os.unlink(fresh, dir_fd=directory)
            if error.errno == errno.EISDIR:
                raise HostFileError(str(place), "is a directory", "move it away") from error
            raise
        os.fsync(directory)


def _make(
    directory: int, name: str, data: bytes, uid: int | None, gid: int | None, mode: int | None
) -> None:
    """A new file in an open directory, on stable storage; 0600 and root's unless said otherwise."""
    descriptor = os.open(name, _CREATE, 0o600, dir_fd=directory)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            if uid is not None and gid is not None and mode is not None:
                os.fchown(descriptor, uid, gid)
                os.fchmod(descriptor, mode)
            os.fsync(descriptor)
    except BaseException:
        os.unlink(name, dir_fd=directory)
        raise
