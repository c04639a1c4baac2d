"""Access to ZFS; no other package runs ``zfs`` or calls libzfs_core."""

from pathlib import Path

from snaporch.default_paths import HOST
from snaporch.zfs.interface import (
    POLICY_PROPERTY,
    PREFIX,
    RAM_POOLS_PROPERTY,
    RAM_PROPERTY,
    REBUILD_PROPERTY,
    Bookmark,
    InUseError,
    MountedError,
    Pool,
    PoolError,
)
from snaporch.zfs.mount_users import BlockingMount

__all__ = [
    "POLICY_PROPERTY",
    "PREFIX",
    "RAM_POOLS_PROPERTY",
    "RAM_PROPERTY",
    "REBUILD_PROPERTY",
    "BlockingMount",
    "Bookmark",
    "InUseError",
    "MountedError",
    "Pool",
    "PoolError",
    "open_pool",
]


def open_pool(*, read_only: bool = False, dev: Path = HOST.dev) -> Pool:
    """Access to the pools of this host: by libzfs_core where it works, else by the ``zfs`` command.

    Args:
        read_only: the caller takes, holds and destroys no snapshots. Then libzfs_core is not used,
            which is slow to import and cannot list.
        dev: the directory of devices.

    Raises:
        UnavailableError: ZFS cannot be used here.
    """
    from snaporch.zfs.cli import ZfsCommand

    command = ZfsCommand.open(dev)
    if read_only:
        return command
    try:
        from snaporch.zfs.lzc import LibZfsCore

        return LibZfsCore(command)
    except (ImportError, OSError):
        return command
