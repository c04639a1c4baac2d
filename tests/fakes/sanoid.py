"""sanoid's configuration, and the process that holds a guest, without sanoid."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fakes.world import World
from snaporch.interrupt import Interrupt
from snaporch.sanoid.config.resolve import SanoidConfig, load_sanoid
from snaporch.sanoid.hold import process

SAMPLES = Path(__file__).parents[1] / "config-samples" / "sanoid"
DEFAULTS = SAMPLES / "sanoid.defaults.conf"
"""The settings that sanoid 2.2 and 2.3 know, with their values for them."""


def script(directory: Path, release: str) -> Path:
    """A script that begins like the sanoid of this release."""
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
    """``text`` as sanoid resolves it if these datasets exist.

    Args:
        listed: the datasets in the list of a running sanoid 2.3.
    """
    (directory / "sanoid.conf").write_text(text)
    (directory / "datasets.txt").write_text("".join(f"{name}\n" for name in listed))
    program = script(directory, release)
    return load_sanoid(directory, datasets, DEFAULTS, program, directory if listed else None)


def hold_on(world: World, uuid: str, path: Path, interrupt: Interrupt, **more: Any) -> int:
    """Run a hold process on the world's fakes; its exit code."""
    return process.hold(
        uuid,
        path,
        None,
        interrupt,
        open_context=lambda _path, progress, stop: replace(
            world.context, progress=progress, interrupt=stop, finishers={}
        ),
        monotonic=world.window_clock,
        **more,
    )
