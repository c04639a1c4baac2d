"""Names of snapshots and runs: the rules, and the names that snaporch chooses itself."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from datetime import datetime

from snaporch.errors import RefusedError, UsageError
from snaporch.zfs_names import MAX_FULL_NAME, is_snapshot, quoted


def check_snapshot_name(name: str) -> None:
    """Refuse a name that ZFS would refuse; the rules are in :mod:`snaporch.zfs_names`.

    Raises:
        UsageError: ZFS allows no snapshot of this name.
    """
    if not is_snapshot(name):
        raise UsageError(
            f"snapshot name {quoted(name)}",
            "may hold letters, digits, '_', '-', '.', ':' and inner spaces, 255 in all",
        )


def check_full_names(datasets: Collection[str], name: str) -> None:
    """Refuse a snapshot name that is too long together with the name of a dataset.

    Raises:
        RefusedError: ``DATASET@NAME`` is longer than ZFS allows.
    """
    for dataset in datasets:
        if len(f"{dataset}@{name}".encode()) > MAX_FULL_NAME:
            raise RefusedError(
                f"{dataset}@{name}", "is longer than ZFS allows", "use a short --name"
            )


def default_name(taken: Collection[str], now: datetime, policy: str | None) -> str:
    """Return ``snaporch_<UTC time>_<policy, or manual>``, with a number if that name is taken."""
    stem, end = f"snaporch_{now:%Y%m%dT%H%M%SZ}", policy or "manual"
    candidates = (f"{stem}{number}_{end}" for number in ["", *(f".{n}" for n in range(2, 100))])
    return next(candidate for candidate in candidates if candidate not in taken)


def new_run_id(now: datetime) -> str:
    """Return an identifier for a run or for one snapshot of a group: UTC time and random digits."""
    return f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
