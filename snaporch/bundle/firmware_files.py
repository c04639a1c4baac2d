"""Small files of the host that an emulator owns: UEFI variables and TPM state.

Whether they can be saved is checked by :mod:`snaporch.snapshot.firmware_blockers`, and whether they
can be put back by :mod:`snaporch.restore.firmware_checks`.

The emulator may also own the directories of these files, and directories above them. So any name on
the path may be a link to anywhere, and may be replaced at any moment. Therefore this module works
on open files only, in directories that it reached through no link but root's.
"""

from __future__ import annotations

import errno
import os
import pwd
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from snaporch.errors import SnaporchError
from snaporch.model import TpmState


class HostFileError(SnaporchError):
    """The file is not a regular file of a sensible size, or its path is not trustworthy."""


LIMIT_BYTES = 64 << 20
"""Far more than the variables of any firmware or the state of any TPM."""
PERMANENT_SUFFIX = ".permall"
"""The suffix of the part of a TPM's state that a cold boot needs."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PATH_ONLY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DATA_MODE = 0o666
"""No file of data is run by anyone, least of all as its owner."""
_MAX_LINKS = 40
"""The kernel's limit (path_resolution(7))."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SWTPM = re.compile(r"tpm2?-00\.(permall|volatilestate|savestate)")
"""The names of swtpm's files. Other files in its directory do not belong to the TPM."""


LIBVIRT_SETTINGS = Path("/etc/libvirt/qemu.conf")
_USER = re.compile(r'^\s*swtpm_user\s*=\s*"\+?([^"]+)"', re.MULTILINE)
_DEFAULT_USER = "tss"
"""libvirt's own; if there is no such user, root (qemu_conf.c)."""


@contextmanager
def trusted_directory(path: Path, *, make: bool = False) -> Iterator[int]:
    """Open a directory without following a link that an emulator could have planted.

    Args:
        make: create missing directories.

    Yields: a descriptor of the directory.

    Raises:
        HostFileError: a link on the path is not root's, or lies in a directory that others write
            to.
        OSError: the directory does not exist or cannot be opened.
    """
    todo = list(reversed(path.parts[1:]))
    here = os.open("/", _PATH_ONLY)
    links = 0
    try:
        while todo:
            name = todo.pop()
            try:
                there = _open_child(here, name, make=make)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR) or not _is_link(here, name):
                    raise
                links += 1
                if links > _MAX_LINKS or not _is_trusted(here):
                    raise HostFileError(
                        str(path), f"{name} in its path is a link of another user"
                    ) from error
                target = Path(os.readlink(name, dir_fd=here))
                there = os.open("/", _PATH_ONLY) if target.is_absolute() else os.dup(here)
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


def _open_child(here: int, name: str, *, make: bool) -> int:
    try:
        return os.open(name, _PATH_ONLY, dir_fd=here)
    except FileNotFoundError:
        if not make:
            raise
    os.mkdir(name, 0o755, dir_fd=here)
    return os.open(name, _PATH_ONLY, dir_fd=here)


def _is_link(here: int, name: str) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode)


def _is_trusted(descriptor: int) -> bool:
    """Whether only root and this process's user can create names in a directory."""
    status = os.fstat(descriptor)
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & _OTHERS_WRITE


def open_without_atime(path: str, flags: int, *, dir_fd: int | None = None) -> int:
    """Open a file for reading without updating its access time, which would write to its dataset.

    Raises:
        OSError: it cannot be opened.
    """
    try:
        return os.open(path, flags | os.O_NOATIME, dir_fd=dir_fd)
    except PermissionError:  # only the owner may use O_NOATIME, or CAP_FOWNER: open(2)
        return os.open(path, flags, dir_fd=dir_fd)


def read_host_file(path: Path, limit: int = LIMIT_BYTES) -> tuple[bytes, os.stat_result]:
    """Read a regular file that has one name and at most ``limit`` bytes.

    Returns: its content and its status.

    Raises:
        HostFileError: it is a link, a FIFO or the like, or too large. Or it has another name, and
            so may be a hard link to a file of root's (without ``fs.protected_hardlinks``).
        OSError: it cannot be read.
    """
    try:
        with trusted_directory(path.parent) as directory:
            descriptor = open_without_atime(path.name, _READ, dir_fd=directory)
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
        raise HostFileError(str(path), "has more than one name (a hard link)")
    with os.fdopen(descriptor, "rb") as stream:
        data = b"" if status.st_size > limit else stream.read(limit + 1)
        if status.st_size > limit or len(data) > limit:
            raise HostFileError(str(path), f"is larger than {limit >> 20} MiB")
        return data, status


def tpm_files(state: TpmState | None, suffix: str = "") -> list[Path]:
    """The files of a TPM's state: the one file, or swtpm's files in the state's directory.

    Args:
        state: where the state is; ``None`` for a guest without a TPM.
        suffix: return only files of a directory whose names end like this.

    Raises:
        HostFileError: see :func:`trusted_directory`.
        OSError: the directory cannot be read.
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


def swtpm_owner(settings: Path = LIBVIRT_SETTINGS) -> tuple[int, int]:
    """The user and group that swtpm runs as on this host.

    Args:
        settings: libvirt's ``qemu.conf``.
    """
    text = ""
    with suppress(OSError):
        text = settings.read_text("utf-8", "replace")
    found = _USER.findall(text)
    try:
        user = pwd.getpwnam(found[-1] if found else _DEFAULT_USER)
    except KeyError:
        return 0, 0
    return user.pw_uid, user.pw_gid


def is_swtpm_file(name: str) -> bool:
    """Whether swtpm names a file of its state like this."""
    return _SWTPM.fullmatch(name) is not None


def replace_host_file(
    place: Path, data: bytes, uid: int | None, gid: int | None, mode: int | None
) -> None:
    """Create or replace the file ``place``, in one step, with ``data``.

    Missing directories are created.

    Args:
        uid: owner of the file; with ``gid`` and ``mode``, or else root's and 0600.
        mode: bits that allow to run the file are removed.

    Raises:
        HostFileError: see :func:`trusted_directory`; or ``place`` is a directory.
        OSError: it cannot be written; a previous file is unchanged.
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
    """Create a file in an open directory, on stable storage; mode 0600 and root's by default."""
    descriptor = os.open(name, _CREATE, 0o600, dir_fd=directory)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            if uid is not None and gid is not None and mode is not None:
                os.fchown(descriptor, uid, gid)
                os.fchmod(descriptor, mode & _DATA_MODE)
            os.fsync(descriptor)
    except BaseException:
        os.unlink(name, dir_fd=directory)
        raise
