import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaporch.errors import NotFoundError, RefusedError, RunFailedError
from snaporch.model import DatasetKind
from snaporch.restore import extract as extract_module
from snaporch.restore.extract import choose_disks, extract
from snaporch.restore.source import NotWholeError, records_called, whole_source
from snaporch.run.snapshot import take_snapshot

GRAIN = 64 << 10


def source(world, text="web@s1"):
    return whole_source(world.context, records_called(world.context, text)[-1], roles=())


def in_snapshot(world, dataset, name, content):
    """The file as a snapshot of a mounted dataset shows it."""
    folder = world.root / "zfs" / dataset / ".zfs" / "snapshot" / "s1"
    folder.mkdir(parents=True)
    (folder / name).write_bytes(content)


def copy(world, to, target="vda", text="web@s1"):
    ((disk, path),) = choose_disks(source(world, text), target, to)
    return extract(world.context, source(world, text), disk, path)


def test_an_image_is_copied_from_the_snapshot(story, world, tmp_path):
    content = b"x" * 1000 + bytes(3 * GRAIN) + b"y"
    in_snapshot(world, "tank/web", "web-vda.img", content)
    done = copy(world, tmp_path / "out.raw")
    assert (tmp_path / "out.raw").read_bytes() == content
    assert (tmp_path / "out.raw").stat().st_mode & 0o777 == 0o600
    assert (done.target, done.bytes, done.format) == ("vda", len(content), "raw")
    assert "pool.clone" not in world.hooks.acts()


def test_a_volume_is_copied_from_a_clone_that_goes_again(world, tmp_path):
    world.pool.create("tank/vol", DatasetKind.VOLUME)
    world.pool.write("tank/vol", b"then")
    world.add_guest("vol", {"vda": "tank/vol"})
    take_snapshot(world.context, world.hypervisor.domain("vol"), name="s1", wait=0)
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
    extract_module._copy(context, thing, directory / "a", directory / "b")
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
    chosen = choose_disks(source(world), None, tmp_path)
    assert [path for _, path in chosen] == [
        tmp_path / "web@s1-vda.raw",
        tmp_path / "web@s1-vdb.raw",
    ]


def test_several_disks_do_not_go_into_one_file(story, world, tmp_path):
    with pytest.raises(RefusedError, match="vda, vdb"):
        choose_disks(source(world), None, tmp_path / "x")


def test_a_disk_that_there_is_not(story, world, tmp_path):
    with pytest.raises(NotFoundError, match="vda, vdb"):
        choose_disks(source(world), "vdz", tmp_path)


def test_nothing_is_overwritten(story, world, tmp_path):
    (tmp_path / "x").write_bytes(b"precious")
    with pytest.raises(RefusedError, match="exists already"):
        choose_disks(source(world), "vda", tmp_path / "x")
    with pytest.raises(RefusedError, match="not a directory"):
        choose_disks(source(world), "vda", tmp_path / "absent" / "x")


def test_an_image_that_is_not_there(story, world, tmp_path):
    with pytest.raises(NotWholeError):
        copy(world, tmp_path / "out.raw")
    assert list(tmp_path.glob("*out*")) == []


def test_a_disk_can_be_had_without_the_rest_of_the_bundle(story, world, tmp_path):
    (Path(story.record.bundle) / "ram.save").unlink()
    in_snapshot(world, "tank/web", "web-vda.img", b"content")
    copy(world, tmp_path / "out.raw")
    assert (tmp_path / "out.raw").read_bytes() == b"content"


@pytest.mark.parametrize("kind", [DatasetKind.FILESYSTEM, DatasetKind.VOLUME])
def test_a_full_disk_leaves_nothing(world, tmp_path, monkeypatch, kind):
    world.pool.create("tank/vol", kind)
    world.pool.write("tank/vol", b"then")
    world.add_guest("vol", {"vda": "tank/vol"})
    take_snapshot(world.context, world.hypervisor.domain("vol"), name="s1", wait=0)
    in_snapshot(world, "tank/vol", "vol-vda.img", b"then")

    def full(*_arguments):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(extract_module, "_write", full)
    with pytest.raises(RunFailedError, match="No space left"):
        copy(world, tmp_path / "out.raw", text="vol@s1")
    assert list(tmp_path.glob("*out*")) == []
    assert [dataset.name for dataset in world.pool.datasets()] == ["tank/vol"]


def test_a_backing_file_is_spoken_of(story, world, tmp_path):
    entry = source(world).disks[0].model_copy(update={"format": "qcow2"})
    for backing, notes in ((b"\0" * 8, 0), (b"\0" * 7 + b"\x68", 1)):
        (tmp_path / "image").write_bytes(b"QFI\xfb\0\0\0\3" + backing)
        extract_module._warn_of_backing_file(
            world.context, source(world), entry, tmp_path / "image"
        )
        assert len(world.heard.notes) == notes
