"""Only times, owners and labels of a file system are discarded, never a byte, a name or a mode."""

import os
import shutil
import signal

import pytest

from snaporch.errors import InterruptedRunError
from snaporch.rebuild.same_data import discard_all_but_data, has_same_data


class Trees:
    """A directory, and the one of its snapshot: with the same data, and other ctimes."""

    def __init__(self, place):
        self.now, self.then = place / "now", place / "then"
        (self.now / "pool").mkdir(parents=True)
        (self.now / "web.raw").write_bytes(bytes(3 << 20))
        (self.now / "pool/iso").write_bytes(b"iso")
        shutil.copytree(self.now, self.then)  # as cp -p
        self.checked = 0

    def same(self):
        return has_same_data(self.now, self.then, self.check)

    def check(self):
        self.checked += 1

    def keep(self, path, change):
        """Change a file, and set its modification time to what it was."""
        before = os.stat(path)
        change(path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def trees(tmp_path):
    return Trees(tmp_path)


def test_what_differs_in_ctime_alone_is_the_same(trees):
    assert trees.same()
    assert trees.checked == 4


def test_what_no_program_changed_is_not_read(trees):
    for name in ("web.raw", "pool/iso"):
        (trees.then / name).unlink()
        os.link(trees.now / name, trees.then / name)
    assert trees.same()
    assert trees.checked == 0


def _last_byte(path):
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"x")


CHANGES = {
    "a byte": lambda now: _last_byte(now / "web.raw"),
    "a longer file": lambda now: os.truncate(now / "web.raw", 4 << 20),
    "a new file": lambda now: (now / "pool/new").touch(),
    "a new directory": lambda now: (now / "new").mkdir(),
    "a file less": lambda now: (now / "pool/iso").unlink(),
    "a mode": lambda now: (now / "pool/iso").chmod(0o777),
    "a link in its place": lambda now: (
        (now / "pool/iso").unlink(),
        (now / "pool/iso").symlink_to("../web.raw"),
    ),
    "a directory in its place": lambda now: (
        (now / "pool/iso").unlink(),
        (now / "pool/iso").mkdir(),
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_data_is_seen(trees, change):
    change(trees.now)
    assert not trees.same()


def test_a_byte_is_seen_under_the_former_modification_time(trees):
    trees.keep(trees.now / "web.raw", _last_byte)
    assert not trees.same()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_while_bytes_are_compared_is_seen(trees, change):
    def check():
        trees.checked += 1
        if trees.checked == 4:  # the last mebibyte
            change(trees.now)

    trees.check = check
    assert not trees.same()


def test_links_are_not_followed_and_count_as_changed(trees):
    for each in (trees.now, trees.then):
        (each / "link").symlink_to("web.raw")
    assert not trees.same()


def test_deep_directories_are_not_the_same(trees):
    for each in (trees.now, trees.then):
        (each / "/".join(["d"] * 120)).mkdir(parents=True)
    assert not trees.same()


# -- the rollback ----------------------------------------------------------------------------------


class FileSystem:
    """The file system ``tank/web`` with the snapshot s1."""

    def __init__(self, world):
        self.world, self.context = world, world.context
        world.pool.create("tank")
        world.add_guest(disks={"vda": "tank/web"})
        world.pool.snapshot(["tank/web@s1"], {})
        self.root = world.root / "zfs/tank/web"
        files = [each for each in self.root.iterdir() if each.name != ".zfs"]
        self.then = world.snapshot_files("tank/web", "s1")
        self.then.mkdir(parents=True)
        for each in files:
            shutil.copy2(each, self.then)

    def discard(self):
        (newest,) = self.world.pool.snapshots(["tank/web"])
        discard_all_but_data(self.context, newest)

    def rolled_back(self):
        return "pool.rollback" in self.world.hooks.acts()


@pytest.fixture
def file_system(world):
    return FileSystem(world)


def test_a_file_system_with_the_same_data_is_rolled_back(file_system):
    file_system.discard()
    assert file_system.rolled_back()


def test_one_with_other_data_is_not(file_system):
    (file_system.root / "new").write_text("of another program")
    file_system.discard()
    assert not file_system.rolled_back()
    assert file_system.world.heard.notes == []


def test_one_that_cannot_be_compared_is_not_and_that_is_noted(file_system):
    shutil.rmtree(file_system.then)
    file_system.discard()
    assert not file_system.rolled_back()
    assert any("not compared with @s1" in each for each in file_system.world.heard.notes)


def test_a_signal_ends_the_comparison(file_system):
    for each in (file_system.root, file_system.then):
        (each / "image").write_bytes(b"image")
        os.utime(each / "image", ns=(0, 0))
    file_system.context.interrupt.signum = signal.SIGTERM
    with pytest.raises(InterruptedRunError):
        file_system.discard()
    assert not file_system.rolled_back()
