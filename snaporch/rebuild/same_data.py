"""Discard what changed of a file system besides its data: access times, owners and labels.

ZFS counts them as changes, too, and receives no increment into the file system. A program that
lists a directory changes its access time, and libvirt changes the owner of an image.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from snaporch.context import Context
from snaporch.model import PoolSnapshot
from snaporch.zfs import PoolError
from snaporch.zfs.resolver import NotOnZfsError

_DEEPEST = 100
_CHUNK = 1 << 20
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOATIME | os.O_CLOEXEC


def discard_all_but_data(context: Context, newest: PoolSnapshot) -> bool:
    """Roll a mounted file system back to its newest snapshot, if it has the same data.

    Otherwise, and if that cannot be found out, nothing is done: then ZFS refuses an increment if
    anything has changed.

    Returns:
        Whether its data is known to differ.

    Raises:
        InterruptedRunError: a signal came.
    """
    context.progress.step(newest.dataset, f"comparing its files with @{newest.name}")

    def check() -> None:
        context.interrupt.check(newest.dataset)

    try:
        root = context.resolver.mount_point_of(newest.dataset)
        with context.pool.mounted_snapshot(newest.full_name) as then:
            same = has_same_data(root, then, check)
        if same:
            context.pool.rollback(newest.full_name)
        return not same
    except (OSError, NotOnZfsError, PoolError) as error:
        context.progress.note(newest.dataset, f"not compared with @{newest.name}: {error}")
        return False


def has_same_data(root: Path, then: Path, check: Callable[[], None]) -> bool:
    """Whether two directories have the same names, types, permissions and bytes.

    Bytes are read only of files that are not the same by inode and ctime, which no program can set.
    That may take hours, so a second look asks whether anything has changed meanwhile. Files below
    other mounts never count as the same.

    Args:
        root: the directory now.
        then: the directory in a snapshot; it may be a link.
        check: is called before each mebibyte; what it raises is raised.

    Raises:
        OSError: something cannot be read.
    """
    flags = _FLAGS & ~os.O_NOFOLLOW | os.O_DIRECTORY
    with _opened(str(root), None, flags) as now, _opened(str(then), None, flags) as before:
        read: set[tuple[int, int]] = set()

        def compare(ours: int, theirs: int) -> bool:
            read.add(_identity(os.fstat(ours)))  # before it is read
            return _same_bytes(ours, theirs, check)

        def was_read(ours: int, _theirs: int) -> bool:
            return _identity(os.fstat(ours)) in read

        return _same_directory(now, before, compare, _DEEPEST) and (
            not read or _same_directory(now, before, was_read, _DEEPEST)
        )


_Compare = Callable[[int, int], bool]
"""Whether two files of one size and time have the same bytes, by their descriptors."""


def _same_directory(now: int, before: int, compare: _Compare, depth: int) -> bool:
    names = set(os.listdir(now)) - {".zfs"}
    if depth == 0 or names != set(os.listdir(before)) - {".zfs"}:
        return False
    return all(_same_entry(name, now, before, compare, depth) for name in names)


def _same_entry(name: str, now: int, before: int, compare: _Compare, depth: int) -> bool:
    ours, theirs = (os.stat(name, dir_fd=each, follow_symlinks=False) for each in (now, before))
    if ours.st_mode != theirs.st_mode or ours.st_dev != os.fstat(now).st_dev:
        return False
    if stat.S_ISDIR(ours.st_mode):
        flags = _FLAGS | os.O_DIRECTORY
        with _opened(name, now, flags) as first, _opened(name, before, flags) as second:
            return _same_directory(first, second, compare, depth - 1)
    if not stat.S_ISREG(ours.st_mode):
        return _is_untouched(ours, theirs)
    with _opened(name, now, _FLAGS) as first, _opened(name, before, _FLAGS) as second:
        return _same_file(first, second, compare)


def _same_file(now: int, before: int, compare: _Compare) -> bool:
    os.fsync(now)  # what was written to memory that is mapped has no time yet
    ours, theirs = os.fstat(now), os.fstat(before)
    if _is_untouched(ours, theirs):
        return True
    if (ours.st_size, ours.st_mtime_ns) != (theirs.st_size, theirs.st_mtime_ns):
        return False
    return compare(now, before)


def _same_bytes(now: int, before: int, check: Callable[[], None]) -> bool:
    for offset in range(0, os.fstat(now).st_size, _CHUNK):
        check()
        if os.pread(now, _CHUNK, offset) != os.pread(before, _CHUNK, offset):
            return False
    return True


def _is_untouched(ours: os.stat_result, theirs: os.stat_result) -> bool:
    return _identity(ours) == _identity(theirs)


def _identity(state: os.stat_result) -> tuple[int, int]:
    return state.st_ino, state.st_ctime_ns


@contextmanager
def _opened(path: str, directory: int | None, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
