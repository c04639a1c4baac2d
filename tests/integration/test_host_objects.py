"""The contract of libvirt's networks and storage pools: the fake, and libvirt's test driver."""

import pytest
from fakes.hypervisor import FakeHypervisor

from snaporch.hypervisor import HypervisorError, open_hypervisor

NETWORK = "<network><name>x</name><ip address='192.168.217.1' prefix='24'/></network>"
POOL = "<pool type='dir'><name>x</name><target><path>/nowhere/x</path></target></pool>"


@pytest.fixture(params=["fake", "libvirt"])
def hypervisor(request):
    return FakeHypervisor() if request.param == "fake" else open_hypervisor("test:///default")


@pytest.mark.parametrize("starts_at_boot", [True, False])
@pytest.mark.parametrize(("kind", "xml"), [("network", NETWORK), ("storage_pool", POOL)])
def test_what_is_defined_is_listed(hypervisor, kind, xml, starts_at_boot):
    listed = getattr(hypervisor, f"defined_{kind}s")
    define = getattr(hypervisor, f"define_{kind}")
    before = [each.name for each in listed()]
    define(xml, starts_at_boot=starts_at_boot)
    (found,) = (each for each in listed() if each.name not in before)
    assert (found.name, found.starts_at_boot) == ("x", starts_at_boot)
    assert "<name>x</name>" in found.xml
    with pytest.raises(HypervisorError):
        define(xml, starts_at_boot=starts_at_boot)
    assert len(listed()) == len(before) + 1
