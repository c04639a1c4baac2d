"""sanoid's ``pre_pruning_script`` and ``pruning_script``: a bundle follows its last snapshot.

sanoid calls both once per snapshot and dataset: the first before it destroys the snapshot, the
second afterwards, and not when the destroy failed. Before it there is nothing to do: nothing has to
be remembered, because the bundles themselves know their snapshots. Afterwards only the bundles that
name the snapshot are looked at.

Whatever the hook misses (destroys by hand, rollbacks, renamed datasets), ``snaporch prune`` finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from snaporch.errors import UsageError
from snaporch.names import MAX_FULL_NAME, is_dataset, is_snapshot, shown


def pre_prune(environment: Mapping[str, str]) -> int:
    """A snapshot is about to be destroyed; nothing is done.

    Raises:
        UsageError: the environment is not sanoid's.
    """
    _read(environment)
    return 0


def prune(environment: Mapping[str, str]) -> int:
    """A snapshot was destroyed: drop the bundles whose last snapshot it was.

    Returns: the exit code, 0 when there is no such bundle.

    Raises:
        UsageError: the environment is not sanoid's; nothing was touched.
        ConfigError, UnavailableError, PoolError: nothing was touched.
    """
    phase = environment.get("SANOID_SCRIPT", "prune")
    if phase != "prune":
        raise UsageError(f"SANOID_SCRIPT={shown(phase)}", "is not 'prune'", _STEP)
    dataset, snapshot = _read(environment)
    from snaporch.bundle.find_bundles import bundles_naming

    references = bundles_naming(_store(environment), dataset, snapshot)
    return _drop(environment, references) if references else 0


_STEP = "this is called by sanoid's pruning_script; nothing was touched"


def _read(environment: Mapping[str, str]) -> tuple[str, str]:
    """Dataset and bare snapshot name; both come from outside and may be anything."""
    dataset = environment.get("SANOID_TARGET", "")
    snapshot = environment.get("SANOID_SNAPNAME", "")
    if not is_dataset(dataset):
        raise UsageError(f"SANOID_TARGET={shown(dataset)}", "is not a dataset", _STEP)
    if len(f"{dataset}@{snapshot}") > MAX_FULL_NAME or not is_snapshot(snapshot):
        raise UsageError(f"SANOID_SNAPNAME={shown(snapshot)}", "is not a snapshot's name", _STEP)
    return dataset, snapshot


def _store(environment: Mapping[str, str]) -> Path:
    """The bundle store, without the schema: most snapshots that sanoid destroys have no bundle.

    Raises:
        ConfigError: the file cannot be read or says something odd.
    """
    import tomllib

    from snaporch import default_paths

    named = environment.get("SNAPORCH_CONFIG")
    try:
        document = tomllib.loads(Path(named or default_paths.CONFIG).read_text("utf-8"))
        return Path(document.get("paths", {}).get("bundles", default_paths.BUNDLES))
    except FileNotFoundError:
        if not named:
            return default_paths.BUNDLES
    except (OSError, ValueError, TypeError, AttributeError):
        pass  # the schema says what is wrong
    from snaporch.config import load_config

    return load_config(Path(named) if named else None).paths.bundles


def _drop(environment: Mapping[str, str], references: list[str]) -> int:
    from snaporch.config import load_config
    from snaporch.prune.decision import PruneAction
    from snaporch.prune.prune import prune as prune_store
    from snaporch.zfs import open_pool

    named = environment.get("SNAPORCH_CONFIG")
    config = load_config(Path(named) if named else None)
    done = prune_store(config, open_pool(), only=references)
    for verdict in done.of(PruneAction.TRASH, PruneAction.DELETE, PruneAction.PUT_BACK):
        print(f"{verdict.found.title}  {verdict.fate.done}: {verdict.reason}")  # noqa: T201
    for failure in done.failures:
        raise failure
    return 0
