"""Consistency groups: two guests in one window, over one pool and two, and interrupted runs."""

import json
import os
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from faults.process import Run
from guests.disks import Disk
from guests.guest import Guest
from support import (
    JOURNAL,
    assert_clean,
    assert_restored,
    config,
    must,
    one_line_error,
    snaporch,
    stalled_compressor,
    wait_for,
    zfs_snapshots,
)

GROUP = '[group.pair]\ndomains = ["app", "db"]\n'
DATASETS = ("flash/app", "tank/app", "tank/db")


@pytest.fixture(scope="module")
def app():
    made = Guest.create("app", disks=[Disk("file", "tank/app"), Disk("zvol", "flash/app")])
    yield made
    made.remove()


@pytest.fixture(scope="module")
def db():
    """A UEFI guest: its firmware alone is more RAM than the pipes between us can hold."""
    made = Guest.create("db", disks=[Disk("zvol", "tank/db")], firmware="uefi")
    yield made
    made.remove()


@pytest.fixture
def pair(app, db):
    """Both, running; at the end of a test they have noticed nothing but the pause."""
    marks = {}
    for guest in (app, db):
        if guest.state() == "shut off":
            guest.start()
        guest.wait_count()
        marks[guest] = guest.mark()
    yield app, db
    for guest, mark in marks.items():
        guest.wait_count()
        guest.assert_undisturbed(mark)
        assert_clean(guest)


def together(tmp_path, name, more=""):
    """A snapshot of the group, which must succeed; the entries by domain."""
    with config(tmp_path, GROUP + more) as env:
        outcome = snaporch("snapshot", "--group", "pair", "--name", name, "--json", env=env)
    assert outcome.status == 0, outcome.err
    return {entry["domain"]: entry for entry in outcome.json}


def pause_of(entry):
    """The time at which a guest was paused, and the time at which it was resumed."""
    manifest = json.loads((Path(entry["bundle"]) / "manifest.json").read_text())
    begin = datetime.fromisoformat(manifest["created"])
    return begin, begin + timedelta(milliseconds=manifest["pause_ms"])


@contextmanager
def taken(tmp_path, name, more=""):
    """A snapshot of the group, stopped when ZFS has it and no guest was released yet."""
    with config(tmp_path, GROUP + more) as env:
        words = ("snapshot", "--group", "pair", "--name", name, "--json")
        run = Run(*words, point="after:pool-snapshot", env=env)
        try:
            run.wait_stopped()
            yield
            outcome = end_of(run)
        finally:
            run.kill()
            run.close()
    assert outcome.status == 0, outcome.err


def end_of(run):
    """Continue the run; the other member reaches the point, too, and may stop there once more."""
    while run.status is None:
        run.go_on()
        _, status = os.waitpid(run.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            run.status = os.waitstatus_to_exitcode(status)
    return run.outcome()


def transactions(name):
    """Of each snapshot of that name."""
    listing = must("zfs", "list", "-Hp", "-t", "snapshot", "-o", "name,createtxg")
    pairs = (line.split("\t") for line in listing.splitlines())
    return {full: txg for full, txg in pairs if full.endswith(f"@{name}")}


def none_of(name):
    return not zfs_snapshots(f"@{name}")


def test_both_are_paused_at_the_same_time_and_share_the_pools_instant(pair, tmp_path):
    before = {guest: guest.wait_count() for guest in pair}
    entries = together(tmp_path, "g1")
    assert {entry["level"] for entry in entries.values()} == {"ram"}
    (from_app, to_app), (from_db, to_db) = (pause_of(entries[guest.name]) for guest in pair)
    assert max(from_app, from_db) < min(to_app, to_db)
    txgs = transactions("g1")
    assert set(txgs) == {f"{dataset}@g1" for dataset in DATASETS}
    assert txgs["tank/app@g1"] == txgs["tank/db@g1"]
    for guest in pair:
        assert before[guest] <= guest.snapshot_count("g1") <= guest.wait_count()
    assert {entry["group"] for entry in entries.values()} == {"pair"}
    assert "GROUP" in snaporch("list").out
    assert "pair: app, db" in snaporch("show", "db@g1").out


def back_together(pair, name, *options):
    """A restore of the group from one member's snapshot; both go on where they were."""
    counts = {guest: guest.snapshot_count(name) for guest in pair}
    marks = {guest: guest.mark() for guest in pair}
    words = ("restore", f"db@{name}", "--group", "--yes", "--json", *options)
    outcome = snaporch(*words)
    assert outcome.status == 0, outcome.err
    assert [entry["domain"] for entry in outcome.json] == ["app", "db"]
    for guest in pair:
        assert_restored(guest, marks[guest], counts[guest])
        assert_clean(guest)


def test_both_come_back_to_it_together(app, db):
    refused = snaporch("restore", "db@g1")
    assert "of the group pair: app@g1 would be of the same instant" in refused.err
    preview = snaporch("restore", "db@g1", "--group", "--dry-run")
    assert preview.status == 0, preview.err
    assert "restoring app@g1:" in preview.out
    assert "restoring db@g1:" in preview.out
    back_together((app, db), "g1")


def test_killed_between_two_members_each_is_finished(app, db):
    """Both are off when the first one is rolled back, so none of them meets the other's future."""
    counts = {guest: guest.snapshot_count("g1") for guest in (app, db)}
    marks = {guest: guest.mark() for guest in (app, db)}
    run = Run("restore", "db@g1", "--group", "--jobs", "1", "--yes", point="after:resume")
    try:
        run.wait_stopped()
    finally:
        run.kill()
        run.close()
    for guest in (app, db):
        recovered = snaporch("recover", guest.name)
        assert recovered.status == 0, recovered.err
    for guest in (app, db):
        assert_restored(guest, marks[guest], counts[guest])
        assert_clean(guest)


@pytest.mark.daily(2, "way")
def test_both_are_paused_when_the_snapshots_are_there(pair, tmp_path):
    with taken(tmp_path, "g5"):
        assert [guest.state() for guest in pair] == ["paused", "paused"]


@pytest.mark.daily(2, "way")
def test_on_overlays_both_run_when_the_snapshots_are_there(pair, tmp_path):
    with taken(tmp_path, "g6", '[defaults]\nram_strategy = "overlay"\n'):
        for guest in pair:
            guest.wait_count(beyond=guest.wait_count())


@pytest.mark.daily(2, "way")
def test_on_overlays_it_is_one_transaction_too(pair, tmp_path):
    entries = together(tmp_path, "g2", '[defaults]\nram_strategy = "overlay"\n')
    assert {entry["level"] for entry in entries.values()} == {"ram"}
    txgs = transactions("g2")
    assert txgs["tank/app@g2"] == txgs["tank/db@g2"]
    for guest in pair:
        assert guest.snapshot_count("g2") <= guest.wait_count()


@pytest.mark.daily(2, "way")
def test_one_that_is_off_is_taken_along(app, db, tmp_path):
    db.destroy()
    entries = together(tmp_path, "g3")
    assert (entries["app"]["level"], entries["db"]["level"]) == ("ram", "off")
    assert transactions("g3")["tank/app@g3"] == transactions("g3")["tank/db@g3"]
    assert_clean(app)
    db.start()


@pytest.mark.daily(2, "way")
def test_one_that_cannot_be_frozen_is_refused_before_anything(pair, tmp_path):
    with config(tmp_path, GROUP + '[domain.db]\nlevel = "quiesced"\n') as env:
        outcome = snaporch("snapshot", "--group", "pair", "--name", "no", env=env)
    one_line_error(outcome, 5, "db", "agent")
    assert none_of("no")


@pytest.mark.daily(2, "way")
def test_one_whose_freeze_fails_has_the_other_released(pair, tmp_path):
    """app is saved and paused; db's RAM never arrives, and its budget ends."""
    with stalled_compressor(tmp_path) as env:
        Path(env["SNAPORCH_CONFIG"]).write_text(
            GROUP
            + '[defaults]\ncompression = "none"\n[domain.db]\ncompression = "gzip"\n'
            + 'ram_capture = "stream"\nram_time_budget = "5s"\non_ram_budget = "abort"\n'
        )
        outcome = snaporch("snapshot", "--group", "pair", "--name", "no", env=env)
    one_line_error(outcome, 8, "db", "saving RAM took more than")
    assert "none of its domains was snapshotted" in outcome.err
    assert none_of("no")
    assert "no" not in {entry["snapshot"] for entry in snaporch("list", "--json").json}


@pytest.mark.daily(2, "way")
def test_a_downgrade_that_is_allowed_takes_the_group_all_the_same(pair, tmp_path):
    more = '[domain.db]\nlevel = "quiesced"\non_unavailable = "paused"\n'
    entries = together(tmp_path, "g4", more)
    assert (entries["app"]["level"], entries["db"]["level"]) == ("ram", "paused")
    (from_app, to_app), (from_db, to_db) = (pause_of(entries[guest.name]) for guest in pair)
    assert max(from_app, from_db) < min(to_app, to_db)


KILLED = {
    "before:freeze": False,
    "after:freeze": False,
    "before:pool-snapshot": False,
    "after:pool-snapshot": True,
    "before:release": True,
    "after:release": True,
}
"""Where the process is killed, and whether the snapshots are there by then."""


@pytest.mark.daily(2)
@pytest.mark.parametrize("point", KILLED)
def test_killed_each_recovers_by_its_own_journal(pair, tmp_path, point):
    name = point.replace(":", "-")
    with config(tmp_path, GROUP) as env:
        run = Run("snapshot", "--group", "pair", "--name", name, point=point, env=env)
        try:
            run.wait_stopped()
        finally:
            run.kill()
            run.close()
        wait_for(lambda: not list(JOURNAL.glob("*")), "the guardians", 300)
    found = [entry for entry in snaporch("list", "--json").json if entry["snapshot"] == name]
    if not KILLED[point]:
        assert none_of(name)
        assert found == []
        return
    assert len(zfs_snapshots(f"@{name}")) == len(DATASETS)
    assert {(e["domain"], e["level"], e["group"]) for e in found} == {
        ("app", "crash", "pair"),
        ("db", "crash", "pair"),
    }


def test_a_policy_takes_the_group_once(pair, tmp_path):
    more = '[policy.hourly]\nevery = "52w"\nstagger = "30m"\ndomains = ["app", "db"]\n'
    with config(tmp_path, GROUP + more) as env:
        outcome = snaporch("run-due", "--json", env=env)
        assert outcome.status == 0, outcome.err
        assert [run["group"] for run in outcome.json["runs"]] == ["pair"]
        assert snaporch("run-due", "--json", env=env).json["runs"] == []
    taken = [entry for entry in snaporch("list", "--json").json if entry["policy"] == "hourly"]
    assert {entry["domain"] for entry in taken} == {"app", "db"}
    assert len({(entry["snapshot"], entry["group_run"]) for entry in taken}) == 1


def test_one_that_has_no_policy_of_its_own_is_no_problem(app, db, tmp_path):
    """The policy of the other one takes it along, also while it is off."""
    if db.state() != "shut off":
        db.destroy()
    more = '[policy.others]\nevery = "52w"\ndomains = ["app"]\n'
    with config(tmp_path, GROUP + more) as env:
        outcome = snaporch("run-due", "--json", env=env)
        assert outcome.status == 0, outcome.err
        problems = snaporch("status", "--json", env=env).json["problems"]
    taken = [entry for entry in snaporch("list", "--json").json if entry["policy"] == "others"]
    assert {(entry["domain"], entry["level"]) for entry in taken} == {("app", "ram"), ("db", "off")}
    assert [each for each in problems if each["grade"] == "critical"] == []
    with config(tmp_path, more) as env:  # the group is gone
        problems = snaporch("status", "--json", env=env).json["problems"]
    assert [each["subject"] for each in problems if each["code"] == "no-policy"] == ["db"]
    db.start()
