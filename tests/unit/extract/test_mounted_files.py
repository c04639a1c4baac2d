"""What the kernel is answered about a guest's files."""

import errno
import stat
import struct

import pytest

from snaporch.errors import UnavailableError
from snaporch.extract import mounted_files as module
from snaporch.extract.fuse_messages import Code
from snaporch.extract.guestfish_text import Entry
from snaporch.extract.mounted_files import BLOCK, MountedFiles

ROOT = 1
OPEN = 14


def entry(name, kind=stat.S_IFREG, size=0, mode=0o644):
    return Entry(name, kind | mode, 1000, 100, size, 1_700_000_000_123_456_789)


class Guest:
    """A guest's files in memory; the methods count what they are asked for."""

    def __init__(self, data, links=()):
        self.data = data
        self.links = dict(links)
        self.asked = []
        self.damaged = set()
        self.names_in = {}

    def _check(self, path):
        if path in self.damaged:
            raise OSError(errno.EIO, "cannot be read")

    def names(self, directory):
        self.asked.append(("names", directory))
        self._check(directory)
        under = directory.rstrip(b"/") + b"/"
        paths = [*self.data, *self.links]
        return sorted({p[len(under) :].split(b"/")[0] for p in paths if p.startswith(under)})

    def entries(self, directory, names):
        self.asked.append(("entries", *names))
        paths = [directory.rstrip(b"/") + b"/" + each for each in names]
        if any(each in self.damaged for each in paths):
            self._check(paths[0])
            paths, names = paths[:1], names[:1]
        return [self._entry(*each) for each in zip(paths, names, strict=True)]

    def _entry(self, path, name):
        if path in self.links:
            return entry(name, stat.S_IFLNK, len(self.links[path]), 0o777)
        if path in self.data:
            return entry(name, size=len(self.data[path]))
        return entry(name, stat.S_IFDIR, mode=0o755)

    def link(self, path):
        return self.links[path]

    def part(self, path, offset, size):
        self.asked.append(("part", path, offset, size))
        self._check(path)
        return self.data[path][offset : offset + size]


class Kernel:
    """The other side of the device."""

    def __init__(self, files):
        self.side = MountedFiles(files, entry(b"", stat.S_IFDIR, mode=0o755))

    def ask(self, code, node=ROOT, body=b""):
        """The body of the answer; the errno of an error."""
        head = struct.pack("<IIQQIIIHH", 40 + len(body), code, 7, node, 0, 0, 0, 0, 0)
        answer = self.side.answer(head + body)
        if answer is None:
            return None
        length, error, number = struct.unpack_from("<IiQ", answer)
        assert (length, number) == (len(answer), 7)
        assert error == 0 or len(answer) == 16
        return -error if error else answer[16:]

    def look_up(self, name, node=ROOT):
        """The number of a file; the errno of an error."""
        answer = self.ask(Code.LOOKUP, node, name + b"\0")
        if isinstance(answer, int):
            return answer, None
        assert len(answer) == 128
        return struct.unpack_from("<Q", answer)[0], answer[40:]

    def read(self, node, offset, size):
        return self.ask(Code.READ, node, struct.pack("<QQIIQII", 0, offset, size, 0, 0, 0, 0))

    def names(self, node=ROOT, size=4096):
        """All names of a directory, as several requests give them."""
        found, offset = [], 0
        while True:
            body = struct.pack("<QQIIQII", 0, offset, size, 0, 0, 0, 0)
            answer = self.ask(Code.READDIR, node, body)
            if isinstance(answer, int):
                return answer
            if not answer:
                return found
            assert len(answer) <= size
            while answer:
                _, offset, length, _ = struct.unpack_from("<QQII", answer)
                found.append(answer[24 : 24 + length])
                answer = answer[24 + -(-length // 8) * 8 :]


@pytest.fixture
def guest():
    return Guest({b"/etc/hosts": b"localhost", b"/etc/odd\n\xff": b""}, {b"/way": b"/etc/shadow"})


@pytest.fixture
def kernel(guest):
    return Kernel(guest)


def test_the_first_answer_has_the_version(kernel):
    answer = kernel.ask(Code.INIT, 0, struct.pack("<IIII", 7, 45, 131072, 0xFFFFFFFF) + bytes(48))
    assert struct.unpack_from("<IIII", answer) == (7, 31, 131072, 1 | 1 << 22)
    assert len(answer) == 64
    kernel.ask(Code.INIT, 0, struct.pack("<IIII", 7, 32, 131072, 0) + bytes(48))
    with pytest.raises(UnavailableError, match=r"older than 5\.10"):  # it follows a guest's links
        kernel.ask(Code.INIT, 0, struct.pack("<IIII", 7, 31, 131072, 0))


def test_files_are_found_and_read(kernel):
    etc, _ = kernel.look_up(b"etc")
    hosts, attributes = kernel.look_up(b"hosts", etc)
    values = struct.unpack("<QQQqqqIIIIIIIIII", attributes)
    assert values[:4] == (hosts, 9, 1, 1_700_000_000)
    assert values[6] == 123_456_789
    assert values[9:13] == (stat.S_IFREG | 0o644, 1, 1000, 100)
    assert kernel.ask(Code.GETATTR, hosts)[16:] == attributes
    assert kernel.read(hosts, 0, 4096) == b"localhost"
    assert kernel.read(hosts, 5, 2) == b"ho"
    assert kernel.read(hosts, 9, 4096) == b""
    way, _ = kernel.look_up(b"way")
    assert kernel.ask(Code.READLINK, way) == b"/etc/shadow"


def test_a_name_that_does_not_exist_is_not_asked_for_twice(kernel, guest):
    for _ in range(2):
        assert kernel.look_up(b"none")[0] == errno.ENOENT
    assert guest.asked == [("names", b"/")]


def test_names_come_in_turns():
    names = [b"%03d" % number + b"x" * 100 for number in range(100)]
    kernel = Kernel(Guest({b"/" + each: b"" for each in names}))
    assert kernel.names(size=500) == [b".", b"..", *names]


def test_names_that_follow_are_asked_for_at_once():
    names = [b"%03d" % number for number in range(20)]
    guest = Guest({b"/" + each: b"" for each in names})
    kernel = Kernel(guest)
    for each in names:
        kernel.look_up(each)
    asked = [words[1:] for words in guest.asked if words[0] == "entries"]
    assert asked == [tuple(names[:16]), tuple(names[16:])]


def test_a_damaged_file_is_an_error_of_it_alone(kernel, guest):
    guest.damaged = {b"/etc/hosts"}
    etc, _ = kernel.look_up(b"etc")
    assert kernel.look_up(b"hosts", etc)[0] == errno.EIO
    assert kernel.look_up(b"odd\n\xff", etc)[1] is not None
    guest.damaged = {b"/"}
    other = Kernel(guest)
    assert other.names() == errno.EIO
    assert other.look_up(b"etc")[0] == errno.EIO  # which is not: no such file


def test_a_file_that_is_shorter_than_it_should_be_is_an_error(kernel, guest):
    etc, _ = kernel.look_up(b"etc")
    hosts, _ = kernel.look_up(b"hosts", etc)
    guest.data[b"/etc/hosts"] = b"local"
    assert kernel.read(hosts, 0, 4096) == errno.EIO


def test_data_are_read_in_blocks_that_are_kept(monkeypatch):
    monkeypatch.setattr(module, "MAX_BLOCKS", 2)
    data = bytes(range(256)) * (BLOCK * 3 // 256) + b"end"
    guest = Guest({b"/big": data})
    kernel = Kernel(guest)
    big, _ = kernel.look_up(b"big")
    assert kernel.read(big, BLOCK - 10, 30) == data[BLOCK - 10 : BLOCK + 20]
    assert kernel.read(big, 0, 100) == data[:100]
    assert kernel.read(big, 3 * BLOCK, 100) == b"end"
    assert kernel.read(big, BLOCK, 100) == data[BLOCK : BLOCK + 100]
    parts = [words[2:] for words in guest.asked if words[0] == "part"]
    assert parts == [(0, BLOCK), (BLOCK, BLOCK), (3 * BLOCK, 3), (BLOCK, BLOCK)]


def test_directories_are_kept_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(module, "MAX_NAMES", 3)
    guest = Guest({b"/a/1": b"", b"/a/2": b"", b"/b/1": b"", b"/b/2": b""})
    kernel = Kernel(guest)
    a, _ = kernel.look_up(b"a")
    b, _ = kernel.look_up(b"b")
    for node in (a, b, a):
        assert kernel.names(node) == [b".", b"..", b"1", b"2"]
    assert guest.asked.count(("names", b"/a")) == 2


def test_what_the_kernel_forgets_is_forgotten(kernel):
    etc, _ = kernel.look_up(b"etc")
    assert kernel.look_up(b"etc")[0] == etc
    kernel.ask(Code.FORGET, etc, struct.pack("<Q", 1))
    assert not isinstance(kernel.ask(Code.GETATTR, etc), int)
    some = struct.pack("<IIQQQQ", 2, 0, etc, 1, ROOT, 5)
    assert kernel.ask(Code.BATCH_FORGET, 0, some) is None
    assert kernel.ask(Code.GETATTR, etc) == errno.ESTALE
    assert not isinstance(kernel.ask(Code.GETATTR, ROOT), int)
    assert kernel.look_up(b"etc")[0] not in (etc, errno.ENOENT)


def test_other_requests_are_not_carried_out(kernel):
    etc, _ = kernel.look_up(b"etc")
    assert kernel.ask(OPEN, ROOT) == errno.ENOSYS
    assert kernel.read(etc, 0, 10) == errno.EINVAL
    assert kernel.ask(Code.INTERRUPT, 0, bytes(8)) is None
    assert struct.unpack_from("<QQ", kernel.ask(Code.STATFS)) == (0, 0)
