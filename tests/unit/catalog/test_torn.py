"""Snapshots that other programs take while overlays are committed, and how these are treated."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from fakes.hooks import failing, failing_once

from snaporch.catalog.records import all_records
from snaporch.catalog.torn import mark_torn, record_commit, recorded_commit
from snaporch.errors import AttentionError, RefusedError, RunFailedError
from snaporch.hypervisor import HypervisorError
from snaporch.hypervisor.commit_timeouts import CommitTimeouts
from snaporch.journal import Note, read_journals, release_mark
from snaporch.model import BundleState, Level
from snaporch.recovery.recover_runs import recover, recover_run
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.select import newest_until
from snaporch.restore.source import IncompleteError, complete_source
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import PoolError

TWO = {"vda": "tank/web", "vdb": "flash/web"}


@pytest.fixture
def ready(world):
    world.add_guest("web", TWO)
    world.with_defaults(ram_strategy="overlay")
    return world


def take(world, name="s1"):
    return take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest(name))


def levels(world):
    return {s.full_name: s.properties.get("level") for s in world.pool.snapshots()}


def records(world):
    return {r.snapshot: r for r in all_records(world.context.store, world.pool.snapshots())}


def other_program(world, name="syncoid"):
    return lambda: world.pool.snapshot([f"tank/web@{name}"], {})


def uncommitted(world):
    """The journal of a run whose commit failed, and was noted as begun."""
    world.hooks.at["hypervisor.commit"] = failing(HypervisorError("vda", "no"))
    with pytest.raises(AttentionError):
        take(world)
    del world.hooks.at["hypervisor.commit"]
    (journal,) = read_journals(world.paths.journal)
    return journal


def forget_commit(journal):
    """As if the disk had been too full to note that it begins."""
    whole = journal.path.read_text().splitlines(keepends=True)
    journal.path.write_text("".join(line for line in whole if '"event": "commit"' not in line))


def test_a_snapshot_of_another_program_during_the_commit(ready):
    ready.pool.snapshot(["tank/web@before"], {})
    ready.hooks.at["commit.pivoting"] = other_program(ready)
    assert take(ready).level is Level.RAM
    other_program(ready, "after")()
    assert levels(ready) == {
        "tank/web@before": None,
        "tank/web@s1": "ram",
        "flash/web@s1": "ram",
        "tank/web@syncoid": "torn",
        "tank/web@after": None,
    }
    assert any("tank/web@syncoid was taken while" in text for text in ready.heard.notes)


def test_a_snapshot_of_another_program_during_the_freeze_is_not_torn(ready):
    """Nothing is written to the bases before the commit."""

    def once():
        del ready.hooks.at["pool.snapshot tank"]
        other_program(ready)()

    ready.hooks.at["pool.snapshot tank"] = once
    take(ready)
    assert levels(ready)["tank/web@syncoid"] is None


def test_a_snapshot_of_another_program_while_a_recovery_commits(ready):
    ready.hooks.at["hypervisor.commit"] = failing(HypervisorError("vda", "no"))
    with pytest.raises(AttentionError):
        take(ready)
    other_program(ready, "late")()
    del ready.hooks.at["hypervisor.commit"]
    ready.hooks.at["commit.pivoting"] = other_program(ready)
    said = recover(ready.context, ready.guest().uuid)
    assert levels(ready)["tank/web@syncoid"] == levels(ready)["tank/web@late"] == "torn"
    assert levels(ready)["tank/web@s1"] == "crash"
    assert any("tank/web@syncoid was taken while" in str(each) for each in said)


def test_the_commit_continues_if_it_cannot_be_recorded(ready, refuse_line):
    refuse_line('"event": "commit')  # its begin and its end
    ready.hooks.at["hypervisor.commit"] = failing_once(HypervisorError("vda", "no"))
    ready.hooks.at["commit.pivoting"] = other_program(ready)
    with pytest.raises(RunFailedError):
        take(ready)
    assert levels(ready)["tank/web@syncoid"] == "torn"
    assert ready.on_bases()


def test_a_run_whose_own_snapshot_was_taken_after_the_guardian_began_to_commit(ready):
    def guardian():
        (journal,) = read_journals(ready.paths.journal)
        record_commit(ready.pool, journal.facts.datasets, journal.path)

    ready.hooks.at["pool.snapshot flash"] = guardian
    record = take(ready)
    assert record.level is Level.TORN
    assert set(levels(ready).values()) == {"torn"}


def test_a_commit_that_its_run_could_not_record(ready):
    """The guardian's: then all since the run's own snapshots counts."""

    def guardian():
        (journal,) = read_journals(ready.paths.journal)
        facts = journal.facts
        ready.hypervisor.commit(facts.uuid, facts.overlays, lambda _stage: None, CommitTimeouts())
        release_mark(journal.path).touch()
        other_program(ready)()
        raise HypervisorError("vda", "no")

    ready.hooks.at["hypervisor.busy_disks"] = guardian
    with pytest.raises(RunFailedError):
        take(ready)
    assert levels(ready)["tank/web@syncoid"] == "torn"
    assert levels(ready)["tank/web@s1"] == "crash"


@pytest.mark.parametrize("noted", [Note.PIVOTING, Note.COMMITTED])
def test_an_unrecorded_commit_is_added_to_a_recorded_one(ready, noted):
    """A run or a guardian began it on a full disk, and a recovery ended it when there was space."""
    journal = uncommitted(ready)
    forget_commit(journal)
    other_program(ready)()
    notes = journal.notes - {Note.PIVOTING} | {noted}
    recover_run(ready.context, journal.facts, notes, keep_snapshots=True)
    assert levels(ready)["tank/web@syncoid"] == "torn"
    assert levels(ready)["tank/web@s1"] == "crash"


def test_a_run_without_overlays_commits_nothing(ready):
    (journal,) = [uncommitted(ready)]
    forget_commit(journal)
    other_program(ready)()
    release_mark(journal.path).touch()
    facts = replace(journal.facts, overlays=(), overlay_dir=str(ready.root / "none"))
    recover_run(ready.context, facts, journal.notes, keep_snapshots=True)
    assert levels(ready)["tank/web@syncoid"] is None


def test_a_snapshot_after_the_commit_of_a_recovery_is_not_torn(ready):
    """The interrupted commit of the run itself ends with it."""
    journal = uncommitted(ready)
    ready.hooks.at["commit.pivoting"] = other_program(ready)
    ready.hooks.at["hypervisor.rebase_inactive"] = other_program(ready, "later")
    recover_run(ready.context, journal.facts, journal.notes, keep_snapshots=True)
    marked = levels(ready)
    assert marked["tank/web@syncoid"] == "torn"
    assert marked["tank/web@later"] is None


def test_a_snapshot_listed_just_after_the_commit_may_be_torn(ready):
    """A snapshot taken during the commit is listed when its transaction group is written."""
    ready.hooks.at["pool.sync"] = other_program(ready)
    assert take(ready).level is Level.RAM
    assert levels(ready)["tank/web@syncoid"] == "torn"


def test_a_pool_that_cannot_be_synced(ready):
    """Then all listed snapshots count, and no guest waits for the sync."""
    ready.hooks.at["pool.sync"] = failing(PoolError("zpool sync", "takes over 60 s"))
    assert take(ready).level is Level.RAM
    assert ready.on_bases()


def test_torn_snapshots_are_found_before_the_runs_own_are_destroyed(ready):
    journal = uncommitted(ready)
    forget_commit(journal)
    other_program(ready)()
    recover_run(ready.context, journal.facts, {Note.PIVOTING}, keep_snapshots=False)
    assert levels(ready) == {"tank/web@syncoid": "torn"}


@pytest.fixture
def unlisted(ready):
    """A pool that lists nothing when the commit begins; another program snapshots meanwhile."""
    ready.pool.snapshot(["tank/web@before"], {})
    ready.pool.age("tank/web@before", datetime(2025, 6, 1, tzinfo=UTC))

    def answers():
        del ready.hooks.at["pool.snapshots"]
        other_program(ready)()

    def suspend():
        ready.hooks.at["pool.snapshots"] = failing(PoolError("tank", "suspended"))

    ready.hooks.at["hypervisor.busy_disks"] = suspend  # asked when the snapshots exist
    ready.hooks.at["commit.pivoting"] = answers


def test_a_pool_that_lists_nothing_keeps_no_guest_on_its_overlays(ready, unlisted):
    assert take(ready).level is Level.RAM
    assert ready.on_bases()
    assert levels(ready) == {
        "tank/web@before": None,
        "tank/web@s1": "ram",
        "flash/web@s1": "ram",
        "tank/web@syncoid": "torn",
    }


def test_without_the_runs_own_snapshots_the_clock_decides(ready):
    ready.pool.snapshot(["tank/web@before"], {})
    ready.pool.age("tank/web@before", datetime(2025, 6, 1, tzinfo=UTC))
    for name in ("tank/web@since", "flash/web@since"):
        ready.pool.snapshot([name], {"snaporch:run": "another"})
    journal = ready.paths.journal / "own.jsonl"
    ready.hooks.at["pool.snapshots"] = failing(PoolError("tank", "suspended"))
    with recorded_commit(ready.pool, ("tank/web",), journal) as commits:
        del ready.hooks.at["pool.snapshots"]
    assert [each.full_name for each in mark_torn(ready.pool, TWO.values(), commits)] == [
        "tank/web@since"
    ]


def test_a_recovery_commits_though_no_pool_lists_anything(ready):
    journal = uncommitted(ready)
    ready.hooks.at["pool.snapshots"] = failing(PoolError("tank", "suspended"))
    with pytest.raises(PoolError):
        recover_run(ready.context, journal.facts, journal.notes, keep_snapshots=True)
    assert ready.on_bases()
    del ready.hooks.at["pool.snapshots"]
    other_program(ready)()
    recover(ready.context, ready.guest().uuid)
    assert levels(ready)["tank/web@syncoid"] == "torn"
    assert levels(ready)["tank/web@s1"] == "crash"


@pytest.fixture
def shared(ready):
    """A second guest that shares a dataset; its own disks do not change."""
    ready.add_guest("db", {"vda": "tank/web"})
    ready.with_defaults(ram_strategy="manual")
    return lambda: take_snapshot(
        ready.context, ready.hypervisor.domain("db"), SnapshotRequest("other")
    )


def test_a_run_of_ours_while_anothers_overlays_are_committed(ready, shared):
    ready.with_defaults(ram_strategy="overlay")

    def other():
        del ready.hooks.at["commit.pivoting"]
        ready.with_defaults(ram_strategy="manual")
        assert shared().level is Level.TORN

    ready.hooks.at["commit.pivoting"] = other
    assert take(ready).level is Level.RAM
    assert records(ready)["other"].level is Level.TORN
    assert levels(ready)["tank/web@other"] == "torn"


def test_a_run_of_ours_when_anothers_overlays_were_committed(ready, shared):
    """It has not ended yet, for its bundle takes its time."""
    ready.with_defaults(ram_strategy="overlay")

    def other():
        ready.heard.at.clear()
        ready.with_defaults(ram_strategy="manual")
        assert shared().level is Level.RAM

    ready.heard.at["sealing the bundle"] = other
    assert take(ready).level is Level.RAM
    assert {record.level for record in records(ready).values()} == {Level.RAM}


def test_a_torn_snapshot_stays_torn_whatever_its_other_properties(ready):
    ready.hooks.at["commit.pivoting"] = other_program(ready)
    take(ready)
    marks = {f"snaporch:{key}": "x" for key in ("run", "uuid", "domain")}
    ready.pool.set_properties(["tank/web@syncoid"], marks | {"snaporch:level": "crash"})
    assert records(ready)["syncoid"].level is Level.TORN


@pytest.fixture
def torn(ready):
    """A snapshot that is good, and a newer one that is torn."""
    good = take(ready, "good")
    take(ready, "bad")
    names = [s.full_name for s in ready.pool.snapshots() if s.name == "bad"]
    ready.pool.set_properties(names[:1], {"snaporch:level": "torn"})
    return good, records(ready)["bad"]


def test_one_torn_snapshot_makes_all_of_the_run_torn(ready, torn):
    assert torn[1].level is Level.TORN
    assert torn[1].state is BundleState.INCOMPLETE  # so nothing counts on it


@pytest.mark.parametrize("how", [{}, {"cold": True}, {"disks_only": True}])
def test_a_torn_snapshot_is_not_restored(ready, torn, how):
    with pytest.raises(RefusedError, match="while overlays were committed"):
        make_restore_plan(ready.context, "web", "bad", **how)


def test_a_torn_snapshot_is_no_source_of_clones_and_verifications(ready, torn):
    with pytest.raises(IncompleteError, match="not of one instant"):
        complete_source(ready.context, torn[1])


def test_a_torn_snapshot_is_not_the_newest(ready, torn):
    assert newest_until(ready.context, "web", torn[1].created).snapshot == "good"
