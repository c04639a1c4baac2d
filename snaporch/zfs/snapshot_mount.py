"""Read the files of a snapshot through a mount that only this process has.

Access to ``.zfs/snapshot`` makes ZFS mount the snapshot for all processes. A mount namespace that
is created meanwhile gets a copy (each emulator has a namespace of its own). If the namespace does
not follow the host's unmounts, the snapshot cannot be destroyed while the namespace exists. A mount
made by fsmount(2) is in no namespace. No process can copy it, and it ends with its last descriptor,
however the process ends. It needs neither ``snapdir`` nor a mounted dataset.
"""

from __future__ import annotations

import ctypes
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from snaporch.zfs.interface import PoolError

_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
"""System calls newer than Linux 5.1 have the same numbers on all architectures of Debian."""
_CLOEXEC = 1
"""FSOPEN_CLOEXEC and FSMOUNT_CLOEXEC."""
_SET_FLAG, _SET_STRING, _CREATE = 0, 1, 6
"""Commands of fsconfig(2)."""
_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
"""Attributes of fsmount(2), MOUNT_ATTR_..."""
_NONE = None


@contextmanager
def mounted_snapshot(snapshot: str) -> Iterator[Path]:
    """Mount a file system's snapshot read-only, for this process and until the end of the block.

    Args:
        snapshot: ``dataset@snapshot``.

    Yields: its root directory.

    Raises:
        PoolError: it cannot be mounted: it does not exist, is of a volume, or its key is not
            loaded.
    """
    try:
        descriptor = _mount(snapshot)
    except OSError as error:
        reason = f"cannot be mounted to be read ({error.strerror})"
        raise PoolError(
            snapshot, reason, f"see `zfs get type,keystatus {shlex.quote(snapshot)}`"
        ) from error
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _mount(snapshot: str) -> int:
    context = _call(_FSOPEN, b"zfs", _CLOEXEC)
    try:
        _call(_FSCONFIG, context, _SET_STRING, b"source", os.fsencode(snapshot), 0)
        _call(_FSCONFIG, context, _SET_FLAG, b"ro", _NONE, 0)
        _call(_FSCONFIG, context, _CREATE, _NONE, _NONE, 0)
        return _call(_FSMOUNT, context, _CLOEXEC, _RDONLY | _NOSUID | _NODEV | _NOEXEC)
    finally:
        os.close(context)


def _call(number: int, *arguments: int | bytes | None) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    done = int(library.syscall(ctypes.c_long(number), *words))
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done
