import hashlib

import pytest
from fakes.cloud import Cloud
from fakes.pool import FakePool

from snaporch.bundle.manifest import Part, Role
from snaporch.errors import RefusedError
from snaporch.model import DatasetKind
from snaporch.replication.interface import ReplicaError
from snaporch.replication.received_bundles import ReceivedBundles
from snaporch.replication.resume_transfer import NO_TOKEN
from snaporch.replication.unsent_files import unsent_files

WEB, COPY = "tank/web", "tank:web"
UUID = "4b1d2f0e-0000-4000-8000-000000000001"
REFERENCE = f"{UUID}/r-1"
FILES = {"manifest.json": b"{}", "ram.save": b"RAM" * 100_000, "z": b"last"}


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """Two chains: a, b; c, d."""
    made = Cloud(tmp_path / "cloud", FakePool(WEB))
    monkeypatch.setenv("PATH", str(made.tools), prepend=":")
    made.take(*(f"{WEB}@{name}" for name in "abcd"))
    there = made.destination(chain=1)
    there.send(WEB, raw=False, until=1 << 62)
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    for name, content in FILES.items():
        (bundle / name).write_bytes(content)
    there.store(bundle, REFERENCE, sums())
    return made


def sums():
    return {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}


def snapshot(source, name):
    (found,) = (each for each in source.snapshots() if each.name == name)
    return found


def test_copies_are_listed_under_their_names_there(cloud):
    source = cloud.source()
    assert [each.full_name for each in source.snapshots()] == [f"{COPY}@{n}" for n in "abcd"]
    assert source.kinds([snapshot(source, "a")]) == {COPY: DatasetKind.FILESYSTEM}
    assert source.encrypted(source.snapshots()) == frozenset()


def test_a_copy_is_of_the_kind_that_it_had_at_the_wanted_snapshot(cloud):
    """A dataset of this name was destroyed, and another one created."""
    cloud.change_record("c", "type=filesystem", "type=volume")
    cloud.change_record("c", "raw=0", "raw=1")
    cloud.change_record("d", "type=filesystem", "type=volume")
    cloud.change_record("d", "raw=0", "raw=1")
    source = cloud.source()
    for name, kind, raw in (
        ("a", DatasetKind.FILESYSTEM, set()),
        ("d", DatasetKind.VOLUME, {COPY}),
    ):
        wanted = [snapshot(source, name)]
        assert (source.kinds(wanted), source.encrypted(wanted)) == ({COPY: kind}, raw)


def test_the_room_is_that_of_the_whole_chain(cloud):
    source, full = cloud.source(), len(cloud.stream(f"{WEB}@a"))
    sizes = source.sizes(source.snapshots())
    assert [sizes[f"{COPY}@{name}"] for name in "abcd"] == [full, 2 * full, full, 2 * full]
    cloud.change_record("b", "referenced=", "referenced=90000000")
    source = cloud.source()
    assert source.sizes([snapshot(source, "b")])[f"{COPY}@b"] > 2 * full


def test_what_was_forgotten_meanwhile_is_not_listed_any_more(cloud):
    source = cloud.source()
    assert len(source.snapshots()) == 4
    cloud.forget("snapshot=c")
    cloud.forget("kind=bundle-record")
    assert [each.name for each in source.snapshots()] == ["a", "b"]
    assert source.bundles(UUID) == {}


@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize(("name", "chain"), [("a", "a"), ("b", "ab"), ("c", "c"), ("d", "cd")])
def test_a_snapshot_comes_by_its_chain(cloud, name, chain, history):
    source = cloud.source()
    wanted = snapshot(source, name)
    needed = source.needed(source.snapshots(), wanted, history=history)
    assert [each.full_name for each in needed] == [f"{COPY}@{each}" for each in chain]


def receive(cloud, name, token=NO_TOKEN):
    """What a receiver got, even if an error came."""
    source, target = cloud.source(), cloud.place / "received"
    words = ["sh", "-c", f"cat >{target}"]
    try:
        source.receive(snapshot(source, name), "", token, words, raw=False)
    finally:
        got = target.read_bytes() if target.exists() else b""
        cloud.got = got
    return got


def test_a_stream_comes_as_it_was_sent(cloud):
    assert receive(cloud, "b") == cloud.stream(f"{WEB}@b", f"{WEB}@a")


def test_the_end_of_a_damaged_stream_never_reaches_zfs(cloud):
    cloud.damage(cloud.stream(f"{WEB}@b", f"{WEB}@a"))
    with pytest.raises(ReplicaError, match="ciphertext verification failed; name an older") as seen:
        receive(cloud, "b")
    assert "rename or destroy the datasets with snaporch:rebuild=transfer" in seen.value.step
    assert len(cloud.got) < len(cloud.stream(f"{WEB}@b", f"{WEB}@a"))


def test_a_stream_that_is_not_as_recorded_never_ends(cloud):
    """An admin with the password may replace a stream."""
    digest = hashlib.sha256(cloud.stream(f"{WEB}@b", f"{WEB}@a")).hexdigest()
    cloud.change_record("b", digest, "0" * 64)
    with pytest.raises(ReplicaError, match="another SHA-256 than its record"):
        receive(cloud, "b")
    assert len(cloud.got) < len(cloud.stream(f"{WEB}@b", f"{WEB}@a"))


def test_a_stream_that_follows_another_snapshot_than_recorded_never_begins(cloud):
    base = cloud.pool.snapshots([WEB])[0].guid
    cloud.change_record("c", "base=0", f"base={base}")
    with pytest.raises(ReplicaError, match="follows another snapshot than it should"):
        receive(cloud, "c")
    assert cloud.got == b""


def test_what_another_replica_has_begun_is_not_continued(cloud):
    with pytest.raises(RefusedError, match="interrupted"):
        receive(cloud, "b", token="1-abc")


def test_a_part_of_a_bundle_is_read(cloud):
    part = Part(role=Role.LIVE_XML, name="z", bytes=4, sha256=sums()["z"])
    assert cloud.source().text(REFERENCE, part) == "last"
    assert cloud.source().manifest(REFERENCE) == "{}"
    assert cloud.source().newest_manifests() == {REFERENCE: "{}"}
    assert list(cloud.source().bundles(UUID)) == ["r-1"]


def test_a_manifest_that_no_guest_has_is_not_read_with_the_others(cloud, tmp_path):
    bundle, forged = tmp_path / "forged", f"{UUID.replace('4', '0')}/r-1"
    bundle.mkdir()
    text = b"x" * ((1 << 20) + 1)
    (bundle / "manifest.json").write_bytes(text)
    digest = hashlib.sha256(text).hexdigest()
    cloud.destination(chain=1).store(bundle, forged, {"manifest.json": digest})
    assert cloud.source().newest_manifests() == {forged: "", REFERENCE: "{}"}


def fetched(cloud, tmp_path, begun):
    store = tmp_path / "store"
    store.mkdir(exist_ok=True)
    received = ReceivedBundles(store, "")
    sizes = {name: len(content) for name, content in FILES.items()}
    return cloud.source().fetch(REFERENCE, unsent_files(sizes, sums(), begun), received)


def test_a_bundle_comes_back(cloud, tmp_path):
    assert fetched(cloud, tmp_path, {}) == []
    for name, content in FILES.items():
        assert (tmp_path / "store" / REFERENCE / name).read_bytes() == content


def test_the_rest_of_a_bundle_comes_back(cloud, tmp_path):
    partial = tmp_path / "store" / UUID / ".r-1.copying"
    partial.mkdir(parents=True)
    (partial / "manifest.json").write_bytes(FILES["manifest.json"])
    (partial / "ram.save").write_bytes(FILES["ram.save"][:1000])
    assert fetched(cloud, tmp_path, {"manifest.json": 2, "ram.save": 1000}) == []
    assert (tmp_path / "store" / REFERENCE / "ram.save").read_bytes() == FILES["ram.save"]


def test_a_damaged_bundle_does_not_come(cloud, tmp_path):
    cloud.damage(FILES["ram.save"])
    assert cloud.source().damaged(REFERENCE, sums()) == ["ram.save"]
    with pytest.raises(ReplicaError):
        fetched(cloud, tmp_path, {})
    assert not (tmp_path / "store" / REFERENCE).exists()
