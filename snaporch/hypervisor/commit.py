"""Bringing overlays back into their bases, never believing an event alone.

The order is that of libvirt's manual: ``blockCommit(ACTIVE|SHALLOW)``, ready, pivot, completed.
A commit is done when the live XML and the inactive XML name the base and no job is left; only then
may anyone think of removing an overlay (an overlay unlinked after a failed commit lost writes in
lxc/incus#3654).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import libvirt

from snaporch.hypervisor import xml as domain_xml
from snaporch.hypervisor.events import DomainEvents
from snaporch.hypervisor.protocol import HypervisorError, OverlayDisk, Tick

_POLL_SECONDS = 0.1
_ACTIVE_COMMIT = libvirt.VIR_DOMAIN_BLOCK_COMMIT_ACTIVE | libvirt.VIR_DOMAIN_BLOCK_COMMIT_SHALLOW
_RESTARTS = 3


def commit_overlays(
    domain: Any,
    events: DomainEvents,
    disks: Sequence[OverlayDisk],
    tick: Tick,
    patience: float,
) -> None:
    """Commit and pivot all ``disks`` side by side.

    After ``patience`` seconds a running guest is suspended until the commit has caught up with it;
    it runs again before this returns or raises.

    Raises:
        HypervisorError: a disk is on neither image, or its job keeps failing.
    """
    pending = {disk.target: disk for disk in disks}
    starts = dict.fromkeys(pending, 0)
    deadline = time.monotonic() + patience
    with contextlib.ExitStack() as still:
        while True:
            root = domain_xml.parse(domain.XMLDesc(0))
            jobs = domain_xml.mirrors(root)
            for disk in list(pending.values()):
                if _advance(domain, root, jobs, disk, starts):
                    del pending[disk.target]
            if not pending:
                return
            if time.monotonic() > deadline:
                deadline = float("inf")
                still.enter_context(_standing_still(domain))
            tick()
            events.wait(_POLL_SECONDS)


@contextlib.contextmanager
def _standing_still(domain: Any) -> Iterator[None]:
    """The guest does not write meanwhile; one that does not run is left as it is."""
    if domain.state()[0] != libvirt.VIR_DOMAIN_RUNNING:
        yield
        return
    domain.suspend()
    try:
        yield
    finally:
        domain.resume()


def _advance(
    domain: Any,
    root: Any,
    jobs: dict[str, tuple[str, bool]],
    disk: OverlayDisk,
    starts: dict[str, int],
) -> bool:
    """Do the next thing for one disk; True when it is on its base with no job left."""
    element = domain_xml.disk_element(root, disk.target)
    if element is None:
        raise HypervisorError(disk.target, "the disk was unplugged during the commit")
    source = domain_xml.source_path(element, element.get("type", "file"))
    job = jobs.get(disk.target)
    if job is None and source == disk.base:
        return not domain.blockJobInfo(disk.target, 0)
    if source != disk.overlay:
        raise HypervisorError(
            disk.target,
            f"is on {source}, neither on its overlay {disk.overlay} nor on its base {disk.base}",
            "look at `virsh domblklist` and finish by hand; nothing was removed",
        )
    if job is None:
        _start(domain, root, disk, starts)
    elif job[0] != "active-commit":
        raise HypervisorError(disk.target, f"a foreign block job ({job[0]}) runs on it")
    elif job[1]:
        _pivot(domain, disk)
    return False


def _start(domain: Any, root: Any, disk: OverlayDisk, starts: dict[str, int]) -> None:
    below = domain_xml.backing_source(root, disk.target)
    if below != disk.base:
        raise HypervisorError(
            disk.target, f"its overlay lies on {below}, not on {disk.base}; nothing was committed"
        )
    starts[disk.target] += 1
    if starts[disk.target] > _RESTARTS:
        raise HypervisorError(
            disk.target,
            f"its commit ended {_RESTARTS} times without reaching the base",
            "see libvirt's log; the guest goes on with its overlay",
        )
    with _explained(disk.target, "blockcommit"):
        domain.blockCommit(disk.target, None, None, 0, _ACTIVE_COMMIT)


def _pivot(domain: Any, disk: OverlayDisk) -> None:
    """Ask for the pivot; "not ready yet" is an answer, not a failure: the next round asks again."""
    with contextlib.suppress(libvirt.libvirtError):
        domain.blockJobAbort(disk.target, libvirt.VIR_DOMAIN_BLOCK_JOB_ABORT_PIVOT)


@contextlib.contextmanager
def _explained(thing: str, operation: str) -> Any:
    try:
        yield
    except libvirt.libvirtError as error:
        raise HypervisorError(thing, f"{operation}: {error.get_error_message()}") from error
