"""The only room that talks to ZFS."""

from snaporch.pool.protocol import PREFIX, RAM_POOLS_PROPERTY, RAM_PROPERTY, Pool, PoolError

__all__ = ["PREFIX", "RAM_POOLS_PROPERTY", "RAM_PROPERTY", "Pool", "PoolError", "open_pool"]


def open_pool() -> Pool:
    """The pool access of this host: libzfs_core where it works, the ``zfs`` command otherwise.

    Raises:
        UnavailableError: neither can be used here.
    """
    from snaporch.pool.command import ZfsCommand

    command = ZfsCommand.open()
    try:
        from snaporch.pool.lzc import LibZfsCore
    except (ImportError, OSError):
        return command
    return LibZfsCore(command)
