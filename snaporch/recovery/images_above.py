"""Finds another program's image over a run's overlay: the guest writes to it, and needs both.

snaporch does not commit such an image: the program that made it may be reading the images below.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress

from snaporch.disks.backing_chain import is_beneath
from snaporch.errors import AttentionError, RefusedError
from snaporch.hypervisor import OverlayDisk
from snaporch.hypervisor.qcow2 import HeaderError
from snaporch.journal import RunFacts
from snaporch.model import Domain
from snaporch.zfs.resolver import Resolver


def check_nothing_above(
    resolver: Resolver, domain: Domain, facts: RunFacts, overlays: Sequence[OverlayDisk]
) -> None:
    """Check that no other image lies over one of the run's overlays, by definition or header.

    Raises:
        AttentionError: an image does; the error says how to return the guest to the overlay.
    """
    for disk in overlays:
        now = domain.disk(disk.target)
        if now is None or now.source in (None, disk.base, disk.overlay):
            continue
        with suppress(HeaderError, RefusedError, OSError):  # then the image is not over the overlay
            if is_beneath(resolver, domain, now, disk.overlay):
                step = _how_to_return(domain, facts, disk)
                raise AttentionError(
                    facts.domain,
                    f"its disk {disk.target} is on {now.source}, which another program put over "
                    f"the overlay {disk.overlay}; nothing was removed",
                    f"{step}; then run: snaporch recover {facts.uuid}",
                )


def _how_to_return(domain: Domain, facts: RunFacts, disk: OverlayDisk) -> str:
    if domain.active and domain.boot == facts.boot:
        words = ["virsh", "blockcommit", domain.name, disk.target, "--base", disk.overlay]
        return f"run: {shlex.join([*words, '--active', '--pivot', '--wait'])}"
    first = "shut it off, and " if domain.active else ""
    return f'{first}commit that image by hand (docs/how-to/recovery.md, "Over an overlay")'
