import hashlib
import json
import os
import subprocess
import threading
from pathlib import Path

import pytest
from fakes.archives import VDA, VDB, in_snapshot
from fakes.domain_xml import DiskSpec
from fakes.images import qcow2
from fakes.story import Story

from snaporch.archive.archive_file import destination, new_archive, standard_output
from snaporch.archive.export import check_export, export
from snaporch.archive.write_archive import END_MARK
from snaporch.bundle.manifest import parse_manifest
from snaporch.errors import BusyError, InterruptedRunError, RefusedError, RunFailedError
from snaporch.model import DatasetKind
from snaporch.restore.new_file import partial_name
from snaporch.restore.source import IncompleteError, complete_source, find_records
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot


@pytest.fixture
def taken(story: Story, world):
    """A guest on two pools with the snapshot ``s1``."""
    in_snapshot(world, "tank/web", "web-vda.img", VDA)
    in_snapshot(world, "flash/web", "web-vdb.img", VDB)
    return story


def source(world, text="web@s1"):
    return complete_source(world.context, find_records(world.context, text)[-1])


def written(world, to, text="web@s1", **options):
    check_export(world.context, source(world, text))
    with new_archive(to) as stream:
        return export(world.context, source(world, text), str(to), stream, **options)


def unpacked(archive: Path, to: Path) -> dict[str, bytes]:
    """What tar and zstd make of an archive, without snaporch."""
    to.mkdir()
    subprocess.run(["tar", "--zstd", "-xf", archive, "-C", to], check=True)
    files = (path for path in to.rglob("*") if path.is_file())
    return {str(path.relative_to(to)): path.read_bytes() for path in files}


def test_tar_and_zstd_open_an_archive(taken, world, tmp_path):
    done = written(world, tmp_path / "web.tar.zst")
    files = unpacked(tmp_path / "web.tar.zst", tmp_path / "out")
    bundle = Path(taken.record.bundle)
    manifest = parse_manifest(files.pop("manifest.json"), "x")
    parts = {part.name: (bundle / part.name).read_bytes() for part in manifest.parts}
    disks = {"disks/vda.raw": VDA, "disks/vdb.raw": VDB}
    contents, sums = files.pop("contents.json"), files.pop("checksums.json")
    assert files == parts | disks
    listed = [each["name"] for each in json.loads(contents)["members"]]
    assert sorted(listed) == sorted([*files, "manifest.json", "checksums.json"])
    assert (listed[0], listed[-2:]) == ("manifest.json", ["ram.save", "checksums.json"])
    assert json.loads(sums)["sha256"]["ram.save"] == hashlib.sha256(parts["ram.save"]).hexdigest()
    assert (tmp_path / "out" / "disks" / "vda.raw").stat().st_blocks * 512 < len(VDA)
    assert (tmp_path / "web.tar.zst").read_bytes().endswith(END_MARK)
    assert (done.of, done.bytes) == ("web@s1", (tmp_path / "web.tar.zst").stat().st_size)
    assert done.with_ram
    assert (tmp_path / "web.tar.zst").stat().st_mode & 0o777 == 0o600
    assert world.heard.amounts[-1][0] > len(VDB)


def test_the_table_is_the_first_member(taken, world, tmp_path):
    written(world, tmp_path / "web.tar.zst")
    listed = subprocess.run(
        ["tar", "--zstd", "-tf", tmp_path / "web.tar.zst"], check=True, capture_output=True
    )
    assert listed.stdout.decode().splitlines()[:2] == ["contents.json", "manifest.json"]


def test_an_archive_may_have_no_ram(taken, world, tmp_path):
    assert not written(world, tmp_path / "web.tar.zst", with_ram=False).with_ram
    assert "ram.save" not in unpacked(tmp_path / "web.tar.zst", tmp_path / "out")


def test_a_volume_is_read_from_a_clone_that_is_removed(world, tmp_path):
    world.pool.create("tank/vol", DatasetKind.VOLUME)
    world.pool.write("tank/vol", b"then")
    world.add_guest("vol", {"vda": "tank/vol"})
    take_snapshot(world.context, world.hypervisor.domain("vol"), SnapshotRequest("s1"))
    world.pool.write("tank/vol", b"now")
    written(world, tmp_path / "vol.tar.zst", "vol@s1")
    assert unpacked(tmp_path / "vol.tar.zst", tmp_path / "out")["disks/vda.raw"] == b"then"
    assert [dataset.name for dataset in world.pool.datasets()] == ["tank/vol"]
    assert list(world.paths.clones.iterdir()) == []


def test_ram_in_pages_becomes_an_image(world, tmp_path):
    world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    world.with_pages()
    record = take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s1"))
    in_snapshot(world, "tank/web", "web-vda.img", VDA)
    in_snapshot(world, "flash/web", "web-vdb.img", VDB)
    written(world, tmp_path / "web.tar.zst")
    files = unpacked(tmp_path / "web.tar.zst", tmp_path / "out")
    manifest = parse_manifest(files["manifest.json"], "x")
    assert manifest.pages is None
    assert files["ram.save"].startswith(b"LibvirtQemudSave")
    assert not (Path(record.bundle) / "ram.save").exists()
    assert list(world.paths.clones.iterdir()) == []


def test_a_damaged_part_is_an_error_and_leaves_no_archive(taken, world, tmp_path):
    image = Path(taken.record.bundle) / "ram.save"
    data = bytearray(image.read_bytes())
    data[-1] ^= 1
    image.write_bytes(data)
    with pytest.raises(IncompleteError, match=r"ram.save: differs from its manifest"):
        written(world, tmp_path / "web.tar.zst")
    assert list(tmp_path.glob("*web.tar*")) == []


def test_a_full_disk_leaves_no_archive(taken, world):
    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb", buffering=0)
    with full, pytest.raises(RunFailedError, match="No space left"):
        export(world.context, source(world), "x", full)


def test_a_signal_leaves_no_archive(taken, world, tmp_path):
    world.heard.at["exporting"] = lambda: setattr(world.context.interrupt, "signum", 15)
    with pytest.raises(InterruptedRunError):
        written(world, tmp_path / "web.tar.zst")
    assert list(tmp_path.glob("*web.tar*")) == []


def test_a_killed_export_leaves_a_named_remainder_that_the_next_overwrites(taken, world, tmp_path):
    to = tmp_path / "web.tar.zst"
    partial_name(to).write_bytes(b"remainder" * (1 << 20))
    written(world, to)
    assert [path.name for path in tmp_path.glob("*web.tar*")] == ["web.tar.zst"]
    unpacked(to, tmp_path / "out")


def test_two_exports_do_not_write_one_file(tmp_path):
    to = tmp_path / "a"
    with new_archive(to) as first:
        with pytest.raises(BusyError), new_archive(to):
            pass
        first.write(b"first")
    assert to.read_bytes() == b"first"


def test_an_archive_that_appeared_meanwhile_stays(tmp_path):
    to = tmp_path / "a"
    with pytest.raises(RefusedError, match="exists already"), new_archive(to):
        to.write_bytes(b"precious")
    assert to.read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [to]


@pytest.mark.parametrize("kind", ["other's", "linked", "link", "pipe"])
def test_an_archive_is_written_into_no_file_of_another_user(tmp_path, kind):
    """Another user has made a file of the temporary name, and keeps it open."""
    to, theirs = tmp_path / "a", tmp_path / "theirs"
    theirs.write_bytes(b"theirs")
    partial = partial_name(to)
    if kind == "link":
        partial.symlink_to(theirs)
    elif kind == "linked":
        os.link(theirs, partial)
    elif kind == "pipe":
        os.mkfifo(partial)
    else:
        partial.write_bytes(b"")
        partial.chmod(0o666)
        os.chown(partial, 12345, 12345)
    held = os.open(partial, os.O_PATH | os.O_NOFOLLOW)
    with new_archive(to) as writing:
        assert not os.path.sameopenfile(writing.fileno(), held)
        writing.write(b"secret")
    os.close(held)
    status = to.lstat()
    assert (status.st_uid, status.st_mode & 0o777, status.st_nlink) == (os.geteuid(), 0o600, 1)
    assert (to.read_bytes(), theirs.read_bytes()) == (b"secret", b"theirs")


def test_a_file_that_was_replaced_while_it_was_written_gets_no_name(tmp_path):
    to = tmp_path / "a"

    def replaced():
        with new_archive(to) as writing:
            writing.write(b"x")
            partial_name(to).unlink()
            partial_name(to).write_bytes(b"of another export")

    with pytest.raises(RunFailedError, match="has replaced"):
        replaced()
    assert not to.exists()
    assert partial_name(to).read_bytes() == b"of another export"


def test_the_archive_is_named_after_the_snapshot(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert destination("web/a@s1", None) == Path("web_a@s1.tar.zst")
    assert destination("web@auto_07:00", None) == Path("web@auto_07_00.tar.zst")
    assert destination("web@s1", tmp_path) == tmp_path / "web@s1.tar.zst"
    assert destination("web@s1", tmp_path / "x") == tmp_path / "x"
    with pytest.raises(RefusedError, match="not a directory"):
        destination("web@s1", tmp_path / "absent" / "x")


def test_a_disk_that_needs_another_file_is_refused(world, tmp_path):
    image = str(world.image("tank/q", "q-vda.img"))
    Path(image).write_bytes(qcow2())
    world.add_guest("q", {}, more=(DiskSpec("vda", image, format="qcow2"),))
    take_snapshot(world.context, world.hypervisor.domain("q"), SnapshotRequest("s1"))
    in_snapshot(world, "tank/q", "q-vda.img", qcow2(backing="/etc/shadow"))
    with pytest.raises(RefusedError, match="needs another file"):
        written(world, tmp_path / "q.tar.zst", "q@s1")


def test_an_encrypted_disk_is_refused(world, tmp_path):
    image = str(world.image("tank/q", "q-vda.img"))
    Path(image).write_bytes(qcow2())
    world.add_guest("q", {}, more=(DiskSpec("vda", image, format="qcow2"),))
    take_snapshot(world.context, world.hypervisor.domain("q"), SnapshotRequest("s1"))
    content = bytearray(qcow2())
    content[32:36] = (2).to_bytes(4, "big")
    in_snapshot(world, "tank/q", "q-vda.img", bytes(content))
    with pytest.raises(RefusedError, match="is encrypted"):
        written(world, tmp_path / "q.tar.zst", "q@s1")


def with_xml(taken, old, new):
    path = Path(taken.record.bundle) / "domain.xml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    "element",
    [
        "<launchSecurity type='sev'/>",
        "<q:commandline xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'/>",
    ],
)
def test_a_guest_that_no_import_accepts_is_refused(taken, world, element):
    found = source(world)
    with_xml(taken, "</domain>", f"{element}</domain>")
    with pytest.raises(RefusedError):
        check_export(world.context, found)


def test_what_an_import_needs_is_noted(taken, world):
    found = source(world)
    with_xml(taken, "</os>", "<kernel>/srv/vmlinuz</kernel></os>")
    check_export(world.context, found)
    assert "--accept /srv/vmlinuz" in str(world.heard.notes)


def test_an_archive_goes_to_standard_output(taken, world, capfdbinary):
    with standard_output() as stream:
        export(world.context, source(world), "-", stream)
    assert capfdbinary.readouterr().out.endswith(END_MARK)


def test_no_thread_is_left(taken, world, capfdbinary):
    before = threading.enumerate()
    with standard_output() as stream:
        export(world.context, source(world), "-", stream)
    assert [each for each in threading.enumerate() if each not in before] == []


def test_a_closed_pipe_is_an_error_of_one_line(taken, world, capfd, monkeypatch):
    monkeypatch.setattr(os, "dup", lambda _number: os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(RunFailedError, match="No space left"), standard_output() as stream:
        export(world.context, source(world), "-", stream)
