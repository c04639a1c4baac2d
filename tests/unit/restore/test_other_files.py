"""Files that are not the guest's, in the dataset that a restore would roll back."""

import os
import shutil
import socket
from pathlib import Path

import pytest
from fakes.hooks import failing
from fakes.resolver import FakeResolver

from snaporch.errors import RefusedError
from snaporch.model import DatasetKind, DomainState
from snaporch.restore.losses import losses
from snaporch.restore.other_files import TooManyError, own_files, walk
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.run import restore
from snaporch.restore.select_undo import choose_copy
from snaporch.restore.undo_plan import make_undo_plan
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import PoolError
from snaporch.zfs.resolver import Mount


class Home:
    """The directory of a dataset with the guest's image, and its snapshot."""

    def __init__(self, world):
        self.world = world
        self.root = world.root / "zfs" / "tank" / "web"
        self.then = self.root / ".zfs" / "snapshot" / "s1"
        self.then.mkdir(parents=True)

    def keep(self, name, text="as it was"):
        """Put the same file (by inode and time of change) into dataset and snapshot."""
        self.write(name, text)
        (self.then / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(self.root / name, self.then / name)

    def write(self, name, text="new"):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def plan(self, **options):
        return make_restore_plan(
            self.world.context, "web", "s1", **({"discard_newer": True} | options)
        )

    def refusal(self, **options):
        with pytest.raises(RefusedError) as caught:
            self.plan(**options)
        return str(caught.value)


@pytest.fixture
def home(story, world):
    return Home(world)


@pytest.mark.parametrize("how", [{}, {"cold": True}, {"disks_only": True}])
def test_files_that_others_wrote_since_are_not_rolled_back(home, how):
    home.keep("old")
    for name in ("sub/b", "c", "d", "e"):
        home.write(name)
    said = home.refusal(**how)
    assert "tank/web would be rolled back with 4 other files: c, d, e and 1 more" in said
    assert "--also-roll-back" in said
    assert home.world.hooks.log == []
    plan = home.plan(also_roll_back=True, **how)
    (line,) = [line for line in losses(home.world.context, plan) if line.startswith("in ")]
    assert line.startswith("in tank/web: 4 other files: c, d, e")


def test_files_that_others_write_while_the_copy_is_written_are_not_rolled_back(home):
    """Saving may take hours."""
    made = home.plan()
    home.world.hooks.at["pool.send_increment"] = lambda: home.write("thesis")
    with pytest.raises(RefusedError, match=r"tank/web would be rolled back with .*thesis"):
        restore(home.world.context, made, safety=True)
    assert home.world.guest().state is DomainState.RUNNING
    assert "pool.rollback" not in home.world.hooks.acts()
    assert (home.root / "thesis").read_text() == "new"


def test_a_file_of_others_counts_only_if_it_differs_from_the_snapshot(home):
    home.keep("home/thesis")
    home.plan()
    home.write("home/thesis", "a year later")
    # from here on the file in the snapshot differs
    os.unlink(home.then / "home" / "thesis")
    (home.then / "home" / "thesis").write_text("as it was")
    assert "1 other file: home/thesis;" in home.refusal()


def test_a_snapshot_that_cannot_be_read(home, monkeypatch):
    """Then every file may have changed."""
    home.keep("old")
    home.plan()
    home.world.hooks.at["pool.mounted_snapshot"] = failing(PoolError("tank/web@s1", "no key"))
    assert "old" in home.refusal()


def test_files_of_the_guest_are_rolled_back(home, world, monkeypatch):
    """Files that its definitions name, then or now; sockets and pipes contain no data."""
    guest, image = world.guest(), home.root / "web-vda.img"
    (home.root / "current.img").symlink_to(image)
    xml = guest.live.replace(str(image), str(home.root / "current.img"))
    state = home.root / "tpm"
    more = (
        f'<console type="file"><source path="{home.write("console.log")}"/></console>'
        f'<tpm><backend type="emulator"><source type="dir" path="{state}"/></backend></tpm>'
        f'<filesystem type="mount"><source dir="{home.root}"/></filesystem>'
    )
    guest.live = xml.replace("</devices>", f"{more}</devices>").replace(
        "</os>", f"<kernel>{home.write('vmlinuz')}</kernel></os>"
    )
    home.write("tpm/tpm2-00.permall")
    home.write("web-vda.img", "changed")
    os.mkfifo(home.root / "pipe")
    with socket.socket(socket.AF_UNIX) as sock:
        monkeypatch.chdir(home.root)
        sock.bind("agent.sock")
    home.plan()
    home.write("shared.txt")
    assert "1 other file: shared.txt" in home.refusal()


@pytest.fixture
def excluding(world):
    """A guest with a disk that is left out, in the dataset of the other."""
    world.with_defaults(exclude_disks=["vdb"])
    world.add_guest("web", disks={"vda": "tank/web", "vdb": "tank/web"})
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s1"))
    home = Home(world)
    os.link(home.root / "web-vdb.img", home.then / "web-vdb.img")
    return home


def test_without_the_bundle_an_excluded_image_is_not_rolled_back(excluding, world):
    for bundle in world.paths.bundles.glob("*/2*"):
        shutil.rmtree(bundle)
    excluding.plan(disks_only=True)
    os.unlink(excluding.root / "web-vdb.img")
    excluding.write("web-vdb.img", "written since")
    assert "web-vdb.img" in excluding.refusal(disks_only=True)


def test_an_undo_does_not_roll_back_an_excluded_image(excluding, world):
    restored = restore(world.context, excluding.plan(disks_only=True), safety=True)
    os.unlink(excluding.root / "web-vdb.img")
    excluding.write("web-vdb.img", "written since")
    (check,) = [
        line for line in Path(restored.undo).read_text().splitlines() if "check tank" in line
    ]
    assert "web-vda.img" in check
    assert "web-vdb.img" not in check
    with pytest.raises(RefusedError, match=r"1 other file: .*web-vdb.img"):
        make_undo_plan(world.context, choose_copy(world.context, "web", None), disks_only=True)


def test_an_excluded_image_is_not_rolled_back(excluding):
    """A restore does not change it, wherever it is."""
    home = excluding
    home.plan(disks_only=True)
    os.unlink(home.root / "web-vdb.img")
    home.write("web-vdb.img", "written since")
    home.write("web-vda.img", "written since")
    assert "with 1 other file: web-vdb.img;" in home.refusal(disks_only=True)
    home.plan(disks_only=True, also_roll_back=True)


def test_a_link_is_not_followed(home, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").touch()
    (home.root / "way out").symlink_to(outside)
    assert "1 other file: way out" in home.refusal()


def test_a_file_written_while_the_safety_copy_is_saved_is_not_rolled_back(home):
    plan = home.plan()
    act = home.world.pool.send_increment

    def send(*arguments, **options):
        home.write("late")
        return act(*arguments, **options)

    home.world.pool.send_increment = send
    with pytest.raises(RefusedError, match="late"):
        restore(home.world.context, plan, safety=True)
    assert home.world.guest().state.value == "running"
    assert home.world.pool.read("tank/web") == b"now"


def test_a_volume_has_no_files(home, world):
    home.write("new")
    for dataset in world.pool._datasets.values():
        dataset.kind = DatasetKind.VOLUME
    home.plan(disks_only=True)


def test_a_file_system_that_is_not_mounted(home, world):
    world.resolver.mount_points["tank/web"] = None
    said = home.refusal(disks_only=True)
    assert "is not mounted" in said
    assert "zfs mount -l" in said
    home.plan(disks_only=True, also_roll_back=True)


def test_deeper_directories_than_are_examined(home):
    home.write(f"{'a/' * 99}x").unlink()
    assert home.plan()
    home.write(f"{'a/' * 101}x")
    assert "entries that are examined" in home.refusal()


def test_more_entries_than_are_examined(tmp_path):
    """Directories count, too."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x").touch()
    assert [each.path for each in walk(tmp_path, frozenset(), most=3)] == ["a/b/x"]
    with pytest.raises(TooManyError):
        list(walk(tmp_path, frozenset(), most=2))


def test_other_mounts_are_not_touched(home, world, monkeypatch):
    """A dead mount would never answer."""
    home.write("mnt/remote")
    world.resolver.table.append(Mount("0:9", str(home.root / "mnt"), "nfs", "far:/"))
    opened = []
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *a, **k: opened.append(path) or real(path, *a, **k)
    )
    home.plan()
    assert "mnt" not in opened


def test_a_file_that_is_removed_during_the_walk(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).touch()
    found = walk(tmp_path, frozenset())
    left = {"a", "b"} - {next(found).path}
    for name in left:
        (tmp_path / name).unlink()
    assert list(found) == []


def test_a_path_that_may_hang_is_not_accessed(tmp_path):
    table = [Mount("0:1", "/", "ext4", "x", 1, 0), Mount("0:2", str(tmp_path), "fuse", "x", 2, 1)]
    (tmp_path / "iso").touch()
    assert own_files(FakeResolver(table=table), [str(tmp_path / "iso")], ()) == set()
