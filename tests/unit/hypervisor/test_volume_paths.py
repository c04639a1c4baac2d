"""A disk that is a volume of a storage pool has the path of that volume."""

import pytest

from snaporch.hypervisor.domain_xml import disks, parse
from snaporch.hypervisor.volume_paths import with_volume_paths

POOLS = [
    "<pool type='dir'><name>files</name><target><path>/tank/web</path></target></pool>",
    "<pool type='zfs'><name>volumes</name><source><name>tank/vm</name></source></pool>",
    "<pool type='logical'><name>others</name><target><path>/dev/vg</path></target></pool>",
]


def domain(pool, volume):
    source = f"<source pool='{pool}' volume='{volume}'/>"
    disk = f"<disk type='volume'>{source}<target dev='vda'/></disk>"
    return f"<domain><devices>{disk}</devices></domain>"


@pytest.mark.parametrize(
    ("pool", "kind", "path"),
    [("files", "file", "/tank/web/a.raw"), ("volumes", "block", "/dev/zvol/tank/vm/a.raw")],
)
def test_a_directory_and_a_dataset_have_paths(pool, kind, path):
    (disk,) = disks(parse(with_volume_paths(domain(pool, "a.raw"), lambda: POOLS)))
    assert (disk.kind, disk.source) == (kind, path)


@pytest.mark.parametrize(
    ("pool", "volume"),
    [("others", "a"), ("none", "a"), ("", "a"), ("files", "../a"), ("files", ".."), ("files", "")],
)
def test_others_stay_volumes(pool, volume):
    (disk,) = disks(parse(with_volume_paths(domain(pool, volume), lambda: POOLS)))
    assert (disk.kind, disk.source) == ("volume", None)


def test_without_a_volume_libvirt_is_not_asked():
    xml = "<domain><devices/></domain>"
    assert with_volume_paths(xml, lambda: pytest.fail("asked")) == xml
