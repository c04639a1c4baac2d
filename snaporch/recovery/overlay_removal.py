"""Whether a run's overlays may be removed: no domain names them, and no process has them open.

What is done with each overlay of an interrupted run is decided by
:mod:`snaporch.recovery.decision`; :mod:`snaporch.disks.overlay_files` removes the files, or moves
them to the quarantine.
"""

from __future__ import annotations

import os
from pathlib import Path
from xml.sax.saxutils import escape

from snaporch.context import Context
from snaporch.disks import overlay_files
from snaporch.errors import AttentionError, one_line
from snaporch.hypervisor import OverlayDisk
from snaporch.journal import RunFacts
from snaporch.recovery.images_above import check_nothing_above


def remove_unused(context: Context, facts: RunFacts) -> None:
    """Remove the run's overlays after checking that nothing uses them.

    Raises:
        AttentionError: one is still in use.
    """
    check_unused(context, facts)
    overlay_files.remove(Path(facts.overlay_dir), facts.overlays)


def check_unused(context: Context, facts: RunFacts) -> None:
    """Check that no domain names an overlay anywhere in a chain, and no process has one open.

    Raises:
        AttentionError: one is in use.
    """
    there = [disk for disk in facts.overlays if os.path.lexists(disk.overlay)]
    if not there:
        return
    for domain in context.hypervisor.domains():
        if domain.uuid == facts.uuid:
            check_nothing_above(context.resolver, domain, facts, there)
        xml = f"{domain.live_xml}{domain.inactive_xml}"
        named = [disk for disk in there if escape(disk.overlay, {"'": "&apos;"}) in xml]
        if named:
            raise _still_used(facts, named, f"the domain {domain.name}")
    opened = overlay_files.open_somewhere([Path(disk.overlay) for disk in there])
    if opened:
        end = f"end that process (ps -fp {opened}), then "
        raise _still_used(facts, there, f"{_program(opened)} (process {opened})", end)


def is_unused(context: Context, disk: OverlayDisk) -> bool:
    """Whether no domain names the disk's base, and no process has the base or the overlay open."""
    if not os.path.lexists(disk.overlay) or not os.path.exists(disk.base):
        return False
    base = os.path.realpath(disk.base)
    for domain in context.hypervisor.domains():
        xmls = [xml for xml in (domain.live_xml, domain.inactive_xml) if xml]
        if any(escape(name, {"'": "&apos;"}) in xml for name in (disk.base, base) for xml in xmls):
            return False
    return not overlay_files.open_somewhere([Path(base), Path(disk.overlay)])


def _still_used(
    facts: RunFacts, disks: list[OverlayDisk], by: str, first: str = ""
) -> AttentionError:
    return AttentionError(
        facts.domain,
        f"{by} still uses {paths_of(disks)}",
        f"nothing was removed; {first}run: snaporch recover {facts.uuid}",
    )


def _program(process: int) -> str:
    """The name of a process's program, which it can set itself, for a message."""
    try:
        return one_line(Path(f"/proc/{process}/comm").read_text("utf-8", "replace")) or "a program"
    except OSError:  # it has just ended
        return "a program"


def paths_of(disks: list[OverlayDisk]) -> str:
    """The overlays' paths, for a message."""
    return ", ".join(disk.overlay for disk in disks)
