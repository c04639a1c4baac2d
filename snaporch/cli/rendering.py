"""Behind ``snaporch render``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from snaporch.check.gather import gather_guests, own_command
from snaporch.cli.checking import chosen_domains
from snaporch.cli.session import session
from snaporch.errors import RefusedError
from snaporch.output.terminal import print_result
from snaporch.sanoid.config.render import render_sanoid


def print_sanoid(config: Path | None, names: Sequence[str]) -> int:
    """Print sections for the domains named, or for all.

    Raises:
        RefusedError: none of them has a disk on ZFS.
    """
    with session(config, quiet=True) as context:
        guests = gather_guests(context, chosen_domains(context, names))
        if not any(guest.datasets for guest in guests):
            told = ", ".join(guest.name for guest in guests) or "snaporch render"
            raise RefusedError(told, "no disk on ZFS" if guests else "there are no domains")
        existing = {dataset.name for dataset in context.pool.datasets()}
        text = render_sanoid(guests, existing, own_command())
    print_result(text.rstrip("\n"))
    return 0
