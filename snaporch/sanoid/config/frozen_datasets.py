"""Which datasets sanoid snapshots while snaporch's hooks freeze the guests, and which without."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from snaporch.sanoid.config.hook_command import PATH, parse_hook
from snaporch.sanoid.config.resolve import (
    CONFIG_DIR,
    SanoidConfig,
    SanoidConfigError,
    Section,
    hook_settings,
    load_sanoid,
    truth,
)


def unfrozen_by_sanoid(
    datasets: Sequence[str], config_dir: Path = CONFIG_DIR, path: str = PATH
) -> str:
    """A text on the first dataset that sanoid snapshots without freezing its guest; or empty."""
    return unfrozen_section(_config(config_dir, path), datasets)


def frozen_by_hooks(
    datasets: Sequence[str], config_dir: Path = CONFIG_DIR, path: str = PATH
) -> frozenset[str]:
    """The datasets that sanoid snapshots only while snaporch's hooks freeze their guests."""
    return frozen_datasets(_config(config_dir, path), datasets)


def _config(config_dir: Path, path: str) -> SanoidConfig | None:
    """sanoid's configuration; ``None`` if sanoid is not installed or refuses it."""
    if shutil.which("sanoid", path=path) is None or not (config_dir / "sanoid.conf").exists():
        return None
    try:
        return load_sanoid(config_dir)
    except SanoidConfigError:
        return None


def frozen_datasets(config: SanoidConfig | None, datasets: Sequence[str]) -> frozenset[str]:
    """As :func:`frozen_by_hooks`, for a configuration that was read already."""
    return frozenset(
        dataset
        for dataset in datasets
        if config and (section := config.covering(dataset)) and _is_held(config, section)
    )


def unfrozen_section(config: SanoidConfig | None, datasets: Sequence[str]) -> str:
    """As :func:`unfrozen_by_sanoid`, for a configuration that was read already."""
    for dataset in datasets:
        section = config.covering(dataset) if config else None
        if config and section and not _is_held(config, section):
            return f"sanoid snapshots {dataset} by [{section.origin}] without freezing the guest"
    return ""


def _is_held(config: SanoidConfig, section: Section) -> bool:
    """Whether sanoid takes a snapshot only if snaporch's pre hook has frozen the guest."""
    settings = hook_settings(config, section) or {}
    return has_hook(settings) and truth(settings.get("no_inconsistent_snapshot"))


def has_hook(settings: Mapping[str, str]) -> bool:
    """Whether a section's settings call snaporch's pre hook."""
    return parse_hook(settings.get("pre_snapshot_script", "")).phase == "pre"
