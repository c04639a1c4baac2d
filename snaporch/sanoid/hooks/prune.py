"""sanoid's ``pre_pruning_script`` and ``pruning_script``: a bundle goes with its last snapshot.

sanoid calls both once per snapshot and dataset: the first before it destroys the snapshot, the
second afterwards unless that failed. The first has nothing to do, because manifests name their
snapshots. The second reads only the bundles that name the snapshot.

``snaporch prune`` finds the rest: snapshots destroyed by hand, rollbacks, renamed datasets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from snaporch.errors import UsageError
from snaporch.zfs_names import MAX_FULL_NAME, is_dataset, is_snapshot, quoted

if TYPE_CHECKING:
    from snaporch.sanoid.hooks.settings import HookSettings
    from snaporch.zfs import Pool

_STEP = "this is called by sanoid's pruning_script; nothing was touched"


def pre_prune(environment: Mapping[str, str]) -> int:
    """Check the environment; there is nothing else to do before a snapshot is destroyed.

    Returns: the exit code, 0.

    Raises:
        UsageError: the environment is not sanoid's.
    """
    _read(environment)
    return 0


def _open_pool() -> Pool:
    from snaporch.zfs.open_pool import open_pool

    return open_pool()


def prune(environment: Mapping[str, str], open_pool: Callable[[], Pool] = _open_pool) -> int:
    """Move bundles whose last snapshot was destroyed to the trash.

    Args:
        environment: sanoid's.
        open_pool: opens ZFS; called only if a bundle names the snapshot.

    Returns: the exit code, 0.

    Raises:
        UsageError: the environment is not sanoid's; nothing was touched.
        ConfigError, UnavailableError, PoolError: nothing was touched.
    """
    phase = environment.get("SANOID_SCRIPT", "prune")
    if phase != "prune":
        raise UsageError(f"SANOID_SCRIPT={quoted(phase)}", "is not 'prune'", _STEP)
    dataset, snapshot = _read(environment)
    from snaporch.bundle.find_bundles import find_bundles
    from snaporch.sanoid.hooks.settings import read_settings

    settings = read_settings(environment)
    references = find_bundles(settings.bundles, dataset, snapshot)
    return _prune_bundles(settings, references, open_pool) if references else 0


def _read(environment: Mapping[str, str]) -> tuple[str, str]:
    """The dataset and the bare snapshot name; as input, both may have any content."""
    dataset = environment.get("SANOID_TARGET", "")
    snapshot = environment.get("SANOID_SNAPNAME", "")
    if not is_dataset(dataset):
        raise UsageError(f"SANOID_TARGET={quoted(dataset)}", "is not a dataset", _STEP)
    if len(f"{dataset}@{snapshot}") > MAX_FULL_NAME or not is_snapshot(snapshot):
        raise UsageError(f"SANOID_SNAPNAME={quoted(snapshot)}", "is not a snapshot's name", _STEP)
    return dataset, snapshot


def _prune_bundles(
    settings: HookSettings, references: list[str], open_pool: Callable[[], Pool]
) -> int:
    from snaporch.prune.decision import PruneAction
    from snaporch.prune.prune import prune as prune_store

    done = prune_store(settings.validated(), open_pool(), only=references)
    for verdict in done.of(PruneAction.TRASH, PruneAction.DELETE, PruneAction.PUT_BACK):
        print(f"{verdict.found.title}  {verdict.action.done}: {verdict.reason}")  # noqa: T201
    for failure in done.failures:
        raise failure
    return 0
