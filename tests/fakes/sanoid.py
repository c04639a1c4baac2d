"""sanoid's configuration, without sanoid."""

from pathlib import Path

from snaporch.sanoid.config.resolve import SanoidConfig, load_sanoid

SAMPLES = Path(__file__).parents[1] / "config-samples" / "sanoid"
DEFAULTS = SAMPLES / "sanoid.defaults.conf"
"""The settings that sanoid 2.2 and 2.3 know, with their values for them."""


def script(directory: Path, release: str) -> Path:
    """Write the beginning of a sanoid script of this release."""
    found = directory / "sanoid"
    found.write_text(f"#!/usr/bin/perl\n\n# GPL\n\n$::VERSION = '{release}';\nuse strict;\n")
    return found


def resolved(
    directory: Path,
    text: str,
    *datasets: str,
    release: str = "2.2.0",
    listed: tuple[str, ...] = (),
) -> SanoidConfig:
    """sanoid's reading of ``text`` if these datasets exist, and 2.3 has listed these."""
    (directory / "sanoid.conf").write_text(text)
    (directory / "datasets.txt").write_text("".join(f"{name}\n" for name in listed))
    program = script(directory, release)
    return load_sanoid(directory, datasets, DEFAULTS, program, directory if listed else None)
