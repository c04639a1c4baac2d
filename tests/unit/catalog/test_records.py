from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from snaporch.bundle.manifest import Manifest, Role, SnapshotEntry, VersionsEntry
from snaporch.bundle.store import BundleStore
from snaporch.catalog.records import all_records, marked_records, record_of, run_members
from snaporch.model import BundleState, Level, PoolSnapshot, VerificationResult, VerifyDepth

NOON = datetime(2025, 6, 1, 12, tzinfo=UTC)
UUID = "7f1c0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d"


def snapshot(dataset, run="r1", *, guid=1, minutes=0, **properties):
    own = {"run": run, "domain": "web", "uuid": UUID, "level": "ram", "bundle": f"{UUID}/{run}"}
    kept = {key: value for key, value in (own | properties).items() if value is not None}
    created = NOON + timedelta(minutes=minutes)
    return PoolSnapshot(dataset, "s", guid, 1, created, kept)


@pytest.fixture
def store(tmp_path):
    return BundleStore(tmp_path)


@pytest.fixture
def bundle(store):
    """Seals a bundle for these snapshots."""

    def seal(*snapshots, run="r1", created=NOON):
        partial = store.create(UUID, run)
        part = partial.add_text("ram.save", Role.RAM, "12345")
        manifest = Manifest(
            run=run,
            domain="web",
            uuid=UUID,
            snapshot="s",
            level=Level.RAM,
            was_running=True,
            started=created,
            created=created,
            finished=created,
            pause_ms=8.5,
            snapshots=tuple(
                SnapshotEntry(dataset=s.dataset, name=s.name, guid=s.guid, createtxg=1)
                for s in snapshots
            ),
            disks=(),
            parts=(part.model_copy(update={"payload_bytes": 50}),),
            versions=VersionsEntry(snaporch="", libvirt="", emulator="", machine=""),
        )
        return partial.seal(manifest)

    return seal


def test_snapshots_of_one_run_are_one_record(store, bundle):
    members = [snapshot("tank/b"), snapshot("flash/a")]
    path = bundle(*members, created=NOON + timedelta(seconds=3))
    (record,) = all_records(store, members)
    assert record.datasets == ("flash/a", "tank/b")
    assert (record.domain, record.uuid, record.snapshot, record.run) == ("web", UUID, "s", "r1")
    assert (record.level, record.state) == (Level.RAM, BundleState.COMPLETE)
    assert (record.ram_bytes, record.stored_bytes, record.pause_ms) == (50, 5, 8.5)
    assert record.bundle == str(path)
    assert record.created == NOON + timedelta(seconds=3)


def test_records_come_oldest_first(store):
    members = [snapshot("t/a", "late", minutes=5), snapshot("t/a", "early", minutes=1)]
    assert [record.run for record in all_records(store, members)] == ["early", "late"]


def test_snapshots_of_other_programs_are_no_records(store):
    foreign = [
        PoolSnapshot("tank/a", "autosnap", 1, 1, NOON, {}),
        snapshot("tank/a", run=None),
        snapshot("tank/a", domain=None),
    ]
    assert all_records(store, foreign) == []


def test_the_record_of_one_run_can_be_found(store):
    members = [snapshot("t/a", "r1"), snapshot("t/b", "r2"), snapshot("t/b", "r1")]
    assert record_of(store, members, "r1", "s").datasets == ("t/a", "t/b")


def test_without_its_bundle_a_ram_snapshot_has_the_level_crash(store):
    (record,) = all_records(store, [snapshot("t/a")])
    assert (record.state, record.level) == (BundleState.MISSING, Level.CRASH)
    assert record.bundle is None
    assert record.created == NOON


@pytest.mark.parametrize(
    ("level", "state"),
    [
        ("crash", BundleState.NONE),  # as a run has it until it seals its bundle
        ("ram", BundleState.MISSING),
        ("quiesced", BundleState.MISSING),
    ],
)
def test_a_run_that_was_interrupted_has_lost_no_bundle(store, level, state):
    (record,) = all_records(store, [snapshot("t/a", level=level)])
    assert (record.state, record.bundle) == (state, None)
    assert not record.state.is_there


@pytest.mark.parametrize("level", ["off", "paused", "quiesced", "crash"])
def test_levels_without_ram_do_not_need_a_bundle(store, level):
    (record,) = all_records(store, [snapshot("t/a", level=level)])
    assert record.level == level


@pytest.mark.parametrize("level", ["best", "", None])
def test_an_unknown_level_counts_as_crash(store, level):
    assert all_records(store, [snapshot("t/a", level=level)])[0].level is Level.CRASH


def test_without_a_manifest_copies_in_a_local_pool_do_not_count(store):
    places = {"tank/a": 1, "flash/b": 2}
    own = [snapshot(each, guid=guid, replicated="nas") for each, guid in places.items()]
    copies = [snapshot(f"backup/{each}", guid=guid, copy="nas") for each, guid in places.items()]
    (record,) = all_records(store, [*copies, *own])
    assert (record.datasets, record.replicated) == (("flash/b", "tank/a"), ("nas",))


def test_without_a_manifest_what_came_back_counts(store):
    members = [snapshot("tank/a", guid=1, copy="nas"), snapshot("flash/b", guid=2)]
    (record,) = all_records(store, members)
    assert record.datasets == ("flash/b", "tank/a")


def test_a_missing_snapshot_makes_the_record_incomplete(store, bundle):
    members = [snapshot("t/a"), snapshot("t/b")]
    bundle(*members)
    (record,) = all_records(store, members[:1])
    assert (record.state, record.level) == (BundleState.INCOMPLETE, Level.CRASH)


def test_a_new_snapshot_of_the_same_name_is_another_one(store, bundle):
    bundle(snapshot("t/a", guid=1))
    (record,) = all_records(store, [snapshot("t/a", guid=2)])
    assert record.state is BundleState.INCOMPLETE


def test_a_damaged_bundle_keeps_its_path(store, bundle):
    path = bundle(snapshot("t/a"))
    (path / "ram.save").unlink()
    (record,) = all_records(store, [snapshot("t/a")])
    assert (record.state, record.bundle) == (BundleState.INCOMPLETE, str(path))


@pytest.mark.parametrize("reference", ["../../etc/passwd", "nonsense", f"{UUID}/../x"])
def test_a_reference_to_a_missing_bundle_does_not_break_the_list(store, reference):
    records = all_records(store, [snapshot("t/a", bundle=reference), snapshot("t/b", "r2")])
    assert [record.run for record in records] == ["r1", "r2"]
    assert records[0].state is not BundleState.COMPLETE
    assert records[0].bundle is None


# -- one instant, several names -----------------------------------------------------------------


def named(name, dataset, guid, *, txg=1, run="r1"):
    return replace(snapshot(dataset, run, guid=guid), name=name, createtxg=txg)


@pytest.fixture
def round_of_two(bundle):
    """Hourly and daily snapshots of two datasets, all of one instant."""
    members = [
        named("daily", "t/a", 1, txg=10),
        named("daily", "t/b", 2, txg=11),
        named("hourly", "t/a", 3, txg=12),
        named("hourly", "t/b", 4, txg=13),
    ]
    bundle(*members)
    return members


def test_each_name_of_a_run_is_a_record(store, round_of_two):
    daily, hourly = all_records(store, round_of_two)
    assert (daily.snapshot, hourly.snapshot) == ("daily", "hourly")
    assert daily.bundle == hourly.bundle
    for record in (daily, hourly):
        assert (record.level, record.state) == (Level.RAM, BundleState.COMPLETE)
        assert record.datasets == ("t/a", "t/b")
    assert record_of(store, round_of_two, "r1", "hourly") == hourly


def test_another_snapshot_of_the_same_instant_replaces_a_missing_one(store, round_of_two):
    daily, hourly = all_records(store, round_of_two[:3])
    assert (hourly.level, hourly.state) == (Level.RAM, BundleState.COMPLETE)
    assert hourly.datasets == ("t/a", "t/b")
    assert daily.state is BundleState.COMPLETE


def test_without_a_snapshot_of_a_dataset_no_record_is_complete(store, round_of_two):
    (daily, hourly) = all_records(store, [round_of_two[0], round_of_two[2]])
    assert {daily.state, hourly.state} == {BundleState.INCOMPLETE}
    assert {daily.level, hourly.level} == {Level.CRASH}


def test_a_name_without_any_snapshot_is_no_record(store, round_of_two):
    (record,) = all_records(store, round_of_two[:2])
    assert record.snapshot == "daily"


def test_names_that_differ_between_datasets_are_each_complete(store, bundle):
    members = [named("at-1", "t/a", 1), named("at-2", "t/b", 2)]
    bundle(*members)
    for record in all_records(store, members):
        assert record.datasets == ("t/a", "t/b")
        assert record.state is BundleState.COMPLETE


def test_without_a_freeze_snapshots_are_of_two_instants(store):
    """No bundle relates them, so each name is a record of its own."""
    members = [named("daily", "t/a", 1), named("hourly", "t/b", 2)]
    daily, hourly = all_records(store, members)
    assert (daily.datasets, hourly.datasets) == (("t/a",), ("t/b",))


def test_a_snapshot_that_replaces_another_is_known_by_its_guid(store, bundle):
    bundle(named("daily", "t/a", 1), named("hourly", "t/a", 2), named("hourly", "t/b", 3))
    remade = [named("daily", "t/a", 1), named("hourly", "t/b", 3), named("other", "t/b", 9)]
    daily = next(record for record in all_records(store, remade) if record.snapshot == "daily")
    assert daily.state is BundleState.COMPLETE
    later = [named("daily", "t/a", 1), named("other", "t/b", 9)]
    daily = next(record for record in all_records(store, later) if record.snapshot == "daily")
    assert (daily.datasets, daily.state) == (("t/a",), BundleState.INCOMPLETE)


def test_a_verification_counts_if_it_is_on_all_snapshots(store):
    text = "2025-06-01T12:00:00Z passed resumed"
    (record,) = all_records(store, [snapshot(name, verified=text) for name in ("t/a", "t/b")])
    assert record.verified is not None
    assert record.verified.as_text() == text


def test_a_verification_on_only_some_snapshots_does_not_count(store):
    text = "2025-06-01T12:00:00Z passed resumed"
    (record,) = all_records(store, [snapshot("t/a", verified=text), snapshot("t/b")])
    assert record.verified is None


def test_two_verifications_that_differ_do_not_count(store):
    """Writing the second was interrupted, and either may be the newer one."""
    verdicts = [VerificationResult(NOON, passed, VerifyDepth.CHECKED) for passed in (True, False)]
    members = [snapshot(f"t/{v.passed}", verified=v.as_text()) for v in verdicts]
    assert [each.verified for each in all_records(store, members)] == [None]


@pytest.mark.parametrize("text", ["", "yes", "2025-13-01T12:00:00Z"])
def test_a_mark_without_a_time_keeps_a_snapshot_too(store, text):
    (record,) = all_records(store, [snapshot("t/a", kept=text), snapshot("t/b")])
    assert record.kept == NOON


def test_a_replica_counts_if_all_snapshots_are_marked_as_copied_there(store):
    marks = {"t/a": "nas,offsite", "t/b": "offsite", "t/c": "offsite,nas2"}
    members = [snapshot(name, replicated=text, dropped=text) for name, text in marks.items()]
    (record,) = all_records(store, members)
    assert (record.replicated, record.dropped) == (("offsite",), ("offsite",))
    (record,) = all_records(store, [*members, snapshot("t/d")])
    assert (record.replicated, record.dropped) == ((), ())


def test_a_policy_counts_if_all_snapshots_have_its_mark(store):
    name = "snaporch_2025-06-01_12:00:00_hourly"
    own = [replace(snapshot(each, retention="hourly"), name=name) for each in ("t/a", "t/b")]
    assert [each.policy for each in all_records(store, own)] == ["hourly"]
    other = replace(snapshot("t/c"), name=name)
    for mixed in ([*own, other], [other, *own]):
        assert [each.policy for each in all_records(store, mixed)] == [None]


# -- guests that share a dataset ----------------------------------------------------------------


def by_another(dataset, guid):
    """A snapshot that another guest's run has marked."""
    other = "0f1c0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d"
    mark = {"domain": "db", "uuid": other, "bundle": f"{other}/r2", "verified": VERDICT}
    return snapshot(dataset, "r2", guid=guid, **mark)


VERDICT = str(VerificationResult(NOON, True, VerifyDepth.RESUMED).as_text())


def test_a_snapshot_with_marks_of_another_guest_is_known_by_its_manifest(store, bundle):
    shared = by_another("tank/shared", 7)
    bundle(shared)
    web, db = sorted(all_records(store, [shared]), key=lambda record: record.domain, reverse=True)
    assert (web.domain, web.uuid, web.run) == ("web", UUID, "r1")
    assert (web.level, web.state) == (Level.RAM, BundleState.COMPLETE)
    assert web.bundle == str(store.root / UUID / "r1")
    assert web.verified is None, "the verdict is the other guest's"
    assert db.verified is not None
    assert marked_records(store, [shared], {shared.guid}) == [db]


def test_a_record_may_have_one_shared_dataset(store, bundle):
    own, shared = snapshot("tank/own", guid=6), by_another("tank/shared", 7)
    bundle(own, shared)
    (web,) = [record for record in all_records(store, [own, shared]) if record.domain == "web"]
    assert web.datasets == ("tank/own", "tank/shared")
    assert (web.level, web.state) == (Level.RAM, BundleState.COMPLETE)


def test_a_manifest_without_existing_snapshots_makes_no_record(store, bundle):
    bundle(snapshot("tank/own", guid=6))
    assert all_records(store, [by_another("tank/own", 8)])[0].domain == "db"
    assert len(all_records(store, [by_another("tank/own", 8)])) == 1


def test_a_forged_snapshot_with_the_guid_of_a_true_one_counts_for_nothing(store, bundle):
    true = named("s1", "tank/web", 7)
    bundle(true)
    forged = replace(named("evil", "tank/web", 7), createtxg=9)
    for order in ([true, forged], [forged, true]):
        (record,) = all_records(store, order)
        assert (record.snapshot, record.level) == ("s1", Level.RAM)
        assert [each.name for each in run_members(None, "r1", order)] == ["s1"]


def test_a_copy_that_claims_the_run_of_another_domain_hides_nothing(store, bundle):
    true = snapshot("tank/web")
    bundle(true)
    other = "4b1d2f0e-0000-4000-8000-00000000000f"
    liar = snapshot("flash/aaa", guid=2, uuid=other, bundle=f"{other}/r1")
    for order in ([true, liar], [liar, true]):
        found = {each.uuid: each for each in all_records(store, order)}
        assert found[true.properties["uuid"]].state is BundleState.COMPLETE


def test_a_bundle_of_another_run_is_not_believed(store, bundle):
    true = snapshot("tank/web")
    bundle(true)
    uuid = true.properties["uuid"]
    liar = snapshot("flash/aaa", guid=2, bundle=f"{uuid}/r2")
    for order in ([true, liar], [liar, true]):
        (record,) = [e for e in all_records(store, order) if e.state is BundleState.COMPLETE]
        assert record.datasets == ("tank/web",)
