"""Files of a guest are written below one directory, whatever the guest's file system has."""

import errno
import os
import stat

import pytest

from snaporch.errors import InterruptedRunError, RefusedError, RunFailedError
from snaporch.extract.copy_guest_files import MAX_DEPTH, Copy, destination
from snaporch.extract.guestfish_text import Entry

THEN = 1_600_000_000 * 10**9


def entry(name, kind=stat.S_IFREG, size=0, mode=0o644, link=None):
    return Entry(name, kind | mode, os.geteuid(), os.getegid(), size, THEN, link)


def directory(name, mode=0o755):
    return entry(name, stat.S_IFDIR, mode=mode)


class Tree:
    """A guest's files: directories by path, and data by path."""

    def __init__(self, directories, data):
        self.directories, self.data = directories, data

    def entries(self, path):
        return self.directories[path]

    def read(self, path, into):
        for start in range(0, len(self.data[path]), 4):
            into(self.data[path][start : start + 4])


@pytest.fixture
def to(tmp_path):
    made = tmp_path / "out"
    made.mkdir()
    return made


def copy(tree, path, found, to, check=lambda: None, *, keep_owner=False):
    target = destination(path, to)
    return Copy("web@s1", tree, check, keep_owner=keep_owner).run(path, found, target)


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
    link = entry(b"sub", stat.S_IFLNK, link=os.fsencode(outside))
    tree = Tree({b"/d": [link, directory(b"sub")], b"/d/sub": [entry(b"x")]}, {b"/d/sub/x": b""})
    with pytest.raises(RunFailedError, match="File exists"):
        copy(tree, b"/d", directory(b"d"), to)
    assert list(outside.iterdir()) == []
    assert list(to.iterdir()) == []
    copy(Tree({b"/d": [link]}, {}), b"/d", directory(b"d"), to)
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
        def entries(self, path):
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


def test_what_an_earlier_copy_left_is_removed(to):
    (to / ".d.partial").mkdir()
    (to / ".d.partial" / "old").write_text("x")
    copy(Tree({b"/d": []}, {}), b"/d", directory(b"d"), to)
    assert [path.name for path in to.iterdir()] == ["d"]
    assert list((to / "d").iterdir()) == []


def test_the_owner_is_kept_only_on_request(to, monkeypatch):
    given = []
    monkeypatch.setattr(os, "fchown", lambda _descriptor, *who: given.append(who))
    copy(Tree({}, {b"/x": b""}), b"/x", entry(b"x"), to)
    assert given == []
    copy(Tree({}, {b"/y": b""}), b"/y", entry(b"y"), to, keep_owner=True)
    assert given == [(os.geteuid(), os.getegid())]
