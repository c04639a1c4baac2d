"""sanoid's configuration, without sanoid."""

from pathlib import Path

from snaporch.sanoid.conf import SanoidConfig, load_sanoid

SAMPLES = Path(__file__).parents[1] / "config-samples" / "sanoid"
DEFAULTS = SAMPLES / "sanoid.defaults.conf"
"""The settings that sanoid 2.2 knows, with its values for them."""


def resolved(directory: Path, text: str, *datasets: str) -> SanoidConfig:
    """What sanoid makes of ``text`` when these datasets exist."""
    (directory / "sanoid.conf").write_text(text)
    return load_sanoid(directory, datasets, DEFAULTS)
