"""Access to ZFS; no other package runs ``zfs`` or calls libzfs_core."""

from snaporch.zfs.interface import (
    POLICY_PROPERTY,
    PREFIX,
    RAM_POOLS_PROPERTY,
    RAM_PROPERTY,
    REBUILD_PROPERTY,
    Bookmark,
    DatasetListing,
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
    "DatasetListing",
    "InUseError",
    "MountedError",
    "Pool",
    "PoolError",
]
