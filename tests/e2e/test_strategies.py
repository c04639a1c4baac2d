"""Every strategy on a running guest; downgrades; the plan without a run."""

import json

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import (
    assert_clean,
    assert_restored,
    config,
    must,
    one_line_error,
    restore,
    snaporch,
    snapshot,
    zfs_snapshots,
)


@pytest.fixture(scope="module")
def guest():
    """In one pool."""
    made = Guest.create("one pool", disks=[Disk("file", "tank/one"), Disk("zvol", "tank/one-data")])
    yield made
    made.remove()


def taken_with(guest, tmp_path, settings, *options):
    with config(tmp_path, f"[defaults]\n{settings}\n") as environment:
        outcome = snaporch("snapshot", guest.name, "--json", *options, env=environment)
    assert outcome.status == 0, outcome.err
    return outcome.json


@pytest.mark.parametrize("strategy", ["overlay", "manual"])
def test_ram_by_either_way_and_back(guest, tmp_path, strategy):
    mark = guest.mark()
    taken = taken_with(guest, tmp_path, f'ram_strategy = "{strategy}"')
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert_clean(guest)
    assert taken["level"] == "ram"
    count = guest.snapshot_count(taken["snapshot"])
    guest.wait_count(beyond=count + 10)
    mark = guest.mark()
    restore(guest, taken["snapshot"])
    assert_restored(guest, mark, count)


def bitmaps(guest):
    """The bitmaps of the guest's block nodes, by node; of each whether it is persistent."""
    query = '{"execute": "query-named-block-nodes", "arguments": {"flat": true}}'
    nodes = json.loads(must("virsh", "qemu-monitor-command", guest.name, query))["return"]
    return {
        node["node-name"]: [(each["name"], each["persistent"]) for each in node["dirty-bitmaps"]]
        for node in nodes
        if node.get("dirty-bitmaps")
    }


def test_the_bitmap_that_libvirt_leaves_is_one_and_is_not_stored(guest, tmp_path):
    """libvirt adds it when it pivots, and leaves it on raw images."""
    taken_with(guest, tmp_path, 'ram_strategy = "overlay"')
    first = bitmaps(guest)
    taken_with(guest, tmp_path, 'ram_strategy = "overlay"')
    assert bitmaps(guest) == first
    assert all(each == [("libvirt-tmp-activewrite", False)] for each in first.values())
    assert len(first) <= len(guest.images)
    guest.destroy()
    guest.start()
    assert bitmaps(guest) == {}


@pytest.mark.parametrize(("strategy", "taken"), [("auto", "manual"), ("overlay", "overlay")])
def test_auto_is_manual(guest, tmp_path, strategy, taken):
    with config(tmp_path, f'[defaults]\nram_strategy = "{strategy}"\n') as environment:
        outcome = snaporch("snapshot", guest.name, env=environment)
    assert f"({taken})" in outcome.err


def test_over_two_pools():
    two = Guest.create("two pools", disks=[Disk("file", "tank/two"), Disk("zvol", "flash/two")])
    outcome = snaporch("snapshot", two.name, "--dry-run")
    assert "by manual" in outcome.out
    taken = snapshot(two)
    count = two.snapshot_count(taken["snapshot"])
    mark = two.mark()
    restore(two, taken["snapshot"])
    assert_restored(two, mark, count)
    two.remove()


@pytest.mark.parametrize("level", ["paused", "crash"])
def test_lower_levels_are_recorded_as_what_they_are(guest, level):
    mark = guest.mark()
    taken = snapshot(guest, "--level", level)
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert_clean(guest)
    assert (taken["level"], taken["state"], taken["ram_bytes"]) == (level, "complete", None)


def test_paused_disks_are_of_one_instant_and_boot(guest):
    taken = snapshot(guest, "--level", "paused")
    count = guest.snapshot_count(taken["snapshot"])
    mark = guest.mark()
    restored = restore(guest, taken["snapshot"])
    assert not restored["resumed"]
    guest.wait_count()
    (found,) = guest.cold_boots_since(mark)
    assert set(found.values()) <= {count, count - 1}  # one may have been in flight


def test_a_level_that_cannot_be_had_is_refused(guest):
    before = zfs_snapshots()
    outcome = snaporch("snapshot", guest.name, "--level", "quiesced")
    one_line_error(outcome, 5, "no quiesced snapshot", "agent")
    assert zfs_snapshots() == before


def test_a_downgrade_is_allowed_said_and_recorded(guest, tmp_path):
    text = '[defaults]\nlevel = "quiesced"\non_unavailable = "paused"\n'
    with config(tmp_path, text) as environment:
        outcome = snaporch("snapshot", guest.name, env=environment)
        assert outcome.status == 0
        assert "taking paused instead" in outcome.err
        assert "  paused  complete" in outcome.out


def test_a_downgrade_after_a_capture_that_failed(guest, tmp_path):
    """RAM cannot be saved within a byte budget of nothing worth mentioning."""
    text = (
        '[defaults]\nram_time_budget = "1s"\non_ram_budget = "abort"\n'
        'on_unavailable = "crash"\ncompression = "gzip"\n'
    )
    programs = tmp_path / "bin"
    programs.mkdir()
    pigz = programs / "pigz"
    pigz.write_text("#!/bin/sh\nexec sleep 600\n")
    pigz.chmod(0o755)
    big = Guest.create("big", firmware="uefi", disks=[Disk("zvol", "tank/big")])
    with config(tmp_path, text) as environment:
        path = {"PATH": f"{programs}:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin"}
        outcome = snaporch("snapshot", big.name, "--json", env=environment | path)
    assert outcome.status == 0, outcome.err
    assert outcome.json["level"] == "crash"
    assert "saving RAM took more than 1 s" in outcome.err
    assert_clean(big)
    big.remove()


def test_dry_run_prints_the_plan_and_touches_nothing(guest):
    before = zfs_snapshots()
    mark = guest.mark()
    outcome = snaporch("snapshot", guest.name, "--dry-run")
    assert outcome.status == 0
    assert "ram, by manual" in outcome.out
    assert "tank/one-data" in outcome.out
    assert zfs_snapshots() == before
    guest.wait_count()
    guest.assert_undisturbed(mark)


def test_a_foreign_overlay_is_named_and_left_alone(guest):
    must("virsh", "snapshot-create-as", guest.name, "--disk-only", "--no-metadata", "--diskspec",
         "vda,file=/var/tmp/foreign.qcow2", "--diskspec", "vdb,snapshot=no")  # fmt: skip
    outcome = snaporch("snapshot", guest.name)
    one_line_error(outcome, 5, "/var/tmp/foreign.qcow2", "snaporch did not make")
    assert guest.sources()["vda"] == "/var/tmp/foreign.qcow2"
    must("virsh", "blockcommit", guest.name, "vda", "--active", "--pivot")
    assert snapshot(guest)["level"] == "ram"
