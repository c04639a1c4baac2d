from contextlib import nullcontext

import pytest

from snaporch.hypervisor import HypervisorError, libvirt_driver
from snaporch.hypervisor.interface import CommitStage, CommitTimeouts, OverlayDisk
from snaporch.hypervisor.libvirt_driver import LibvirtHypervisor


def test_pivoted_disks_are_defined_before_the_pivot_is_reported_over(monkeypatch):
    """After that stage, readers rely on the definition."""
    done = []
    vda, vdb = (
        OverlayDisk(name, f"/{name}.img", "file", "raw", f"/overlays/{name}.qcow2")
        for name in ("vda", "vdb")
    )
    failed = {"vda": HypervisorError("vda", "no luck")}
    hypervisor = LibvirtHypervisor("test:///default")
    monkeypatch.setattr(libvirt_driver, "commit_overlays", lambda *_: failed)
    monkeypatch.setattr(libvirt_driver, "_keep_definitions", lambda: done.append("kept"))
    monkeypatch.setattr(hypervisor, "_events", lambda _handle: nullcontext())
    monkeypatch.setattr(hypervisor, "rebase_inactive", lambda _uuid, disks: done.append(disks))
    uuid = hypervisor.domain("test").uuid
    with pytest.raises(HypervisorError, match="no luck"):
        hypervisor.commit(uuid, [vda, vdb], done.append, CommitTimeouts())
    assert done == [[vdb], "kept", CommitStage.PIVOTED]
