import hashlib
import signal
from threading import Thread

import pytest
from fakes.cloud import Cloud
from fakes.pool import FakePool

from snaporch.bundle.store import COPY_NAME, copy_name
from snaporch.catalog.records import all_records
from snaporch.config import Config
from snaporch.errors import InterruptedRunError, WindowClosedError
from snaporch.interrupt import Interrupt, WindowInterrupt
from snaporch.replication.interface import ReplicaError
from snaporch.replication.replicate import replicate
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot

ALL = 1 << 62
WEB = "tank/web"
UUID = "4b1d2f0e-0000-4000-8000-000000000001"


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    made = Cloud(tmp_path / "cloud", FakePool(WEB))
    monkeypatch.setenv("PATH", str(made.tools), prepend=":")
    return made


def names(cloud):
    return [each.full_name for each in cloud.destination().snapshots([WEB])]


def test_snapshots_are_stored_with_their_guids_and_properties(cloud):
    cloud.take(f"{WEB}@a", f"{WEB}@b", run="r-1", note="a, ü")
    there = cloud.destination()
    there.send(WEB, raw=False, until=ALL)
    ours = [(e.name, e.guid, dict(e.properties)) for e in cloud.pool.snapshots([WEB])]
    found = [(e.name, e.guid, dict(e.properties)) for e in there.snapshots([WEB])]
    assert found == [(name, guid, {**marks, "copy": "cloud"}) for name, guid, marks in ours]
    assert cloud.sent() == [f"send -Lc {WEB}@a", f"send -Lc -i {WEB}@a {WEB}@b"]


def test_what_was_stored_is_not_sent_again(cloud):
    cloud.take(f"{WEB}@a")
    cloud.destination().send(WEB, raw=False, until=ALL)
    cloud.take(f"{WEB}@b", f"{WEB}@c")
    last = cloud.pool.snapshots([WEB])[1]
    cloud.destination().send(WEB, raw=False, until=last.createtxg)
    assert names(cloud) == [f"{WEB}@a", f"{WEB}@b"]
    cloud.destination().send(WEB, raw=False, until=last.createtxg)
    assert len(cloud.sent()) == 2


def test_a_replication_that_meets_a_lock_names_the_command_that_removes_it(cloud, tmp_path):
    cloud.take(f"{WEB}@a")
    (tmp_path / "bundle").mkdir()
    held = "echo 'no: repository is already locked exclusively by PID 7 on vm' >&2; exit 1"
    fake = cloud.tools / "restic"
    fake.rename(cloud.tools / "restic.real")
    fake.write_text(f'#!/bin/sh\ntest "$1" = backup && {{ {held}; }}\nexec "$0.real" "$@"\n')
    fake.chmod(0o755)
    for act in (
        lambda: cloud.destination().send(WEB, raw=False, until=ALL),
        lambda: cloud.destination().store(tmp_path / "bundle", f"{UUID}/r-1", {}),
    ):
        with pytest.raises(ReplicaError) as caught:
            act()
        assert caught.value.reason == "repository is already locked exclusively by PID 7 on vm"
        assert caught.value.step.endswith(" unlock")


def test_a_stream_follows_a_bookmark(cloud):
    cloud.take(f"{WEB}@a")
    cloud.destination().send(WEB, raw=False, until=ALL)
    cloud.pool.bookmark(f"{WEB}@a", "place")
    cloud.pool.destroy_snapshots([f"{WEB}@a"])
    cloud.take(f"{WEB}@b")
    cloud.destination().send(WEB, raw=False, until=ALL)
    assert cloud.sent()[1:] == [f"send -Lc -i {WEB}#place {WEB}@b"]
    assert names(cloud) == [f"{WEB}@a", f"{WEB}@b"]


def test_without_a_base_another_chain_begins(cloud):
    """After a restore: what the repository has in its chain stays there."""
    cloud.take(f"{WEB}@a", f"{WEB}@b")
    cloud.destination().send(WEB, raw=False, until=ALL)
    cloud.pool.destroy_snapshots([f"{WEB}@a", f"{WEB}@b"])
    cloud.take(f"{WEB}@c")
    cloud.destination().send(WEB, raw=False, until=ALL)
    assert cloud.sent()[2:] == [f"send -Lc {WEB}@c"]
    assert names(cloud) == [f"{WEB}@a", f"{WEB}@b", f"{WEB}@c"]


def test_encrypted_datasets_are_sent_raw(cloud):
    cloud.take(f"{WEB}@a")
    cloud.destination().send(WEB, raw=True, until=ALL)
    assert cloud.sent() == [f"send -w {WEB}@a"]
    source = cloud.source()
    assert source.encrypted(list(source.snapshots())) == {"tank:web"}


def test_a_chain_has_so_many_increments(cloud):
    cloud.take(*(f"{WEB}@{name}" for name in "abcd"))
    cloud.destination(chain=1).send(WEB, raw=False, until=ALL)
    assert [line.split()[2] == "-i" for line in cloud.sent()] == [False, True, False, True]


def test_a_stream_that_was_cut_does_not_count_and_is_sent_again(cloud):
    """restic stored what came of it."""
    cloud.take(f"{WEB}@a")
    (cloud.place / "cut").touch()
    with pytest.raises(ReplicaError, match="tank/web@a"):
        cloud.destination().send(WEB, raw=False, until=ALL)
    stored = list((cloud.place / "repository" / "snapshots").iterdir())
    assert len(stored) == 1
    assert names(cloud) == []
    (cloud.place / "cut").unlink()
    cloud.destination().send(WEB, raw=False, until=ALL)
    assert names(cloud) == [f"{WEB}@a"]


class Ending:
    """What ends a transfer as soon as its stream is under way."""

    def __init__(self, cloud, way):
        self.under_way, self.way, self.has_ended = cloud.slow(), way, False
        signals = Interrupt()
        self.interrupt = WindowInterrupt(outer=signals, closed=self.closed)
        self.await_stream = Thread(target=self.end, args=(signals,))
        self.await_stream.start()

    def end(self, signals):
        self.under_way.read_bytes()
        self.has_ended = True
        if self.way == "signal":
            signals.signum = signal.SIGTERM

    def closed(self):
        return "its window has ended" if self.has_ended and self.way == "window" else ""


@pytest.mark.parametrize(
    ("way", "error"), [("window", WindowClosedError), ("signal", InterruptedRunError)]
)
def test_a_stream_ends_with_its_window_or_by_a_signal_and_is_sent_again(cloud, way, error):
    cloud.take(f"{WEB}@a", f"{WEB}@b")
    cloud.destination().send(WEB, raw=False, until=cloud.pool.snapshots([WEB])[0].createtxg)
    ending = Ending(cloud, way)
    with pytest.raises(error) as caught:
        cloud.destination(ending.interrupt).send(WEB, raw=False, until=ALL)
    ending.await_stream.join()
    assert type(caught.value) is error
    assert names(cloud) == [f"{WEB}@a"]
    ending.under_way.unlink()
    cloud.destination().send(WEB, raw=False, until=ALL)
    assert names(cloud) == [f"{WEB}@a", f"{WEB}@b"]
    assert cloud.sent()[1:] == [f"send -Lc -i {WEB}@a {WEB}@b"] * 2


def test_the_end_of_the_window_also_ends_a_bundle(cloud, bundle):
    window = WindowInterrupt(closed=lambda: "its window has ended")
    with pytest.raises(WindowClosedError):
        cloud.destination(window).store(bundle, f"{UUID}/r-1", sums(bundle))
    assert cloud.destination().bundles(UUID) == {}


def test_a_name_that_was_used_again_meanwhile_is_not_taken_for_the_snapshot(cloud):
    cloud.take(f"{WEB}@a", f"{WEB}@b")
    (cloud.place / "streams" / "tank:web@b").write_bytes(cloud.stream(f"{WEB}@a"))
    with pytest.raises(ReplicaError, match="has another snapshot"):
        cloud.destination().send(WEB, raw=False, until=ALL)
    assert names(cloud) == [f"{WEB}@a"]


def test_a_full_stream_that_restic_finds_in_damaged_data_does_not_count(cloud):
    """As after a chain was forgotten, and the repository was not repaired."""
    cloud.take(f"{WEB}@a")
    cloud.destination().send(WEB, raw=False, until=ALL)
    cloud.damage(cloud.stream(f"{WEB}@a"))
    cloud.forget("kind=stream")
    with pytest.raises(ReplicaError, match=r"cannot be read: .*verification failed; see: .*check"):
        cloud.destination().send(WEB, raw=False, until=ALL)
    assert names(cloud) == []
    for path in (cloud.place / "repository" / "data").iterdir():
        path.unlink()
    cloud.destination().send(WEB, raw=False, until=ALL)
    assert names(cloud) == [f"{WEB}@a"]


def test_the_reason_of_a_failed_upload_is_what_restic_says(cloud):
    cloud.take(f"{WEB}@a")
    path = cloud.place / "streams" / "tank:web@a"
    path.write_bytes(path.read_bytes() + bytes(3_000_000))
    cloud.fail("backup", 1)
    with pytest.raises(ReplicaError, match="tank/web@a: no server; try again"):
        cloud.destination().send(WEB, raw=False, until=ALL)


def test_a_dataset_that_is_renamed_meanwhile_is_an_error_in_one_line(cloud):
    cloud.take(f"{WEB}@a")
    destination = cloud.destination()
    cloud.pool.datasets = list
    with pytest.raises(ReplicaError, match="tank/web: was renamed or destroyed meanwhile"):
        destination.send(WEB, raw=False, until=ALL)


def test_nothing_can_be_sent_without_snapshots(cloud):
    with pytest.raises(ReplicaError, match="has no snapshots"):
        cloud.destination().send(WEB, raw=False, until=ALL)


def test_later_properties_and_policies_are_stored(cloud):
    cloud.take(f"{WEB}@a", level="crash")
    there = cloud.destination()
    there.send(WEB, raw=False, until=ALL)
    late = there.mark({f"{WEB}@a": {"level": "ram", "copy": "cloud"}, f"{WEB}@none": {}})
    assert late == [f"{WEB}@none"]
    there.set_policies({WEB: "hourly"})
    stored = len(list((cloud.place / "repository" / "snapshots").iterdir()))
    (found,) = cloud.destination().snapshots([WEB])
    assert dict(found.properties) == {"level": "ram", "copy": "cloud"}
    cloud.destination().set_policies({WEB: "hourly"})
    assert len(list((cloud.place / "repository" / "snapshots").iterdir())) == stored
    assert cloud.source().policies(["tank:web"]) == {"tank:web": "hourly"}


def test_many_policies_are_stored_in_several_records(cloud):
    """A command line has a limit."""
    policies = {f"tank/{number:0200}": "x" * 1000 for number in range(2400)}
    cloud.destination().set_policies(policies)
    copies = [copy_name(name) for name in policies]
    assert len(cloud.source().policies(copies)) == 2400
    assert len(list((cloud.place / "repository" / "snapshots").iterdir())) == 5


@pytest.fixture
def bundle(tmp_path):
    path = tmp_path / "bundle"
    path.mkdir()
    (path / "manifest.json").write_bytes(b"{}")
    (path / "ram.save").write_bytes(b"RAM" * 1000)
    return path


def sums(bundle):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in bundle.iterdir()}


def test_a_bundle_counts_with_its_record(cloud, bundle):
    there = cloud.destination()
    assert there.bundles(UUID) == {}
    assert there.store(bundle, f"{UUID}/r-1", sums(bundle)) == []
    (copy,) = there.bundles(UUID).values()
    assert copy.sizes == {"manifest.json": 2, "ram.save": 3000, COPY_NAME: 0}
    assert there.manifest(f"{UUID}/r-1") == "{}"
    assert there.manifest(f"{UUID}/r-2") == ""
    assert there.damaged(f"{UUID}/r-1", sums(bundle)) == []
    cloud.forget("kind=bundle-record")
    assert cloud.destination().bundles(UUID) == {}


def test_a_bundle_that_is_damaged_here_is_not_stored(cloud, bundle):
    wanted = sums(bundle)
    (bundle / "ram.save").write_bytes(b"other")
    assert cloud.destination().store(bundle, f"{UUID}/r-1", wanted) == ["ram.save"]
    assert list((cloud.place / "repository" / "snapshots").iterdir()) == []


def test_damage_in_the_repository_is_found_and_not_repaired_by_storing_again(cloud, bundle):
    there, wanted = cloud.destination(), sums(bundle)
    there.store(bundle, f"{UUID}/r-1", wanted)
    cloud.damage((bundle / "ram.save").read_bytes())
    assert there.damaged(f"{UUID}/r-1", wanted) == ["ram.save"]
    with pytest.raises(ReplicaError, match=r"also as it was stored again: ram\.save; repair it"):
        there.store(bundle, f"{UUID}/r-1", wanted)


def test_a_bundle_comes_again_after_a_repair(cloud, bundle):
    there, wanted = cloud.destination(), sums(bundle)
    there.store(bundle, f"{UUID}/r-1", wanted)
    cloud.damage((bundle / "ram.save").read_bytes())
    assert there.damaged(f"{UUID}/r-1", wanted) == ["ram.save"]
    for path in (cloud.place / "repository" / "data").iterdir():
        path.unlink()
    assert there.store(bundle, f"{UUID}/r-1", wanted) == []
    assert there.damaged(f"{UUID}/r-1", wanted) == []


def test_a_guest_is_replicated_as_to_any_replica(world, tmp_path, monkeypatch):
    world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    cloud = Cloud(tmp_path / "cloud", world.pool)
    monkeypatch.setenv("PATH", str(cloud.tools), prepend=":")
    document = world.context.config.model_dump() | {"replica": {"cloud": cloud.section()}}
    world.context.config = Config.model_validate(document)
    domain = world.context.hypervisor.domain("web")

    def ship():
        records = all_records(world.context.store, world.pool.snapshots())
        return replicate(world.context, records, "cloud", cloud.destination())

    for name in ("s1", "s2"):
        take_snapshot(world.context, domain, SnapshotRequest(name))
    cloud.prepare()
    assert [each.snapshot for each in ship().arrived] == ["s1", "s2"]
    assert ship().arrived == ()
    records = all_records(world.context.store, world.pool.snapshots())
    assert [each.replicated for each in records] == [("cloud",), ("cloud",)]
    sent = len(cloud.sent())
    cloud.forget("chain=tank/web@")  # an admin did
    assert [each.snapshot for each in ship().arrived] == ["s1", "s2"]
    assert cloud.sent()[sent:] == ["send -Lc tank/web@s1", "send -Lc -i tank/web@s1 tank/web@s2"]
