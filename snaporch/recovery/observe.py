"""Observes a run's disks: the guest's definitions, its emulator and the overlay files.

What the files hold is read by :mod:`snaporch.disks.overlay_files`.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from snaporch.context import Context
from snaporch.errors import SnaporchError, UnavailableError
from snaporch.hypervisor import HypervisorError, OverlayDisk, domain_xml
from snaporch.journal import Note, RunFacts
from snaporch.model import Domain
from snaporch.recovery.decision import (
    EmulatorState,
    ImageRef,
    Observation,
    OverlayState,
    decide,
)
from snaporch.recovery.overlay_removal import is_unused


def find_domain(context: Context, facts: RunFacts) -> Domain | None:
    """The domain, ``None`` if it does not exist; waits for a libvirtd that restarts.

    Raises:
        UnavailableError, HypervisorError: libvirtd does not answer.
    """

    def look() -> tuple[bool, Domain | None]:
        try:
            return True, context.hypervisor.find(facts.uuid)
        except (UnavailableError, HypervisorError):
            return False, None

    times = context.libvirt_times
    patience = Retrying(
        stop=stop_after_delay(times.reconnect),
        wait=wait_fixed(times.poll),
        retry=retry_if_result(lambda answer: not answer[0]),
        retry_error_callback=lambda _state: (True, context.hypervisor.find(facts.uuid)),
    )
    found: tuple[bool, Domain | None] = patience(look)
    return found[1]


def observe(
    context: Context,
    domain: Domain | None,
    facts: RunFacts,
    disk: OverlayDisk,
    notes: Collection[Note],
    *,
    alive: bool = False,
) -> Observation:
    """Observe one disk of a run.

    Args:
        domain: the run's domain as it is now, if it exists.
        alive: the run itself asks, and has held the domain's lock all the time.
    """
    xmls = (domain.live_xml, domain.inactive_xml) if domain is not None else (None, None)
    live, inactive = map(domain_xml.sources, xmls)
    power, where = _emulator_state(domain, facts), _image_ref(live, disk)
    if power is EmulatorState.OFF:  # a start uses the RAM that libvirt saved
        inactive = context.hypervisor.saved_sources(facts.uuid) or inactive
    known = where is ImageRef.OVERLAY or (power is EmulatorState.ACTIVE and where is ImageRef.BASE)
    observation = Observation(
        power=power,
        live=where,
        inactive=_image_ref(inactive, disk),
        file=OverlayState.WRITTEN,
        pivoting=Note.PIVOTING in notes,
        unused=alive and power is EmulatorState.NO_DOMAIN and is_unused(context, disk),
    )
    if known:
        return observation
    # compared only where the result decides the action: comparing a large disk takes long
    compare = decide(observation) is not decide(replace(observation, file=OverlayState.COMMITTED))
    return replace(observation, file=_overlay_state(context, facts, disk, notes, compare=compare))


def _emulator_state(domain: Domain | None, facts: RunFacts) -> EmulatorState:
    if domain is None:
        return EmulatorState.NO_DOMAIN
    if not domain.active:
        return EmulatorState.OFF
    return EmulatorState.ACTIVE if domain.boot == facts.boot else EmulatorState.RESTARTED


def _image_ref(sources: dict[str, str] | None, disk: OverlayDisk) -> ImageRef:
    if sources is None:
        return ImageRef.NOWHERE
    known = {disk.base: ImageRef.BASE, disk.overlay: ImageRef.OVERLAY}
    return known.get(sources.get(disk.target, ""), ImageRef.ELSEWHERE)


def _overlay_state(
    context: Context, facts: RunFacts, disk: OverlayDisk, notes: Collection[Note], *, compare: bool
) -> OverlayState:
    if not os.path.lexists(disk.overlay):
        return OverlayState.MISSING
    if Note.COMMITTED in notes:
        return OverlayState.COMMITTED
    images = context.overlay_images
    try:
        if not images.holds_writes(disk, facts.emulator):
            return OverlayState.EMPTY
        same = compare and images.holds_what_base_holds(disk, facts.emulator)
    except (SnaporchError, OSError, ValueError):
        return OverlayState.WRITTEN
    return OverlayState.COMMITTED if same else OverlayState.WRITTEN
