"""ZFS by libzfs_core (pyzfs): atomic, and without a fork while a guest is frozen.

It is chosen by :mod:`snaporch.zfs.open_pool`.

libzfs_core cannot list, nor read or set properties (``lzc_list_snaps`` raises NotImplementedError).
For these this class uses the ``zfs`` command.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import libzfs_core
from libzfs_core import exceptions as lzc_errors

from snaporch.command_log import LoggedCommand
from snaporch.zfs.cli import ZfsCommand
from snaporch.zfs.interface import InUseError, PoolError

_DESTROY = "destroy"


class LibZfsCore(ZfsCommand):
    """:class:`~snaporch.zfs.interface.Pool` by libzfs_core; listings by ``zfs``.

    pyzfs loads its libraries at the first call, which would be the snapshot of a frozen guest. So
    the constructor loads them by a call that does nothing.

    Raises:
        ImportError: the libraries cannot be loaded, or do not fit the kernel module.
    """

    def __init__(self, command: ZfsCommand) -> None:
        super().__init__(command._zfs)
        try:
            libzfs_core.lzc_hold({})
        except (OSError, AttributeError, lzc_errors.ZFSError) as error:
            raise ImportError(f"libzfs_core: {error}") from error

    def snapshot(self, names: Sequence[str], properties: Mapping[str, str]) -> None:
        values = {key.encode(): value.encode() for key, value in properties.items()}
        with _calling("snapshot", names):
            libzfs_core.lzc_snapshot(_bytes(names), values)

    def _destroy_snapshots(self, names: Sequence[str]) -> None:
        with _calling(_DESTROY, names):
            libzfs_core.lzc_destroy_snaps(_bytes(names), defer=False)

    def hold(self, names: Sequence[str], tag: str) -> None:
        with _calling("hold", names):
            missing = libzfs_core.lzc_hold({name: tag.encode() for name in _bytes(names)})
        if missing:  # the existing ones were held nevertheless
            there = [name for name in names if name.encode() not in missing]
            self.release(there, tag)
            raise PoolError(", ".join(name.decode() for name in missing), "no such snapshot")

    def holds_of(self, names: Sequence[str]) -> dict[str, list[str]]:
        return {name: self._holds(name) for name in names}

    def _holds(self, name: str) -> list[str]:
        with _calling("holds", [name]):
            tags = libzfs_core.lzc_get_holds(name.encode())
        return [tag.decode("utf-8", "surrogateescape") for tag in tags]

    def release(self, names: Sequence[str], tag: str) -> None:
        with _calling("release", names):
            libzfs_core.lzc_release({name: [tag.encode()] for name in _bytes(names)})

    def rollback(self, snapshot: str) -> None:
        dataset = snapshot.split("@", 1)[0]
        with _calling("rollback", [snapshot]):
            libzfs_core.lzc_rollback_to(dataset.encode(), snapshot.encode())


@contextmanager
def _calling(operation: str, names: Sequence[str]) -> Iterator[None]:
    """Log a call of libzfs_core about ``names``, and explain its failure.

    Raises:
        PoolError: it failed.
    """
    with LoggedCommand("libzfs_core", operation, *names):
        try:
            yield
        except lzc_errors.ZFSError as error:
            raise _pool_error(operation, names, error) from error


def _bytes(names: Sequence[str]) -> list[bytes]:
    return [name.encode() for name in names]


def _pool_error(operation: str, names: Sequence[str], error: Exception) -> PoolError:
    """An error with all causes inside a libzfs_core failure, each with its dataset."""
    causes = getattr(error, "errors", None) or [error]
    texts = []
    for cause in causes:
        name = getattr(cause, "name", None)
        subject = name.decode(errors="replace") if isinstance(name, bytes) else ", ".join(names)
        text = getattr(cause, "message", None) or type(cause).__name__
        texts.append(f"{subject}: {text}")
    # lzc_destroy_snaps makes these of EBUSY, also while a snapshot is sent, and of EEXIST.
    busy = (lzc_errors.SnapshotIsHeld, lzc_errors.SnapshotIsCloned)
    in_use = operation == _DESTROY and all(isinstance(cause, busy) for cause in causes)
    return (InUseError if in_use else PoolError)(f"zfs {operation}", "; ".join(texts))
