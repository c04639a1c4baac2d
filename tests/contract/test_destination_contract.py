"""The contract of a destination: the fake, append-only copies, zfs with rsync here and by ssh."""

import json
import os
import subprocess
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from contract_pools import FakeScratch, ZfsScratch
from fakes.replica import FakeReplica
from fakes.world import Heard
from lab_ssh import RECEIVING_HOST, hand_over, permit_copies, receive_as_user, sshd_here

from snaporch.config import Replica
from snaporch.errors import InterruptedRunError, SnaporchError
from snaporch.interrupt import Interrupt
from snaporch.private_files import sha256_of
from snaporch.remote_host import Host
from snaporch.replication.append_only import AppendOnlyDestination
from snaporch.replication.destination import ReplicaDestination, has_encrypted_bundles
from snaporch.replication.interface import ReplicaError
from snaporch.replication.stall_detector import StallDetector

UUID = "4b1d2f0e-0000-4000-8000-000000000001"
ALL = 1 << 62
"""A txg after that of every snapshot."""
# pyzfs 2.3 warns on Python 3.13 when it formats an error
pytestmark = pytest.mark.filterwarnings("ignore:'maxsplit' is passed:DeprecationWarning")


def _real_pool():
    from snaporch.zfs.cli import ZfsCommand

    return ZfsCommand.open()


def destination(scratch, replica, interrupt=None, heard=None, **more):
    given = scratch.pool, interrupt or Interrupt(), heard or Heard()
    return ReplicaDestination("x", replica, *given, **more)


class WithAdmin(AppendOnlyDestination):
    """A replica whose admin does what only root can."""

    def create(self):
        permit_copies(self.copy_name("any").rpartition("/")[0])
        super().create()


def append_only(scratch, store, interrupt=None, heard=None, **more):
    copies = f"{scratch.other}/copies"
    receive_as_user(copies, store)
    replica = Replica(host=RECEIVING_HOST, dataset=copies, bundles=store, append_only=True, **more)
    return WithAdmin("x", replica, scratch.pool, interrupt or Interrupt(), heard or Heard())


IN_LAB = (pytest.mark.lab, pytest.mark.daily(18, "destination"))


@pytest.fixture(
    params=[
        "fake",
        pytest.param("append-only", marks=IN_LAB),
        pytest.param("ssh", marks=IN_LAB),
        *([pytest.param("here", marks=pytest.mark.lab)] if os.environ.get("LONG") else []),
    ]
)
def place(request, tmp_path):
    """A source and a destination."""
    store = tmp_path / "there"
    store.mkdir()
    if request.param == "fake":
        scratch = FakeScratch()
        yield scratch, FakeReplica(scratch.fake, store)
        scratch.remove()
        return
    scratch = ZfsScratch(_real_pool())
    if request.param == "append-only":
        with sshd_here():
            yield scratch, append_only(scratch, store)
        scratch.remove()
        return
    with sshd_here() if request.param == "ssh" else nullcontext("") as host:
        replica = Replica(host=host, dataset=f"{scratch.other}/copies", bundles=store)
        yield scratch, destination(scratch, replica)
    scratch.remove()


@pytest.fixture
def scratch(place):
    return place[0]


@pytest.fixture
def pool(scratch):
    return scratch.pool


@pytest.fixture
def root(scratch):
    return scratch.root


@pytest.fixture
def there(place):
    place[1].create()
    return place[1]


def take(scratch, *names):
    for name in names:
        scratch.write(scratch.root, name.encode())
        scratch.pool.snapshot([f"{scratch.root}@{name}"], {"snaporch:run": f"r-{name}"})


def names(there, *datasets):
    return [each.full_name for each in there.snapshots(list(datasets))]


def guids(found):
    return {each.full_name: each.guid for each in found}


def test_a_dataset_that_was_never_sent_has_no_snapshots(there, root):
    assert there.snapshots([root]) == []
    assert there.bundles(UUID) == {}


def test_a_replica_without_its_dataset_lists_nothing(place, scratch, root):
    """As if its pool were not imported."""
    take(scratch, "a")
    with pytest.raises(ReplicaError, match="dataset does not exist"):
        place[1].snapshots([root])
    place[1].create()
    assert place[1].snapshots([root]) == []


def test_all_snapshots_are_sent_with_their_guids_and_without_properties(there, scratch, pool, root):
    take(scratch, "a", "b")
    there.send(root, raw=False, until=ALL)
    assert guids(there.snapshots([root])) == guids(pool.snapshots([root]))
    assert [each.properties for each in there.snapshots([root])] == [{}, {}]
    there.send(root, raw=False, until=ALL)
    assert names(there, root) == [f"{root}@a", f"{root}@b"]


def test_newer_snapshots_are_sent(there, scratch, pool, root):
    take(scratch, "a")
    there.send(root, raw=False, until=ALL)
    take(scratch, "b", "c")
    pool.destroy_snapshots([f"{root}@b"])
    there.send(root, raw=False, until=ALL)
    assert names(there, root) == [f"{root}@a", f"{root}@c"]


def test_snapshots_after_the_wanted_one_are_not_sent(there, scratch, pool, root):
    take(scratch, "a", "b", "c")
    middle = pool.snapshots([root])[1]
    there.send(root, raw=False, until=middle.createtxg)
    assert names(there, root) == [f"{root}@a", f"{root}@b"]


def test_it_continues_from_a_bookmark(there, scratch, pool, root):
    take(scratch, "a")
    there.send(root, raw=False, until=ALL)
    pool.bookmark(f"{root}@a", "place")
    take(scratch, "b", "c")
    pool.destroy_snapshots([f"{root}@a"])
    there.send(root, raw=False, until=ALL)
    assert names(there, root) == [f"{root}@a", f"{root}@b", f"{root}@c"]


def test_it_continues_from_a_bookmark_despite_an_older_snapshot(there, scratch, pool, root):
    take(scratch, "a", "b")
    there.send(root, raw=False, until=ALL)
    pool.bookmark(f"{root}@b", "place")
    pool.destroy_snapshots([f"{root}@b"])
    take(scratch, "c", "d")
    there.send(root, raw=False, until=ALL)
    assert names(there, root) == [f"{root}@{name}" for name in "abcd"]
    assert guids(there.snapshots([root])).items() >= guids(pool.snapshots([root])).items()


def test_without_the_newest_snapshot_or_its_bookmark_nothing_is_sent(there, scratch, pool, root):
    take(scratch, "a", "b")
    there.send(root, raw=False, until=ALL)
    pool.bookmark(f"{root}@a", "old")
    pool.destroy_snapshots([f"{root}@b"])
    take(scratch, "c")
    with pytest.raises(ReplicaError):
        there.send(root, raw=False, until=ALL)
    assert names(there, root) == [f"{root}@a", f"{root}@b"]


def test_a_snapshot_that_was_renamed_here_is_still_a_base(there, scratch, pool, root):
    take(scratch, "a", "b")
    there.send(root, raw=False, until=ALL)
    scratch.rename_snapshot(f"{root}@b", "kept")
    take(scratch, "c", "d")
    there.send(root, raw=False, until=ALL)
    assert names(there, root) == [f"{root}@{name}" for name in "abcd"]


def test_a_name_that_was_used_again_is_refused(there, scratch, pool, root):
    take(scratch, "a", "b")
    there.send(root, raw=False, until=ALL)
    pool.destroy_snapshots([f"{root}@a"])
    take(scratch, "a")
    before = guids(there.snapshots([root]))
    with pytest.raises(ReplicaError) as caught:
        there.send(root, raw=False, until=ALL)
    assert "rename" in caught.value.step
    assert guids(there.snapshots([root])) == before


def test_a_dataset_and_one_below_it_have_their_copies(there, scratch, pool, root):
    """Whichever of them is sent first."""
    below = f"{root}/below"
    scratch.create(below)
    pool.snapshot([f"{root}@a", f"{below}@a"], {})
    there.send(below, raw=False, until=ALL)
    there.send(root, raw=False, until=ALL)
    assert sorted(names(there, root, below)) == [f"{below}@a", f"{root}@a"]


def test_a_missing_store_is_not_created(there, tmp_path):
    """It may be the mount point of a file system that is not mounted."""
    (tmp_path / "there").rename(tmp_path / "away")
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    with pytest.raises(SnaporchError):
        there.store(bundle, f"{UUID}/run-1", {})
    assert not (tmp_path / "there").exists()


def test_encrypted_datasets_are_sent_raw(there, scratch, root):
    secret = f"{root}/secret"
    scratch.create_encrypted(secret)
    scratch.pool.snapshot([f"{secret}@a"], {})
    if isinstance(there, AppendOnlyDestination):  # it cannot protect the key of the copy
        with pytest.raises(ReplicaError, match="is encrypted"):
            there.send(secret, raw=True, until=ALL)
        assert names(there, secret) == []
        return
    there.send(secret, raw=True, until=ALL)
    assert names(there, secret) == [f"{secret}@a"]


def test_a_dataset_in_clear_is_sent_to_an_encrypted_replica(place, scratch, pool, root):
    """``zfs receive`` refuses embedded blocks there."""
    scratch.create_encrypted(f"{scratch.other}/copies")
    there = place[1]
    there.create()  # it exists, and stays as it is
    take(scratch, "a")
    there.send(root, raw=False, until=ALL)
    pool.bookmark(f"{root}@a", "place")
    before = guids(pool.snapshots([root]))
    pool.destroy_snapshots([f"{root}@a"])
    take(scratch, "b", "c")
    there.send(root, raw=False, until=ALL)
    assert guids(there.snapshots([root])) == before | guids(pool.snapshots([root]))


def test_nothing_can_be_sent_without_snapshots(there, root):
    with pytest.raises(ReplicaError):
        there.send(root, raw=False, until=ALL)


def test_snapshots_of_the_replica_alone_stay(there, scratch, pool, root):
    """After a restore: later snapshots were removed here, and others were taken."""
    take(scratch, "a", "b")
    there.send(root, raw=False, until=ALL)
    pool.destroy_snapshots([f"{root}@b"])
    take(scratch, "c")
    with pytest.raises(ReplicaError) as caught:
        there.send(root, raw=False, until=ALL)
    assert caught.value.step
    assert names(there, root) == [f"{root}@a", f"{root}@b"]


def test_each_snapshot_gets_its_own_properties(there, scratch, root):
    take(scratch, "a", "b")
    there.send(root, raw=False, until=ALL)
    odd = 'it\'s a "web" $1 ünd; more'
    there.mark({f"{root}@a": {"run": "r", "domain": odd}, f"{root}@b": {"level": "ram"}})
    marks = [dict(each.properties) for each in there.snapshots([root])]
    assert [each.pop("copy", "") for each in marks] in (["", ""], ["append-only"] * 2)
    assert marks == [{"run": "r", "domain": odd}, {"level": "ram"}]


def test_the_policies_of_datasets_come_back_with_the_copies(there, scratch, root):
    take(scratch, "a")
    there.send(root, raw=False, until=ALL)
    assert copied_policy(there, root) == ""
    for policy in ("hourly,it's", "nightly", "", ""):
        there.set_policies({root: policy})
        assert copied_policy(there, root) == policy


def copied_policy(there, dataset):
    if isinstance(there, FakeReplica):
        return there.policies.get(dataset, "")
    copy = there.copy_name(dataset)
    words = ["zfs", "get", "-H", "-o", "value", "snaporch:policy", copy]
    value = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    return value.removeprefix("-")


def test_a_bundle_arrives_as_a_whole(there, tmp_path):
    bundle = tmp_path / "bundle"
    bundle.mkdir(mode=0o700)
    for name, size in (("manifest.json", 10), ("ram.save", 100_000)):
        (bundle / name).write_bytes(os.urandom(size))
        (bundle / name).chmod(0o600)
    assert there.store(bundle, f"{UUID}/run-1", sums(bundle)) == []
    copy = tmp_path / "there" / UUID / "run-1"
    assert sorted(path.name for path in copy.iterdir()) == [
        "copy.json", "manifest.json", "ram.save",
    ]  # fmt: skip
    assert json.loads((copy / "copy.json").read_text())["dataset"]
    for path in bundle.iterdir():
        assert (copy / path.name).read_bytes() == path.read_bytes()
        assert (copy / path.name).stat().st_mode & 0o777 == 0o600
    (found,) = there.bundles(UUID).values()
    assert {name: found.sizes[name] for name in sums(bundle)} == {
        "manifest.json": 10,
        "ram.save": 100_000,
    }
    assert found.unread < 600


def sums(bundle):
    return {path.name: sha256_of(path) for path in bundle.iterdir()}


def test_a_damaged_bundle_is_found_and_replaced(there, tmp_path):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    for name in ("manifest.json", "ram.save"):
        (bundle / name).write_bytes(os.urandom(1000))
    there.store(bundle, f"{UUID}/run-1", sums(bundle))
    copy = tmp_path / "there" / UUID / "run-1"
    assert there.damaged(f"{UUID}/run-1", sums(bundle)) == []
    (copy / "ram.save").write_bytes(os.urandom(1000))
    assert there.damaged(f"{UUID}/run-1", sums(bundle)) == ["ram.save"]
    (copy / "ram.save").unlink()
    assert there.damaged(f"{UUID}/run-1", sums(bundle)) == ["ram.save"]
    assert there.store(bundle, f"{UUID}/run-1", sums(bundle)) == []
    assert there.damaged(f"{UUID}/run-1", sums(bundle)) == []
    assert [path.name for path in copy.parent.iterdir()] == ["run-1"]


def test_a_copy_that_differs_from_its_sums_is_not_kept(there, tmp_path):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "ram.save").write_bytes(b"damaged")
    assert there.store(bundle, f"{UUID}/run-1", {"ram.save": "0" * 64}) == ["ram.save"]
    assert there.bundles(UUID) == {}
    assert list((tmp_path / "there" / UUID).iterdir()) == []


def test_a_partial_bundle_is_not_listed(there, tmp_path):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "manifest.json").write_bytes(b"{}")
    partial = tmp_path / "there" / UUID / ".run-1.copying"
    partial.mkdir(parents=True)
    (partial / "manifest.json").write_bytes(b"torn and longer")
    (partial / "other").write_bytes(b"of a bundle that was another")
    hand_over(tmp_path / "there")
    assert there.bundles(UUID) == {}
    there.store(bundle, f"{UUID}/run-1", sums(bundle))
    assert there.bundles(UUID).keys() == {"run-1"}
    copy = tmp_path / "there" / UUID / "run-1"
    assert sorted(path.name for path in copy.iterdir()) == ["copy.json", "manifest.json"]
    assert (copy / "manifest.json").read_bytes() == b"{}"


def test_a_missing_bundle_is_an_error(there, tmp_path):
    with pytest.raises(ReplicaError):
        there.store(tmp_path / "never", f"{UUID}/run-1", {})
    assert there.bundles(UUID) == {}


@pytest.mark.lab
def test_a_signal_ends_a_transfer(tmp_path):
    """The next transfer continues where this one ended."""
    scratch = ZfsScratch(_real_pool())
    interrupt = Interrupt()
    replica = Replica(dataset=f"{scratch.other}/copies", bundles=tmp_path, rate=1)
    there = destination(scratch, replica, interrupt)
    there.create()
    try:
        scratch.write(scratch.root, os.urandom(24 << 20))
        scratch.pool.snapshot([f"{scratch.root}@a"], {})
        stop = threading.Timer(3, lambda: setattr(interrupt, "signum", 15))
        stop.start()
        with pytest.raises(InterruptedRunError):
            there.send(scratch.root, raw=False, until=ALL)
        interrupt.signum = None
        assert names(there, scratch.root) == []
        processes = subprocess.run(["pgrep", "-f", f"zfs send.*{scratch.root}"], check=False)
        assert processes.returncode == 1
        faster = destination(
            scratch, Replica(dataset=f"{scratch.other}/copies", bundles=tmp_path), interrupt
        )
        faster.send(scratch.root, raw=False, until=ALL)
        assert names(faster, scratch.root) == [f"{scratch.root}@a"]
    finally:
        scratch.remove()


def cut(words, copy):
    """A transfer that ends before its stream does; the copy's token."""
    script = f"zfs send {words} | head -c 9000000 | zfs receive -s -u {copy}"
    subprocess.run(["sh", "-c", script], check=False)
    listing = ["zfs", "get", "-H", "-o", "value", "receive_resume_token", copy]
    token = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.strip()
    assert token.startswith("1-")
    return token


@pytest.fixture
def receiving(tmp_path):
    """A dataset of this machine, and an append-only replica."""
    scratch, heard = ZfsScratch(_real_pool()), Heard()
    store = tmp_path / "there"
    store.mkdir()
    with sshd_here():
        there = append_only(scratch, store, heard=heard)
        there.create()
        yield scratch, there, heard
    scratch.remove()


@pytest.mark.lab
def test_an_interrupted_transfer_is_continued_where_copies_are_only_appended(receiving):
    scratch, there, heard = receiving
    root = scratch.root
    scratch.write(root, os.urandom(24 << 20))
    scratch.pool.snapshot([f"{root}@a"], {})
    cut(f"-Lce {root}@a", there.copy_name(root))
    there.send(root, raw=False, until=ALL)
    scratch.write(root, os.urandom(24 << 20))
    scratch.pool.snapshot([f"{root}@b"], {})
    cut(f"-Lce -i {root}@a {root}@b", there.copy_name(root))
    there.send(root, raw=False, until=ALL)
    assert names(there, root) == [f"{root}@a", f"{root}@b"]
    assert heard.notes == []


@pytest.mark.lab
@pytest.mark.parametrize("permitted", [False, True])
def test_a_part_that_append_only_copies_cannot_continue_is_named_to_the_admin(receiving, permitted):
    """Or discarded, if the admin permits it."""
    scratch, there, _ = receiving
    root, copy = scratch.root, there.copy_name(scratch.root)
    take(scratch, "a")
    there.send(root, raw=False, until=ALL)
    scratch.write(root, os.urandom(24 << 20))
    scratch.pool.snapshot([f"{root}@b"], {})
    cut(f"-Lce -i {root}@a {root}@b", copy)
    scratch.pool.destroy_snapshots([f"{root}@b"])
    take(scratch, "c")
    with pytest.raises(ReplicaError, match="permission denied") as caught:
        there.send(root, raw=False, until=ALL)
    command = caught.value.line().partition("as root on the replica: ")[2]
    assert command == f"zfs receive -A {copy}"
    if permitted:
        permit_copies(copy.rpartition("/")[0], "destroy")
    else:
        assert shell(command).returncode == 0
    there.send(root, raw=False, until=ALL)
    assert names(there, root) == [f"{root}@a", f"{root}@c"]


@pytest.mark.lab
def test_a_line_that_is_cut_is_continued_where_copies_are_only_appended(receiving, tmp_path):
    scratch, there, heard = receiving
    root, copy = scratch.root, there.copy_name(scratch.root)
    scratch.write(root, os.urandom(24 << 20))
    take_without_writing(scratch, "a")
    interrupt = Interrupt()
    slow = append_only(scratch, tmp_path / "there", interrupt, rate=1)
    stop = threading.Timer(12, lambda: setattr(interrupt, "signum", 15))
    stop.start()
    with pytest.raises(InterruptedRunError):
        slow.send(root, raw=False, until=ALL)
    shown = ["zfs", "get", "-H", "-o", "value", "receive_resume_token", copy]
    end = time.monotonic() + 60
    while not shell(" ".join(shown)).stdout.startswith("1-") and time.monotonic() < end:
        time.sleep(0.2)
    assert shell(" ".join(shown)).stdout.startswith("1-")
    there.send(root, raw=False, until=ALL)
    assert names(there, root) == [f"{root}@a"]
    assert heard.notes == []


def take_without_writing(scratch, name):
    scratch.pool.snapshot([f"{scratch.root}@{name}"], {})


@pytest.mark.lab
def test_the_rest_of_an_interrupted_bundle_is_sent(receiving, tmp_path):
    _, there, heard = receiving
    bundle, partial = tmp_path / "bundle", tmp_path / "there" / UUID / ".run-1.copying"
    bundle.mkdir()
    partial.mkdir(parents=True)
    for name in ("domain.xml", "manifest.json", "ram.save"):
        (bundle / name).write_bytes(os.urandom(1 << 20))
    (partial / "domain.xml").write_bytes((bundle / "domain.xml").read_bytes())
    (partial / "manifest.json").write_bytes((bundle / "manifest.json").read_bytes()[:1000])
    hand_over(tmp_path / "there")
    assert there.store(bundle, f"{UUID}/run-1", sums(bundle)) == []
    assert {total for _, total in heard.amounts} <= {(2 << 20) - 1000}
    for path in bundle.iterdir():
        assert (tmp_path / "there" / UUID / "run-1" / path.name).read_bytes() == path.read_bytes()
    (bundle / "ram.save").write_bytes(b"another")
    with pytest.raises(ReplicaError, match="is as it was stored, and is never replaced"):
        there.store(bundle, f"{UUID}/run-1", sums(bundle))


@pytest.fixture
def secret():
    """An encrypted dataset with a snapshot of 24 MiB, a replica, and the notes."""
    scratch, heard = ZfsScratch(_real_pool()), Heard()
    name = f"{scratch.root}/secret"
    scratch.create_encrypted(name)
    scratch.write(name, os.urandom(24 << 20))
    scratch.pool.snapshot([f"{name}@a"], {})
    replica = Replica(dataset=f"{scratch.other}/copies", bundles=Path("/nowhere"))
    there = destination(scratch, replica, heard=heard)
    there.create()
    yield name, there, heard
    scratch.remove()


@pytest.mark.lab
def test_bundles_on_an_encrypted_dataset_are_known(secret, tmp_path):
    name, there, _ = secret
    assert not there.is_encrypted()
    assert not there.has_encrypted_bundles()  # there is no such directory
    host = Host("")
    for directory, expected in ((f"/{name}", True), (f"/{name}/below", True), (tmp_path, False)):
        Path(directory).mkdir(exist_ok=True)
        replica = Replica(dataset="backup/kvm", bundles=directory)
        assert has_encrypted_bundles(replica, host) is expected
    clear = Replica(dataset="backup/kvm", bundles=f"/{name.rpartition('/')[0]}")
    assert not has_encrypted_bundles(clear, host)


@pytest.mark.lab
def test_an_interrupted_raw_transfer_is_continued(secret):
    name, there, heard = secret
    cut(f"-w {name}@a", there.copy_name(name))
    there.send(name, raw=True, until=ALL)
    assert names(there, name) == [f"{name}@a"]
    assert heard.notes == []


@pytest.mark.lab
def test_an_encrypted_dataset_is_not_continued_in_clear(secret):
    """The key is loaded here: ``zfs send -t`` alone would send what the token asks for."""
    name, there, heard = secret
    copy = there.copy_name(name)
    cut(f"{name}@a", copy)
    there.send(name, raw=True, until=ALL)
    assert names(there, name) == [f"{name}@a"]
    assert [note for note in heard.notes if "its token is not for a raw stream" in note]
    shown = subprocess.run(["zfs", "get", "-H", "-o", "value", "encryption", copy],
                           check=True, capture_output=True, text=True)  # fmt: skip
    assert shown.stdout.strip() not in ("off", "-")


@pytest.mark.lab
def test_an_interrupted_increment_from_a_bookmark_is_continued(tmp_path):
    scratch, heard = ZfsScratch(_real_pool()), Heard()
    root, pool = scratch.root, scratch.pool
    replica = Replica(dataset=f"{scratch.other}/copies", bundles=tmp_path)
    there = destination(scratch, replica, heard=heard)
    there.create()
    try:
        take(scratch, "a")
        there.send(root, raw=False, until=ALL)
        pool.bookmark(f"{root}@a", "place")
        pool.destroy_snapshots([f"{root}@a"])
        scratch.write(root, os.urandom(24 << 20))
        pool.snapshot([f"{root}@b"], {})
        take(scratch, "c")
        cut(f"-Lce -i {root}#place {root}@b", there.copy_name(root))
        there.send(root, raw=False, until=ALL)
        assert names(there, root) == [f"{root}@{name}" for name in "abc"]
        assert heard.notes == []
    finally:
        scratch.remove()


@pytest.fixture
def replica(tmp_path):
    """A dataset of this machine, its replica on another pool, and the notes."""
    scratch, heard = ZfsScratch(_real_pool()), Heard()
    options = Replica(dataset=f"{scratch.other}/copies", bundles=tmp_path)
    there = destination(scratch, options, heard=heard)
    there.create()
    yield scratch, there, heard
    scratch.remove()


def shell(command):
    return subprocess.run(["sh", "-c", command], check=False, capture_output=True, text=True)


@pytest.mark.lab
def test_nothing_of_a_replica_is_mounted_and_no_volume_has_a_device(tmp_path):
    scratch = ZfsScratch(_real_pool())
    volume, place = f"{scratch.root}/volume", f"{scratch.other}/a/b/copies"
    there = destination(scratch, Replica(dataset=place, bundles=tmp_path))
    try:
        there.create()
        shown = shell(f"zfs get -r -H -o value mounted {scratch.other}").stdout.split()
        assert shown == ["yes", *["no"] * 3]
        scratch.create(f"{scratch.other}/a/own")
        assert shell(f"zfs get -H -o value mounted {scratch.other}/a/own").stdout == "yes\n"
        before = volumes()
        assert shell(f"zfs create -s -V 16m {volume}").returncode == 0
        assert volumes(more_than=before) == before + 1
        scratch.pool.snapshot([f"{volume}@a"], {})
        there.send(volume, raw=False, until=ALL)
        copy, back = there.copy_name(volume), f"{scratch.root}/back"
        assert shell(f"zfs send -p {copy}@a | zfs receive -u {back}").returncode == 0
        assert volumes(more_than=before + 1) == before + 2, "what came back has a device again"
    finally:
        scratch.remove()


def volumes(more_than=-1):
    """How many devices of volumes there are; the kernel makes one in the background."""
    end = time.monotonic() + 60
    while len(found := [*Path("/sys/block").glob("zd*")]) <= more_than and time.monotonic() < end:
        time.sleep(0.1)
    return len(found)


@pytest.mark.lab
def test_after_the_rename_in_the_error_a_name_can_be_used_again(replica):
    scratch, there, _ = replica
    root, pool = scratch.root, scratch.pool
    take(scratch, "a", "b")
    there.send(root, raw=False, until=ALL)
    (first, *_) = before = there.snapshots([root])
    pool.destroy_snapshots([f"{root}@a"])
    take(scratch, "a", "c")
    with pytest.raises(ReplicaError) as caught:
        there.send(root, raw=False, until=ALL)
    command = caught.value.step.partition("names: ")[2].partition(", and replicate")[0]
    assert shell(command).returncode == 0
    there.send(root, raw=False, until=ALL)
    assert names(there, root) == [f"{root}@{each}" for each in (f"a-kept-{first.guid}", *"bac")]
    assert guids(there.snapshots([root])).items() >= guids(before[1:]).items()


@pytest.mark.lab
def test_a_changed_copy_of_an_interrupted_transfer_ends_with_the_rollback_that_it_needs(replica):
    """ZFS finds the change only when the whole stream has arrived."""
    scratch, there, heard = replica
    root, copy = scratch.root, there.copy_name(scratch.root)
    take(scratch, "a")
    there.send(root, raw=False, until=ALL)
    scratch.write(root, os.urandom(24 << 20))
    scratch.pool.snapshot([f"{root}@b"], {})
    cut(f"-Lce -i {root}@a {root}@b", copy)
    change = "zfs set readonly=off mountpoint=/mnt/changed {0}; zfs mount {0}; touch /mnt/changed/x"
    assert shell(f"{change.format(copy)} && zfs unmount {copy}").returncode == 0
    for _ in range(2):
        with pytest.raises(ReplicaError, match="has been modified") as caught:
            there.send(root, raw=False, until=ALL)
    assert "the replica refuses to continue it" in heard.notes[-1]
    command = caught.value.step.partition("newest snapshot: ")[2]
    assert shell(command).returncode == 0
    there.send(root, raw=False, until=ALL)
    assert names(there, root) == [f"{root}@a", f"{root}@b"]


@pytest.mark.lab
@pytest.mark.parametrize("way", ["keep", "discard"])
def test_a_diverged_copy_with_a_part_of_a_transfer_can_be_kept_or_discarded(replica, way):
    scratch, there, _ = replica
    root, copy = scratch.root, there.copy_name(scratch.root)
    take(scratch, "a", "b")
    there.send(root, raw=False, until=ALL)
    scratch.write(root, os.urandom(24 << 20))
    scratch.pool.snapshot([f"{root}@c"], {})
    cut(f"-Lce -i {root}@b {root}@c", copy)
    scratch.pool.destroy_snapshots([f"{root}@b", f"{root}@c"])
    take(scratch, "d")
    if way == "keep":
        step = there.diverged(root, ["b"]).step
        assert shell(step.partition("keep them: ")[2].partition(", and")[0]).returncode == 0
    else:
        rollback = f"zfs rollback -r {copy}@a"
        assert "%recv" in shell(rollback).stderr
        assert shell(f"zfs receive -A {copy} && {rollback}").returncode == 0
    there.send(root, raw=False, until=ALL)
    assert names(there, root) == [f"{root}@a", f"{root}@d"]


@pytest.mark.lab
def test_a_stalled_transfer_is_ended_and_continued(tmp_path):
    """As with a suspended pool of the replica: no process reads the stream.

    The lab's kernel does not count what a process reads and writes.
    """

    def watch(group):
        """Nothing moves, and five seconds are more than an hour."""
        return StallDetector(group, lambda _group: 0, lambda: time.monotonic() * 750)

    scratch = ZfsScratch(_real_pool())
    replica = Replica(dataset=f"{scratch.other}/copies", bundles=tmp_path)
    there = destination(scratch, replica, watch=watch)
    there.create()
    stopper = threading.Thread(target=_stop_receiver, args=[f"{scratch.other}/copies"])
    try:
        scratch.write(scratch.root, os.urandom(24 << 20))
        scratch.pool.snapshot([f"{scratch.root}@a"], {})
        stopper.start()
        with pytest.raises(ReplicaError, match="no data moved"):
            there.send(scratch.root, raw=False, until=ALL)
        there.send(scratch.root, raw=False, until=ALL)
        assert names(there, scratch.root) == [f"{scratch.root}@a"]
    finally:
        stopper.join()
        scratch.remove()


def _stop_receiver(copies):
    """Stop the first ``zfs receive`` that appears, within a minute."""
    pattern = f"^(/[^ ]*/)?zfs receive.*{copies}"
    for _ in range(6000):
        if subprocess.run(["pkill", "-STOP", "-f", pattern], check=False).returncode == 0:
            return
        time.sleep(0.01)
