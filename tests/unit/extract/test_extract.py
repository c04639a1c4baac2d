import errno
import os
import shutil
from pathlib import Path

import pytest
from fakes.domain_xml import DiskSpec
from fakes.images import qcow2
from hypothesis import given
from hypothesis import strategies as st

from snaporch.errors import BusyError, NotFoundError, RefusedError, RunFailedError
from snaporch.extract import extract as extract_module
from snaporch.extract.extract import choose_disks, extract
from snaporch.model import DatasetKind
from snaporch.restore.safe_path import LeadsOutError
from snaporch.restore.source import IncompleteError, complete_source, find_records
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot

GRAIN = 64 << 10


def source(world, text="web@s1"):
    return complete_source(world.context, find_records(world.context, text)[-1], roles=())


def in_snapshot(world, dataset, name, content):
    """The file as a snapshot of a mounted dataset shows it."""
    folder = world.root / "zfs" / dataset / ".zfs" / "snapshot" / "s1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


def copy(world, to, target="vda", text="web@s1"):
    ((disk, path),) = choose_disks(world.resolver, source(world, text), target, to)
    return extract(world.context, source(world, text), disk, path)


def test_an_image_is_copied_from_the_snapshot(story, world, tmp_path):
    content = b"x" * 1000 + bytes(3 * GRAIN) + b"y"
    in_snapshot(world, "tank/web", "web-vda.img", content)
    done = copy(world, tmp_path / "out.raw")
    assert (tmp_path / "out.raw").read_bytes() == content
    assert (tmp_path / "out.raw").stat().st_mode & 0o777 == 0o600
    assert (done.target, done.bytes, done.format) == ("vda", len(content), "raw")
    assert "pool.clone" not in world.hooks.acts()


def test_a_volume_is_copied_from_a_clone_that_is_removed_again(world, tmp_path):
    world.pool.create("tank/vol", DatasetKind.VOLUME)
    world.pool.write("tank/vol", b"then")
    world.add_guest("vol", {"vda": "tank/vol"})
    take_snapshot(world.context, world.hypervisor.domain("vol"), SnapshotRequest("s1"))
    world.pool.write("tank/vol", b"now")
    copy(world, tmp_path / "out.raw", text="vol@s1")
    assert (tmp_path / "out.raw").read_bytes() == b"then"
    assert [dataset.name for dataset in world.pool.datasets()] == ["tank/vol"]
    assert list(world.paths.clones.iterdir()) == []


@given(runs=st.lists(st.tuples(st.booleans(), st.integers(0, 2 * GRAIN)), max_size=6))
def test_copies_are_the_same_and_zeros_take_no_space(runs, tmp_path_factory):
    content = b"".join((b"x" if full else b"\0") * length for full, length in runs)
    directory = tmp_path_factory.mktemp("copy")
    (directory / "a").write_bytes(content)
    heard = type("Heard", (), {"amount": lambda *_: None, "step": lambda *_: None})()
    interrupt = type("Interrupt", (), {"check": lambda *_: None})()
    context = type("Context", (), {"progress": heard, "interrupt": interrupt})()
    thing = type("Source", (), {"thing": "x"})()
    with (directory / "a").open("rb", buffering=0) as reading:
        extract_module._copy(context, thing, reading, directory / "b")
    assert (directory / "b").read_bytes() == content
    if not content.strip(b"\0"):
        assert (directory / "b").stat().st_blocks == 0


def test_a_sparse_image_stays_sparse(story, world, tmp_path):
    in_snapshot(world, "tank/web", "web-vda.img", b"")
    image = next((world.root / "zfs" / "tank/web" / ".zfs").rglob("*.img"))
    with image.open("r+b") as stream:
        stream.seek(10 << 20)
        stream.write(b"end")
    done = copy(world, tmp_path / "out.raw")
    assert done.bytes == (10 << 20) + 3
    assert done.stored_bytes < 1 << 20
    assert (tmp_path / "out.raw").read_bytes() == image.read_bytes()


def test_all_disks_go_into_a_directory(story, world, tmp_path):
    chosen = choose_disks(world.resolver, source(world), None, tmp_path)
    assert [path for _, path in chosen] == [
        tmp_path / "web@s1-vda.raw",
        tmp_path / "web@s1-vdb.raw",
    ]


def test_several_disks_do_not_go_into_one_file(story, world, tmp_path):
    with pytest.raises(RefusedError, match="vda, vdb"):
        choose_disks(world.resolver, source(world), None, tmp_path / "x")


def test_a_missing_disk_is_refused(story, world, tmp_path):
    with pytest.raises(NotFoundError, match="vda, vdb"):
        choose_disks(world.resolver, source(world), "vdz", tmp_path)


def test_nothing_is_overwritten(story, world, tmp_path):
    (tmp_path / "x").write_bytes(b"precious")
    with pytest.raises(RefusedError, match="exists already"):
        choose_disks(world.resolver, source(world), "vda", tmp_path / "x")
    with pytest.raises(RefusedError, match="not a directory"):
        choose_disks(world.resolver, source(world), "vda", tmp_path / "absent" / "x")


def test_a_link_in_the_destination_directory_is_not_followed(world, story, tmp_path):
    in_snapshot(world, "tank/web", "web-vda.img", b"content")
    (tmp_path / "other").write_bytes(b"precious")
    (tmp_path / ".out.raw.partial").symlink_to(tmp_path / "other")
    copy(world, tmp_path / "out.raw")
    assert (tmp_path / "out.raw").read_bytes() == b"content"
    assert (tmp_path / "other").read_bytes() == b"precious"


def test_a_missing_image_is_an_error(story, world, tmp_path):
    with pytest.raises(IncompleteError):
        copy(world, tmp_path / "out.raw")
    assert list(tmp_path.glob("*out*")) == []


def test_a_disk_is_extracted_although_the_bundle_is_incomplete(story, world, tmp_path):
    (Path(story.record.bundle) / "ram.save").unlink()
    in_snapshot(world, "tank/web", "web-vda.img", b"content")
    copy(world, tmp_path / "out.raw")
    assert (tmp_path / "out.raw").read_bytes() == b"content"


@pytest.mark.parametrize("kind", [DatasetKind.FILESYSTEM, DatasetKind.VOLUME])
def test_a_full_disk_leaves_nothing(world, tmp_path, monkeypatch, kind):
    world.pool.create("tank/vol", kind)
    world.pool.write("tank/vol", b"then")
    world.add_guest("vol", {"vda": "tank/vol"})
    take_snapshot(world.context, world.hypervisor.domain("vol"), SnapshotRequest("s1"))
    in_snapshot(world, "tank/vol", "vol-vda.img", b"then")

    def full(*_arguments):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RunFailedError, match="No space left"):
        copy(world, tmp_path / "out.raw", text="vol@s1")
    assert list(tmp_path.glob("*out*")) == []
    assert [dataset.name for dataset in world.pool.datasets()] == ["tank/vol"]


def test_a_damaged_block_is_an_error_and_no_zeros(story, world, tmp_path, monkeypatch):
    """A read that ends at it returns the data before it; the next read fails."""
    in_snapshot(world, "tank/web", "web-vda.img", b"x" * (1 << 20))
    read = os.pread

    def damaged(descriptor, length, offset):
        if offset >= 4096:
            raise OSError(errno.EIO, "Input/output error")
        return read(descriptor, min(length, 4096 - offset), offset)

    monkeypatch.setattr(os, "pread", damaged)
    with pytest.raises(RunFailedError, match="Input/output error"):
        copy(world, tmp_path / "out.raw")
    assert list(tmp_path.glob("*out*")) == []


def test_a_disk_that_ends_too_early_is_an_error_and_no_zeros(story, world, tmp_path, monkeypatch):
    in_snapshot(world, "tank/web", "web-vda.img", b"x" * (1 << 20))
    monkeypatch.setattr(os, "pread", lambda *_: b"")
    with pytest.raises(RunFailedError, match="no data can be read at byte 0"):
        copy(world, tmp_path / "out.raw")


def test_a_link_is_followed_within_the_snapshot_and_not_out_of_it(story, world, tmp_path):
    """An absolute link names a file of the original, which has changed since."""
    live = Path(story.domain.disks[0].source)
    live.write_bytes(b"now")
    in_snapshot(world, "tank/web", "then.img", b"then")
    folder = live.parent / ".zfs" / "snapshot" / "s1"
    (folder / live.name).symlink_to(live.parent / "then.img")
    copy(world, tmp_path / "out.raw")
    assert (tmp_path / "out.raw").read_bytes() == b"then"
    (folder / live.name).unlink()
    (folder / live.name).symlink_to(tmp_path / "out.raw")
    with pytest.raises(LeadsOutError, match="leads out"):
        copy(world, tmp_path / "other.raw")
    assert not (tmp_path / "other.raw").exists()


def test_after_a_link_was_changed_the_file_of_the_snapshot_is_copied(world, tmp_path):
    """The path of the image was a link outside of its dataset."""
    for name in ("then", "other"):
        world.image("tank/web", f"{name}.img")
        in_snapshot(world, "tank/web", f"{name}.img", name.encode())
    link = tmp_path / "link.img"
    link.symlink_to(world.root / "zfs/tank/web/then.img")
    world.add_guest("far", {}, more=(DiskSpec("vda", str(link)),))
    take_snapshot(world.context, world.hypervisor.domain("far"), SnapshotRequest("s1"))
    link.unlink()
    link.symlink_to(world.root / "zfs/tank/web/other.img")
    copy(world, tmp_path / "out.raw", text="far@s1")
    assert (tmp_path / "out.raw").read_bytes() == b"then"


@pytest.mark.parametrize(
    ("names", "notes"), [({}, 0), ({"backing": "base"}, 1), ({"data_file": "data"}, 1)]
)
def test_other_files_of_an_image_are_reported(world, tmp_path, names, notes):
    image = str(world.image("tank/q", "q-vda.img"))
    Path(image).write_bytes(qcow2())
    world.add_guest("q", {}, more=(DiskSpec("vda", image, format="qcow2"),))
    take_snapshot(world.context, world.hypervisor.domain("q"), SnapshotRequest("s1"))
    in_snapshot(world, "tank/q", "q-vda.img", qcow2(**names))
    world.heard.notes.clear()
    copy(world, tmp_path / "out.qcow2", text="q@s1")
    assert len(world.heard.notes) == notes


def test_two_copies_do_not_write_one_file(story, world, tmp_path):
    """The second one is of another disk; the first one has not ended."""
    in_snapshot(world, "tank/web", "web-vda.img", b"a" * (1 << 20))
    in_snapshot(world, "flash/web", "web-vdb.img", b"b" * (1 << 20))
    seen = []

    def amount(_thing, done, _total):
        if not seen:
            seen.append(done)
            with pytest.raises(BusyError, match="another process writes it"):
                copy(world, tmp_path / "out.raw", "vdb")

    world.heard.amount = amount
    copy(world, tmp_path / "out.raw")
    assert seen == [1 << 20]
    assert (tmp_path / "out.raw").read_bytes() == b"a" * (1 << 20)
    assert list(tmp_path.glob("*out*")) == [tmp_path / "out.raw"]


def test_what_another_process_has_made_meanwhile_stays(story, world, tmp_path):
    in_snapshot(world, "tank/web", "web-vda.img", b"content")
    out = tmp_path / "out.raw"
    world.heard.amount = lambda *_: out.write_bytes(b"precious")
    with pytest.raises(RefusedError, match="exists already"):
        copy(world, out)
    assert out.read_bytes() == b"precious"
    assert list(tmp_path.glob("*out*")) == [out]


@pytest.mark.parametrize("kind", [DatasetKind.FILESYSTEM, DatasetKind.VOLUME])
def test_the_room_that_guests_need_is_not_used_up(world, tmp_path, monkeypatch, kind):
    world.pool.create("tank/vol", kind)
    world.pool.write("tank/vol", b"then" * GRAIN)
    world.add_guest("vol", {"vda": "tank/vol"})
    take_snapshot(world.context, world.hypervisor.domain("vol"), SnapshotRequest("s1"))
    in_snapshot(world, "tank/vol", "vol-vda.img", b"then" * GRAIN)
    real = shutil.disk_usage(tmp_path)
    looks = [real.total]
    left = lambda _path: real._replace(free=looks.pop() if looks else 1 << 20)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", left)
    with pytest.raises(RunFailedError, match=r"1 MiB left, and .* are kept for others"):
        copy(world, tmp_path / "out.raw", text="vol@s1")
    with pytest.raises(RefusedError, match="has room for 0 MiB"):
        copy(world, tmp_path / "out.raw", text="vol@s1")
    assert list(tmp_path.glob("*out*")) == []
