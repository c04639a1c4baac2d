"""The kernel's requests to a FUSE file system that is only read, and the answers; fuse(4).

Pure functions. What is answered is in :mod:`snaporch.extract.mounted_files`. The form is that of
version 7.31. A kernel has to offer 7.32, as each since 5.10 does. That it follows no link of a
guest is seen in the mount itself (:mod:`snaporch.extract.mount_point`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from snaporch.extract.guestfish_text import Entry

ROOT = 1
"""The number that the kernel has for the root."""
REQUEST_BYTES = 1 << 16
"""As much as is read at once. The kernel wants room for a page of data beside the headers."""
_VERSION, _MINOR = 7, 31
_LEAST = (7, 32)
_FOREVER = 1 << 31
"""Seconds for which an answer stays true: a snapshot does not change."""
_ASYNC_READ, _MAX_PAGES = 1 << 0, 1 << 22
_PAGES = 256
"""Pages that the kernel reads at once."""
_WRITE_BYTES = 4096
_UNKNOWN_INODE = 0xFFFFFFFF
_BLOCK, _SECTOR, _NAME = 4096, 512, 255
_HEADER = struct.Struct("<IIQQIIIHH")
_ANSWER = struct.Struct("<IiQ")
_INIT = struct.Struct("<IIII")
_INIT_ANSWER = struct.Struct("<IIIIHHIIHHI28x")
_ATTRIBUTES = struct.Struct("<QQQqqqIIIIIIIIII")
_ENTRY = struct.Struct("<QQQQII")
_ATTRIBUTES_VALID = struct.Struct("<QII")
_READ = struct.Struct("<QQI")
_FORGET = struct.Struct("<Q")
_FORGET_SOME = struct.Struct("<II")
_FORGET_ONE = struct.Struct("<QQ")
_NAME_ENTRY = struct.Struct("<QQII")
_SPACE = struct.Struct("<QQQQQIIII24x")


class Code(IntEnum):
    """The requests that are answered."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    READLINK = 5
    READ = 15
    STATFS = 17
    INIT = 26
    READDIR = 28
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the kernel."""

    code: int
    """A :class:`Code`, or another one."""
    number: int
    """The answer bears it."""
    node: int
    """The file, by the number that it was answered with."""
    body: bytes


def parse_request(data: bytes) -> Request:
    """Read what ``/dev/fuse`` gave; the kernel gives whole requests."""
    _, code, number, node, *_ = _HEADER.unpack_from(data)
    return Request(code, number, node, data[_HEADER.size :])


def answer(request: Request, body: bytes = b"", *, error: int = 0) -> bytes:
    """An answer.

    Args:
        error: an errno; then there is no ``body``.
    """
    return _ANSWER.pack(_ANSWER.size + len(body), -error, request.number) + body


def speaks(body: bytes) -> bool:
    """Whether the kernel's first request offers the least version, or a newer one."""
    major, minor, *_ = _INIT.unpack_from(body)
    return (major, minor) >= _LEAST


def first_answer(body: bytes) -> bytes:
    """The answer to the first request: the version, and how much is read at once."""
    ahead = _INIT.unpack_from(body)[2]
    flags = _ASYNC_READ | _MAX_PAGES
    return _INIT_ANSWER.pack(_VERSION, _MINOR, ahead, flags, 0, 0, _WRITE_BYTES, 1, _PAGES, 0, 0)


def looked_up_name(body: bytes) -> bytes:
    """The name that is looked up in a directory."""
    return body.partition(b"\0")[0]


def looked_up(node: int, entry: Entry) -> bytes:
    """A file that was looked up, and has the number ``node`` from now on."""
    return _ENTRY.pack(node, 0, _FOREVER, _FOREVER, 0, 0) + _attributes(node, entry)


def attributes(node: int, entry: Entry) -> bytes:
    """What a file is."""
    return _ATTRIBUTES_VALID.pack(_FOREVER, 0, 0) + _attributes(node, entry)


def _attributes(node: int, entry: Entry) -> bytes:
    seconds, nanoseconds = divmod(entry.mtime_ns, 10**9)
    sectors = -(-entry.size // _SECTOR)
    return _ATTRIBUTES.pack(
        *(node, entry.size, sectors, seconds, seconds, seconds),
        *(nanoseconds, nanoseconds, nanoseconds, entry.mode, 1, entry.uid, entry.gid),
        *(0, _BLOCK, 0),  # a device has the number 0:0
    )


def read_range(body: bytes) -> tuple[int, int]:
    """From where, and how many bytes, a file or a directory is read."""
    _, offset, size = _READ.unpack_from(body)
    return offset, size


def some_names(names: Sequence[bytes], start: int, size: int) -> bytes:
    """Names of a directory, from the number ``start`` on, as many as fit into ``size`` bytes."""
    found = bytearray()
    for number in range(start, len(names)):
        name = names[number]
        head = _NAME_ENTRY.pack(_UNKNOWN_INODE, number + 1, len(name), 0)
        one = head + name + bytes(-len(name) % 8)
        if len(found) + len(one) > size:
            break
        found += one
    return bytes(found)


def forgotten(request: Request) -> list[tuple[int, int]]:
    """The files that the kernel forgets, and how many lookups of each."""
    if request.code == Code.FORGET:
        return [(request.node, _FORGET.unpack_from(request.body)[0])]
    count, _ = _FORGET_SOME.unpack_from(request.body)
    end = _FORGET_SOME.size + count * _FORGET_ONE.size
    return list(_FORGET_ONE.iter_unpack(request.body[_FORGET_SOME.size : end]))


def no_space() -> bytes:
    """Room of a file system that is full."""
    return _SPACE.pack(0, 0, 0, 0, 0, _BLOCK, _NAME, _BLOCK, 0)
