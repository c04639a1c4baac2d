"""Which datasets of a guest sanoid snapshots in one round, by ``sanoid.conf``."""

from __future__ import annotations

from collections.abc import Iterable

from snaporch.sanoid.config.resolve import SanoidConfig, Section, load_sanoid
from snaporch.sanoid.hooks.caller import Caller

_TYPES = ("frequently", "hourly", "daily", "weekly", "monthly", "yearly")


def conf_of(caller: Caller) -> SanoidConfig | None:
    """The configuration of the calling sanoid; ``None`` if no sanoid calls and none is configured.

    Raises:
        ConfigError: it cannot be read.
    """
    if not caller.pid and not (caller.config_dir / "sanoid.conf").exists():
        return None
    if not caller.pid:
        return load_sanoid(caller.config_dir)
    return load_sanoid(caller.config_dir, program=caller.program, cache_dir=caller.cache_dir)


def takes_children(config: SanoidConfig, target: str) -> bool:
    """Whether a snapshot of ``target`` includes its children (``recursive = zfs``)."""
    section = config.covering(target)
    return section is not None and section.recursive == "zfs"


def promised(config: SanoidConfig, target: str, datasets: Iterable[str]) -> frozenset[str]:
    """Those of ``datasets`` that sanoid handles in the same round as ``target``.

    Snapshots of the same types are due at the same time, so sanoid handles datasets with the same
    schedule. Datasets with another schedule, or without both hooks, are not waited for.
    """
    own = config.covering(target)
    if own is None:
        return frozenset()
    schedule = _schedule(own)
    return frozenset(
        dataset
        for dataset in datasets
        if (section := config.covering(dataset)) is not None
        and section.autosnap
        and _schedule(section) == schedule
        and all(section.settings.get(f"{phase}_snapshot_script") for phase in ("pre", "post"))
    )


def _schedule(section: Section) -> frozenset[str]:
    return frozenset(
        kind for kind in _TYPES if section.settings.get(kind, "0").strip() not in ("", "0")
    )
