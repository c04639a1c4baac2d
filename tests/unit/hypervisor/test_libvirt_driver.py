import os

import libvirt
import pytest

from snaporch.hypervisor import HypervisorError, domain_xml
from snaporch.hypervisor.commit_timeouts import CommitTimeouts
from snaporch.hypervisor.interface import CommitStage, OverlayDisk
from snaporch.hypervisor.libvirt_driver import LibvirtHypervisor

UUID = "7f1c0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d"
VDA, VDB = (
    OverlayDisk(name, f"/{name}.img", "file", "raw", f"/overlays/{name}.qcow2")
    for name in ("vda", "vdb")
)


def xml(vda, vdb):
    disks = "".join(
        f"<disk type='file'><driver type='raw'/><source file='{source}'/>"
        f"<target dev='{name}'/></disk>"
        for name, source in {"vda": vda, "vdb": vdb}.items()
    )
    return f"<domain><devices>{disks}</devices></domain>"


class Guest:
    """A running guest: ``vda`` is on an unknown image, ``vdb`` was pivoted to its base."""

    def name(self):
        return "web"

    def UUIDString(self):  # noqa: N802 - libvirt's
        return UUID

    def ID(self):  # noqa: N802 - libvirt's
        return 1

    def state(self):
        return libvirt.VIR_DOMAIN_RUNNING, 0

    def isActive(self):  # noqa: N802 - libvirt's
        return 1

    def isPersistent(self):  # noqa: N802 - libvirt's
        return 1

    def hasManagedSaveImage(self, _flags):  # noqa: N802 - libvirt's
        return 0

    def blockJobInfo(self, _target, _flags):  # noqa: N802 - libvirt's
        return {}

    def XMLDesc(self, flags):  # noqa: N802 - libvirt's
        inactive = xml(VDA.overlay, VDB.overlay)
        return inactive if flags & libvirt.VIR_DOMAIN_XML_INACTIVE else xml("/else", VDB.base)


class Connection:
    """A connection to a libvirt with this guest."""

    def __init__(self, done, versions=(11_003_000, 10_000_000)):
        self._done = done
        self._versions = versions

    def getLibVersion(self):  # noqa: N802 - libvirt's
        return self._versions[0]

    def getVersion(self):  # noqa: N802 - libvirt's
        return self._versions[1]

    def restoreFlags(self, _path, _xml, flags):  # noqa: N802 - libvirt's
        self._done.append(flags)

    def isAlive(self):  # noqa: N802 - libvirt's
        return 1

    def setKeepAlive(self, _interval, _count):  # noqa: N802 - libvirt's
        return 0

    def lookupByUUIDString(self, _uuid):  # noqa: N802 - libvirt's
        return Guest()

    def domainEventRegisterAny(self, *_about):  # noqa: N802 - libvirt's
        return 1

    def domainEventDeregisterAny(self, _callback):  # noqa: N802 - libvirt's
        return 0

    def defineXMLFlags(self, text, _flags):  # noqa: N802 - libvirt's
        disks = domain_xml.disks(domain_xml.parse(text))
        self._done.append({disk.target: disk.source for disk in disks})


def test_pivoted_disks_are_defined_before_the_pivot_is_reported_over(monkeypatch):
    """After that stage, readers rely on the definition."""
    done = []
    for name in ("fsync", "sync"):
        monkeypatch.setattr(os, name, lambda *_: done.append("kept"))
    hypervisor = LibvirtHypervisor("qemu:///fake", connect=lambda _uri: Connection(done))
    with pytest.raises(HypervisorError, match="vda: is on /else, neither on its overlay"):
        hypervisor.commit(UUID, [VDA, VDB], done.append, CommitTimeouts())
    defined = {"vda": VDA.overlay, "vdb": VDB.base}
    stages = [CommitStage.WAITING] * done.count(CommitStage.WAITING)
    assert done == [*stages, defined, "kept", "kept", CommitStage.PIVOTED]


@pytest.mark.parametrize(
    ("versions", "by_pipe"),
    [
        ((11_003_000, 10_000_000), False),
        ((11_003_000, 11_001_000), True),
        ((12_001_000, 11_001_000), False),
    ],
)
def test_a_qemu_that_loads_from_pipes_only_gets_a_pipe(tmp_path, versions, by_pipe):
    done = []
    hypervisor = LibvirtHypervisor("qemu:///fake", connect=lambda _uri: Connection(done, versions))
    hypervisor.restore(tmp_path / "ram.save", running=True)
    bypass = libvirt.VIR_DOMAIN_SAVE_BYPASS_CACHE
    assert done == [libvirt.VIR_DOMAIN_SAVE_RUNNING | (bypass if by_pipe else 0)]
