"""Strategies that a definition or a state rules out (host devices, LUKS, agent, jobs).

vGPUs are host devices, too; shared directories (virtiofs, 9p) rule out the same. What rules
strategies out because of storage is found by :mod:`snaporch.snapshot.storage_blockers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import libvirt

from snaporch.hypervisor import domain_xml
from snaporch.hypervisor.interface import Blocker
from snaporch.hypervisor.qemu_arguments import unknown_argument
from snaporch.model import Disk, Domain, DomainState, Strategy

_OVERLAY = frozenset({Strategy.OVERLAY})
_RAM = frozenset({Strategy.OVERLAY, Strategy.MANUAL})
_QUIESCED = frozenset({Strategy.QUIESCED})
_CAREFUL = _RAM | {Strategy.QUIESCED, Strategy.PAUSED}
_ONLY_LIBVIRT = {
    "encryption": "is encrypted",
    "slices": "is a slice of its image",
}
"""Properties of an image, or of one below it, that a plain qemu-img would ignore (LUKS, slices)."""
_ACTIVE = _CAREFUL | {Strategy.CRASH}


def find_domain_blockers(handle: Any, domain: Domain) -> list[Blocker]:
    """See :meth:`Hypervisor.blockers`."""
    if domain.live_xml is None:
        return []
    root = domain_xml.parse(domain.live_xml)
    found = list(_of_state(domain))
    found += _of_devices(root)
    found += _of_arguments(root)
    found += [blocker for disk in domain.disks for blocker in _of_disk(disk)]
    found += [blocker for disk in domain.disks for blocker in _of_image(root, disk)]
    found += _of_jobs(handle, root)
    if not domain_xml.agent_connected(root):
        found.append(
            Blocker(
                _QUIESCED, "no guest agent is connected", "install qemu-guest-agent in the guest"
            )
        )
    return found


def _of_state(domain: Domain) -> Iterator[Blocker]:
    if domain.state is DomainState.STOPPING:
        yield Blocker(_ACTIVE, "it is shutting down", "wait until it is off")
    if domain.state is DomainState.CRASHED:
        yield Blocker(_CAREFUL, "it has crashed", "reset or destroy it first")
    if domain.state is DomainState.SUSPENDED:
        step = "wake it with `virsh dompmwakeup`"
        yield Blocker(_RAM | _QUIESCED, "its guest has suspended it", step)
    if domain.state is DomainState.PAUSED:
        yield Blocker(_QUIESCED, "it is paused, so its agent cannot answer", "resume it")
        yield Blocker(_OVERLAY, "it is paused, and an overlay could not be committed", "use manual")


def _of_devices(root: Any) -> Iterator[Blocker]:
    for element in root.findall("devices/hostdev"):
        kind = element.get("type") or element.get("mode") or "host"
        yield Blocker(_RAM, f"a {kind} host device cannot be saved with RAM", "detach it")
    for element in root.findall("devices/interface[@type='hostdev']"):
        yield Blocker(_RAM, f"a network {element.tag} is a host device", "use a virtual one")
    for element in root.findall("devices/filesystem"):
        driver = element.find("driver")
        kind = driver.get("type", "9p") if driver is not None else "9p"
        yield Blocker(_RAM, f"a shared directory ({kind}) cannot be saved with RAM", "detach it")
    for element in root.findall("devices/shmem"):
        if element.get("role") != "master":
            yield Blocker(_RAM, "shared memory (shmem) cannot be saved with RAM", "detach it")
    for feature in root.findall("cpu/feature[@name='invtsc']"):
        fixed = root.find("clock/timer[@name='tsc']")
        has_frequency = fixed is not None and fixed.get("frequency")
        if feature.get("policy") in ("require", "force") and not has_frequency:
            yield Blocker(
                _RAM, "its CPU has invtsc without a frequency", "add <timer name='tsc' frequency=…>"
            )


def _of_arguments(root: Any) -> Iterator[Blocker]:
    argument = unknown_argument(root)
    if argument is not None:
        reason = f"libvirt passes {argument} on to QEMU, and no snapshot would contain it"
        yield Blocker(_RAM, reason, "remove it from <qemu:commandline>")


def _of_disk(disk: Disk) -> Iterator[Blocker]:
    name = disk.target
    if disk.device == "lun":
        reason = f"{name} is a lun, which cannot have an overlay"
        yield Blocker(_OVERLAY, reason, "exclude it by exclude_disks", name)
    if disk.kind == "volume":
        reason = f"{name} is a storage pool's volume, which could not be committed back"
        yield Blocker(_OVERLAY, reason, "name its file or device instead, or use manual", name)
    if disk.transient:
        # even if it is excluded: libvirt saves no RAM of a guest that has one
        yield Blocker(_RAM, f"{name} is transient, and cannot be saved with RAM", "detach it")
    if disk.cache == "unsafe":
        reason = f"{name} has cache='unsafe', which ignores flushes"
        yield Blocker(_CAREFUL, reason, "change the mode", name)


def _of_image(root: Any, disk: Disk) -> Iterator[Blocker]:
    """Properties that only libvirt handles.

    An overlay of a guest that is off is committed by qemu-img, which must be able to read the
    image.
    """
    element = domain_xml.disk_element(root, disk.target)
    if domain_xml.is_shareable(root, disk.target):
        reason = f"{disk.target} is shareable, and libvirt puts no overlay over such a disk"
        yield Blocker(_OVERLAY, reason, "use manual", disk.target)
    for name, words in _ONLY_LIBVIRT.items():
        if element is not None and element.find(f".//{name}") is not None:
            reason = f"{disk.target} {words}, so that only libvirt could commit an overlay into it"
            yield Blocker(_OVERLAY, reason, "use manual", disk.target)


def _of_jobs(handle: Any, root: Any) -> Iterator[Blocker]:
    for target, (job, _) in domain_xml.mirrors(root).items():
        # libvirt's qemuMigrationSrcIsAllowed: a job on any disk prevents saving RAM
        yield Blocker(_RAM, f"a block job ({job}) runs on {target}", "wait until it has ended")
    try:
        checkpoints = handle.listAllCheckpoints(0)
    except libvirt.libvirtError:  # a driver without checkpoints
        checkpoints = []
    if checkpoints:
        names = ", ".join(checkpoint.getName() for checkpoint in checkpoints)
        yield Blocker(
            _OVERLAY, f"checkpoints ({names}) break a commit", "delete them, or use manual"
        )
