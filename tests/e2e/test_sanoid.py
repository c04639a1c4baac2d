"""Real sanoid, real guests: what its hooks make of its snapshots."""

import os
import shutil

import pytest
from guests.disks import Disk
from guests.guest import Guest
from guests.sector import agreed_count
from sanoid_here import PATIENT, Sanoid, autosnaps, forget, records
from support import (
    assert_clean,
    assert_restored,
    config,
    must,
    restore,
    snaporch,
    system_config,
    zfs_snapshots,
)


@pytest.fixture(scope="module", autouse=True)
def patient():
    with system_config(PATIENT):
        yield


@pytest.fixture(scope="module")
def guest():
    """Two disks on two datasets of one pool."""
    must("zfs", "create", "tank/one")
    made = Guest.create("one", disks=[Disk("file", "tank/one/a"), Disk("zvol", "tank/one/b")])
    yield made
    made.remove()


@pytest.fixture(scope="module")
def other():
    made = Guest.create("other", disks=[Disk("file", "tank/other")])
    yield made
    made.remove()


@pytest.fixture(autouse=True)
def undisturbed(guest):
    mark = guest.mark()
    yield mark
    guest.wait_count()
    assert_clean(guest)
    forget()


def assert_goes_back(guest, name, *options):
    """A restore to the exact count."""
    member = next(record for record in records(guest) if record["snapshot"] == name)
    assert (member["level"], member["state"]) == ("ram", "complete"), member
    by_dataset = dict(full.split("@") for full in autosnaps(*guest.datasets()))
    count = agreed_count([image.count(by_dataset[image.dataset]) for image in guest.images])
    guest.wait_count(beyond=count + 2)
    mark = guest.mark()
    restore(guest, name, *options)
    assert_restored(guest, mark, count)


def test_hourly_and_daily_of_a_round_are_of_one_instant(guest, undisturbed):
    sanoid = Sanoid.configured("zfs", {"tank/one": "zfs"}, daily="5")
    outcome = sanoid.run("--cron")
    assert outcome.status == 0, outcome.err
    assert "WARN" not in outcome.err
    assert len(autosnaps("tank/one/a", "tank/one/b")) == 4
    guest.assert_undisturbed(undisturbed)
    daily, hourly = sorted(records(guest), key=lambda record: record["snapshot"])
    assert daily["bundle"] == hourly["bundle"]
    assert {daily["level"], hourly["level"]} == {"ram"}
    assert guest.snapshot_count(daily["snapshot"]) == guest.snapshot_count(hourly["snapshot"])
    must("zfs", "destroy", f"tank/one/b@{daily['snapshot']}")
    assert_goes_back(guest, daily["snapshot"])
    assert_goes_back(guest, hourly["snapshot"])


def test_dataset_by_dataset_they_are_still_of_one_instant(guest, undisturbed):
    """``recursive = yes``: a pre and a post for each dataset, in an unknown order."""
    sanoid = Sanoid.configured("yes", {"tank/one": "yes"})
    outcome = sanoid.run("--take-snapshots")
    assert outcome.status == 0, outcome.err
    assert "WARN" not in outcome.err
    guest.assert_undisturbed(undisturbed)
    found = records(guest)
    assert len({record["run"] for record in found}) == 1
    for record in found:
        assert record["datasets"] == ["tank/one/a", "tank/one/b"]
    assert_goes_back(guest, found[0]["snapshot"])


@pytest.mark.daily(1, "two guests")
def test_two_guests_in_one_round(guest, other):
    sanoid = Sanoid.configured("two", {"tank/one": "zfs", "tank/other": "no"})
    outcome = sanoid.run("--take-snapshots")
    assert outcome.status == 0, outcome.err
    assert "WARN" not in outcome.err
    for each in (guest, other):
        (record,) = records(each)
        assert_goes_back(each, record["snapshot"])
    assert_clean(other)
    forget()


@pytest.mark.daily(1, "two guests")
def test_two_guests_on_one_dataset(tmp_path):
    """The snapshot carries the marks of one; the other's bundle is found and good all the same."""
    must("zfs", "create", "tank/shared")
    guests = [
        Guest.create(name, disks=[Disk("plain", "/tank/shared", file_name=f"{name}.img")])
        for name in ("left", "right")
    ]
    sanoid = Sanoid.configured("shared", {"tank/shared": "no"})
    outcome = sanoid.run("--take-snapshots")
    assert outcome.status == 0, outcome.err
    found = [records(each)[0] for each in guests]
    assert {(record["level"], record["state"]) for record in found} == {("ram", "complete")}
    (full,) = autosnaps("tank/shared")
    for each, record in zip(guests, found, strict=True):
        assert record["datasets"] == ["tank/shared"]
        refused = snaporch("restore", f"{each.name}@{record['snapshot']}")
        assert refused.status == 5, refused
        passed = snaporch("verify", f"{each.name}@{record['snapshot']}", "--json")
        assert passed.status == 0, passed.err
    must("zfs", "destroy", full)
    pruned = snaporch("prune", "--json").json
    assert len([item for item in pruned["items"] if item["action"] == "trash"]) == 2
    for each in guests:
        each.remove()
    must("zfs", "destroy", "-r", "tank/shared")


def test_a_guest_that_is_off_gets_its_record(other):
    other.destroy()
    sanoid = Sanoid.configured("off", {"tank/other": "no"})
    assert sanoid.run("--take-snapshots").status == 0
    (record,) = records(other)
    assert (record["level"], record["state"]) == ("off", "complete")
    forget()
    other.start()


OPTIONS = {
    "default": ({"no_inconsistent_snapshot": "no"}, 3),
    "forced": ({"no_inconsistent_snapshot": "no", "force_post_snapshot_script": "yes"}, 3),
    "consistent": ({"no_inconsistent_snapshot": "yes"}, 0),
}


@pytest.mark.daily(1)
@pytest.mark.parametrize(("options", "taken"), OPTIONS.values(), ids=OPTIONS)
def test_a_guest_that_cannot_be_frozen(guest, other, tmp_path, undisturbed, options, taken):
    """Neither is the one that could."""
    sanoid = Sanoid.configured("failing", {"tank": "zfs"}, **options)
    with config(tmp_path, PATIENT + '[domain.other]\nlevel = "off"\n') as environment:
        outcome = sanoid.run("--take-snapshots", env=environment)
    assert "WARN: pre_snapshot_script failed" in outcome.err
    assert (
        "other: it runs, and its level is off: it is snapshotted only while it is off"
        in outcome.err
    )
    datasets = ["tank/one/a", "tank/one/b", "tank/other"]
    assert len(autosnaps(*datasets)) == taken
    assert records(guest) == []
    guest.wait_count()
    guest.assert_undisturbed(undisturbed)
    assert_clean(other)


NO_SNAPSHOT = """#!/bin/sh
case "$*" in
    "snapshot tank/one/b@"*) echo "cannot create snapshot: out of space" >&2; exit 1 ;;
esac
exec {zfs} "$@"
"""


def test_a_zfs_snapshot_that_fails(guest, undisturbed, tmp_path):
    """Of one of two datasets there is nothing of the instant."""
    sanoid = Sanoid.configured("taken", {"tank/one": "yes"})
    program = tmp_path / "zfs"
    program.write_text(NO_SNAPSHOT.format(zfs=shutil.which("zfs")))
    program.chmod(0o755)
    before = zfs_snapshots()
    path = f"{tmp_path}:{os.environ['PATH']}"
    outcome = sanoid.run("--take-snapshots", env={"PATH": path})
    assert "CRITICAL ERROR" in outcome.err
    assert "incomplete" in outcome.err
    fresh = set(zfs_snapshots()) - set(before)
    assert {name.split("@")[0] for name in fresh} >= {"tank/one/a"}
    (record,) = records(guest)
    assert (record["level"], record["state"]) == ("crash", "incomplete")
    guest.wait_count()
    guest.assert_undisturbed(undisturbed)
