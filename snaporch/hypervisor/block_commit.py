"""Commit overlays into their bases, by the state of the domain and never by an event alone.

How long a guest may be suspended, and when a commit is given up, is set by
:mod:`snaporch.hypervisor.commit_timeouts`.

The order is that of libvirt's manual: ``blockCommit(ACTIVE|SHALLOW)``, ready, pivot, completed.
Here a commit is done when the live XML names the base and no block job is left. That neither the
live nor the inactive XML names the overlay is proved by :mod:`snaporch.recovery.overlay_removal`.
Only then may it be removed (an overlay unlinked after a failed commit lost writes in
lxc/incus#3654).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Self

import libvirt

from snaporch.hypervisor import domain_xml
from snaporch.hypervisor.apparmor import PROFILES, denies_writing, is_confined
from snaporch.hypervisor.commit_timeouts import CommitTimeouts
from snaporch.hypervisor.events import DomainEvents
from snaporch.hypervisor.interface import (
    CommitStage,
    HypervisorError,
    OnCommitStage,
    OverlayDisk,
)

Clock = Callable[[], float]

_POLL_SECONDS = 0.1
_ACTIVE_COMMIT = libvirt.VIR_DOMAIN_BLOCK_COMMIT_ACTIVE | libvirt.VIR_DOMAIN_BLOCK_COMMIT_SHALLOW
_ACTIVE_COMMIT_JOB = libvirt.VIR_DOMAIN_BLOCK_JOB_TYPE_ACTIVE_COMMIT
_RESTARTS = 3


class _Progress(Enum):
    """The progress of one disk's commit."""

    UNDER_WAY = "under way"
    READY = "ready"
    ON_BASE = "on base"


def commit_overlays(
    domain: Any,
    events: DomainEvents,
    disks: Sequence[OverlayDisk],
    on_stage: OnCommitStage,
    patience: CommitTimeouts,
    clock: Clock = time.monotonic,
    profiles: Path = PROFILES,
) -> dict[str, HypervisorError]:
    """Commit all ``disks`` at the same time, and pivot them together when all are ready.

    A running guest that writes faster than the commit copies is suspended from time to time, as
    ``patience`` says. It is resumed before this returns or raises. A disk that is on neither image,
    or whose job fails repeatedly, does not stop the others. But if AppArmor confines the guest, no
    disk is pivoted then: libvirt would write a new profile, which denies a disk that is still on
    its overlay its base permanently.

    Args:
        clock: returns seconds.
        profiles: the directory of libvirt's AppArmor profiles.

    Returns: the errors of failed disks, by target.

    Raises:
        HypervisorError: a disk failed during the pivot or in a confined guest, or nothing moves.
    """
    pending = {disk.target: disk for disk in disks}
    failed: dict[str, HypervisorError] = {}
    work = _Work(domain, dict.fromkeys(pending, 0), profiles)
    stall = _StallDetector(domain, patience.stall, clock)
    pivoting = False
    with _Throttle(domain, on_stage, patience, clock) as throttle:
        while True:
            root = domain_xml.parse(domain.XMLDesc(0))
            jobs = domain_xml.mirrors(root)
            found = {}
            for disk in list(pending.values()):
                try:
                    found[disk.target] = _advance(work, root, jobs, disk)
                except HypervisorError as error:
                    if pivoting or is_confined(domain.UUIDString(), profiles):
                        raise
                    failed[disk.target] = error
                    del pending[disk.target]
            for target in [name for name, each in found.items() if each is _Progress.ON_BASE]:
                del pending[target], found[target]
            if not pending:
                return failed
            if all(each is _Progress.READY for each in found.values()):
                if not pivoting:
                    on_stage(CommitStage.PIVOTING)
                    pivoting = True
                for target in pending:
                    _pivot(domain, target)
            on_stage(CommitStage.WAITING)
            throttle.turn()
            stall.check(list(pending), moving=pivoting)
            events.wait(_POLL_SECONDS)


class _Throttle:
    """Suspends a guest that the commit cannot catch up with, each time twice as long.

    When, and for how long, is set by ``running`` and ``pause`` of :class:`CommitTimeouts`.
    """

    def __init__(
        self, domain: Any, on_stage: OnCommitStage, patience: CommitTimeouts, clock: Clock
    ) -> None:
        self._domain = domain
        self._clock = clock
        self._on_stage = on_stage
        self._pause = patience.pause
        self._next = clock() + patience.running
        self._suspended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._suspended:
            self._resume()

    def turn(self) -> None:
        """Suspend or resume the guest if it is time to."""
        if self._clock() < self._next:
            return
        if self._suspended:
            self._resume()
        elif self._domain.state()[0] == libvirt.VIR_DOMAIN_RUNNING:
            self._on_stage(CommitStage.SUSPENDING)
            self._domain.suspend()
            self._suspended = True
        self._next = self._clock() + self._pause
        if not self._suspended:
            self._pause *= 2

    def _resume(self) -> None:
        self._suspended = False
        try:
            self._domain.resume()
        except libvirt.libvirtError:
            if self._domain.state()[0] == libvirt.VIR_DOMAIN_PAUSED:
                raise
        self._on_stage(CommitStage.RESUMED)


class _StallDetector:
    """Detects a commit whose jobs no longer move: a base blocks, or a pivot does not end."""

    def __init__(self, domain: Any, limit: float, clock: Clock) -> None:
        self._domain = domain
        self._clock = clock
        self._limit = limit
        self._last: object = None
        self._since = self._checked = clock()

    def check(self, targets: Sequence[str], *, moving: bool) -> None:
        """Compare the jobs' progress with the last time.

        Raises:
            HypervisorError: nothing has moved for the time limit.
        """
        now = self._clock()
        if now - self._checked < self._limit / 10:
            return
        self._checked = now
        infos = {target: self._domain.blockJobInfo(target, 0) for target in targets}
        state = moving, [(name, info.get("cur"), info.get("end")) for name, info in infos.items()]
        if state != self._last:
            self._last, self._since = state, now
        elif now - self._since > self._limit:
            raise HypervisorError(
                ", ".join(targets),
                f"its commit has not moved for {self._limit:.0f} s",
                "check whether the pool and the overlay directory respond; nothing was removed",
            )


@dataclass(frozen=True)
class _Work:
    """The commits of one domain."""

    domain: Any
    starts: dict[str, int]
    """How often the commit of each disk was started, by target."""
    profiles: Path


def _advance(
    work: _Work, root: Any, jobs: dict[str, tuple[str, bool]], disk: OverlayDisk
) -> _Progress:
    """Determine the progress of one disk, and start its commit if none runs."""
    element = domain_xml.disk_element(root, disk.target)
    if element is None:
        raise HypervisorError(disk.target, "the disk was unplugged during the commit")
    source = domain_xml.source_path(element, element.get("type", "file"))
    job = jobs.get(disk.target)
    if job is not None and (job[0] != "active-commit" or source == disk.base):
        raise HypervisorError(disk.target, f"another program's block job ({job[0]}) runs on it")
    if source == disk.base:
        return (
            _Progress.UNDER_WAY if work.domain.blockJobInfo(disk.target, 0) else _Progress.ON_BASE
        )
    if source != disk.overlay:
        raise HypervisorError(
            disk.target,
            f"is on {source}, neither on its overlay {disk.overlay} nor on its base {disk.base}",
            "check `virsh domblklist` and finish by hand; nothing was removed",
        )
    if job is None:
        _start(work, root, disk)
    return _Progress.READY if job is not None and job[1] else _Progress.UNDER_WAY


def _start(work: _Work, root: Any, disk: OverlayDisk) -> None:
    below = domain_xml.backing_source(root, disk.target)
    if below != disk.base:
        raise HypervisorError(
            disk.target, f"its overlay lies on {below}, not on {disk.base}; nothing was committed"
        )
    work.starts[disk.target] += 1
    if work.starts[disk.target] > _RESTARTS:
        raise HypervisorError(
            disk.target,
            f"its commit ended {_RESTARTS} times without reaching the base",
            "see libvirt's log; the guest stays on its overlay",
        )
    try:
        work.domain.blockCommit(disk.target, None, None, 0, _ACTIVE_COMMIT)
    except libvirt.libvirtError as error:
        raise HypervisorError(disk.target, _reason_of_refusal(work, disk, error)) from error


def _reason_of_refusal(work: _Work, disk: OverlayDisk, error: libvirt.libvirtError) -> str:
    """Why libvirt refused to start a commit.

    If libvirtd is killed just when it starts a commit, a job without a mirror is left, which cannot
    be pivoted. libvirt 11.3 crashes when that job is aborted (seen in the lab).
    """
    with contextlib.suppress(libvirt.libvirtError):
        if denies_writing(work.domain.UUIDString(), disk.base, work.profiles):
            return (
                f"AppArmor denies the guest to write to {disk.base}, because libvirt wrote its "
                "profile while it was on its overlay; the overlay is whole, and is committed when "
                "the guest is off: shut it off, recover it, then start it"
            )
        if work.domain.blockJobInfo(disk.target, 0).get("type") == _ACTIVE_COMMIT_JOB:
            return (
                "libvirt was killed when it began the commit, and can neither finish nor end it; "
                "its overlay is whole, and is committed when the guest is off: shut it off"
            )
    return f"blockcommit: {error.get_error_message()}"


def _pivot(domain: Any, target: str) -> None:
    """Request the pivot.

    libvirt may refuse because the job is not ready yet; the next round retries.
    """
    with contextlib.suppress(libvirt.libvirtError):
        domain.blockJobAbort(target, libvirt.VIR_DOMAIN_BLOCK_JOB_ABORT_PIVOT)
