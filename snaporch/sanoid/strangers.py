"""Whether sanoid snapshots datasets of guests that no hook of ours holds still meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from snaporch.sanoid.command import PATH, parse_hook
from snaporch.sanoid.conf import (
    CONFIG_DIR,
    SanoidConfig,
    SanoidConfigError,
    Section,
    load_sanoid,
    truth,
)
from snaporch.sanoid.covering import hook_settings


def unheld_by_hooks(datasets: Sequence[str], config_dir: Path = CONFIG_DIR) -> str:
    """The section of ``sanoid.conf`` by which sanoid does, in words; empty if there is none."""
    if shutil.which("sanoid", path=PATH) is None or not (config_dir / "sanoid.conf").exists():
        return ""
    try:
        config = load_sanoid(config_dir)
    except SanoidConfigError:  # sanoid dies of it, too
        return ""
    return unheld_section(config, datasets)


def unheld_section(config: SanoidConfig, datasets: Sequence[str]) -> str:
    """As :func:`unheld_by_hooks`, of a configuration that was read."""
    for dataset in datasets:
        section = config.covering(dataset)
        if section is not None and not _is_held(config, section):
            return f"sanoid snapshots {dataset} by [{section.origin}] without holding the guest"
    return ""


def _is_held(config: SanoidConfig, section: Section) -> bool:
    """Whether there is no snapshot unless our hook has frozen the guest."""
    settings = hook_settings(config, section) or {}
    return has_hook(settings) and truth(settings.get("no_inconsistent_snapshot"))


def has_hook(settings: Mapping[str, str]) -> bool:
    """Whether a section's settings have our pre hook called."""
    return parse_hook(settings.get("pre_snapshot_script", "")).phase == "pre"
