"""The only room that talks to ZFS."""

from snaporch.zfs.interface import (
    PREFIX,
    RAM_POOLS_PROPERTY,
    RAM_PROPERTY,
    MountedError,
    Pool,
    PoolError,
)
from snaporch.zfs.mount_users import ForeignMount

__all__ = [
    "PREFIX",
    "RAM_POOLS_PROPERTY",
    "RAM_PROPERTY",
    "ForeignMount",
    "MountedError",
    "Pool",
    "PoolError",
    "open_pool",
]


def open_pool(*, to_look: bool = False) -> Pool:
    """The pool access of this host: libzfs_core where it works, the ``zfs`` command otherwise.

    Args:
        to_look: nothing will be snapshotted, held or destroyed, so that libzfs_core, which takes
            its time to import and cannot list, is not needed.

    Raises:
        UnavailableError: neither can be used here.
    """
    from snaporch.zfs.cli import ZfsCommand

    command = ZfsCommand.open()
    if to_look:
        return command
    try:
        from snaporch.zfs.lzc import LibZfsCore

        return LibZfsCore(command)
    except (ImportError, OSError):
        return command
