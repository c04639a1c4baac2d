"""What guestfish is asked, and what it answers: words are quoted, answers are parsed.

Pure functions. The process is in :mod:`snaporch.extract.appliance`. An answer comes from programs
that have read a guest's file systems, so it is checked like the guest's own data.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass

_PLAIN = re.compile(rb"[A-Za-z0-9_./:@,+=-]")
_FIELD = re.compile(r"(st_[a-z_]+): (-?[0-9]{1,19})")
_NEEDED = ("st_mode", "st_uid", "st_gid", "st_size", "st_mtime_sec", "st_mtime_nsec")
_MOST = {
    "st_mode": (1 << 16) - 1,
    "st_uid": (1 << 32) - 2,
    "st_gid": (1 << 32) - 2,
    "st_size": (1 << 63) - 1,
}
_PAIR = re.compile(r"(?P<key>.{1,4096}?): (?P<value>.{1,4096})")
_MAX_SECONDS = 1 << 62
_MAX_NAME = 255
"""Bytes of a name (NAME_MAX); a longer one cannot be written here."""
ENCRYPTED = ("crypto_LUKS", "BitLocker")
"""What libguestfs calls an encrypted partition."""
_UNMOUNTABLE = (*ENCRYPTED, "swap", "unknown", "LVM2_member", "linux_raid_member", "squashfs")


class AnswerError(ValueError):
    """guestfish answered something that it does not answer."""


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A file system in a guest's disks."""

    device: str
    """As libguestfs names it, such as ``/dev/sda1`` or ``/dev/vg/root``."""
    kind: str

    @property
    def is_encrypted(self) -> bool:
        """Whether it is a container that needs a key."""
        return self.kind in ENCRYPTED

    @property
    def is_mountable(self) -> bool:
        """Whether it may hold files."""
        return self.kind not in _UNMOUNTABLE


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, directory, link or other name in a guest's file system."""

    name: bytes
    mode: int
    """Type and permissions (``st_mode``)."""
    uid: int
    gid: int
    size: int
    mtime_ns: int
    link: bytes | None = None
    """Where a link leads."""

    @property
    def kind(self) -> str:
        """``file``, ``directory``, ``link`` or ``other``."""
        for test, name in (
            (stat.S_ISREG, "file"),
            (stat.S_ISDIR, "directory"),
            (stat.S_ISLNK, "link"),
        ):
            if test(self.mode):
                return name
        return "other"


def quoted(word: str | bytes) -> str:
    """A word as guestfish reads it: in double quotes, every unusual byte as its number.

    Args:
        word: of any bytes but NUL.

    Raises:
        ValueError: it has a NUL.
    """
    data = word.encode("utf-8", "surrogateescape") if isinstance(word, str) else word
    if b"\0" in data:
        raise ValueError("a NUL in a word")
    parts = (bytes((byte,)) for byte in data)
    return '"' + "".join(p.decode() if _PLAIN.match(p) else f"\\x{p[0]:02x}" for p in parts) + '"'


def parse_names(answer: bytes, most: int) -> list[bytes]:
    """The names of a directory, from ``ls0``; sorted.

    Args:
        answer: the names, each with a NUL behind it.
        most: the number of names that are accepted.

    Raises:
        AnswerError: a name is none of a file in a directory, comes twice, or there are too many.
    """
    names = answer.split(b"\0")
    if names.pop() != b"":
        raise AnswerError("a list of names has no end")
    if len(names) > most:
        raise AnswerError(f"a directory has more than {most} names")
    for name in names:
        if name in (b"", b".", b"..") or b"/" in name or len(name) > _MAX_NAME:
            raise AnswerError(f"{name[:_MAX_NAME]!r} is no name of a file")
    if len(set(names)) != len(names):
        raise AnswerError("a directory has a name twice")
    return sorted(names)


def parse_entry(name: bytes, answer: bytes) -> Entry:
    """An entry, from the answer to ``lstatns``.

    Raises:
        AnswerError: a number is missing, or out of its range.
    """
    lines = answer.decode("ascii", "replace").splitlines()
    fields = (_FIELD.fullmatch(line) for line in lines)
    found = {field[1]: int(field[2]) for field in fields if field}
    if missing := [key for key in _NEEDED if key not in found]:
        raise AnswerError(f"{missing[0]} is missing")
    seconds, nanoseconds = found["st_mtime_sec"], found["st_mtime_nsec"]
    if abs(seconds) > _MAX_SECONDS // 10**9 or not 0 <= nanoseconds < 10**9:
        seconds = nanoseconds = 0  # no host can set such a time
    if wrong := [key for key, most in _MOST.items() if not 0 <= found[key] <= most]:
        raise AnswerError(f"{wrong[0]} is out of its range")
    return Entry(
        name=name,
        mode=found["st_mode"],
        uid=found["st_uid"],
        gid=found["st_gid"],
        size=found["st_size"],
        mtime_ns=seconds * 10**9 + nanoseconds,
    )


def parse_pairs(answer: bytes) -> dict[str, str]:
    """The lines ``KEY: VALUE`` of an answer, such as devices and the types of their content."""
    lines = answer.decode("utf-8", "backslashreplace").splitlines()
    found = (_PAIR.fullmatch(line) for line in lines)
    return {match["key"]: match["value"] for match in found if match}


def parse_file_systems(answer: bytes) -> list[FileSystem]:
    """What is in a guest's disks, from ``list-filesystems``."""
    return [FileSystem(device, kind) for device, kind in sorted(parse_pairs(answer).items())]


def mount_order(answer: bytes) -> list[tuple[str, str]]:
    """The mount points of a guest's system, from ``inspect-get-mountpoints``; parents first.

    Returns:
        Pairs of mount point and device.
    """
    pairs = parse_pairs(answer).items()
    return sorted((p for p in pairs if p[0].startswith("/")), key=lambda p: (len(p[0]), p[0]))


def disk_of(device: str, targets: Iterable[str]) -> str | None:
    """The target of the disk that a device is on; None if it may be on several, as with LVM.

    Args:
        device: as libguestfs names it.
        targets: of the disks, in the order in which the appliance has them.
    """
    found = re.fullmatch(r"/dev/sd([a-z]+)[0-9]*", device)
    if found is None:
        return None
    number = 0
    for letter in found[1]:
        number = number * 26 + ord(letter) - ord("a") + 1
    names = list(targets)
    return names[number - 1] if number <= len(names) else None
