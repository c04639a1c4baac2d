from types import SimpleNamespace

import libvirt
import pytest

from snaporch.hypervisor import HypervisorError, LostLibvirtError
from snaporch.hypervisor.libvirt_driver import LibvirtHypervisor


@pytest.mark.parametrize("went", [False, True])
@pytest.mark.parametrize("fails", ["lookup", "act"])
def test_a_lost_connection_differs_from_a_refusal(monkeypatch, fails, went):
    """Only a call detects that the connection is lost."""
    alive = [1]

    def fail(*_):
        alive[0] = 0 if went else 1
        raise libvirt.libvirtError("end of file")

    class Found:
        suspend = fail

    lookup = fail if fails == "lookup" else lambda _uuid: Found()
    hypervisor = LibvirtHypervisor("test:///default")
    connection = SimpleNamespace(isAlive=lambda: alive[0], lookupByUUIDString=lookup)
    monkeypatch.setattr(hypervisor, "_connection", connection)
    with pytest.raises(HypervisorError) as failed:
        hypervisor.suspend("uuid")
    assert isinstance(failed.value, LostLibvirtError) is went


def test_a_lost_connection_differs_from_a_missing_domain_or_network(monkeypatch):
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
        with pytest.raises(LostLibvirtError, match="connection to libvirt was lost"):
            ask("web")
