"""The directory of bundles on an append-only replica, and what a hostile host tries there."""

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import time
from math import inf

import pytest
from fakes.hooks import failing

from snaporch.errors import BusyError, RefusedError, UnavailableError
from snaporch.replication import received_bundles
from snaporch.replication.interface import ReplicaError
from snaporch.replication.receive_request import SentFile
from snaporch.replication.received_bundles import ReceivedBundles

UUID = "4b1d2f0e-0000-4000-8000-000000000001"
CONTENT = {"manifest.json": b"{}", "ram.save": b"all of the RAM"}


def digest(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "bundles"
    path.mkdir()
    return path


@pytest.fixture
def there(root):
    return ReceivedBundles(root, "backup/vm1")


def send(there, content=CONTENT, run="r-1", *, sums=None, offsets=None, sent=None):
    """Store a bundle with this content."""
    sums = sums or {name: digest(data) for name, data in content.items()}
    offsets = offsets or {}
    files = [
        SentFile(name, len(data), sums[name], offsets.get(name, 0))
        for name, data in content.items()
    ]
    if sent is None:
        sent = b"".join(data[offsets.get(name, 0) :] for name, data in content.items())
    return there.store(UUID, run, files, io.BytesIO(sent))


def sums(content=CONTENT):
    return {name: digest(data) for name, data in content.items()}


def tree(root):
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
        if path.name != "copy.json"
    }


def test_a_bundle_arrives_with_a_record_of_the_replica(there, root):
    assert send(there) == []
    bundle = root / UUID / "r-1"
    record = json.loads((bundle / "copy.json").read_bytes())
    assert record.pop("stored").startswith("20")
    assert record == {"dataset": "backup/vm1", "files": sums()}
    assert tree(root / UUID) == {"r-1": None, **{f"r-1/{n}": d for n, d in CONTENT.items()}}
    assert {path.stat().st_mode & 0o777 for path in bundle.iterdir()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (bundle, bundle.parent)} == {0o700}


def test_it_is_listed_with_its_sizes_and_the_time_since_it_was_read(there, root):
    send(there)
    os.utime(root / UUID / "r-1" / "copy.json", (1, time.time() - 5000))
    (found,) = there.bundles(UUID).values()
    assert {n: found.sizes[n] for n in CONTENT} == {n: len(d) for n, d in CONTENT.items()}
    assert 5000 <= found.unread < 6000
    assert there.bundles(UUID[:-1] + "2") == {}
    (root / UUID / "r-1" / "copy.json").unlink()
    assert there.bundles(UUID)["r-1"].unread == inf


def test_a_record_of_the_future_is_no_reading(there, root):
    send(there)
    os.utime(root / UUID / "r-1" / "copy.json", (1, time.time() + 5000))
    assert there.bundles(UUID)["r-1"].unread == inf


def test_an_unfinished_bundle_is_not_listed(there, root):
    (root / UUID / ".r-1.copying").mkdir(parents=True)
    (root / UUID / "r-2").symlink_to("/etc")
    assert there.bundles(UUID) == {}


def test_the_manifest_is_read_whatever_it_contains(there):
    send(there, {"manifest.json": b"\xff\n{"})
    assert there.manifest(UUID, "r-1").encode("utf-8", "surrogateescape") == b"\xff\n{"
    assert there.manifest(UUID, "r-2") == ""


@pytest.mark.parametrize("content", [CONTENT, {"manifest.json": b"other", "ram.save": b"x"}])
def test_a_bundle_that_is_whole_is_never_replaced(there, root, content):
    send(there)
    before = tree(root)
    with pytest.raises(RefusedError, match="is as it was stored, and is never replaced"):
        send(there, content)
    assert tree(root) == before


def test_a_bundle_that_the_replica_finds_damaged_is_kept_and_gets_a_successor(there, root):
    send(there)
    (root / UUID / "r-1" / "ram.save").write_bytes(b"none of it")
    assert send(there) == []
    assert (root / UUID / "r-1" / "ram.save").read_bytes() == CONTENT["ram.save"]
    (kept,) = (root / ".replaced").iterdir()
    assert kept.name.endswith(f"Z.{UUID}.r-1")
    assert (kept / "ram.save").read_bytes() == b"none of it"


@pytest.mark.parametrize("record", [None, "", "[]", "{", '{"files": 3}', "[" * 50_000])
def test_a_bundle_without_a_readable_record_is_damaged(there, root, record):
    send(there)
    path = root / UUID / "r-1" / "copy.json"
    path.unlink()
    if record is not None:
        path.write_text(record)
    assert send(there) == []
    assert len(list((root / ".replaced").iterdir())) == 1


def test_a_bundle_that_rsync_has_copied_is_never_replaced(there, root):
    send(there)
    (root / UUID / "r-1" / "copy.json").write_text('{"dataset": "backup/vm1"}')
    with pytest.raises(RefusedError, match="a record without sums"):
        send(there)
    assert not (root / ".replaced").exists()


def test_what_differs_from_its_sum_is_discarded(there, root):
    assert send(there, sums={**sums(), "ram.save": "0" * 64}) == ["ram.save"]
    assert tree(root) == {UUID: None}


def test_a_stream_that_ends_early_leaves_what_arrived(there, root):
    with pytest.raises(ReplicaError, match="ended early"):
        send(there, sent=b"{}all of")
    assert there.begun(UUID, "r-1") == {"manifest.json": 2, "ram.save": 6}
    assert there.bundles(UUID) == {}
    offsets = {"manifest.json": 2, "ram.save": 6}
    assert send(there, offsets=offsets) == []
    assert (root / UUID / "r-1" / "ram.save").read_bytes() == CONTENT["ram.save"]
    assert there.begun(UUID, "r-1") == {}


def test_what_arrived_before_is_checked_too(there):
    with pytest.raises(ReplicaError):
        send(there, {"ram.save": b"another kind"}, sent=b"another")
    offsets = {"manifest.json": 0, "ram.save": 7}
    assert send(there, offsets=offsets) == ["ram.save"]
    assert there.begun(UUID, "r-1") == {}


def test_an_offset_behind_what_arrived_is_refused(there):
    with pytest.raises(ReplicaError, match="less of it has arrived"):
        send(there, offsets={"ram.save": 3})
    assert there.bundles(UUID) == {}


def test_more_than_the_offset_is_cut(there, root):
    with pytest.raises(ReplicaError):
        send(there, sent=b"{}all of")
    assert send(there, offsets={"manifest.json": 2, "ram.save": 3}) == []
    assert (root / UUID / "r-1" / "ram.save").read_bytes() == CONTENT["ram.save"]


def test_bytes_after_the_last_file_are_not_read(there, root):
    assert send(there, sent=b"".join(CONTENT.values()) + b"more") == []
    assert tree(root / UUID / "r-1") == CONTENT


def test_files_of_another_try_are_removed_and_leftovers_of_other_bundles_too(there, root):
    for name in (".r-1.copying", ".r-0.copying"):
        (root / UUID / name).mkdir(parents=True)
        (root / UUID / name / "other").write_bytes(b"x")
    for name in (".r-0.partial", "odd.copying"):
        (root / UUID / name).mkdir()
    send(there)
    left = sorted(path.name for path in (root / UUID).iterdir())
    assert left == [".r-0.partial", "odd.copying", "r-1"]
    assert tree(root / UUID / "r-1") == CONTENT


def test_a_directory_that_is_missing_is_named_once(there, root):
    shutil.rmtree(root)
    with pytest.raises(UnavailableError) as raised:
        there.check()
    assert raised.value.line().count(str(root)) == 1


@pytest.mark.parametrize("place", [UUID, f"{UUID}/r-1", f"{UUID}/.r-1.copying"])
def test_no_link_is_followed_to_another_directory(there, root, tmp_path, place):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "manifest.json").write_bytes(b"of another")
    (root / place).parent.mkdir(exist_ok=True)
    (root / place).symlink_to(outside)
    with pytest.raises(UnavailableError, match="belong to the user that receives"):
        send(there)
    assert [path.name for path in outside.iterdir()] == ["manifest.json"]
    assert (outside / "manifest.json").read_bytes() == b"of another"


def test_no_link_is_followed_to_another_file(there, root, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"of another")
    (root / UUID / ".r-1.copying").mkdir(parents=True)
    (root / UUID / ".r-1.copying" / "ram.save").symlink_to(outside)
    with pytest.raises(UnavailableError):
        send(there)
    (root / UUID / "r-2").mkdir()
    (root / UUID / "r-2" / "manifest.json").symlink_to(outside)
    with pytest.raises(UnavailableError):
        there.manifest(UUID, "r-2")
    assert there.bundles(UUID)["r-2"].sizes == {}
    assert there.damaged(UUID, "r-2", {"manifest.json": digest(b"of another")}) == ["manifest.json"]
    assert outside.read_bytes() == b"of another"


def test_a_pipe_in_place_of_a_file_blocks_nothing_and_is_no_empty_file(there, root):
    content = {"manifest.json": b"{}", "ram.save": b""}
    send(there, content)
    (root / UUID / "r-1" / "ram.save").unlink()
    os.mkfifo(root / UUID / "r-1" / "ram.save")
    assert there.damaged(UUID, "r-1", sums(content)) == ["ram.save"]


def test_a_reading_of_a_bundle_without_a_record_is_not_recorded(there, root):
    send(there)
    (root / UUID / "r-1" / "copy.json").unlink()
    assert there.damaged(UUID, "r-1", sums()) == []
    assert not (root / UUID / "r-1" / "copy.json").exists()


def test_each_former_bundle_is_kept(there, root):
    send(there)
    for content in (b"one", b"two"):
        (root / UUID / "r-1" / "ram.save").write_bytes(content)
        send(there)
    kept = sorted((root / ".replaced").iterdir())
    assert [(path / "ram.save").read_bytes() for path in kept] == [b"one", b"two"]
    assert (root / ".replaced").stat().st_mode & 0o777 == 0o700


def test_a_reading_is_recorded_only_if_all_is_whole(there, root):
    send(there)
    record = root / UUID / "r-1" / "copy.json"
    for asked, found in (
        ({}, []),
        ({"ram.save": digest(b"other")}, ["ram.save"]),
        ({"nvram.fd": digest(b"")}, ["nvram.fd"]),
    ):
        os.utime(record, (1, 1))
        assert there.damaged(UUID, "r-1", asked) == found
        assert record.stat().st_mtime == 1
    assert there.damaged(UUID, "r-1", sums()) == []
    assert record.stat().st_mtime > 1
    (root / UUID / "r-1" / "ram.save").write_bytes(b"other")
    os.utime(record, (1, 1))
    only_whole = {"manifest.json": digest(b"{}")}
    assert there.damaged(UUID, "r-1", only_whole) == ["ram.save"]
    assert record.stat().st_mtime == 1


def test_a_missing_bundle_is_all_damaged(there):
    assert there.damaged(UUID, "r-9", sums()) == list(CONTENT)


def test_two_bundles_of_a_domain_are_not_stored_at_once(there, root):
    (root / UUID).mkdir()
    other = os.open(root / UUID, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(BusyError):
        send(there)
    os.close(other)
    assert send(there) == []


def test_a_missing_directory_is_not_made(tmp_path):
    there = ReceivedBundles(tmp_path / "away", "backup/vm1")
    for act in (
        there.check,
        lambda: send(there),
        lambda: there.bundles(UUID),
        lambda: there.begun(UUID, "r-1"),
        lambda: there.damaged(UUID, "r-1", sums()),
        lambda: there.manifest(UUID, "r-1"),
    ):
        with pytest.raises(UnavailableError, match="it must exist, and belong"):
            act()
    assert not (tmp_path / "away").exists()


def test_a_directory_that_cannot_be_written_is_reported(there, monkeypatch):
    there.check()
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    with pytest.raises(UnavailableError, match=r"cannot write.*chown"):
        there.check()


def test_what_an_abandoned_transfer_left_makes_room_for_the_next_one(there, root, monkeypatch):
    with pytest.raises(ReplicaError, match="ended early"):
        send(there, run="r-1", sent=b"x")
    full = OSError(errno.EDQUOT, "Disk quota exceeded")
    take = received_bundles._take

    def limited(*given):
        if (root / UUID / ".r-1.copying").exists():
            raise full
        return take(*given)

    monkeypatch.setattr(received_bundles, "_take", limited)
    assert send(there, run="r-2") == []
    assert sorted(path.name for path in (root / UUID).iterdir()) == ["r-2"]


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC])
def test_a_full_directory_is_called_full(there, monkeypatch, number):
    fail = failing(OSError(number, "no room"))
    monkeypatch.setattr(received_bundles, "_take", lambda *_given: fail())
    with pytest.raises(UnavailableError) as raised:
        send(there)
    assert raised.value.step == "make room there, or raise the quota, and try again"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ENOMEM])
def test_a_bundle_that_cannot_be_judged_is_not_replaced(there, root, monkeypatch, number):
    send(there)
    monkeypatch.setattr(received_bundles, "_file", failing_for("ram.save", number))
    for act in (lambda: send(there), lambda: there.damaged(UUID, "r-1", sums())):
        with pytest.raises(UnavailableError):
            act()
    assert not (root / ".replaced").exists()


def failing_for(wanted, number):
    real = received_bundles._file

    def opened(name, *given):
        if name == wanted:
            raise OSError(number, "no")
        return real(name, *given)

    return opened


def test_bundles_that_come_back_have_no_record_and_replace_none(root):
    here = ReceivedBundles(root, "")
    assert send(here) == []
    assert not (root / UUID / "r-1" / "copy.json").exists()
    with pytest.raises(RefusedError, match="already"):
        send(here)


def test_a_bundle_gets_its_name_when_it_is_on_stable_storage(there, root, monkeypatch):
    done = []
    for name in ("fsync", "rename"):
        real = getattr(os, name)

        def noted(*given, name=name, real=real, **more):
            where = os.readlink(f"/proc/self/fd/{given[0]}") if name == "fsync" else given[1]
            done.append((name, where.rpartition("/")[2]))
            if name == "fsync" and where.endswith((".json", ".save")):
                assert os.fstat(given[0]).st_size, "nothing is left in a buffer"
            return real(*given, **more)

        monkeypatch.setattr(received_bundles.os, name, noted)
    send(there)
    assert done == [
        ("fsync", "manifest.json"),
        ("fsync", "ram.save"),
        ("fsync", "copy.json"),
        ("fsync", ".r-1.copying"),
        ("rename", "r-1"),
        ("fsync", UUID),
        ("fsync", "bundles"),
    ]
    (root / UUID / "r-1" / "ram.save").unlink()
    done.clear()
    send(there)
    kept = done.index(("fsync", ".replaced"))
    assert done[kept - 1][1].endswith(f"{UUID}.r-1")
    assert done[kept + 1] == ("rename", "r-1")


@pytest.mark.parametrize(
    ("uuid", "run"), [("..", "r-1"), ("." * 36, "r-1"), ("a/../" * 7 + "x", "r"), (UUID, "../r")]
)
def test_names_that_lead_elsewhere_are_refused(there, root, uuid, run):
    before = tree(root.parent)
    calls = [
        lambda: there.begun(uuid, run),
        lambda: there.manifest(uuid, run),
        lambda: there.damaged(uuid, run, {}),
        lambda: there.store(uuid, run, [], io.BytesIO()),
    ]
    for call in calls:
        with pytest.raises(RefusedError, match="is no name of a bundle"):
            call()
    assert tree(root.parent) == before
