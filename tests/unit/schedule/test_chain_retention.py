"""Retention of whole chains, for any marks, datasets and bundles of a repository."""

import random
from datetime import UTC, datetime, timedelta

import pytest

from snaporch.config.policy import Keep
from snaporch.model import DatasetKind, Level, PoolSnapshot
from snaporch.replication.restic_records import BundleRecord, Contents, Kind, Stored, StreamRecord
from snaporch.schedule.chain_retention import (
    CONTINUED,
    NEWEST,
    decide_repository,
    in_steps,
    to_read,
)

NOW = datetime(2026, 6, 10, 12, 30, tzinfo=UTC)
WEB = "4b1d2f0e-0000-4000-8000-000000000001"
DATABASE = "4b1d2f0e-0000-4000-8000-000000000002"


class Read:
    """What is read of a manifest."""

    pages, level = None, "off"

    def __init__(self, domain, *snapshots):
        self.domain, self.snapshots = domain, snapshots


class Repository:
    """Streams by chain: a full one, and as many increments as are asked for."""

    def __init__(self):
        self.contents = Contents()
        self.manifests = {}

    def chain(self, first, count, *, dataset="tank/web", uuid=WEB, bundle=True, **marks):
        """The snapshots of the days from ``first`` on, each of a run of its own."""
        base = 0
        for day in range(first, first + count):
            run = f"20260501T000000Z-{day:06x}"
            own = {"uuid": uuid, "run": run, "domain": f"guest-{uuid[-1]}", **marks}
            own |= {"bundle": f"{uuid}/{run}"} if bundle else {}
            guid = day * 10 + len(dataset)
            created = NOW - timedelta(days=100 - day)
            snapshot = PoolSnapshot(dataset, f"day-{day}", guid, day, created, own)
            upload = f"{dataset}-{day}"
            record = StreamRecord(
                snapshot, base, 100, "0" * 64, False, DatasetKind.FILESYSTEM, 100, upload, upload
            )
            self.contents.streams[record.key] = record
            tag = f"{dataset}@{first * 10 + len(dataset)}"
            self.stored(Kind.STREAM, upload, chain=tag)
            self.stored(Kind.STREAM_RECORD, upload, chain=tag)
            if bundle:
                self.bundle(f"{uuid}/{run}")
                manifest = self.manifests.setdefault(f"{uuid}/{run}", Read(own["domain"]))
                manifest.snapshots = (*manifest.snapshots, snapshot)
            base = guid

    def stored(self, kind, upload, *, chain="", bundle=""):
        place = f"{kind} {upload}"
        self.contents.stored.append(Stored(place, kind, upload, chain, bundle))

    def bundle(self, reference):
        if reference in self.contents.bundles:
            return
        self.contents.bundles[reference] = BundleRecord(reference, "/b", {}, reference, "id")
        self.stored(Kind.BUNDLE, reference, bundle=reference)
        self.stored(Kind.BUNDLE_RECORD, reference, bundle=reference)

    def decide(self, *, continued=(), manifests=None, **keep):
        read = self.manifests | (manifests or {})
        return decide_repository(self.contents, read, continued, Keep(**keep), NOW, UTC)


@pytest.fixture
def repository():
    return Repository()


def deleted(decision):
    return [e.streams[0].snapshot.full_name for e in decision.chains if e.delete]


def reasons(decision):
    return {e.streams[0].snapshot.full_name: e.reason for e in decision.chains}


def test_a_chain_goes_when_no_rule_keeps_any_of_its_snapshots(repository):
    repository.chain(1, 5)
    repository.chain(6, 5)
    repository.chain(11, 2)
    decision = repository.decide(last=4)
    assert deleted(decision) == ["tank/web@day-1"]
    assert reasons(decision) == {
        "tank/web@day-1": "no rule keeps any of its 5 snapshots",
        "tank/web@day-6": "has guest-1@day-9: last 4 of 4",
        "tank/web@day-11": NEWEST,
    }


def test_the_last_chain_never_goes(repository):
    repository.chain(1, 3)
    repository.chain(1, 3, dataset="tank/gone", uuid=DATABASE)
    assert deleted(repository.decide(last=1)) == []


def test_the_chain_in_which_the_next_copy_begins_stays(repository):
    repository.chain(1, 3)
    repository.chain(4, 3)
    found = repository.decide(continued={("tank/web", 38)}, last=1)
    assert reasons(found)["tank/web@day-1"] == CONTINUED
    assert deleted(found) == []


def test_a_run_in_two_datasets_keeps_the_chains_of_both(repository):
    for dataset in "tank/web", "tank/web-data":
        repository.chain(1, 4, dataset=dataset)
    repository.chain(5, 1, dataset="tank/web")
    repository.chain(5, 1, dataset="tank/web-data")
    assert deleted(repository.decide(last=2)) == []
    assert deleted(repository.decide(last=1)) == ["tank/web@day-1", "tank/web-data@day-1"]


def test_of_a_guest_without_any_bundle_nothing_goes(repository):
    """Its first copy was interrupted after the streams, before the bundles."""
    for day in 1, 3, 5:
        repository.chain(day, 2)
    repository.contents.bundles.clear()
    decision = repository.decide(last=1)
    assert deleted(decision) == []
    assert reasons(decision)["tank/web@day-1"] == "has guest-1@day-1: is not whole, last 1 of 1"
    repository.manifests.clear()  # nor has this host the bundles
    assert deleted(repository.decide(last=1)) == []


def test_a_run_that_is_not_whole_stays_as_long_as_if_it_were(repository):
    repository.chain(1, 2)
    repository.chain(3, 2)
    repository.chain(5, 2)
    for reference in [*repository.contents.bundles][:4]:
        del repository.contents.bundles[reference]
    assert deleted(repository.decide(last=3)) == []
    assert deleted(repository.decide(last=2)) == ["tank/web@day-1", "tank/web@day-3"]


@pytest.mark.parametrize("lost", ["stream", "pages", "bundle", "manifest", "torn"])
def test_a_run_that_is_not_whole_takes_no_place_of_a_whole_one(repository, lost):
    """The admin forgot a damaged chain of one dataset, as for a repair."""
    for day in range(1, 8, 2):
        repository.chain(day, 2)
        repository.chain(day, 2, dataset="tank/data")
    keys = [f"{WEB}/20260501T000000Z-{day:06x}" for day in (5, 6)]
    for day, key in zip((5, 6), keys, strict=True):
        if lost == "stream":
            del repository.contents.streams["tank/data", day * 10 + len("tank/data")]
        elif lost == "pages":
            repository.manifests[key].pages = PoolSnapshot("tank/pages", "gone", 7, 7, NOW)
        elif lost == "bundle":
            del repository.contents.bundles[key]
        elif lost == "manifest":
            del repository.manifests[key]
        else:
            repository.manifests[key].level = Level.TORN
    decision = repository.decide(last=3)
    assert deleted(decision) == ["tank/data@day-1", "tank/web@day-1"]
    whole = [each.run.snapshot for each in decision.runs if each.run.is_whole and not each.delete]
    assert whole == ["day-4", "day-7", "day-8"]


def test_no_run_that_is_not_whole_is_the_last_good_one_with_ram(repository):
    repository.chain(1, 1, level="ram")
    repository.chain(2, 1)
    repository.chain(3, 1, level="ram")
    repository.chain(4, 1)
    del repository.contents.streams["tank/web", 38]
    del repository.contents.bundles[f"{WEB}/20260501T000000Z-000003"]
    decision = repository.decide(last=1)
    assert deleted(decision) == ["tank/web@day-2"]
    assert "last good RAM" in reasons(decision)["tank/web@day-1"]


def test_what_a_group_took_together_stays_together(repository):
    """The bundles of one guest of the group are not there yet."""
    for day in 1, 2, 3:
        repository.chain(day, 1, group=f"g{day}")
        repository.chain(day, 1, dataset="tank/db", uuid=DATABASE, group=f"g{day}")
    for key in [each for each in repository.contents.bundles if each.startswith(DATABASE)]:
        del repository.contents.bundles[key]
    assert deleted(repository.decide(last=1)) == []


def test_while_an_unmarked_bundle_cannot_be_read_nothing_goes(repository):
    repository.chain(1, 1)
    repository.chain(2, 1)
    repository.bundle(f"{DATABASE}/unknown")
    decision = repository.decide(last=1)
    assert deleted(decision) == []
    text = f"the manifest of the bundle {DATABASE}/unknown cannot be read"
    assert reasons(decision)["tank/web@day-1"] == text


def test_the_bundle_of_a_guest_that_shares_a_dataset_is_not_there_yet(repository):
    repository.chain(1, 1)
    repository.chain(2, 1)
    first = next(iter(repository.contents.streams.values())).snapshot
    here = {f"{DATABASE}/20260501T000000Z-000001": Read("other", first)}
    assert deleted(repository.decide(last=1, manifests=here)) == []
    assert deleted(repository.decide(last=1)) == ["tank/web@day-1"]


def test_snapshots_of_other_programs_keep_no_chain(repository):
    repository.chain(1, 2, bundle=False)
    repository.chain(3, 2)
    for record in [*repository.contents.streams.values()][:2]:
        record.snapshot.properties.clear()
    assert deleted(repository.decide(last=9)) == ["tank/web@day-1"]


def test_pages_of_ram_stay_with_their_runs(repository):
    repository.chain(1, 1)
    repository.chain(1, 1, dataset="tank/pages", bundle=False)
    repository.chain(2, 1)
    repository.chain(2, 1, dataset="tank/pages", bundle=False)
    for record in repository.contents.streams.values():
        if record.snapshot.dataset == "tank/pages":
            marks = record.snapshot.properties
            marks["ram"] = f"{marks.pop('uuid')}/{marks.pop('run')}"
    assert deleted(repository.decide(last=2)) == []
    assert deleted(repository.decide(last=1)) == ["tank/pages@day-1", "tank/web@day-1"]


def test_a_guest_that_shares_a_dataset_keeps_its_chain(repository):
    repository.chain(1, 1)
    repository.chain(2, 1)
    reference = f"{DATABASE}/20260501T000000Z-000001"
    repository.bundle(reference)
    first = next(iter(repository.contents.streams.values())).snapshot
    decision = repository.decide(last=1, manifests={reference: Read("other", first)})
    assert deleted(decision) == []
    assert reasons(decision)["tank/web@day-1"].startswith("has other@day-1")


def test_a_bundle_goes_with_any_of_its_streams_and_one_without_streams_too(repository):
    repository.chain(1, 2)
    repository.chain(3, 1)
    lost = f"{DATABASE}/lost"
    repository.bundle(lost)
    gone = PoolSnapshot("tank/other", "gone", 7, 7, NOW)
    decision = repository.decide(last=1, manifests={lost: Read("other", gone)})
    first, second, third = sorted(set(repository.contents.bundles) - {lost})
    assert decision.bundles == sorted([first, second, lost])
    assert third not in decision.bundles
    kept = decision.only((), "not now")
    assert kept.bundles == [lost]
    assert {each.reason for each in kept.chains} == {"not now", NEWEST}


def test_bundles_go_first_and_the_full_stream_last(repository):
    """So what an interruption leaves of a chain is found by the next prune."""
    repository.chain(1, 2)
    repository.chain(3, 1)
    repository.stored(Kind.STREAM, "cut", chain="tank/web@18")
    repository.stored(Kind.STREAM, "cut-new", chain="tank/web@38")
    decision = repository.decide(last=1)
    first, second = decision.bundles
    assert in_steps(repository.contents, decision) == [
        [f"bundle {first}", f"bundle {second}"],
        [f"bundle-record {first}", f"bundle-record {second}"],
        ["stream tank/web-2", "stream-record tank/web-2", "stream cut"],
        ["stream tank/web-1"],
        ["stream-record tank/web-1"],
    ]
    assert in_steps(repository.contents, decision.only((), "")) == []


def random_repository(dice):
    repository, day = Repository(), 1
    for _ in range(dice.randint(1, 6)):
        count = dice.randint(1, 4)
        for dataset in ("tank/web", "tank/web-data"):
            if dice.random() < 0.8:
                repository.chain(day, count, dataset=dataset)
        day += count
    for reference in [*repository.contents.bundles]:
        if dice.random() < 0.1:
            del repository.contents.bundles[reference]
    return repository


@pytest.mark.parametrize("seed", range(100))
def test_what_a_kept_snapshot_needs_never_goes(seed):
    """For any chains, lost bundles and rules."""
    dice = random.Random(seed)
    repository = random_repository(dice)
    contents = repository.contents
    decision = repository.decide(last=dice.randint(1, 4), monthly=dice.randint(0, 2))
    kept = [each.run for each in decision.runs if not each.delete and each.run.is_whole]
    needed = {f"bundle {each.key}" for each in kept}
    newest = {}
    for each in contents.streams.values():
        newest[each.snapshot.dataset] = each.key
    keys = [(m.dataset, m.guid) for each in kept for m in each.members]
    for key in [*keys, *newest.values()]:
        for record in contents.chain(key):
            needed |= {f"stream {record.upload}", f"stream-record {record.upload}"}
    going = {number for step in in_steps(contents, decision) for number in step}
    assert needed.isdisjoint(going)


def test_of_each_guest_that_loses_a_chain_all_of_its_newest_snapshot_is_read(repository):
    for dataset in ("tank/web", "tank/data"):
        repository.chain(1, 5, dataset=dataset)
        repository.chain(6, 2, dataset=dataset)
    repository.chain(1, 9, dataset="tank/db", uuid=DATABASE)
    decision = repository.decide(last=2)
    assert len(deleted(decision)) == 2
    streams, runs = to_read(repository.contents, decision, NOW)
    names = [f"{dataset}@day-{day}" for dataset in ("tank/data", "tank/web") for day in (6, 7)]
    assert sorted(each.snapshot.full_name for each in streams) == names
    assert [(each.uuid, each.snapshot) for each in runs] == [(WEB, "day-7")]


def test_nothing_is_read_if_nothing_goes(repository):
    repository.chain(1, 3)
    assert to_read(repository.contents, repository.decide(last=1), NOW) == ([], [])
