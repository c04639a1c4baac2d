import pytest

from snaporch.rebuild.host_object_xml import NotAllowedError
from snaporch.rebuild.missing_storage_pools import Created, allowed_pool

CREATED = Created({"/tank/web", "/tank/web/in"}, {"tank/web", "tank/vms"})


def dir_pool(path, more=""):
    return (
        "<pool type='dir'><name>vms</name><uuid>u</uuid><capacity unit='bytes'>1</capacity>"
        f"<source/><target><path>{path}</path><permissions><mode>0711</mode></permissions>"
        f"{more}</target></pool>"
    )


def zfs_pool(dataset):
    return (
        f"<pool type='zfs'><name>vms</name><source><name>{dataset}</name></source>"
        f"<target><path>/dev/zvol/{dataset}</path></target></pool>"
    )


@pytest.mark.parametrize(
    ("path", "above"),
    [("/tank/web", "/tank/web"), ("/tank/web/a/b", "/tank/web"), ("/tank/web/in", "/tank/web/in")],
)
def test_a_directory_of_the_guest_may_be_a_pool(path, above):
    found = allowed_pool("vms", dir_pool(path), CREATED)
    assert (found.directory, found.mountpoint, found.description) == (path, above, f"dir {path}")
    assert "permissions" not in found.xml


@pytest.mark.parametrize(
    "path",
    [
        *("/tank", "/", "/etc", "/tank/webber", "/tank/web/../mail", "/tank/web//x", "tank/web"),
        *("", "/tank/web/", "/tank/web/./x", "/tank/web/a\nb", "//tank/web"),
    ],
)
def test_another_directory_is_refused(path):
    with pytest.raises(NotAllowedError, match="outside of the guest's datasets"):
        allowed_pool("vms", dir_pool(path), CREATED)


def test_a_dataset_that_the_rebuild_creates_may_be_a_pool():
    found = allowed_pool("vms", zfs_pool("tank/vms"), CREATED)
    assert (found.directory, found.description) == ("", "zfs tank/vms")
    assert "<source><name>tank/vms</name></source>" in found.xml
    assert "target" not in found.xml


@pytest.mark.parametrize("dataset", ["tank", "tank/web/volume", "tank/mail", "", "tank/vms/"])
def test_another_dataset_is_refused(dataset):
    with pytest.raises(NotAllowedError, match="which is not the guest's alone"):
        allowed_pool("vms", zfs_pool(dataset), CREATED)


@pytest.mark.parametrize("kind", ["fs", "netfs", "logical", "disk", "iscsi", "rbd", ""])
def test_another_type_is_refused(kind):
    xml = dir_pool("/tank/web").replace("'dir'", f"'{kind}'")
    with pytest.raises(NotAllowedError, match="has the type"):
        allowed_pool("vms", xml, CREATED)


def test_a_source_that_could_be_formatted_is_refused():
    xml = dir_pool("/tank/web").replace("<source/>", "<source><device path='/dev/sda'/></source>")
    with pytest.raises(NotAllowedError, match="has <source/device>"):
        allowed_pool("vms", xml, CREATED)
