"""Whether a replica has room for the last snapshot of a guest: a pure function."""

from __future__ import annotations

from collections.abc import Sequence

_MIB = 1 << 20
_SPARE = 64 * _MIB
"""For metadata, and for what other guests send meanwhile."""


def lack_of_room(bundle: int, disks: int, free: Sequence[int]) -> tuple[str, str] | None:
    """Why the last snapshot of a guest has no room on a replica, and what to do; None if it has.

    Its places may be one pool, so each must have room for all of it.

    Args:
        bundle: bytes of the sealed bundle; encrypted, it is less than 1 % larger.
        disks: bytes that were written to the datasets since the last snapshot that is there.
        free: see :meth:`~snaporch.replication.interface.Destination.free_bytes`.
    """
    needed = bundle + bundle // 100 + disks + _SPARE
    if not free or min(free) >= needed:
        return None
    reason = f"has {min(free) // _MIB} MiB free, and its last snapshot needs {needed // _MIB} MiB"
    return reason, "make room there, and try again"
