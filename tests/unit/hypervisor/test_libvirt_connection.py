import libvirt
import pytest

from snaporch.hypervisor import HypervisorError, LostLibvirtError
from snaporch.hypervisor.libvirt_driver import LibvirtHypervisor


class Connection:
    """A connection with these methods, which is alive while ``alive`` says so."""

    def __init__(self, alive, methods):
        self.isAlive = lambda: alive[0]
        vars(self).update(methods)

    def setKeepAlive(self, _interval, _count):  # noqa: N802 - libvirt's
        return 0


def connected(alive, **methods):
    return LibvirtHypervisor("qemu:///fake", connect=lambda _uri: Connection(alive, methods))


@pytest.mark.parametrize("went", [False, True])
@pytest.mark.parametrize("fails", ["lookup", "act"])
def test_a_lost_connection_differs_from_a_refusal(fails, went):
    """Only a call detects that the connection is lost."""
    alive = [1]

    def fail(*_):
        alive[0] = 0 if went else 1
        raise libvirt.libvirtError("end of file")

    class Found:
        suspend = fail

    lookup = fail if fails == "lookup" else lambda _uuid: Found()
    hypervisor = connected(alive, lookupByUUIDString=lookup)
    with pytest.raises(HypervisorError) as failed:
        hypervisor.suspend("uuid")
    assert isinstance(failed.value, LostLibvirtError) is went


def test_a_lost_connection_differs_from_a_missing_domain_or_network():
    alive = [1]

    def fail(*_):
        alive[0] = 0
        raise libvirt.libvirtError("end of file")

    lookups = ("lookupByName", "lookupByUUIDString", "networkLookupByName")
    hypervisor = connected(alive, **dict.fromkeys(lookups, fail))
    for ask in (hypervisor.domain, hypervisor.network_is_isolated):
        alive[0] = 1
        with pytest.raises(LostLibvirtError, match="connection to libvirt was lost"):
            ask("web")
