"""Files of a guest are written below one directory, whatever the guest's file system has."""

import errno
import os
import stat

import pytest

from snaporch.errors import InterruptedRunError, RefusedError, RunFailedError
from snaporch.extract.copy_guest_files import (
    MAX_DEPTH,
    MAX_HELD,
    Copy,
    destination,
    rename_complete,
)
from snaporch.extract.guestfish_text import Entry
from snaporch.reserve import RoomWatch

THEN = 1_600_000_000 * 10**9


def entry(name, kind=stat.S_IFREG, size=0, mode=0o644):
    return Entry(name, kind | mode, os.geteuid(), os.getegid(), size, THEN)


def directory(name, mode=0o755):
    return entry(name, stat.S_IFDIR, mode=mode)


class Tree:
    """A guest's files: directories by path, and data by path."""

    def __init__(self, directories, data, links=None):
        self.directories, self.data, self.links = directories, data, links or {}

    def names(self, path):
        return [each.name for each in self.directories[path]]

    def entries(self, path, names):
        return self.directories[path]

    def link(self, path):
        return self.links[path]

    def read(self, path, into):
        for start in range(0, len(self.data[path]), 4):
            into(self.data[path][start : start + 4])


@pytest.fixture
def to(tmp_path):
    made = tmp_path / "out"
    made.mkdir()
    return made


def copy(tree, path, found, to, check=lambda: None, *, room=None, keep_owner=False):
    target = destination(path, to)
    copying = Copy("web@s1", tree, check, room or RoomWatch(to), keep_owner=keep_owner)
    return copying.run(path, found, target)


def test_a_file_with_its_mode_and_time(to):
    done = copy(Tree({}, {b"/etc/hello": b"hello world"}), b"/etc/hello", entry(b"", size=11), to)
    found = to / "hello"
    assert found.read_bytes() == b"hello world"
    assert (found.stat().st_mtime_ns, found.stat().st_mode & 0o7777) == (THEN, 0o644)
    assert (done.files, done.bytes, done.path, done.left_out) == (1, 11, str(found), [])


def test_a_directory_with_odd_names(to):
    names = [b"a\nb", b"esc\x1b[31m", b"it's", b"\xff\xfe", b"-rf", b"$(id)"]
    tree = Tree(
        {b"/d": [*(entry(name, size=1) for name in names), directory(b"sub")], b"/d/sub": []},
        {b"/d/" + name: b"x" for name in names},
    )
    done = copy(tree, b"/d", directory(b"d", 0o750), to)
    assert sorted(os.listdir(os.fsencode(to / "d"))) == sorted([*names, b"sub"])
    assert (to / "d").stat().st_mode & 0o7777 == 0o750
    assert (to / "d").stat().st_mtime_ns == THEN
    assert done.files == len(names)


def test_a_link_is_made_and_never_followed(to, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    link, links = entry(b"sub", stat.S_IFLNK), {b"/d/sub": os.fsencode(outside)}
    tree = Tree(
        {b"/d": [link, directory(b"sub")], b"/d/sub": [entry(b"x")]}, {b"/d/sub/x": b""}, links
    )
    with pytest.raises(RunFailedError, match="File exists"):
        copy(tree, b"/d", directory(b"d"), to)
    assert list(outside.iterdir()) == []
    assert list(to.iterdir()) == []
    copy(Tree({b"/d": [link]}, {}, links), b"/d", directory(b"d"), to)
    assert os.readlink(to / "d" / "sub") == str(outside)


def test_nothing_becomes_a_device_or_runs_as_another_user(to):
    kinds = (stat.S_IFBLK, stat.S_IFCHR, stat.S_IFIFO, stat.S_IFSOCK)
    others = [entry(b"%d" % number, kind) for number, kind in enumerate(kinds)]
    tree = Tree({b"/d": [*others, entry(b"su", mode=0o6755)]}, {b"/d/su": b""})
    done = copy(tree, b"/d", directory(b"d", 0o1777), to)
    assert [path.name for path in (to / "d").iterdir()] == ["su"]
    assert (to / "d" / "su").stat().st_mode & 0o7777 == 0o755
    assert (to / "d").stat().st_mode & 0o7777 == 0o777
    assert done.left_out == ["/d/0", "/d/1", "/d/2", "/d/3"]


@pytest.mark.parametrize(("data", "how"), [(b"12345", "shorter"), (b"1234567890", "longer")])
def test_a_file_of_another_length_than_its_file_system_says_is_an_error(to, data, how):
    with pytest.raises(RunFailedError, match=f"it is {how} than its file system says"):
        copy(Tree({}, {b"/x": data}), b"/x", entry(b"x", size=7), to)
    assert list(to.iterdir()) == []


def test_no_room(to):
    with pytest.raises(RunFailedError, match=os.strerror(errno.ENOSPC)):
        copy(Tree({}, {}), b"/x", entry(b"x", size=1 << 62), to)
    assert list(to.iterdir()) == []


def test_a_signal_leaves_nothing(to):
    calls = []

    def check():
        calls.append(1)
        if len(calls) == 3:
            raise InterruptedRunError("web@s1", "stopped by SIGTERM", 15)

    tree = Tree({b"/d": [entry(b"a", size=8)]}, {b"/d/a": b"12345678"})
    with pytest.raises(InterruptedRunError):
        copy(tree, b"/d", directory(b"d"), to, check)
    assert list(to.iterdir()) == []


def test_directories_without_end_are_refused(to):
    class Endless(Tree):
        def names(self, path):
            return [b"d"]

        def entries(self, path, names):
            return [directory(b"d")]

    with pytest.raises(RefusedError, match="too deep"):
        copy(Endless({}, {}), b"/d", directory(b"d"), to)
    assert list(to.iterdir()) == []
    assert MAX_DEPTH < 500  # each has a descriptor open


@pytest.mark.parametrize("kind", [stat.S_IFBLK, stat.S_IFIFO, stat.S_IFLNK])
def test_only_files_and_directories_are_copied(to, kind):
    with pytest.raises(RefusedError, match="neither a file nor a directory"):
        copy(Tree({}, {}), b"/x", entry(b"x", kind), to)


@pytest.mark.parametrize("path", [b"/", b"/etc/..", b"//", b"/."])
def test_a_path_without_a_last_name_has_no_destination(to, path):
    with pytest.raises(RefusedError, match="no name"):
        destination(path, to)


def test_nothing_is_overwritten(to):
    (to / "x").symlink_to("nowhere")
    with pytest.raises(RefusedError, match="exists already"):
        destination(b"/etc/x", to)
    with pytest.raises(RefusedError, match="is not a directory"):
        destination(b"/etc/x", to / "none")
    assert os.readlink(to / "x") == "nowhere"


def test_a_name_like_that_of_a_partial_copy_is_left_alone(to):
    (to / ".d.partial").mkdir()
    (to / ".d.partial" / "precious").write_text("x")
    copy(Tree({b"/d": []}, {}), b"/d", directory(b"d"), to)
    assert sorted(path.name for path in to.iterdir()) == [".d.partial", "d"]
    assert (to / ".d.partial" / "precious").read_text() == "x"


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_of_two_copies_to_one_name_the_first_that_ends_is_kept_whole(to, kind):
    """The other one begins when this one has half of its data."""

    class Second(Tree):
        def read(self, path, into):
            into(b"2222")
            first = Tree({b"/x": [entry(b"f", size=8)]}, dict.fromkeys((b"/x", b"/x/f"), b"1" * 8))
            Copy("web@mon", first, lambda: None, RoomWatch(to), keep_owner=False).run(
                b"/x", found, target
            )
            into(b"2222")

        def entries(self, path, names):
            return [entry(b"f", size=8)]

        def names(self, path):
            return [b"f"]

    found = entry(b"x", size=8) if kind == "file" else directory(b"x")
    target = destination(b"/x", to)
    (to / "other").touch()
    with pytest.raises(RunFailedError, match="File exists"):
        Copy("web@tue", Second({}, {}), lambda: None, RoomWatch(to), keep_owner=False).run(
            b"/x", found, target
        )
    assert sorted(path.name for path in to.iterdir()) == ["other", "x"]
    data = target if kind == "file" else target / "f"
    assert data.read_bytes() == b"1" * 8


def test_a_name_that_appears_meanwhile_is_not_overwritten(to):
    (to / "partial").mkdir()
    (to / "file").write_text("new")
    (to / "x").mkdir()
    (to / "x" / "precious").write_text("x")
    parent = os.open(to, os.O_RDONLY)
    for partial in ("partial", "file"):
        with pytest.raises(FileExistsError):
            rename_complete(partial, "x", parent)
    os.close(parent)
    assert (to / "x" / "precious").read_text() == "x"


def test_the_longest_name_is_copied(to):
    name = b"x" * 255
    copy(Tree({}, {b"/" + name: b""}), b"/" + name, entry(name), to)
    assert os.listdir(os.fsencode(to)) == [name]


def test_names_that_are_in_memory_at_once_are_bounded(to):
    class Wide(Tree):
        def names(self, path):
            return [b"d"] * (MAX_HELD // 3)

        def entries(self, path, names):
            return [directory(b"d")]

    with pytest.raises(RefusedError, match="/d/d/d: more than 400000 names"):
        copy(Wide({}, {}), b"/d", directory(b"d"), to)
    assert list(to.iterdir()) == []
    tree = Tree({b"/d": [directory(b"%d" % n) for n in range(4)]}, {})
    tree.directories |= {b"/d/%d" % n: [] for n in range(4)}
    once = [b"x"] * (MAX_HELD - 4)
    tree.names = lambda path: once if path != b"/d" else [b"0", b"1", b"2", b"3"]
    copy(tree, b"/d", directory(b"d"), to)  # one after the other is no matter


def test_the_owner_is_kept_only_on_request(to, monkeypatch):
    given = []
    monkeypatch.setattr(os, "fchown", lambda _descriptor, *who: given.append(who))
    copy(Tree({}, {b"/x": b""}), b"/x", entry(b"x"), to)
    assert given == []
    copy(Tree({}, {b"/y": b""}), b"/y", entry(b"y"), to, keep_owner=True)
    assert given == [(os.geteuid(), os.getegid())]


class Room:
    """A watch on a file system with so many bytes for others to write."""

    def __init__(self, free):
        self.free = free

    def wrote(self, count):
        self.free -= count
        if self.free < 0:
            raise RunFailedError("/out", "has 0 MiB left")


@pytest.mark.parametrize(("count", "size"), [(1, 1 << 20), (100, 20_000), (1000, 0)])
def test_what_a_guest_has_does_not_use_up_the_room_of_others(to, count, size):
    """The guest says how much there is: one file of many names, or many empty ones."""
    names = [entry(b"f%d" % number, size=size) for number in range(count)]
    tree = Tree({b"/d": names}, {})
    tree.read = lambda _path, into: into(bytes(size))
    with pytest.raises(RunFailedError, match="0 MiB left"):
        copy(tree, b"/d", directory(b"d"), to, room=Room(1_000_000))
    assert list(to.iterdir()) == []
    copy(tree, b"/d", directory(b"d"), to, room=Room(1 << 40))
