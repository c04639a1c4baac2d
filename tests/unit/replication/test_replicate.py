import os
import shutil
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import streams
from fakes.hooks import failing, failing_once
from fakes.replica import FakeReplica

from snaporch import default_paths
from snaporch.bundle.store import COPY_NAME
from snaporch.catalog.records import all_records
from snaporch.config import Config
from snaporch.errors import BusyError, InterruptedRunError, RefusedError, WindowClosedError
from snaporch.interrupt import Interrupt
from snaporch.journal import Journal, RunFacts
from snaporch.locks import domain_lock, held_by, readers_lock, replication_lock_name
from snaporch.model import BundleState, DomainState, Level, Strategy
from snaporch.replication.interface import ReplicaError
from snaporch.replication.replicate import host_lock, replicate
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.snapshot.store_pages import store_as_pages
from snaporch.zfs import PREFIX, PoolError

TWO = {"vda": "tank/web", "vdb": "flash/web"}


class Shop:
    """A guest with two disks in two pools, and a replica."""

    def __init__(self, world):
        self.world = world
        self.world.add_guest(disks=TWO)
        self.there = FakeReplica(world.pool, world.root / "there")
        self.configure()

    @property
    def context(self):
        return self.world.context

    def configure(self, **more):
        """Two replicas; ``more`` are options of ``nas``."""
        replicas = {
            name: {"host": host, "dataset": "backup/kvm", "bundles": f"/backup/{name}"}
            for name, host in (("nas", "nas"), ("usb", "other"))
        }
        replicas["nas"] |= more
        document = self.context.config.model_dump() | {"replica": replicas}
        self.context.config = Config.model_validate(document)

    def take(self, *names, **more):
        domain = self.context.hypervisor.domain("web")
        return [take_snapshot(self.context, domain, SnapshotRequest(n, **more)) for n in names]

    def records(self):
        return all_records(self.context.store, self.world.pool.snapshots())

    def ship(self, name="nas", **more):
        return replicate(self.context, self.records(), name, self.there, **more)

    def replicated(self):
        return {record.snapshot: record.replicated for record in self.records()}

    def copy(self, record):
        """The bundle on the replica."""
        return self.there.root / record.uuid / record.run

    def is_whole(self, record):
        """Whether the replica has the same bytes."""
        return all(
            (self.copy(record) / path.name).read_bytes() == path.read_bytes()
            for path in Path(record.bundle).iterdir()
        )

    def bundles(self):
        return sorted(path.name for path in (self.there.root).glob("*/*"))


@pytest.fixture
def shop(world):
    return Shop(world)


def names(shipped):
    return [record.snapshot for record in shipped.arrived]


def test_the_replica_gets_snapshots_properties_and_bundles(shop):
    first, second = shop.take("s1", "s2")
    more = {PREFIX + key: key for key in ("verified", "retention", "group", "note", "torn")}
    shop.world.pool.set_properties(["tank/web@s1"], more)
    shipped = shop.ship()
    assert (names(shipped), shipped.missing) == (["s1", "s2"], ())
    assert sorted(shop.there.names()) == sorted(shop.world.pool.names())
    assert shop.bundles() == sorted([first.run, second.run])
    ours = {s.full_name: s for s in shop.world.pool.snapshots(["tank/web", "flash/web"])}
    for copy in shop.there.snapshots(["tank/web", "flash/web"]):
        wanted = dict(ours[copy.full_name].properties)
        assert wanted.pop("replicated") == "nas"
        wanted["copy"] = "nas"
        assert dict(copy.properties) == wanted
        assert copy.properties["level"] == "ram"
    assert shop.replicated() == {"s1": ("nas",), "s2": ("nas",)}


@pytest.mark.parametrize("ends", ["after", "while listed", "before"])
def test_the_marks_of_a_run_under_way_are_left_to_the_next_replication(shop, ends):
    """Its level is still that of a crash, and an append-only replica keeps what it got first."""
    first, second = shop.take("s1", "s2")
    run = RunFacts(
        second.run, "web", second.uuid, DomainState.RUNNING, "", Strategy.OVERLAY, "s2",
        second.datasets, "", (), "",
    )  # fmt: skip
    journal = Journal(shop.world.paths.journal, run)
    if ends == "before":
        journal.close(settled=True)
    if ends == "while listed":
        snapshots = shop.world.pool.snapshots

        def listing(datasets=None):
            found = snapshots(datasets)
            if shop.there.names() and len(datasets) == len(second.datasets):
                journal.close(settled=True)
            return found

        shop.world.pool.snapshots = listing
    replicate(shop.context, [first], "nas", shop.there)
    marked = {s.full_name for s in shop.there.snapshots(["tank/web"]) if s.properties}
    assert marked == {"tank/web@s1"} | ({"tank/web@s2"} if ends == "before" else set())


def test_an_append_only_replica_gets_nothing_from_an_unfinished_run_on(shop):
    """What it gets without its marks would never have them: a newer one would have its own."""
    first, second, third = shop.take("s1", "s2", "s3")
    shop.configure(append_only=True)
    run = RunFacts(
        second.run, "web", second.uuid, DomainState.RUNNING, "", Strategy.OVERLAY, "s2",
        second.datasets, "", (), "",
    )  # fmt: skip
    journal = Journal(shop.world.paths.journal, run)
    with pytest.raises(ReplicaError, match="a run before it has not ended") as raised:
        replicate(shop.context, [first, third], "nas", shop.there)
    assert raised.value.step.endswith("snaporch recover")
    assert sorted(shop.there.names()) == ["flash/web@s1", "tank/web@s1"]
    journal.close(settled=True)
    assert names(replicate(shop.context, shop.records(), "nas", shop.there)) == ["s2", "s3"]


def test_a_snapshot_that_gets_no_marks_any_more_is_not_called_replicated(shop):
    shop.configure(append_only=True)
    shop.take("s1", "s2")
    shop.there.late = ["tank/web@s1"]
    assert names(shop.ship()) == ["s2"]
    assert shop.replicated() == {"s1": (), "s2": ("nas",)}


def test_a_bundle_is_marked_with_its_domain_and_run(shop):
    """The replica refuses the one without the others."""
    shop.configure(append_only=True)
    (taken,) = shop.take("s1")
    shop.ship()
    copies = shop.there.snapshots(["tank/web"])
    without = {k: v for k, v in copies[0].properties.items() if k != "bundle"}
    shop.there.put([replace(copies[0], properties=without)])
    given = []
    mark = shop.there.mark
    shop.there.mark = lambda marks: (given.append(marks), mark(marks))[1]
    shop.ship()
    assert given == [
        {
            "tank/web@s1": {
                "bundle": f"{taken.uuid}/{taken.run}",
                "uuid": taken.uuid,
                "run": taken.run,
            }
        }
    ]


def test_an_append_only_replica_is_not_asked_to_change_a_mark(shop):
    shop.configure(append_only=True)
    shop.take("s1")
    shop.ship()
    shop.world.pool.set_properties(["tank/web@s1"], {f"{PREFIX}level": "crash"})
    shop.there.hooks.log.clear()
    shop.ship()
    assert "replica.mark" not in shop.there.hooks.acts()


def test_a_guest_is_not_rolled_back_while_it_is_sent(shop):
    """ZFS could not destroy what is being sent, and the guest would stay off."""
    taken, runtime = shop.take("s1")[0], default_paths.LOCKS
    elsewhere = {"runtime": shop.world.paths.runtime / "own"}
    paths = shop.context.config.paths.model_copy(update=elsewhere)
    shop.context.config = shop.context.config.model_copy(update={"paths": paths})
    seen = []

    def restore():
        with readers_lock(runtime, "web", taken.uuid, alone=True, interrupt=Interrupt()):
            seen.append("rolled back")

    shop.there.hooks.at["replica.send"] = restore
    with pytest.raises(BusyError, match="cloned, verified, copied or mounted"):
        shop.ship()
    assert seen == []
    shop.there.hooks.at.clear()
    lock = readers_lock(runtime, "web", taken.uuid, alone=True, interrupt=Interrupt())
    with lock, pytest.raises(BusyError, match="it is being rolled back"):
        shop.ship()
    assert shop.there.names() == []
    assert names(shop.ship()) == ["s1"]


def test_the_next_replication_copies_only_new_snapshots(shop):
    shop.take("s1")
    shop.ship()
    (new,) = shop.take("s2")
    shop.there.hooks.log.clear()
    assert names(shop.ship()) == ["s2"]
    assert shop.there.hooks.log[-1] == f"replica.store {new.uuid}/{new.run}"
    assert shop.there.hooks.acts().count("replica.store") == 1
    marked = [line for line in shop.there.hooks.log if line.startswith("replica.mark")]
    assert marked == ["replica.mark flash/web@s2 tank/web@s2"]
    assert names(shop.ship()) == []


def test_each_dataset_and_bundle_is_reported(shop):
    shop.take("s1")
    shop.world.heard.steps.clear()
    shop.ship()
    reported = "; ".join(shop.world.heard.steps)
    assert all(word in reported for word in ("flash/web", "tank/web", "bundle of @s1"))


def test_the_copies_get_the_policies_of_their_datasets(shop):
    pool = shop.world.pool
    pool.create("tank")
    pool.set_properties(["tank"], {"snaporch:policy": "hourly"})
    pool.set_properties(["flash/web"], {"snaporch:policy": "nightly"})
    shop.take("s1")
    shop.ship()
    assert shop.there.policies == {"flash/web": "nightly", "tank/web": "hourly"}
    pool.set_properties(["flash/web"], {"snaporch:policy": ""})
    shop.take("s2")
    shop.ship()
    assert shop.there.policies == {"flash/web": "", "tank/web": "hourly"}


def test_a_policy_that_could_not_be_set_stops_nothing_else(shop):
    shop.take("s1")
    shop.there.hooks.at["replica.set_policies"] = failing_once(PoolError("nas", "is suspended"))
    with pytest.raises(PoolError):
        shop.ship()
    assert shop.replicated() == {"s1": ("nas",)}


def test_two_datasets_never_share_a_copy(shop):
    shop.take("s1")
    shop.world.pool.create("tank:web")
    with pytest.raises(RefusedError, match="same name as that of tank:web"):
        shop.ship()
    assert shop.there.names() == []


def test_marks_of_other_replicas_are_not_copied(shop):
    shop.take("s1")
    shop.ship("nas")
    shop.ship("usb")
    copies = shop.there.snapshots(["tank/web", "flash/web"])
    assert not any("replicated" in copy.properties for copy in copies)


def test_a_marked_snapshot_is_not_marked_again(shop):
    shop.take("s1")
    shop.ship("nas")
    shop.ship("usb")
    shop.world.hooks.log.clear()
    assert names(shop.ship(recheck=True)) == []
    assert "pool.set_properties" not in shop.world.hooks.acts()


def test_one_bundle_of_two_snapshots_of_a_run_is_copied_once(shop):
    """sanoid takes such an hourly and a daily snapshot at the same instant."""
    shop.take("s1")
    shop.world.take_again("daily")
    assert len(shop.records()) == 2
    assert sorted(names(shop.ship())) == ["daily", "s1"]
    assert shop.there.hooks.acts().count("replica.store") == 1


def test_each_replica_has_its_own_marks(shop):
    shop.take("s1")
    shop.ship("nas")
    assert names(shop.ship("usb")) == ["s1"]
    assert shop.replicated() == {"s1": ("nas", "usb")}


def test_a_signal_ends_it_at_once(shop):
    shop.take("s1")
    tried = []

    def send(dataset, **_options):
        tried.append(dataset)
        raise InterruptedRunError("nas", "SIGTERM", 15)

    shop.there.send = send
    with pytest.raises(InterruptedRunError):
        shop.ship()
    assert len(tried) == 1


def test_encrypted_datasets_are_sent_raw(shop):
    shop.world.add_guest("secret", {"vda": "tank/secret"})
    shop.world.pool.create("tank/secret", encrypted=True)
    take_snapshot(shop.context, shop.context.hypervisor.domain("secret"), SnapshotRequest("s1"))
    records = [record for record in shop.records() if record.domain == "secret"]
    shop.there.has_vault = True
    replicate(shop.context, records, "nas", shop.there)
    assert "replica.send tank/secret raw" in shop.there.hooks.log


def test_a_dataset_that_is_encrypted_when_its_turn_comes_is_sent_raw(shop):
    """Hours after the first one: another dataset may have got its name."""
    shop.take("s1")
    shop.there.has_vault = True
    pool = shop.world.pool
    shop.there.hooks.at["replica.send"] = lambda: setattr(
        pool, "encrypted", lambda: frozenset(["tank/web"])
    )
    shop.ship()
    sent = [line for line in shop.there.hooks.log if line.startswith("replica.send")]
    assert sent == ["replica.send flash/web", "replica.send tank/web raw"]


def test_pages_of_ram_are_copied_with_the_bundle_that_needs_them(shop):
    shop.world.with_pages()
    shop.configure()
    (record,) = shop.take("s1")
    manifest = shop.context.store.state(f"{record.uuid}/{record.run}")[1]
    assert names(shop.ship()) == ["s1"]
    (copy,) = shop.there.snapshots([manifest.pages.dataset])
    assert copy.guid == manifest.pages.guid
    assert copy.properties["ram"] == f"{record.uuid}/{record.run}"
    assert copy.properties["ram-pools"] == "flash,tank"


def dropped(shop):
    return {record.snapshot: record.dropped for record in shop.records()}


def page_dataset_of(record):
    return f"tank/ram/{record.uuid}"


def failing_send(shop, dataset):
    """Nothing of this dataset is sent; returns what sends it again."""
    send = shop.there.send

    def failing(each, **options):
        if each == dataset:
            raise ReplicaError("nas", "away")
        send(each, **options)

    shop.there.send = failing
    return lambda: setattr(shop.there, "send", send)


def test_pages_that_came_back_can_still_be_sent(shop):
    """What came back has another txg than its manifest names."""
    shop.world.with_pages()
    shop.configure()
    (first, *_) = shop.take("s1", "s2")
    shop.ship()
    shop.take("s3")
    shop.world.pool.come_back(page_dataset_of(first))
    send_again = failing_send(shop, page_dataset_of(first))
    with pytest.raises(ReplicaError, match="away"):
        shop.ship()
    assert dropped(shop) == {"s1": (), "s2": (), "s3": ()}
    send_again()
    assert names(shop.ship()) == ["s3"]


def test_pages_that_are_missing_here_are_not_dropped_by_the_replica(shop):
    """They may be in a pool that is not imported, and come back."""
    shop.world.with_pages()
    shop.configure()
    (first, *_) = shop.take("s1", "s2")
    pages = page_dataset_of(first)
    shop.ship()
    shop.take("s3", "s4")
    send_again = failing_send(shop, pages)
    shop.world.pool.destroy_snapshots([f"{pages}@s3"])
    with pytest.raises(ReplicaError, match="away"):
        shop.ship()
    shop.world.pool.come_back(pages)
    with pytest.raises(ReplicaError, match="away"):
        shop.ship()
    assert dropped(shop)["s3"] == ()
    send_again()
    assert names(shop.ship()) == ["s4"]


@pytest.mark.parametrize("sent", [True, False])
def test_the_mark_of_a_dropped_snapshot_is_removed_when_it_can_be_sent_again(shop, sent):
    shop.take("s1", "s2", "s3")
    shop.ship()
    shop.there.drop("tank/web@s2")
    shop.ship()
    assert dropped(shop)["s2"] == ("nas",)
    shop.there.drop("tank/web@s3")
    if not sent:
        failing_send(shop, "tank/web")
    with nullcontext() if sent else pytest.raises(ReplicaError, match="away"):
        shop.ship()
    assert dropped(shop) == {"s1": (), "s2": (), "s3": ()}


def test_the_mark_of_a_dropped_snapshot_is_removed_when_the_replica_has_it_again(shop):
    """Its bundle here is damaged, so it is not replicated either."""
    record, _ = shop.take("s1", "s2")
    shop.ship()
    copies = shop.there.snapshots(["tank/web"])
    shop.there.drop("tank/web@s1")
    shop.ship()
    assert dropped(shop)["s1"] == ("nas",)
    (Path(record.bundle) / "ram.save").unlink()
    shutil.rmtree(shop.copy(record))
    shop.there.put(copies)
    assert [each.snapshot for each in shop.ship().missing] == ["s1"]
    assert dropped(shop)["s1"] == ()


def test_a_bundle_without_its_pages_has_not_arrived(shop):
    shop.world.with_pages()
    shop.configure()
    (record,) = shop.take("s1")
    pages = shop.context.store.state(f"{record.uuid}/{record.run}")[1].pages
    send = shop.there.send
    shop.there.send = lambda dataset, **options: (
        None if dataset == pages.dataset else send(dataset, **options)
    )
    with pytest.raises(ReplicaError, match="did not arrive"):
        shop.ship()
    assert shop.replicated() == {"s1": ()}
    assert shop.bundles() == []


@pytest.mark.parametrize("place", ["replica.send", "replica.mark", "replica.snapshots"])
def test_an_interrupted_replication_does_not_count_and_continues(shop, place):
    shop.take("s1", "s2")
    shop.there.hooks.at[place] = failing_once(ReplicaError("nas", "away"))
    with pytest.raises(ReplicaError, match="nas: away"):
        shop.ship()
    assert shop.replicated() == {"s1": (), "s2": ()}
    assert names(shop.ship()) == ["s1", "s2"]
    assert len(shop.bundles()) == 2


@pytest.mark.parametrize(
    ("place", "error"),
    [("replica.store", ReplicaError("nas", "away")), ("replica.stored", OSError(28, "No space"))],
)
def test_a_bundle_that_fails_does_not_stop_the_others(shop, place, error):
    shop.take("s1", "s2")
    shop.there.hooks.at[place] = failing_once(error)
    with pytest.raises(ReplicaError):
        shop.ship()
    assert shop.replicated() == {"s1": (), "s2": ("nas",)}
    assert shop.world.pool.bookmarks("tank/web")
    assert names(shop.ship()) == ["s1"]
    assert len(shop.bundles()) == 2


def test_a_dataset_that_fails_does_not_stop_the_others(shop):
    shop.take("s1")
    shop.there.hooks.at["replica.send"] = failing_once(ReplicaError("nas", "away"))
    with pytest.raises(ReplicaError, match="nas: away"):
        shop.ship()
    assert shop.there.names() == ["tank/web@s1"]


def test_a_snapshot_that_could_not_be_marked_is_replicated_again(shop):
    shop.take("s1")
    shop.world.hooks.at["pool.set_properties"] = failing(PoolError("tank", "is suspended"))
    with pytest.raises(PoolError):
        shop.ship()
    del shop.world.hooks.at["pool.set_properties"]
    assert names(shop.ship()) == ["s1"]


def failing_for(shop, name):
    """ZFS sets no property on this snapshot."""
    real = shop.world.pool.set_properties

    def set_properties(names, properties):
        if name in names:
            raise PoolError("zfs set", f"cannot set property for '{name}': out of space")
        real(names, properties)

    shop.world.pool.set_properties = set_properties
    return real


def test_a_snapshot_that_cannot_be_marked_does_not_stop_the_others(shop):
    shop.take("s1", "s2")
    real = failing_for(shop, "tank/web@s1")
    with pytest.raises(PoolError, match="out of space"):
        shop.ship()
    assert shop.replicated() == {"s1": (), "s2": ("nas",)}
    assert len(shop.bundles()) == 2
    shop.world.pool.set_properties = real
    assert names(shop.ship()) == ["s1"]


def test_a_false_mark_that_cannot_be_removed_does_not_stop_the_others(shop):
    lost, _ = shop.take("s1", "s2")
    shop.ship()
    shutil.rmtree(shop.copy(lost))
    shop.take("s3")
    failing_for(shop, "tank/web@s1")
    with pytest.raises(PoolError, match="out of space"):
        shop.ship()
    assert shop.replicated()["s3"] == ("nas",)
    assert shop.is_whole(lost)


def test_a_damaged_bundle_is_replaced_although_its_mark_cannot_be_removed(shop):
    (damaged,) = shop.take("s1")
    shop.ship()
    flip(shop.copy(damaged) / "ram.save")
    failing_for(shop, "tank/web@s1")
    with pytest.raises(PoolError, match="out of space"):
        shop.ship(recheck=True)
    assert shop.is_whole(damaged)


def test_a_dropped_snapshot_that_cannot_be_marked_does_not_stop_the_others(shop):
    shop.take("s1", "s2", "s3")
    shop.ship()
    shop.there.drop("tank/web@s1")
    shop.there.drop("tank/web@s2")
    failing_for(shop, "tank/web@s1")
    with pytest.raises(PoolError, match="out of space"):
        shop.ship()
    dropped = {record.snapshot: record.dropped for record in shop.records()}
    assert dropped == {"s1": (), "s2": ("nas",), "s3": ()}


def test_copies_that_cannot_be_marked_do_not_count_and_stop_no_other(shop):
    """Without its properties a copy would come back as no snapshot of snaporch."""
    first, second = shop.take("s1", "s2")
    shop.there.hooks.at["replica.mark"] = failing_once(PoolError("zfs set on nas", "out of space"))
    with pytest.raises(PoolError, match="out of space"):
        shop.ship()
    assert shop.replicated() == {"s1": (), "s2": ()}
    assert shop.bundles() == sorted([first.run, second.run])
    assert shop.there.policies
    assert names(shop.ship()) == ["s1", "s2"]


def test_all_failures_are_reported(shop):
    shop.take("s1")
    failing_for(shop, "tank/web@s1")
    shop.there.hooks.at["replica.set_policies"] = failing(PoolError("nas", "is suspended"))
    with pytest.raises(PoolError, match="is suspended"):
        shop.ship()
    (note,) = [note for note in shop.world.heard.notes if "out of space" in note]
    assert "tank/web@s1" in note


def test_a_signal_between_two_datasets(shop):
    shop.take("s1")
    interrupt = shop.context.interrupt
    shop.there.hooks.at["replica.send"] = lambda: setattr(interrupt, "signum", 15)
    with pytest.raises(InterruptedRunError):
        shop.ship()
    assert shop.there.hooks.acts() == ["replica.send"]
    assert shop.replicated() == {"s1": ()}


def test_a_signal_between_two_bundles(shop):
    shop.take("s1", "s2")
    interrupt = shop.context.interrupt
    shop.there.hooks.at["replica.store"] = lambda: setattr(interrupt, "signum", 15)
    with pytest.raises(InterruptedRunError):
        shop.ship()
    assert shop.there.hooks.acts().count("replica.store") == 1
    assert shop.replicated() == {"s1": ("nas",), "s2": ()}


# -- bookmarks ----------------------------------------------------------------------------------


def test_a_snapshot_that_both_have_is_bookmarked_so_that_it_may_be_deleted_here(shop):
    shop.take("s1")
    shop.ship()
    shop.take("s2", "s3")
    shop.world.pool.destroy_snapshots(["tank/web@s1"])
    shop.world.pool.destroy_snapshots(["flash/web@s1"])
    assert names(shop.ship()) == ["s2", "s3"]


def test_it_continues_from_the_bookmark_although_both_have_an_older_snapshot(shop):
    """As after retention: the newest hourly is destroyed here, and a daily still exists."""
    shop.take("s1", "s2")
    shop.ship()
    for dataset in ("tank/web", "flash/web"):
        shop.world.pool.destroy_snapshots([f"{dataset}@s2"])
    shop.take("s3", "s4")
    shop.there.hooks.at["replica.send"] = failing_once(ReplicaError("nas", "away"))
    with pytest.raises(ReplicaError, match="nas: away"):
        shop.ship()
    assert names(shop.ship()) == ["s3", "s4"]
    assert shop.replicated() == dict.fromkeys(["s1", "s3", "s4"], ("nas",))
    for dataset in ("tank/web", "flash/web"):
        assert [n for n in shop.there.names() if n.startswith(dataset)] == [
            f"{dataset}@{name}" for name in ("s1", "s2", "s3", "s4")
        ]


def test_a_bookmark_is_destroyed_only_after_a_newer_one_exists(shop):
    shop.take("s1")
    shop.ship()
    bookmarks = shop.world.pool.bookmarks
    before = [bookmarks(dataset) for dataset in ("tank/web", "flash/web")]
    shop.take("s2")
    shop.world.hooks.at["pool.bookmark"] = failing(PoolError("tank", "is suspended"))
    with pytest.raises(PoolError):
        shop.ship()
    assert [bookmarks(dataset) for dataset in ("tank/web", "flash/web")] == before


def test_a_bookmark_stays_while_nothing_newer_has_arrived(shop):
    shop.take("s1", "s2")
    shop.ship()
    before = shop.world.pool.bookmarks("tank/web")
    shop.world.pool.destroy_snapshots(["tank/web@s2"])
    shop.take("s3")
    shop.there.hooks.at["replica.send"] = failing(ReplicaError("nas", "away"))
    with pytest.raises(ReplicaError):
        shop.ship()
    assert before.items() < shop.world.pool.bookmarks("tank/web").items()


def test_a_snapshot_is_bookmarked_before_its_copies_are_marked(shop):
    """Retention may run next here, and the replica may be away for a long time."""
    shop.take("s1")
    shop.there.hooks.at["replica.mark"] = failing(ReplicaError("nas", "away"))
    with pytest.raises(ReplicaError):
        shop.ship()
    assert shop.world.pool.bookmarks("tank/web")
    assert shop.world.pool.bookmarks("flash/web")


def test_a_dataset_that_fails_does_not_delay_bookmarks_of_the_others(shop):
    shop.take("s1", "s2")
    shop.ship()
    behind = shop.world.pool.bookmarks("flash/web")
    shop.world.pool.destroy_snapshots(["flash/web@s2"])
    shop.take("s3")
    shop.there.hooks.at["replica.send"] = failing_once(ReplicaError("nas", "away"))
    with pytest.raises(ReplicaError):
        shop.ship()
    assert behind.items() < shop.world.pool.bookmarks("flash/web").items()
    (guid,) = {s.guid for s in shop.world.pool.snapshots(["tank/web"]) if s.name == "s3"}
    assert list(shop.world.pool.bookmarks("tank/web")) == [f"tank/web#snaporch-nas-{guid}"]


def test_snapshots_are_bookmarked_before_they_are_sent(shop):
    """Of an interrupted transfer some arrive, and retention may destroy them here."""
    shop.take("s1")
    shop.ship()
    shop.take("s2", "s3")
    shop.there.hooks.at["replica.received"] = failing(InterruptedRunError("nas", "SIGTERM", 15))
    with pytest.raises(InterruptedRunError):
        shop.ship()
    shop.there.hooks.at.clear()
    assert "flash/web@s2" in shop.there.names()
    assert "flash/web@s3" not in shop.there.names()
    for dataset in ("flash/web", "tank/web"):
        shop.world.pool.destroy_snapshots([f"{dataset}@{name}" for name in ("s1", "s2", "s3")])
    shop.take("s4")
    assert names(shop.ship()) == ["s4"]
    arrived = [name.partition("@")[2] for name in shop.there.names() if "flash" in name]
    assert arrived == ["s1", "s2", "s4"]
    assert len(shop.world.pool.bookmarks("flash/web")) == 1


def test_snapshots_of_all_datasets_are_bookmarked_before_the_first_is_sent(shop):
    """The last one may be sent hours later, and sanoid prunes meanwhile."""
    shop.take("s1")
    shop.ship()
    bookmarks = shop.world.pool.bookmarks
    before = {dataset: bookmarks(dataset) for dataset in ("flash/web", "tank/web")}
    shop.take("s2")
    seen = []
    shop.there.hooks.at["replica.send"] = lambda: seen.append(
        [bookmarks(dataset).items() > known.items() for dataset, known in before.items()]
    )
    shop.ship()
    assert seen[0] == [True, True]


def test_a_snapshot_that_is_destroyed_while_it_is_bookmarked_is_left_out(shop):
    pool = shop.world.pool
    shop.take("s1", "s2")
    real = pool.bookmark

    def bookmark(snapshot, name):
        if snapshot == "tank/web@s1" and snapshot in pool.names():
            pool.destroy_snapshots([snapshot])
        real(snapshot, name)

    pool.bookmark = bookmark
    assert "s2" in names(shop.ship())


def test_what_cannot_be_bookmarked_is_sent_and_reported(shop):
    """A full pool refuses bookmarks; the copy matters more."""
    shop.take("s1")
    shop.world.hooks.at["pool.bookmark"] = failing(PoolError("tank", "out of space"))
    with pytest.raises(PoolError, match="out of space"):
        shop.ship()
    assert sorted(shop.there.names()) == ["flash/web@s1", "tank/web@s1"]


def test_what_could_not_be_bookmarked_before_it_was_sent_is_bookmarked_afterwards(shop):
    shop.take("s1")

    def fail_until_it_has_arrived():
        if len(shop.there.names()) < len(TWO):
            raise PoolError("tank", "out of space")

    shop.world.hooks.at["pool.bookmark"] = fail_until_it_has_arrived
    with pytest.raises(PoolError, match="out of space"):
        shop.ship()
    assert all(len(shop.world.pool.bookmarks(dataset)) == 1 for dataset in TWO.values())


def test_a_failed_bookmark_of_a_snapshot_that_was_renamed_here_is_reported(shop):
    shop.take("s0", "s1")
    shop.ship()
    for dataset in ("flash/web", "tank/web"):
        shop.world.pool.rename_snapshot(f"{dataset}@s1", "kept")
        for mark in list(shop.world.pool.bookmarks(dataset)):
            shop.world.pool.destroy_bookmark(mark)
    shop.take("s2")
    shop.world.hooks.at["pool.bookmark"] = failing(PoolError("tank", "out of space"))
    with pytest.raises(PoolError, match="out of space"):
        shop.ship()


def rename_replica(shop, name):
    document = shop.context.config.model_dump()
    document["replica"][name] = document["replica"].pop("nas")
    shop.context.config = Config.model_validate(document)


def test_a_replica_with_a_new_name_is_continued_from_the_bookmark_of_its_old_name(shop):
    shop.take("s1")
    shop.ship()
    rename_replica(shop, "attic")
    shop.take("s2")
    for dataset in ("flash/web", "tank/web"):
        shop.world.pool.destroy_snapshots([f"{dataset}@s1"])
    assert names(shop.ship("attic")) == ["s2"]
    for dataset in ("flash/web", "tank/web"):
        marks = sorted(shop.world.pool.bookmarks(dataset))
        assert [mark.split("-")[1] for mark in marks] == ["attic", "nas"]


@pytest.mark.parametrize("now", ["attic", None])
def test_another_replica_destroys_no_bookmark_of_one_that_was_renamed_or_removed(shop, now):
    """It may be away for weeks, or be configured again later."""
    other = FakeReplica(shop.world.pool, shop.world.root / "other")
    shop.take("s1")
    shop.ship("nas")
    replicate(shop.context, shop.records(), "usb", other)
    document = shop.context.config.model_dump()
    removed = document["replica"].pop("nas")
    shop.context.config = Config.model_validate(
        document | {"replica": document["replica"] | ({now: removed} if now else {})}
    )
    for name in ("s2", "s3"):
        shop.take(name)
        replicate(shop.context, shop.records(), "usb", other)
    for dataset in ("flash/web", "tank/web"):
        shop.world.pool.destroy_snapshots([f"{dataset}@s1", f"{dataset}@s2"])
    document["replica"][now or "nas"] = removed
    shop.context.config = Config.model_validate(document)
    assert names(shop.ship(now or "nas")) == ["s3"]


def test_a_diverged_copy_is_reported_with_the_snapshots_that_only_it_has(shop):
    shop.take("s1", "s2", "s3")
    shop.ship()
    pool = shop.world.pool
    for dataset in ("flash/web", "tank/web"):
        pool.destroy_snapshots([f"{dataset}@s2", f"{dataset}@s3"])
        for mark in list(pool.bookmarks(dataset)):
            pool.destroy_bookmark(mark)  # as a rollback does
    shop.take("s4")
    shop.there.hooks.log.clear()
    with pytest.raises(ReplicaError, match="has diverged: s2, s3"):
        shop.ship()
    assert "replica.send" not in shop.there.hooks.acts()


def test_without_a_known_bookmark_no_transfer_begins_at_one(shop):
    shop.take("s1", "s2")
    shop.ship()
    pool = shop.world.pool
    for mark in list(pool.bookmarks("tank/web")):
        pool.destroy_bookmark(mark)
    pool.destroy_snapshots(["tank/web@s2"])
    shop.take("s3")
    with pytest.raises(ReplicaError, match="has diverged"):
        shop.ship()


def test_there_is_one_bookmark_for_each_replica(shop):
    pool = shop.world.pool
    pool.snapshot(["tank/web@x"], {})
    pool.bookmark("tank/web@x", "snaporch-nas-mine")
    pool.bookmark("tank/web@x", "somebodys")
    shop.take("s1")
    shop.ship("nas")
    shop.ship("usb")
    shop.take("s2")
    shop.ship("nas")
    guids = {each.full_name: each.guid for each in pool.snapshots(["tank/web"])}
    assert sorted(pool.bookmarks("tank/web")) == sorted(
        [
            f"tank/web#snaporch-nas-{guids['tank/web@s2']}",
            f"tank/web#snaporch-usb-{guids['tank/web@s1']}",
            "tank/web#snaporch-nas-mine",
            "tank/web#somebodys",
        ]
    )


# -- what cannot be there as a whole ------------------------------------------------------------


def test_an_incomplete_bundle_is_not_copied(shop):
    broken, good = shop.take("s1", "s2")
    (shop.context.store.path(f"{broken.uuid}/{broken.run}") / "ram.save").unlink()
    shipped = shop.ship()
    assert names(shipped) == ["s2"]
    assert [record.snapshot for record in shipped.missing] == ["s1"]
    assert shop.bundles() == [good.run]


def test_a_bundle_that_is_pruned_meanwhile_is_no_failure(shop):
    pruned, _ = shop.take("s1", "s2")

    def prune():
        shop.there.hooks.at.clear()
        shutil.rmtree(shop.context.store.path(f"{pruned.uuid}/{pruned.run}"))
        raise ReplicaError("nas", "file has vanished")

    shop.there.hooks.at["replica.store"] = prune
    shipped = shop.ship()
    assert names(shipped) == ["s2"]
    assert [record.snapshot for record in shipped.missing] == ["s1"]


def test_a_missing_bundle_is_a_failure_and_not_a_snapshot_without_bundle(shop):
    """The store may merely not be mounted."""
    first, _ = shop.take("s1", "s2")
    away = shop.world.paths.bundles.rename(shop.world.root / "away")
    with pytest.raises(ReplicaError, match=r"web@s[12]: its bundle here is not whole"):
        shop.ship()
    assert shop.bundles() == []
    away.rename(shop.world.paths.bundles)
    assert shop.replicated() == {"s1": (), "s2": ()}
    assert names(shop.ship()) == ["s1", "s2"]
    assert first.run in shop.bundles()


def test_a_snapshot_that_never_had_a_bundle_has_none_to_copy(shop):
    (record,) = shop.take("s1")
    shutil.rmtree(shop.context.store.path(f"{record.uuid}/{record.run}"))
    for name in shop.world.pool.names():
        shop.world.pool.inherit(name, "snaporch:bundle")
    (left,) = shop.records()
    assert (left.state, left.level) == (BundleState.MISSING, Level.CRASH)
    assert names(shop.ship()) == ["s1"]
    assert shop.bundles() == []
    shop.take("s2")
    assert names(shop.ship()) == ["s2"], "no bundle is missing of a snapshot that never had one"


@pytest.mark.parametrize("unmarked", ["tank/web", "flash/web"])
def test_a_bundle_that_only_some_snapshots_name_is_copied(shop, unmarked):
    (record,) = shop.take("s1")
    shop.world.pool.inherit(f"{unmarked}@s1", "snaporch:bundle")
    assert names(shop.ship()) == ["s1"]
    assert shop.bundles() == [record.run]


def test_a_bundle_whose_snapshots_have_lost_all_their_marks_is_copied(shop):
    """Its manifest names the snapshots."""
    (record,) = shop.take("s1")
    for each in shop.world.pool.snapshots(["tank/web", "flash/web"]):
        for key in each.properties:
            shop.world.pool.inherit(each.full_name, PREFIX + key)
    assert names(shop.ship()) == ["s1"]
    assert shop.bundles() == [record.run]


def test_a_replica_that_has_lost_its_bundles_is_reported_and_filled_again(shop):
    shop.take("s1")
    shop.ship()
    shutil.rmtree(shop.there.root)
    shop.there.root.mkdir()
    shop.take("s2")
    shop.there.hooks.log.clear()
    with pytest.raises(ReplicaError) as caught:
        shop.ship()
    assert "web@s1: its bundle is missing on the replica, and so are all others" in str(
        caught.value
    )
    assert "snaporch replicate web --to nas --recheck" in str(caught.value)
    assert shop.there.hooks.log == []
    assert names(shop.ship(recheck=True)) == ["s1", "s2"]
    assert len(shop.bundles()) == 2


def test_a_snapshot_of_a_run_under_way_is_copied_later(shop):
    """Its bundle may still change: RAM is moved into pages as the run's last work."""
    first, second = shop.take("s1", "s2")
    with domain_lock(
        shop.context.config.paths.runtime, "web", second.uuid, "snapshot", wait=0,
        interrupt=Interrupt(),
    ):  # fmt: skip
        assert names(shop.ship()) == ["s1"]
        assert shop.bundles() == [first.run]
        assert names(shop.ship()) == []
    assert names(shop.ship()) == ["s2"]


def test_guests_that_share_a_dataset_do_not_count_for_each_other(shop):
    shop.world.add_guest("db", {"vda": "tank/web"})
    shop.take("s1")
    db = shop.context.hypervisor.domain("db")
    take_snapshot(shop.context, db, SnapshotRequest("d1"))
    records = [record for record in shop.records() if record.domain == "db"]
    replicate(shop.context, records, "nas", shop.there)
    assert shop.replicated() == {"s1": (), "d1": ("nas",)}


def test_marks_of_another_guests_run_do_not_count_for_this_guest(shop):
    """As where sanoid takes one snapshot of a dataset for both of them."""
    pool = shop.world.pool
    shop.world.add_guest("db", {"vda": "tank/db", "vdb": "tank/web"})
    taken = take_snapshot(shop.context, shop.context.hypervisor.domain("db"), SnapshotRequest("d1"))
    (web,) = shop.take("s1")
    pool.set_properties(
        ["tank/web@d1"], {PREFIX + key: getattr(web, key) for key in ("run", "uuid", "domain")}
    )
    records = [record for record in shop.records() if record.run == taken.run]
    replicate(shop.context, records, "nas", shop.there)
    marks = {s.full_name: s.properties.get("replicated") for s in pool.snapshots()}
    assert (marks["tank/db@d1"], marks["tank/web@d1"]) == ("nas", None)


def test_a_replica_is_asked_what_it_has_before_and_after(shop):
    """Each question is a connection to another machine."""
    asked = []
    shop.there.hooks.at["replica.snapshots"] = lambda: asked.append("once")
    shop.take("s1")
    shop.ship()
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("host", "copy"),
    [
        ("", "backup/kvm/tank/web"),
        ("root@this-host", "backup/kvm/tank:web"),
        ("root@nas", "backup/of-a-replica-that-was-removed/tank:web"),
    ],
)
def test_copies_in_a_pool_of_this_host_are_no_originals(shop, host, copy):
    """Without a manifest they look like the guest's own: they carry the same properties."""
    shop.configure(host=host, dataset="backup/kvm")
    (record,) = shop.take("s1")
    shop.world.pool.create("backup")
    shop.world.pool.replicate("tank/web@s1", copy)
    shutil.rmtree(record.bundle)
    (left,) = shop.records()
    assert copy in left.datasets
    with pytest.raises(ReplicaError, match="its bundle here is not whole"):
        shop.ship()
    sent = [line for line in shop.there.hooks.log if line.startswith("replica.send")]
    assert sent == ["replica.send flash/web", "replica.send tank/web"]


def test_a_local_copy_is_not_copied_on_when_its_original_is_destroyed(shop):
    """Its replica is no longer configured, and newer snapshots name the original dataset."""
    copy = "backup/of-a-replica-that-was-removed/tank:web"
    first, _ = shop.take("s1", "s2")
    shop.world.pool.create("backup")
    shop.world.pool.replicate("tank/web@s1", copy)
    shutil.rmtree(first.bundle)
    for name in ("tank/web@s1", "flash/web@s1"):
        shop.world.pool.destroy_snapshots([name])
    assert copy in shop.records()[0].datasets
    assert names(shop.ship()) == ["s2"]
    sent = [line for line in shop.there.hooks.log if line.startswith("replica.send")]
    assert sent == ["replica.send flash/web", "replica.send tank/web"]


def add_guest_on_a_replica(shop):
    """Its disk lies below the dataset of a replica of this host; returns its snapshot."""
    document = shop.context.config.model_dump()
    document["replica"]["disk"] = {"dataset": "backup", "bundles": "/backup/disk"}
    shop.context.config = Config.model_validate(document)
    shop.world.add_guest("db", {"vda": "backup/db"})
    return take_snapshot(shop.context, shop.context.hypervisor.domain("db"), SnapshotRequest("d1"))


def test_a_guest_in_the_pool_of_a_local_replica_is_copied_to_another_one(shop):
    add_guest_on_a_replica(shop)
    assert names(shop.ship()) == ["d1"]
    assert shop.there.names() == ["backup/db@d1"]
    assert shop.replicated() == {"d1": ("nas",)}


def test_a_guest_is_not_copied_to_the_replica_that_its_disk_is_in(shop):
    add_guest_on_a_replica(shop)
    with pytest.raises(RefusedError, match="backup/db is inside backup, to which"):
        shop.ship("disk")
    assert shop.there.hooks.log == []


def test_a_dataset_that_any_manifest_names_is_no_copy(shop):
    lost = add_guest_on_a_replica(shop)
    db = shop.context.hypervisor.domain("db")
    take_snapshot(shop.context, db, SnapshotRequest("d2"))
    shutil.rmtree(lost.bundle)
    shipped = shop.ship()
    assert (names(shipped), [r.snapshot for r in shipped.missing]) == (["d2"], ["d1"])
    assert shop.there.names() == ["backup/db@d1", "backup/db@d2"]


def test_a_newest_snapshot_that_seems_to_be_a_copy_is_a_failure(shop):
    shutil.rmtree(add_guest_on_a_replica(shop).bundle)
    with pytest.raises(ReplicaError, match="db@d1: backup/db looks like a copy, and its"):
        shop.ship()
    assert shop.there.names() == []


def test_of_an_incomplete_snapshot_the_rest_is_copied(shop):
    shop.take("s1", "s2")
    shop.world.pool.destroy_snapshots(["flash/web@s1"])
    assert names(shop.ship()) == ["s2"]
    assert sorted(shop.there.names()) == ["flash/web@s2", "tank/web@s1", "tank/web@s2"]
    assert shop.replicated() == {"s1": (), "s2": ("nas",)}


def test_a_snapshot_that_is_incomplete_only_here_stays_replicated(shop):
    shop.take("s1", "s2")
    shop.ship()
    shop.world.pool.destroy_snapshots(["flash/web@s1"])
    shop.ship()
    assert shop.replicated() == {"s1": ("nas",), "s2": ("nas",)}
    shop.there.drop("flash/web@s1")
    shop.ship()
    assert shop.replicated() == {"s1": (), "s2": ("nas",)}


def test_it_stays_replicated_when_a_dataset_has_no_snapshot_here_any_more(shop):
    shop.take("s1")
    shop.ship()
    shop.world.pool.destroy_snapshots(["flash/web@s1"])
    assert names(shop.ship()) == []
    assert shop.replicated() == {"s1": ("nas",)}


def test_the_newest_that_is_incomplete_here_is_a_failure(shop):
    shop.take("s1", "s2")
    shop.world.pool.destroy_snapshots(["flash/web@s2"])
    with pytest.raises(ReplicaError) as caught:
        shop.ship()
    assert str(caught.value) == (
        "nas: web@s2: its ZFS snapshot of flash/web does not exist any more; take another snapshot"
    )
    assert shop.replicated() == {"s1": ("nas",), "s2": ()}


def test_the_newest_that_was_replicated_and_is_incomplete_on_both_sides_is_a_failure(shop):
    shop.take("s1")
    shop.ship()
    shop.world.pool.destroy_snapshots(["flash/web@s1"])
    shop.there.drop("flash/web@s1")
    with pytest.raises(ReplicaError, match="its ZFS snapshot of flash/web does not exist any more"):
        shop.ship()
    assert shop.replicated() == {"s1": ()}


@pytest.mark.parametrize(("lost", "left"), [("s1", ["s2"]), ("s2", ["s1"])])
def test_a_snapshot_deleted_meanwhile_has_not_arrived_and_is_no_failure(shop, lost, left):
    shop.take("s1", "s2")
    records = shop.records()
    shop.world.pool.destroy_snapshots([f"flash/web@{lost}"])
    assert names(replicate(shop.context, records, "nas", shop.there)) == left


def test_a_snapshot_that_the_replica_dropped_is_not_sent_again_and_no_failure(shop):
    """The replica prunes by its own rules: only the newest snapshot must be there."""
    shop.take("s1")
    shop.ship()
    shop.take("s2")
    shop.ship()
    shop.there.drop("tank/web@s1")
    shop.take("s3")
    assert names(shop.ship()) == ["s3"]


def test_what_the_replica_dropped_is_known_before_anything_is_sent(shop):
    """A window may end while it is sent, each night: what was pruned there does not wait here."""
    shop.take("s1", "s2", "s3")
    shop.ship()
    shop.there.drop("tank/web@s1")
    shop.take("s4")
    shop.there.hooks.at["replica.send"] = failing(WindowClosedError("nas", "has ended", 15))
    with pytest.raises(WindowClosedError):
        shop.ship()
    assert dropped(shop) == {"s1": ("nas",), "s2": (), "s3": (), "s4": ()}
    assert shop.replicated()["s1"] == ()


def test_the_newest_that_the_replica_dropped_before_it_was_marked_is_no_failure(shop):
    """As after a kill; another program's snapshot is newer there."""
    shop.take("s1")
    for each in TWO.values():
        shop.world.pool.snapshot([f"{each}@newer"], {})
    shop.there.hooks.at["replica.store"] = failing_once(ReplicaError("x", "killed"))
    with pytest.raises(ReplicaError, match="killed"):
        shop.ship()
    shop.there.drop("tank/web@s1")
    assert names(shop.ship()) == []
    assert shop.replicated() == {"s1": ()}


def test_a_part_that_a_power_loss_damaged_there_is_not_blamed_on_this_host(shop, monkeypatch):
    """rsync takes a file of the same size and time for the same."""
    shop.take("s1")
    store, parts = shop.there.store, ["ram.save"]

    def over_the_part(*arguments):
        return [parts.pop()] if parts else store(*arguments)

    monkeypatch.setattr(shop.there, "store", over_the_part)
    assert names(shop.ship()) == ["s1"]


def test_every_failure_is_reported_with_its_step(shop):
    shop.take("s1")

    def send(dataset, **_options):
        raise ReplicaError(dataset, "has diverged", f"see the copy of {dataset}")

    shop.there.send = send
    with pytest.raises(ReplicaError, match="see the copy of flash/web"):
        shop.ship()
    assert [note for note in shop.world.heard.notes if "see the copy of tank/web" in note]


def test_the_newest_that_did_not_arrive_is_a_failure(shop):
    shop.take("s1")
    shop.there.send = lambda dataset, **options: None
    with pytest.raises(ReplicaError, match="web@s1: did not arrive; try again: snap"):
        shop.ship()


@pytest.mark.parametrize("dataset", ["tank/web", "tank/web/copies"])
def test_a_copy_below_its_original_is_refused(shop, dataset):
    shop.configure(host="", dataset=dataset)
    shop.take("s1")
    with pytest.raises(RefusedError, match="is inside tank/web"):
        shop.ship()
    assert shop.there.hooks.log == []


def test_the_same_dataset_name_on_another_machine_is_not_refused(shop):
    shop.configure(dataset="tank")
    shop.take("s1")
    assert names(shop.ship()) == ["s1"]
    assert shop.there.names() == ["flash/web@s1", "tank/web@s1"]


def test_a_dataset_whose_name_only_begins_like_the_original_is_not_refused(shop):
    shop.configure(host="", dataset="tank/web-copies")
    shop.take("s1")
    assert names(shop.ship()) == ["s1"]


# -- what the replica has lost ------------------------------------------------------------------


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def age(shop, record, days):
    """The bundle on the replica was read so many days ago."""
    at = time.time() - days * 86_400
    os.utime(shop.copy(record) / COPY_NAME, (at, at))


LOSSES = {
    "emptied": lambda copy: (copy / "ram.save").write_bytes(b""),
    "a file is gone": lambda copy: (copy / "domain.xml").unlink(),
    "no manifest": lambda copy: (copy / "manifest.json").unlink(),
    "nothing is left": shutil.rmtree,
    "not known whose": lambda copy: (copy / COPY_NAME).unlink(),
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_a_bundle_that_is_missing_or_shorter_on_the_replica_is_copied_again(shop, lose):
    lost, _ = shop.take("s1", "s2")
    shop.ship()
    lose(shop.copy(lost))
    seen = []
    shop.there.hooks.at["replica.store"] = lambda: seen.append(shop.replicated()["s1"])
    shipped = shop.ship()
    assert seen == [()]  # the mark is removed first
    assert names(shipped) == ["s1"]
    assert [record.snapshot for record in shipped.damaged] == ["s1"]
    assert shop.is_whole(lost)
    assert shop.replicated() == {"s1": ("nas",), "s2": ("nas",)}
    assert any("its bundle there is missing or damaged" in note for note in shop.world.heard.notes)
    again = shop.ship()
    assert (again.arrived, again.damaged) == ((), ())


@pytest.mark.parametrize("part", ["ram.save", "manifest.json"])
def test_a_damaged_bundle_on_the_replica_is_found_by_recheck_and_replaced(shop, part):
    damaged, _ = shop.take("s1", "s2")
    shop.ship()
    flip(shop.copy(damaged) / part)
    assert shop.ship().damaged == ()  # its size is the same
    seen = []
    shop.there.hooks.at["replica.store"] = lambda: seen.append(shop.replicated()["s1"])
    shipped = shop.ship(recheck=True)
    assert seen == [()]
    assert (names(shipped), shipped.read) == (["s1"], 1)
    assert [record.snapshot for record in shipped.damaged] == ["s1"]
    assert shop.is_whole(damaged)
    assert shop.replicated() == {"s1": ("nas",), "s2": ("nas",)}
    assert shop.ship(recheck=True).read == 2


@pytest.mark.parametrize("unmarked", [[], ["s1"]])
def test_damage_of_a_bundle_on_the_replica_counts_for_all_names_of_the_run(shop, unmarked):
    (record,) = shop.take("s1")
    shop.world.take_again("daily")
    shop.ship()
    for name in unmarked:
        for dataset in TWO.values():
            shop.world.pool.inherit(f"{dataset}@{name}", PREFIX + "replicated")
    flip(shop.copy(record) / "ram.save")
    ram = Path(record.bundle) / "ram.save"
    kept = ram.rename(shop.world.root / "kept")
    with suppress(ReplicaError):
        shop.ship(recheck=not unmarked)
    assert shop.replicated() == {"daily": (), "s1": ()}
    kept.rename(ram)
    assert sorted(names(shop.ship())) == ["daily", "s1"]
    assert shop.is_whole(record)


def test_a_bundle_on_the_replica_is_read_again_after_a_week(shop):
    first, second, third = shop.take("s1", "s2", "s3")
    shop.ship()
    for record, days in ((first, 7.1), (second, 8), (third, 6)):
        age(shop, record, days)
    flip(shop.copy(first) / "ram.save")
    flip(shop.copy(third) / "ram.save")
    shipped = shop.ship()
    assert ([r.snapshot for r in shipped.damaged], shipped.read) == (["s1"], 1)
    assert shop.is_whole(first)
    assert not shop.is_whole(third)
    assert [r.snapshot for r in shop.ship().damaged] == ["s3"]
    assert shop.ship().read == 0


def test_each_replication_reads_the_bundle_that_was_read_longest_ago(shop):
    """So they are not all due at the same time."""
    taken = shop.take("s1", "s2", "s3")
    shop.ship()
    for record, days in zip(taken, (3, 4, 0.5), strict=True):
        age(shop, record, days)
    shop.there.hooks.log.clear()
    assert [shop.ship().read for _ in range(3)] == [1, 1, 0]
    read = [line for line in shop.there.hooks.log if line.startswith("replica.damaged")]
    assert read == [f"replica.damaged {r.uuid}/{r.run}" for r in (taken[1], taken[0])]


def test_the_next_step_is_a_command_for_a_guest_with_a_blank_in_its_name(shop):
    shop.world.add_guest("my web", {"vda": "tank/own"})
    domain = shop.context.hypervisor.domain("my web")
    for name, word in (("s1", "verify"), ("s2", "show")):
        record = take_snapshot(shop.context, domain, SnapshotRequest(name))
        path = Path(record.bundle) / "ram.save"
        _ = flip(path) if word == "verify" else path.unlink()
        records = [each for each in shop.records() if each.domain == "my web"]
        with pytest.raises(ReplicaError) as caught:
            replicate(shop.context, records[-1:], "nas", shop.there)
        assert f"see: snaporch {word} 'my web@{name}'" in caught.value.step


def test_a_bundle_that_is_damaged_here_is_not_copied_over_a_good_one(shop):
    (record,) = shop.take("s1")
    shop.ship()
    (shop.copy(record) / COPY_NAME).unlink()
    flip(Path(record.bundle) / "ram.save")
    before = (shop.copy(record) / "ram.save").read_bytes()
    with pytest.raises(ReplicaError) as caught:
        shop.ship()
    reason = "web@s1: its bundle is damaged on this host, and was not copied: ram.save"
    assert reason in str(caught.value)
    assert "snaporch verify web@s1" in str(caught.value)
    assert (shop.copy(record) / "ram.save").read_bytes() == before
    assert shop.replicated() == {"s1": ()}


def test_a_damaged_copy_that_cannot_be_replaced_is_a_failure(shop):
    record, _ = shop.take("s1", "s2")
    shop.ship()
    (shop.copy(record) / "ram.save").unlink()
    (Path(record.bundle) / "ram.save").unlink()
    with pytest.raises(ReplicaError, match="there is damaged, and the one on this host is not"):
        shop.ship()
    assert shop.replicated() == {"s1": (), "s2": ("nas",)}
    assert [record.snapshot for record in shop.ship().missing] == ["s1"]


def test_a_copy_of_a_bundle_that_is_incomplete_here_stays_replicated(shop):
    record, _ = shop.take("s1", "s2")
    shop.ship()
    (Path(record.bundle) / "ram.save").unlink()
    shipped = shop.ship(recheck=True)
    assert (shipped.damaged, shipped.missing, shipped.read) == ((), (), 2)
    assert shop.replicated() == {"s1": ("nas",), "s2": ("nas",)}


def test_a_copy_whose_bundle_here_is_lost_is_compared_with_its_own_manifest(shop):
    record, _ = shop.take("s1", "s2")
    shop.ship()
    shutil.rmtree(record.bundle)
    assert shop.ship(recheck=True).read == 2
    assert shop.replicated() == {"s1": ("nas",), "s2": ("nas",)}
    copy = shop.copy(record) / "ram.save"
    content = copy.read_bytes()
    copy.write_bytes(b"x" * len(content))
    with pytest.raises(ReplicaError, match="damaged, and the one on this host is not whole"):
        shop.ship(recheck=True)
    assert shop.replicated() == {"s1": (), "s2": ("nas",)}
    copy.write_bytes(content)
    assert names(shop.ship()) == ["s1"]


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", None])
def test_a_copy_without_any_manifest_is_not_replicated(shop, text):
    record, other = shop.take("s1", "s2")
    shop.ship()
    shutil.rmtree(record.bundle)
    copy = shop.copy(record) / "manifest.json"
    copy.write_bytes((shop.copy(other) / "manifest.json").read_bytes() if text is None else text)
    with pytest.raises(ReplicaError, match="damaged, and the one on this host is not whole"):
        shop.ship(recheck=True)
    assert shop.replicated() == {"s1": (), "s2": ("nas",)}


def test_an_unmarked_bundle_is_read_before_it_is_marked(shop):
    """It may have arrived under another name of the replica, long ago."""
    (record,) = shop.take("s1")
    shop.ship()
    flip(shop.copy(record) / "ram.save")
    for name in ("tank/web@s1", "flash/web@s1"):
        shop.world.pool.inherit(name, PREFIX + "replicated")
    assert names(shop.ship()) == ["s1"]
    assert shop.is_whole(record)


def test_snapshots_that_the_replica_destroyed_are_not_called_replicated(shop):
    shop.take("s1", "s2", "s3")
    shop.ship()
    shop.there.drop("tank/web@s1")
    shipped = shop.ship()
    assert (shipped.arrived, shipped.damaged) == ((), ())
    assert shop.replicated() == {"s1": (), "s2": ("nas",), "s3": ("nas",)}
    dropped = {record.snapshot: record.dropped for record in shop.records()}
    assert dropped == {"s1": ("nas",), "s2": (), "s3": ()}


@pytest.mark.parametrize("recheck", [False, True])
def test_a_replica_whose_dataset_is_missing_has_lost_nothing(shop, recheck):
    """Its pool may only be exported."""
    shop.take("s1", "s2")
    shop.ship()
    bookmarks = shop.world.pool.bookmarks
    marks = {dataset: bookmarks(dataset) for dataset in ("tank/web", "flash/web")}
    shop.there.is_there = False
    with pytest.raises(ReplicaError, match="is its pool imported"):
        shop.ship(recheck=recheck)
    assert not shop.there.is_there
    assert shop.replicated() == {"s1": ("nas",), "s2": ("nas",)}
    assert {dataset: bookmarks(dataset) for dataset in marks} == marks
    shop.there.create()
    assert names(shop.ship()) == []


def test_the_dataset_of_a_replica_is_not_created_for_another_guest(shop):
    """An empty one would look as if all copies were lost."""
    shop.take("s1")
    shop.ship()
    shop.there.is_there = False
    shop.world.add_guest("db", {"vda": "tank/db"})
    take_snapshot(shop.context, shop.context.hypervisor.domain("db"), SnapshotRequest("d1"))
    records = [record for record in shop.records() if record.domain == "db"]
    with pytest.raises(ReplicaError, match="is its pool imported"):
        replicate(shop.context, records, "nas", shop.there)
    assert not shop.there.is_there
    replicate(shop.context, records, "usb", shop.there)
    assert shop.there.is_there


@pytest.mark.parametrize("recheck", [False, True])
def test_a_replica_whose_directory_is_missing_has_lost_no_bundle(shop, recheck):
    shop.take("s1")
    shop.ship()
    away = shop.there.root.rename(shop.world.root / "away")
    with pytest.raises(ReplicaError, match="is not there"):
        shop.ship(recheck=recheck)
    assert shop.replicated() == {"s1": ("nas",)}
    away.rename(shop.there.root)
    assert names(shop.ship(recheck=recheck)) == []


def test_snapshots_that_the_replica_rolled_back_are_sent_again(shop):
    shop.take("s1", "s2")
    shop.ship()
    for dataset in ("tank/web", "flash/web"):
        shop.there.drop(f"{dataset}@s2")
    assert names(shop.ship()) == ["s2"]
    assert {record.dropped for record in shop.records()} == {()}


def test_a_copy_that_was_destroyed_is_sent_again(shop):
    shop.take("s1", "s2")
    shop.ship()
    shop.there.drop("tank/web@s1")
    shop.ship()
    shop.there.drop("tank/web@s2")
    shipped = shop.ship()
    assert names(shipped) == ["s1", "s2"]
    assert {record.dropped for record in shop.records()} == {()}


# -- two at once --------------------------------------------------------------------------------


def test_a_domain_whose_snapshots_are_copied_or_deleted_is_busy(shop):
    (record,) = shop.take("s1")
    lock = domain_lock(
        shop.context.config.paths.runtime,
        "web",
        replication_lock_name(record.uuid),
        "replicate",
        wait=0,
        interrupt=Interrupt(),
    )
    with lock, pytest.raises(BusyError):
        shop.ship()
    assert names(shop.ship()) == ["s1"]


def test_the_lock_names_replication_as_its_holder(shop):
    (record,) = shop.take("s1")
    holders = []
    lock = replication_lock_name(record.uuid)
    shop.there.hooks.at["replica.store"] = lambda: holders.append(
        held_by(default_paths.LOCKS, lock)
    )
    shop.ship()
    assert [each.doing for each in holders] == ["replicate"]


def test_replication_of_one_guest_does_not_block_another(shop):
    shop.take("s1")
    runtime = shop.context.config.paths.runtime
    with domain_lock(
        runtime, "db", replication_lock_name("4b1d2f0e"), "replicate", wait=0, interrupt=Interrupt()
    ):
        assert names(shop.ship()) == ["s1"]


def test_snapshots_are_taken_meanwhile(shop):
    shop.take("s1")
    shop.there.hooks.at["replica.store"] = lambda: (
        shop.there.hooks.at.clear(),
        shop.take("s2"),
    )
    assert names(shop.ship()) == ["s1"]
    assert names(shop.ship()) == ["s2"]


def test_replication_changes_neither_the_journal_nor_the_guest(shop):
    shop.take("s1")
    shop.there.hooks.at["replica.store"] = failing(ReplicaError("nas", "away"))
    with suppress(ReplicaError):
        shop.ship()
    assert shop.world.is_as_it_was()


def test_a_bundle_that_went_into_pages_meanwhile_is_not_there_yet(shop):
    """The copy has no snapshot of the pages: those were not wanted when it began."""
    shop.world.guest().ram = streams.guest_stream()
    (record,) = shop.take("s1")
    shop.world.with_pages()
    shop.configure()
    real = shop.there.store

    def meanwhile(source, reference, sums):
        store_as_pages(shop.context, shop.records()[0])
        return real(source, reference, sums)

    shop.there.store = meanwhile
    assert names(shop.ship()) == []
    assert shop.replicated() == {"s1": ()}
    del shop.there.store
    assert names(shop.ship()) == ["s1"]
    pages = f"tank/ram/{record.uuid}@s1"
    assert pages in shop.there.names()


def test_a_domain_whose_only_snapshot_may_still_change_is_not_read_and_not_copied(shop):
    """Its RAM may be moved into pages as long as the domain is locked."""
    (record,) = shop.take("s1")
    lock = ("web", record.uuid, "snapshot")
    with domain_lock(default_paths.LOCKS, *lock, wait=0, interrupt=Interrupt()):
        shipped = shop.ship()
    assert (shipped.arrived, shipped.missing, shipped.damaged, shipped.read) == ((), (), (), 0)
    assert shop.there.names() == []


def test_all_snapshots_of_a_copy_that_has_none_in_common_are_named(shop):
    shop.take("s1", "s2")
    shop.ship()
    strange = [
        replace(each, guid=each.guid + 7000, properties={})
        for each in shop.there.snapshots(["tank/web"])
    ]
    shop.there.put(strange)
    for mark in shop.world.pool.bookmarks("tank/web"):
        shop.world.pool.destroy_bookmark(mark)
    with pytest.raises(ReplicaError, match="has diverged: s1, s2"):
        shop.ship()


def destroy(shop, *names):
    """``zfs destroy`` of snapshots on this host."""
    for dataset in TWO.values():
        shop.world.pool.destroy_snapshots([f"{dataset}@{name}" for name in names])


def sent(shop):
    """The datasets that were sent, in this order."""
    return [line.split()[1] for line in shop.there.hooks.log if line.startswith("replica.send")]


def test_a_copy_that_is_up_to_date_is_not_sent(shop):
    shop.take("s1", "s2")
    shop.ship()
    shop.there.hooks.log.clear()
    shop.world.heard.steps.clear()
    shop.ship()
    assert sent(shop) == []
    assert not any(step.startswith("sending") for step in shop.world.heard.steps)


def test_only_what_a_replica_may_still_get_is_bookmarked_for_it(shop):
    shop.take("s1", "s2", "s3")
    shop.ship()
    marks = shop.world.pool.bookmarks("tank/web").values()
    newest = shop.there.snapshots(["tank/web"])[-1]
    assert [mark.guid for mark in marks] == [newest.guid]


def test_a_replica_that_has_only_snapshots_of_another_guest_is_not_created(shop):
    """It has newer ones than a snapshot that is left here, and no other guest is known to it."""
    shop.take("s1", "s2", "s3")
    shop.ship()
    shop.there.drop("tank/web@s2")
    shop.ship()
    destroy(shop, "s1", "s3")
    assert (shop.replicated(), dropped(shop)) == ({"s2": ()}, {"s2": ("nas",)})
    shop.there.is_there = False
    shop.world.add_guest("db", {"vda": "tank/db"})
    take_snapshot(shop.context, shop.context.hypervisor.domain("db"), SnapshotRequest("d1"))
    records = [record for record in shop.records() if record.domain == "db"]
    with pytest.raises(ReplicaError, match="is its pool imported"):
        replicate(shop.context, records, "nas", shop.there)
    assert not shop.there.is_there


def test_a_snapshot_of_which_a_part_is_marked_is_marked_completely(shop):
    """A crash between two pools leaves that."""
    shop.take("s1")
    shop.ship()
    shop.world.pool.set_properties(["tank/web@s1"], {PREFIX + "replicated": ""})
    shop.ship()
    properties = [each.properties for each in shop.world.pool.snapshots([*TWO.values()])]
    assert [each["replicated"] for each in properties] == ["nas", "nas"]


def test_a_part_that_has_lost_the_marks_of_its_run_does_not_count(shop):
    shop.take("s1")
    properties = dict.fromkeys(
        PREFIX + key for each in shop.world.pool.snapshots(["flash/web"]) for key in each.properties
    )
    shop.world.pool.set_properties(["flash/web@s1"], dict.fromkeys(properties, ""))
    assert names(shop.ship()) == ["s1"]
    assert names(shop.ship()) == []
    assert shop.replicated() == {"s1": ("nas",)}


def test_a_run_whose_snapshots_are_gone_does_not_hide_what_the_replica_dropped(shop):
    shop.take("s1", "s2", "s3")
    shop.ship()
    records = shop.records()
    destroy(shop, "s1")
    shop.there.drop("tank/web@s2")
    replicate(shop.context, records, "nas", shop.there)
    assert dropped(shop)["s2"] == ("nas",)


def test_a_dropped_snapshot_that_is_not_whole_here_stays_dropped(shop):
    shop.take("s1", "s2", "s3")
    shop.ship()
    shop.there.drop("tank/web@s2")
    shop.ship()
    shop.world.pool.destroy_snapshots(["tank/web@s2"])
    shop.ship()
    assert dropped(shop)["s2"] == ("nas",)


def test_a_transfer_that_fails_is_the_only_failure_that_is_reported(shop):
    shop.take("s1")
    failing_send(shop, "tank/web")
    shop.world.heard.notes.clear()
    with pytest.raises(ReplicaError, match="nas: away"):
        shop.ship()
    assert shop.world.heard.notes == []


def test_a_snapshot_taken_during_a_transfer_is_bookmarked_before_it_is_sent(shop):
    """Hours after the first dataset; if it is destroyed later, the bookmark remains."""
    shop.take("s1")
    pool = shop.world.pool

    def taken_meanwhile():
        shop.there.hooks.at.clear()
        pool.snapshot(["tank/web@later"], {})
        failing_send(shop, "tank/web")

    shop.there.hooks.at["replica.send"] = taken_meanwhile  # of flash/web
    with pytest.raises(ReplicaError, match="nas: away"):
        shop.ship()
    (later,) = [each for each in pool.snapshots(["tank/web"]) if each.name == "later"]
    assert later.guid in {mark.guid for mark in pool.bookmarks("tank/web").values()}


def test_a_snapshot_taken_while_its_dataset_is_sent_is_left_to_the_next_replication(shop):
    """It has no bookmark yet: once there and destroyed here, nothing could be sent after it."""
    shop.take("s1")
    pool, send = shop.world.pool, shop.there.send

    def taken_meanwhile(dataset, **options):
        if dataset == "tank/web":
            pool.snapshot(["tank/web@later"], {})
        send(dataset, **options)

    shop.there.send = taken_meanwhile
    assert names(shop.ship()) == ["s1"]
    assert "tank/web@later" not in shop.there.names()
    shop.there.send = send
    shop.ship()
    assert "tank/web@later" in shop.there.names()
    (later,) = [each for each in pool.snapshots(["tank/web"]) if each.name == "later"]
    assert [mark.guid for mark in pool.bookmarks("tank/web").values()] == [later.guid]


def test_a_copy_does_not_diverge_when_sanoid_prunes_while_the_replica_is_away(shop):
    shop.take("s1")
    shop.ship()
    shop.take("s2")
    pool, send, snapshots = shop.world.pool, shop.there.send, shop.there.snapshots
    away = []

    def taken_meanwhile(dataset, **options):
        if dataset == "tank/web":
            pool.snapshot(["tank/web@later"], {})
        send(dataset, **options)
        away.extend([dataset] if dataset == "tank/web" else [])

    def listed(datasets):
        if away:
            raise ReplicaError("nas", "away")
        return snapshots(datasets)

    shop.there.send, shop.there.snapshots = taken_meanwhile, listed
    with pytest.raises(ReplicaError, match="away"):
        shop.ship()
    pool.destroy_snapshots(["tank/web@later"])
    away.clear()
    shop.there.send, shop.there.snapshots = send, snapshots
    shop.take("s3")
    assert names(shop.ship()) == ["s2", "s3"]


def test_after_a_signal_no_other_dataset_is_sent(shop, monkeypatch):
    shop.take("s1")
    flag = []

    def check(_thing):
        if flag:
            raise InterruptedRunError("nas", "SIGTERM", 15)

    monkeypatch.setattr(shop.context.interrupt, "check", check)
    shop.there.hooks.at["replica.send"] = lambda: flag.append("SIGTERM")
    with pytest.raises(InterruptedRunError):
        shop.ship()
    assert sent(shop) == ["flash/web"]


def test_snapshots_destroyed_during_a_transfer_are_not_marked(shop):
    shop.take("s1", "s2")
    send = shop.there.send

    def sent_first(dataset, **options):
        send(dataset, **options)
        if dataset == "tank/web":
            destroy(shop, "s1")

    shop.there.send = sent_first
    assert names(shop.ship()) == ["s2"]


def test_a_snapshot_of_an_interrupted_run_is_replicated_without_a_bundle(shop):
    (record,) = shop.take("s1")
    shutil.rmtree(record.bundle)
    properties = {PREFIX + "level": "crash", PREFIX + "bundle": ""}
    shop.world.pool.set_properties([f"{dataset}@s1" for dataset in TWO.values()], properties)
    assert [each.state for each in shop.records()] == [BundleState.NONE]
    shipped = shop.ship()
    assert (names(shipped), shipped.missing) == (["s1"], ())


def test_one_replication_at_a_time_runs_on_a_host_and_at_low_priority(shop):
    works = shop.world.lowered
    works.clear()
    with host_lock(shop.context):
        with (
            pytest.raises(BusyError, match="replication: held by replicate;"),
            host_lock(shop.context),
        ):
            pytest.fail("a second one runs")
        assert works == ["replicate"]
    with host_lock(shop.context):
        assert works == ["replicate"] * 2
