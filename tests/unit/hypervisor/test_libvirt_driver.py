"""What the driver makes of libvirt's figures."""

from contextlib import nullcontext
from types import SimpleNamespace

import libvirt
import pytest

from snaporch.errors import NotFoundError
from snaporch.hypervisor import HypervisorError, LostLibvirtError, domain_reader, libvirt_driver
from snaporch.hypervisor.interface import CommitStage, OverlayDisk, Patience
from snaporch.hypervisor.libvirt_driver import LibvirtHypervisor


@pytest.mark.parametrize(
    ("backing", "used"),
    [("", 1 << 20), ("<memoryBacking><hugepages/></memoryBacking>", 4 << 20)],
)
def test_ram_on_huge_pages_is_in_use_as_a_whole(monkeypatch, backing, used):
    """The kernel does not count it as resident."""
    handle = SimpleNamespace(
        info=lambda: [1, 4096, 4096, 1, 0],
        memoryStats=lambda: {"rss": 1024},
        XMLDesc=lambda _flags: f"<domain><memory>4096</memory>{backing}</domain>",
    )
    hypervisor = LibvirtHypervisor("test:///default")
    monkeypatch.setattr(hypervisor, "_handle", lambda _uuid: handle)
    assert hypervisor.ram_in_use("uuid") == used


def test_an_emulator_that_is_gone_has_no_downtime_limit():
    """libvirt's Python binding raises no error there, but gives None."""
    hypervisor = LibvirtHypervisor("test:///default")
    assert hypervisor.downtime_limit(hypervisor.domain("test").uuid) is None


@pytest.mark.parametrize("went", [False, True])
@pytest.mark.parametrize("fails", ["lookup", "act"])
def test_a_libvirt_that_went_away_is_told_from_one_that_refuses(monkeypatch, fails, went):
    """Only what was sent finds out that nobody listens any more."""
    alive = [1]

    def fail(*_):
        alive[0] = 0 if went else 1
        raise libvirt.libvirtError("end of file")

    found = SimpleNamespace(suspend=fail)
    lookup = fail if fails == "lookup" else lambda _uuid: found
    hypervisor = LibvirtHypervisor("test:///default")
    connection = SimpleNamespace(isAlive=lambda: alive[0], lookupByUUIDString=lookup)
    monkeypatch.setattr(hypervisor, "_connection", connection)
    with pytest.raises(HypervisorError) as failed:
        hypervisor.suspend("uuid")
    assert isinstance(failed.value, LostLibvirtError) is went


def test_a_libvirt_that_went_away_is_not_one_without_the_domain_or_the_network(monkeypatch):
    alive = [1]

    def fail(*_):
        alive[0] = 0
        raise libvirt.libvirtError("end of file")

    lookups = ("lookupByName", "lookupByUUIDString", "networkLookupByName")
    connection = SimpleNamespace(isAlive=lambda: alive[0], **dict.fromkeys(lookups, fail))
    hypervisor = LibvirtHypervisor("test:///default")
    for ask in (hypervisor.domain, hypervisor.network_is_isolated):
        alive[0] = 1
        monkeypatch.setattr(hypervisor, "_connection", connection)
        with pytest.raises(LostLibvirtError, match="libvirt went away"):
            ask("web")


@pytest.mark.parametrize("name", ["absent", "", "00000000-f6a4-8304-79aa-97f2502e193f"])
def test_what_libvirt_does_not_have(name):
    hypervisor = LibvirtHypervisor("test:///default")
    for ask in (hypervisor.domain, hypervisor.network_is_isolated):
        with pytest.raises(NotFoundError, match="no such"):
            ask(name)


def test_an_emulator_is_told_from_the_next_though_libvirtd_counts_anew(monkeypatch, tmp_path):
    monkeypatch.setattr(domain_reader, "_PROCESSES", tmp_path)
    hypervisor = LibvirtHypervisor("test:///default")
    (tmp_path / "test.pid").write_text("100\n")
    first = hypervisor.domain("test").boot
    assert hypervisor.domain("test").boot == first
    (tmp_path / "test.pid").write_text("101\n")
    assert hypervisor.domain("test").boot not in ("", first)


def test_disks_that_were_pivoted_are_defined_so_before_a_pivot_is_said_to_be_over(monkeypatch):
    """Whoever reads that none is being switched goes by the definition."""
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
        hypervisor.commit(uuid, [vda, vdb], done.append, Patience())
    assert done == [[vdb], "kept", CommitStage.PIVOTED]
