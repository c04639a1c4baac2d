"""A FUSE mount that this process serves: the directory, the calls of the kernel, the loop.

Only root can open what is mounted. Programs, devices and setuid bits have no effect there. The
mount is removed after the block; if this process is killed, a dead mount stays.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from snaporch.errors import RefusedError, RunFailedError, UnavailableError
from snaporch.extract.fuse_messages import REQUEST_BYTES

DEVICE = Path("/dev/fuse")
KIND = "fuse.snaporch"
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _NOSYMFOLLOW, _NOATIME = 1, 2, 4, 8, 256, 1024
_SAFE = _RDONLY | _NOSUID | _NODEV | _NOEXEC | _NOATIME
_DETACH, _NOFOLLOW = 2, 8
_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount that waits to be served."""

    thing: str
    """The subject of errors."""
    descriptor: int
    """Of ``/dev/fuse``."""

    def serve(self, answer: Callable[[bytes], bytes | None], check: Callable[[], None]) -> None:
        """Answer requests until the file system is unmounted.

        Args:
            answer: the answer to a request; None if it has none.
            check: is called often; raises to stop.

        Raises:
            RunFailedError: the kernel refuses an answer, or does not go on.
        """
        try:
            while True:
                check()
                if select.select([self.descriptor], [], [], _POLL_SECONDS)[0]:
                    with suppress(BlockingIOError, FileNotFoundError):  # who asked has gone
                        found = answer(os.read(self.descriptor, REQUEST_BYTES))
                        if found is not None:
                            os.write(self.descriptor, found)
        except OSError as error:
            if error.errno != errno.ENODEV:
                reason = f"can no longer be shown ({error.strerror})"
                raise RunFailedError(self.thing, reason) from error


def check_mount_point(directory: Path) -> None:
    """Check that a file system can be mounted on a directory.

    Raises:
        RefusedError: it does not exist, is a link, is not empty, or has a mount.
        UnavailableError: the kernel has no FUSE.
    """
    os.close(_opened(directory))
    os.close(_device())


def _opened(directory: Path) -> int:
    name, quoted = str(directory), shlex.quote(str(directory))
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise RefusedError(name, "does not exist", f"mkdir {quoted}") from error
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            reason = "is a mount whose command has ended"
            raise RefusedError(name, reason, f"umount {quoted}") from error
        raise RefusedError(name, "is not a directory, or is a link") from error
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        _check_free(directory, descriptor)
        stack.pop_all()
    return descriptor


def _check_free(directory: Path, descriptor: int) -> None:
    if os.path.ismount(directory):
        raise RefusedError(str(directory), "is a mount point already", "take another directory")
    if os.listdir(descriptor):
        raise RefusedError(str(directory), "is not empty", "take an empty directory")


def _device() -> int:
    try:
        return os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = f"cannot be opened ({error.strerror})"
        raise UnavailableError(str(DEVICE), reason, "modprobe fuse") from error


@contextmanager
def mounted(thing: str, directory: Path, *, follow_links: bool) -> Iterator[Mount]:
    """Mount a file system, read-only, that is served in the block.

    Args:
        thing: its name, which ``findmnt`` shows.
        directory: where; see :func:`check_mount_point`.
        follow_links: whether the kernel follows links in it.

    Raises:
        RefusedError, UnavailableError: as :func:`check_mount_point`.
        RunFailedError: the kernel refuses it.
    """
    with ExitStack() as stack:
        place = _opened(directory)
        stack.callback(os.close, place)
        descriptor = _device()
        stack.callback(os.close, descriptor)
        # the same directory, whatever has its name by now
        path = os.readlink(f"/proc/self/fd/{place}")
        options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0,default_permissions"
        flags = _SAFE | (0 if follow_links else _NOSYMFOLLOW)
        try:
            _call("mount", thing, f"/proc/self/fd/{place}", KIND, flags, options)
        except OSError as error:
            reason = f"cannot be mounted on {directory} ({error.strerror})"
            raise RunFailedError(thing, reason) from error
        stack.callback(_unmount, path, descriptor)
        yield Mount(thing, descriptor)


def _unmount(path: str, descriptor: int) -> None:
    """Take the mount away, unless it has gone; who has a file of it open gets an error."""
    try:
        os.read(descriptor, REQUEST_BYTES)  # a request is not answered any more
    except OSError as error:
        if error.errno == errno.ENODEV:
            return
    with suppress(OSError):
        _call("umount2", path, _DETACH | _NOFOLLOW)


def _call(name: str, *arguments: str | int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    words = [
        ctypes.c_ulong(each) if isinstance(each, int) else os.fsencode(each) for each in arguments
    ]
    if getattr(library, name)(*words) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
