"""Files that a compromised emulator may leave where snaporch will read them as root.

Planted by a child that is the emulator's user (or swtpm's), so that the kernel refuses what that
user may not do; a case then shows that it may not.
"""

import hashlib
import os
import pwd
import socket
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MARKER = b"canary of root: "
GIANT = 4 << 40
_PEEK = 1 << 20
Plant = Callable[[Path, Path], None]
"""Called with the place, and a file of root's that is not the guest's business."""


# -- in the place of a file ---------------------------------------------------------------------


def _link(place: Path, canary: Path) -> None:
    place.symlink_to(canary)


def _relative_link(place: Path, canary: Path) -> None:
    place.symlink_to(os.path.relpath(canary, place.parent))


def _dangling_link(place: Path, canary: Path) -> None:
    place.symlink_to(canary.with_name("not-there-yet"))


def _hard_link(place: Path, canary: Path) -> None:
    os.link(canary, place)


def _fifo(place: Path, canary: Path) -> None:
    os.mkfifo(place)


def _device(place: Path, canary: Path) -> None:
    os.mknod(place, 0o600 | stat.S_IFCHR, os.makedev(1, 5))


def _socket(place: Path, canary: Path) -> None:
    os.chdir(place.parent)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(place.name)


def _directory(place: Path, canary: Path) -> None:
    (place / "below").mkdir(parents=True)


def _giant(place: Path, canary: Path) -> None:
    place.touch()
    os.truncate(place, GIANT)


def _unreadable(place: Path, canary: Path) -> None:
    place.write_bytes(b"x")
    place.chmod(0)


FILES: dict[str, Plant] = {
    "link": _link,
    "relative-link": _relative_link,
    "dangling-link": _dangling_link,
    "hard-link": _hard_link,
    "fifo": _fifo,
    "device": _device,
    "socket": _socket,
    "directory": _directory,
    "giant": _giant,
    "unreadable": _unreadable,
}


def _parent_link(place: Path, canary: Path) -> None:
    """The whole directory is a link to one of root's, which has a file of that name."""
    place.parent.rename(place.parent.with_name("moved-away"))
    place.parent.symlink_to(canary.parent)


NAMES = {
    "newline": b"a\nb.permall",
    "dash": b"-rf.permall",
    "255": b"n" * 247 + b".permall",
    "not-utf-8": b"\xff\xfe.permall",
    "shell": b"$(touch x)`id`'.permall",
}
WHOLE: dict[str, Plant] = FILES | {"parent-link": _parent_link}


def odd_names(place: Path) -> None:
    """Create files of every odd name beside it."""
    for name in NAMES.values():
        (place.parent / os.fsdecode(name)).write_bytes(b"odd")


# -- headers of overlays ------------------------------------------------------------------------


def _header(image: bytearray, offset: int, form: str, *values: int) -> None:
    struct.pack_into(form, image, offset, *values)


def _with_backing(image: bytearray, name: bytes) -> None:
    begin = 0x8000 if len(image) > 0x9000 else len(image) - 2048
    image[begin : begin + len(name)] = name
    _header(image, 8, ">QI", begin, len(name))


def _with_extension(image: bytearray, kind: int, text: bytes, length: int | None = None) -> None:
    begin = struct.unpack_from(">I", image, 100)[0]
    _header(image, begin, ">II", kind, len(text) if length is None else length)
    image[begin + 8 : begin + 8 + len(text)] = text
    after = begin + 8 + ((len(text) + 7) & ~7)
    _header(image, after, ">II", 0, 0)


def _data_file(image: bytearray, canary: Path) -> None:
    _header(image, 72, ">Q", struct.unpack_from(">Q", image, 72)[0] | 1 << 2)
    _with_extension(image, 0x44415441, bytes(canary))


HEADERS: dict[str, Callable[[bytearray, Path], object]] = {
    "backing-root": lambda image, canary: _with_backing(image, bytes(canary)),
    "backing-json": lambda image, canary: _with_backing(
        image, b'json:{"driver":"raw","file":{"driver":"file","filename":"%b"}}' % bytes(canary)
    ),
    "backing-nbd": lambda image, canary: _with_backing(image, b"nbd+unix:///x?socket=/run/x"),
    "data-file": _data_file,
    "data-file-unnamed": lambda image, canary: _header(image, 72, ">Q", 1 << 2),
    "format": lambda image, canary: _with_extension(image, 0xE2792ACA, b"qcow2"),
    "format-length": lambda image, canary: _with_extension(image, 0xE2792ACA, b"raw", 1 << 31),
    "size-huge": lambda image, canary: _header(image, 24, ">Q", 1 << 62),
    "size-less": lambda image, canary: _header(image, 24, ">Q", 512),
    "encrypted": lambda image, canary: _header(image, 32, ">I", 2),
    "header-length": lambda image, canary: _header(image, 100, ">I", 0xFFFFFFFF),
    "name-length": lambda image, canary: _header(image, 16, ">I", 0xFFFFFFF0),
    "name-offset": lambda image, canary: _header(image, 8, ">Q", 0xFFFFFFFFFFFFFFF0),
    "cluster-bits": lambda image, canary: _header(image, 20, ">I", 0xFFFFFFFF),
    "version": lambda image, canary: _header(image, 4, ">I", 99),
    "magic": lambda image, canary: _header(image, 0, ">I", 0),
    "tables-beyond": lambda image, canary: _header(image, 36, ">IQ", 1 << 30, 1 << 60),
    "nothing": lambda image, canary: image.clear(),
}


def forged(name: str, good: bytes, canary: Path) -> bytes:
    """An overlay with a forged header."""
    image = bytearray(good)
    HEADERS[name](image, canary)
    return bytes(image)


# -- acting as a user ----------------------------------------------------------------


def as_user(user: str, act: Callable[[], None]) -> bool:
    """Let a child process of that user do it; returns whether it was permitted."""
    account = pwd.getpwnam(user)
    child = os.fork()
    if child == 0:
        status = 2
        try:
            os.setgroups([])
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
            act()
            status = 0
        except PermissionError:
            status = 1
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1), status
    return status == 0


# -- files that must not change ---------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """The state of one file."""

    digest: str
    owner: tuple[int, int]
    mode: int
    size: int
    mtime_ns: int


def look(files: Iterable[Path], directories: Iterable[Path]) -> dict[Path, object]:
    """The content, owner, mode and time of each file, and the names in each directory."""
    found: dict[Path, object] = {}
    for path in files:
        status = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        owner = status.st_uid, status.st_gid
        found[path] = Seen(digest, owner, status.st_mode, status.st_size, status.st_mtime_ns)
    for directory in directories:
        status = directory.lstat()
        names = sorted(os.listdir(directory))
        found[directory] = (names, status.st_uid, status.st_gid, status.st_mode)
    return found


def leaks(places: Iterable[Path]) -> Iterator[Path]:
    """Regular files below ``places`` that begin with data of root's."""
    for place in (each for each in places if not each.is_symlink()):
        for root, _, names in os.walk(place):
            for name in names:
                path = Path(root, name)
                if not stat.S_ISREG(path.lstat().st_mode):
                    continue
                with path.open("rb") as stream:
                    if path.lstat().st_nlink == 1 and MARKER in stream.read(_PEEK):
                        yield path
