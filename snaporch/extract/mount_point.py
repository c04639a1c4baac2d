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
MOUNTS = Path("/proc/self/mountinfo")
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
        with ExitStack() as new:
            new.callback(_detach, path)
            own = _topmost(path)
            if not follow_links and not _forbids_links(MOUNTS.read_text(), own):
                reason = "cannot forbid that links of a mount are followed, as each since 5.10 can"
                raise UnavailableError("the kernel", reason)
            new.pop_all()
        stack.callback(_unmount, path, descriptor, own)
        yield Mount(thing, descriptor)


def _topmost(path: str) -> str:
    """The kernel's number of the topmost mount on a path; its file system is not asked."""
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        lines = Path(f"/proc/self/fdinfo/{place}").read_text().splitlines()
    finally:
        os.close(place)
    return next(words[1] for line in lines if (words := line.split())[0] == "mnt_id:")


def _forbids_links(mounts: str, number: str) -> bool:
    """Whether a mount is one on which links are not followed: an older kernel ignores that.

    Args:
        mounts: ``/proc/self/mountinfo``.
        number: of the mount.
    """
    options = next((w[5] for w in map(str.split, mounts.splitlines()) if w[0] == number), "")
    return "nosymfollow" in options.split(",")


def _detach(path: str) -> None:
    """Take away what was mounted a moment ago."""
    with suppress(OSError):
        _call("umount2", path, _DETACH | _NOFOLLOW)


def _unmount(path: str, descriptor: int, own: str) -> None:
    """Take the mount away, unless it has gone; who has a file of it open gets an error.

    Args:
        path: of the mount.
        descriptor: of ``/dev/fuse``.
        own: the number of the mount.

    Raises:
        RunFailedError: another one is on top of it, which stays.
    """
    try:
        os.read(descriptor, REQUEST_BYTES)  # a request is not answered any more
    except OSError as error:
        if error.errno == errno.ENODEV:
            return
    with suppress(OSError):
        if _topmost(path) != own:
            reason = "stays, since another file system was mounted over it"
            step = f"after that one is gone: umount {shlex.quote(path)}"
            raise RunFailedError(path, reason, step)
        _call("umount2", path, _DETACH | _NOFOLLOW)


def _call(name: str, *arguments: str | int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    words = [
        ctypes.c_ulong(each) if isinstance(each, int) else os.fsencode(each) for each in arguments
    ]
    if getattr(library, name)(*words) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
