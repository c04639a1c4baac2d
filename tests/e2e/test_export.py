"""A guest in one file: exported from ZFS, imported on a host without ZFS, at its exact count."""

import os
import subprocess
from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import must, one_line_error, run, snaporch, snapshot, wait_for

DISKS = [Disk("file", "tank/web"), Disk("zvol", "flash/web")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory that the emulator may enter."""
    made = tmp_path_factory.mktemp("export")
    for path in (made, *made.parents):
        if path.is_relative_to("/tmp/pytest-of-root"):
            path.chmod(0o711)
    return made


@pytest.fixture(scope="module")
def archive(place):
    """An archive of a guest that is lost; its count in the snapshot; what else was in it."""
    guest = Guest.create("web", disks=DISKS, firmware="uefi")
    snapshot(guest, "--name", "s1")
    count = guest.snapshot_count("s1")
    mark = guest.mark()
    outcome = snaporch("export", "web@s1", str(place), "--json")
    assert outcome.status == 0, outcome.err
    guest.assert_undisturbed(mark)
    assert not must("zfs", "list", "-H", "-o", "name", "-r", "flash").count("extract")
    guest.remove()
    return Path(outcome.json["path"]), count


@pytest.fixture
def without_zfs(tmp_path):
    """An environment of a host that has neither the commands nor the library of ZFS."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for folder in ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"):
        for path in Path(folder).glob("*"):
            link = commands / path.name
            if path.name not in ("zfs", "zpool") and not link.is_symlink():
                link.symlink_to(path)
    return os.environ | {"PATH": str(commands)}


def bring(archive, place, *options, env=None):
    outcome = snaporch(
        "import", str(archive), "--directory", str(place), *options, "--json", env=env
    )
    assert outcome.status == 0, outcome.err
    return outcome.json, Guest.existing(outcome.json["name"])


def remove(guest, place):
    must("virsh", "destroy", guest.name)
    must("virsh", "undefine", "--nvram", guest.name)
    must("rm", "-r", str(place / guest.name))


def test_it_goes_on_at_its_exact_count_on_a_host_without_zfs(archive, place, without_zfs):
    path, count = archive
    document, guest = bring(path, place, env=without_zfs)
    assert document["state"] == "resumed", document
    guest.assert_continues(0, count)
    assert all(Path(disk).is_relative_to(place / "web") for disk in document["disks"].values())
    assert sorted(path.suffix for path in (place / "web").iterdir() if path.name[0] == ".") == []
    remove(guest, place)


def test_it_boots_beside_another_with_another_name(archive, place):
    path, _ = archive
    _, first = bring(path, place)
    document, second = bring(path, place, "--name", "second", "--cold")
    assert (document["state"], document["cold_reason"]) == ("booted", None)
    second.wait_count()
    assert first.domain().UUIDString() != second.domain().UUIDString()
    one_line_error(snaporch("import", str(path), "--directory", str(place)), 5, "has its UUID")
    for guest in (first, second):
        remove(guest, place)


def test_it_comes_through_a_pipe_into_a_dataset(archive):
    path, count = archive
    must("zfs", "create", "tank/imported")
    with path.open("rb") as stream:
        subprocess.run(
            ["snaporch", "import", "-", "--dataset", "tank/imported"], stdin=stream, check=True
        )
    guest = Guest.existing("web")
    guest.assert_continues(0, count)
    snapshot(guest, "--name", "here")
    must("virsh", "destroy", "web")
    must("virsh", "undefine", "--nvram", "web")
    must("zfs", "destroy", "-r", "tank/imported")


def test_damage_is_refused_and_leaves_nothing(archive, place):
    data = archive[0].read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    for content in (data[:-1], data[: len(data) // 2], bytes(flipped)):
        bad = place / "bad.tar.zst"
        bad.write_bytes(content)
        one_line_error(snaporch("import", str(bad), "--directory", str(place)), 5, "bad.tar.zst")
        bad.unlink()
    assert run("virsh", "domstate", "web").status != 0
    assert not (place / "web").exists()


def test_a_killed_import_is_repeated(archive, place):
    path, count = archive
    words = ["snaporch", "import", "-", "--directory", str(place)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        data = path.read_bytes()
        process.stdin.write(data[: len(data) // 2])  # it cannot end before the kill
        process.stdin.flush()
        wait_for((place / "web" / "vda.raw").exists, "the first disk")
        process.kill()
    assert run("virsh", "domstate", "web").status != 0
    _, guest = bring(path, place)
    guest.assert_continues(0, count)
    remove(guest, place)


def test_tar_opens_it(archive, tmp_path):
    must("tar", "--zstd", "-xf", str(archive[0]), "-C", str(tmp_path))
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"contents.json", "disks/vda.raw", "disks/vdb.raw", "ram.save"} <= names
