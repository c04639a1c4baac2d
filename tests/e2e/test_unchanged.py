"""A policy takes nothing of a guest that is off, as long as nothing of it has changed."""

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import must, snaporch, system_config, zfs_snapshots

POLICY = '[policy.hourly]\nevery = "1h"\ndomains = ["idle"]\nkeep = { hourly = 2 }\n'
IDLE = "tank/idle"
VOLUME = "flash/idle"


@pytest.fixture
def guest():
    with system_config(POLICY):
        made = Guest.create(
            "idle", disks=[Disk("file", IDLE), Disk("zvol", VOLUME)], start=False, firmware="uefi"
        )
        yield made
        made.remove()


def take():
    outcome = snaporch("snapshot", "idle", "--policy", "hourly", "--if-changed", "--json")
    assert outcome.status == 0, outcome.err
    return outcome.json


@pytest.mark.timeout(120)
def test_none_is_taken_until_something_changed(guest):
    first = take()
    assert (first["level"], first["unchanged"]) == ("off", None)
    for _ in range(2):
        again = take()
        assert again["snapshot"] == first["snapshot"]
        assert again["unchanged"] is not None
    assert len([name for name in zfs_snapshots() if name.startswith(f"{IDLE}@")]) == 1
    policies = snaporch("status", "--json").json["domains"][0]["policies"]
    assert policies[0]["unchanged"] == again["unchanged"]

    must("dd", "if=/dev/urandom", f"of=/dev/zvol/{VOLUME}", "bs=4k", "count=1", "conv=notrunc")
    second = take()
    assert second["snapshot"] != first["snapshot"]
    assert take()["snapshot"] == second["snapshot"]

    must("virsh", "desc", "idle", "--config", "another definition")
    third = take()
    assert third["snapshot"] != second["snapshot"]
    assert take()["snapshot"] == third["snapshot"]
