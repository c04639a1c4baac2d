"""The contract of what a rebuild reads from a replica, and of this host's datasets."""

import hashlib
import json
from pathlib import Path

import pytest
from contract_pools import FakeScratch, ZfsScratch
from fakes.hooks import Hooks
from fakes.rebuild_source import FakeLocal, FakeSource
from fakes.replica import FakeReplica
from fakes.world import Heard
from lab_ssh import sshd_here

from snaporch.bundle.store import COPY_NAME, copy_name
from snaporch.config import Replica
from snaporch.errors import SnaporchError
from snaporch.interrupt import Interrupt
from snaporch.model import DatasetKind
from snaporch.rebuild.local_datasets import RECEIVED, LocalDatasets
from snaporch.rebuild.replica_source import ReplicaSource
from snaporch.replication.destination import ReplicaDestination
from snaporch.replication.received_bundles import ReceivedBundles
from snaporch.replication.resume_transfer import NO_TOKEN
from snaporch.replication.unsent_files import unsent_files
from snaporch.zfs import REBUILD_PROPERTY
from snaporch.zfs.cli import ZfsCommand

UUID = "4b1d2f0e-0000-4000-8000-000000000001"
REFERENCE = f"{UUID}/r-1"
CONTENT = {"manifest.json": b"{}", "ram.save": b"all of the RAM" * 100_000}
# pyzfs 2.3 warns on Python 3.13 when it formats an error
pytestmark = pytest.mark.filterwarnings("ignore:'maxsplit' is passed:DeprecationWarning")


class Place:
    """A host and its replica, which has two snapshots of a dataset and a bundle."""

    def __init__(self, scratch, replica, source, local, lose):
        self.scratch, self.source, self.local, self._lose = scratch, source, local, lose
        self.root, self.copy = scratch.root, copy_name(scratch.root)
        replica.create()
        for name in ("a", "b"):
            scratch.write(self.root, name.encode())
            scratch.pool.snapshot([f"{self.root}@{name}"], {})
        replica.send(self.root, raw=False, until=1 << 62)
        replica.mark({f"{self.root}@a": {"run": "r-1", "copy": "x"}})
        replica.set_policies({self.root: "hourly"})
        self.guids = [each.guid for each in scratch.pool.snapshots([self.root])]

    def lose(self):
        self._lose(self.root)

    def receive(self, name, base="", token=NO_TOKEN):
        (snapshot,) = [
            e for e in self.source.snapshots() if (e.dataset, e.name) == (self.copy, name)
        ]
        receiver = self.local.receiver(self.root, name, DatasetKind.FILESYSTEM)
        self.source.receive(snapshot, base, token, receiver, raw=False)


@pytest.fixture(params=["fake", pytest.param("ssh", marks=pytest.mark.lab)])
def place(request, tmp_path):
    store = tmp_path / "there"
    store.mkdir()
    if request.param == "fake":
        scratch = FakeScratch()
        replica = FakeReplica(scratch.fake, store)
        source = FakeSource(scratch.fake, replica, Hooks())
        local = FakeLocal(scratch.fake, Hooks())
        made = Place(scratch, replica, source, local, source.lose)
        add_bundle(replica, tmp_path)
        yield made
        scratch.remove()
        return
    scratch = ZfsScratch(ZfsCommand.open())
    with sshd_here() as host:
        section = Replica(host=host, dataset=f"{scratch.other}/copies", bundles=store)
        replica = ReplicaDestination("x", section, scratch.pool, Interrupt(), Heard())
        source = ReplicaSource("x", section, Interrupt(), Heard())
        local = LocalDatasets(scratch.pool, Interrupt())

        def lose(dataset):
            scratch.pool.destroy_snapshots([f"{dataset}@a", f"{dataset}@b"])
            scratch.pool.destroy_dataset(dataset)

        made = Place(scratch, replica, source, local, lose)
        add_bundle(replica, tmp_path)
        yield made
    scratch.remove()


def add_bundle(replica, tmp_path):
    directory = tmp_path / "bundle"
    directory.mkdir()
    for name, content in CONTENT.items():
        (directory / name).write_bytes(content)
    assert replica.store(directory, REFERENCE, sums()) == []


def sums():
    return {name: hashlib.sha256(content).hexdigest() for name, content in CONTENT.items()}


def sizes():
    return {name: len(content) for name, content in CONTENT.items()}


@pytest.fixture
def received(tmp_path):
    (tmp_path / "here").mkdir()
    return ReceivedBundles(tmp_path / "here", "")


def test_copies_are_listed_with_their_marks_oldest_first(place):
    found = [each for each in place.source.snapshots() if each.dataset == place.copy]
    assert [(each.name, each.guid) for each in found] == list(zip("ab", place.guids, strict=True))
    assert [dict(each.properties) for each in found] == [{"run": "r-1", "copy": "x"}, {}]
    assert place.source.policies([place.copy]) == {place.copy: "hourly"}
    assert place.copy not in place.source.encrypted(found)
    assert place.source.kinds(found)[place.copy] is DatasetKind.FILESYSTEM
    sizes = place.source.sizes(found)
    assert sizes.keys() == {each.full_name for each in found}
    assert all(size > 0 for size in sizes.values())
    assert place.source.sizes([]) == {}


def test_a_lost_dataset_comes_back_snapshot_by_snapshot(place):
    place.lose()
    assert place.local.state(place.root) == (False, NO_TOKEN, (), "")
    place.receive("a")
    assert place.local.state(place.root).guids == place.guids[:1]
    found = place.scratch.pool.local_properties([REBUILD_PROPERTY], [place.root])
    assert found == {place.root: {REBUILD_PROPERTY: RECEIVED}}
    place.receive("b", base="a")
    assert place.local.state(place.root)[:2] == (True, NO_TOKEN)
    assert place.local.state(place.root).guids == place.guids


def test_the_newest_alone_comes_back(place):
    place.lose()
    place.receive("b")
    assert place.local.state(place.root).guids == [place.guids[1]]


def test_nothing_is_received_over_what_is_here(place):
    with pytest.raises(SnaporchError):
        place.receive("a")
    assert place.local.state(place.root).guids == place.guids


def test_a_bundle_is_fetched(place, received, tmp_path):
    assert place.source.bundles(UUID)["r-1"].sizes.keys() == {*CONTENT, COPY_NAME}
    assert json.loads(place.source.manifest(REFERENCE)) == {}
    unsent = unsent_files(sizes(), sums(), received.begun(UUID, "r-1"))
    assert place.source.fetch(REFERENCE, unsent, received) == []
    here = tmp_path / "here" / REFERENCE
    assert {path.name: path.read_bytes() for path in here.iterdir()} == CONTENT


def test_a_bundle_is_read_where_it_is(place, tmp_path):
    assert place.source.damaged(REFERENCE, sums()) == []
    path = tmp_path / "there" / REFERENCE / "ram.save"
    path.write_bytes(CONTENT["ram.save"][:-1] + b"x")
    assert place.source.damaged(REFERENCE, sums()) == ["ram.save"]
    path.unlink()
    assert place.source.damaged(REFERENCE, sums()) == ["ram.save"]


def test_a_part_of_a_bundle_is_continued(place, received, tmp_path):
    partial = tmp_path / "here" / UUID / ".r-1.copying"
    partial.mkdir(parents=True)
    (partial / "manifest.json").write_bytes(CONTENT["manifest.json"])
    (partial / "ram.save").write_bytes(CONTENT["ram.save"][:1000])
    unsent = unsent_files(sizes(), sums(), received.begun(UUID, "r-1"))
    assert unsent.bytes == len(CONTENT["ram.save"]) - 1000
    assert place.source.fetch(REFERENCE, unsent, received) == []
    assert (tmp_path / "here" / REFERENCE / "ram.save").read_bytes() == CONTENT["ram.save"]


@pytest.mark.parametrize("content", [b"other", b""])
def test_a_bundle_that_is_damaged_there_does_not_come(place, received, tmp_path, content):
    path = tmp_path / "there" / REFERENCE / "ram.save"
    path.write_bytes(content.ljust(len(CONTENT["ram.save"]), b"x") if content else b"")
    unsent = unsent_files(sizes(), sums(), {})
    try:
        damaged = place.source.fetch(REFERENCE, unsent, received)
    except SnaporchError:
        damaged = ["ram.save"]
        assert content == b""
    assert damaged == ["ram.save"]
    assert not (Path(tmp_path) / "here" / REFERENCE).exists()
