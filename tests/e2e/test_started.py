"""Every command once as a user starts it: a Python of its own, from start to end."""

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import assert_clean, assert_restored, must, run

NAME = "started"


@pytest.fixture(scope="module")
def guest():
    made = Guest.create(NAME, disks=[Disk("file", "tank/started"), Disk("zvol", "flash/started")])
    yield made
    made.remove()


def test_from_the_first_snapshot_to_the_last_restore(guest, tmp_path):
    must("snaporch", "snapshot", NAME, "--name", "s1", "--quiet")
    assert_clean(guest)
    for command in ("list", "show s1", "plan", "prune", "recover", "verify s1"):
        word, *of = command.split()
        must("snaporch", word, *(f"{NAME}@{name}" for name in of))
    assert run("snaporch", "check").status != 1
    assert run("snaporch", "status").status != 1
    must("snaporch", "extract", f"{NAME}@s1", str(tmp_path / "vda.raw"), "--disk", "vda")
    must("snaporch", "clone", f"{NAME}@s1", "started-clone")
    must("snaporch", "clone", "--delete", "started-clone")
    mark, count = guest.mark(), guest.snapshot_count("s1")
    must("snaporch", "restore", f"{NAME}@s1", "--yes", "--quiet")
    assert_restored(guest, mark, count)
