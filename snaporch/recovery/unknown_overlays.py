"""Overlays of no known run: guests that are on one, and directories that are empty by now.

A run removes its journal last, so its overlays are unknown only if the journal was lost or moved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from snaporch import default_paths
from snaporch.context import Context
from snaporch.disks.overlay_files import QUARANTINE, is_empty
from snaporch.errors import AttentionError, SnaporchError
from snaporch.hypervisor import domain_xml
from snaporch.journal import list_journals
from snaporch.locks import held_by
from snaporch.model import Domain
from snaporch.private_files import subdirectories

STEP = 'see docs/how-to/recovery.md, "On an overlay of no known run"'


class UnknownOverlayError(AttentionError):
    """A guest is on an overlay of no known run, and nothing was changed."""


_RUN = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]+")


def is_overlay(overlays: Path, path: str) -> bool:
    """Whether a path is that of a run's overlay below ``paths.overlays``, by its form."""
    place = Path(path)
    return place.parent.parent == overlays and _RUN.fullmatch(place.parent.name) is not None


def overlays_in_use(context: Context, domain: Domain) -> tuple[str, ...]:
    """Overlays that a domain or its definition names now; none while a command works on it.

    Args:
        domain: may be older, so libvirt is asked again.
    """
    overlays = context.config.paths.overlays
    xmls = (domain.live_xml, domain.inactive_xml)
    seen = [disk.source for xml in xmls if xml for disk in domain_xml.disks(domain_xml.parse(xml))]
    if not any(path and Path(path).is_relative_to(overlays) for path in seen):
        return ()
    if held_by(default_paths.LOCKS, domain.uuid) is not None:
        return ()
    try:
        live, inactive = context.hypervisor.sources(domain.uuid)
    except SnaporchError:  # the domain was undefined meanwhile
        return ()
    paths = {path for each in (live, inactive) for path in (each or {}).values()}
    return tuple(sorted(path for path in paths if Path(path).is_relative_to(overlays)))


def guests_on_unknown_overlays(context: Context) -> list[UnknownOverlayError]:
    """Return an error for each guest that is on an overlay and has no journal.

    Raises:
        UnavailableError: libvirt does not answer, or the journals cannot be listed.
    """
    overlays = context.config.paths.overlays
    found = [
        (each, [path for path in overlays_in_use(context, each) if is_overlay(overlays, path)])
        for each in context.hypervisor.domains()
    ]
    if not any(paths for _, paths in found):
        return []
    known = {each.uuid for each in list_journals(context.config.paths.journal, sweep=False)}
    return [
        UnknownOverlayError(
            domain.name,
            f"is on an overlay of no known run, and nothing was changed: {', '.join(paths)}",
            STEP,
        )
        for domain, paths in found
        if paths and domain.uuid not in known
    ]


def remove_empty_directories(context: Context, *, dry_run: bool) -> Iterator[str]:
    """Remove empty directories of runs that have ended; yields what was done."""
    overlays = context.config.paths.overlays
    there = [*_directories(overlays), *_directories(overlays / QUARANTINE)]
    # a run makes its journal first and removes it last
    known = {each.path.stem for each in list_journals(context.config.paths.journal, sweep=False)}
    for path in there:
        if path.name in known or not _RUN.fullmatch(path.name) or not is_empty(path):
            continue
        if dry_run:
            yield f"remove the empty directory {path}"
            continue
        with suppress(OSError):  # it is in use by now, or was removed
            path.rmdir()
            yield f"removed the empty directory {path}"


def _directories(path: Path) -> list[Path]:
    try:
        return subdirectories(path)
    except OSError:
        return []
