import pytest

from snaporch.replication.append_only_protection import weakness

NEEDED = {"create", "mount", "receive:append", "userprop"}


@pytest.mark.parametrize("release", ["2.3.2", "2.3.9-0+deb13u1", "2.4.0", "3.0.0", "", "odd"])
def test_what_is_needed_is_no_weakness(release):
    assert weakness(release, NEEDED, is_root=False) == ""


@pytest.mark.parametrize("release", ["2.1.11-1+deb12u1", "2.2.9", "2.3.1"])
def test_an_older_openzfs_permits_to_overwrite(release):
    given = NEEDED - {"receive:append"} | {"receive"}
    found = weakness(release, given, is_root=False)
    assert release in found
    assert "older than 2.3.2" in found
    assert "zfs receive -F" in found


@pytest.mark.parametrize(
    "permission",
    [
        "clone", "destroy", "mountpoint", "promote", "readonly", "receive", "rename", "rollback",
        "@bad", "allow", "change-key", "load-key", "hold", "anything",
    ],
)  # fmt: skip
def test_a_permission_that_can_change_copies_is_named(permission):
    assert permission in weakness("2.3.9", NEEDED | {permission}, is_root=False)


@pytest.mark.parametrize("release", ["2.3.2", "2.4.0", "odd"])
def test_receive_is_more_than_is_needed_where_openzfs_can_append(release):
    found = weakness(release, NEEDED | {"receive"}, is_root=False)
    assert found == "zfs allow there permits more than is needed: receive"


def test_an_older_openzfs_without_the_permission_is_no_weakness():
    assert weakness("2.2.9", NEEDED, is_root=False) == ""


def test_root_needs_no_permission():
    assert "root" in weakness("2.3.9", NEEDED, is_root=True)
