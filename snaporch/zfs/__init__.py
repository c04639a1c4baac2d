"""Access to ZFS; no other package runs ``zfs`` or calls libzfs_core."""

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


def open_pool(*, read_only: bool = False) -> Pool:
    """Access to the pools of this host: by libzfs_core where it works, else by the ``zfs`` command.

    Args:
        read_only: the caller takes, holds and destroys no snapshots. Then libzfs_core is not used,
            which is slow to import and cannot list.

    Raises:
        UnavailableError: ZFS cannot be used here.
    """
    from snaporch.zfs.cli import ZfsCommand

    command = ZfsCommand.open()
    if read_only:
        return command
    try:
        from snaporch.zfs.lzc import LibZfsCore

        return LibZfsCore(command)
    except (ImportError, OSError):
        return command
