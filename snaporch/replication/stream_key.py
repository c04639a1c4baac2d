"""The key that a raw stream brings: ZFS sets it on the whole dataset that receives the stream.

OpenZFS keeps the wrapped key of a dataset in one place for all of its snapshots. A raw increment
replaces it (``dsl_crypto_recv_raw_key_sync``); ZFS only compares ``DSL_CRYPTO_GUID``, which a
sender can choose. So the older snapshots would need the key of the sender, or could never be
read again. The key is in the payload of the first record: a packed ``nvlist`` (``nvpair.c``), with
the ``nvlist`` ``crypt_keydata`` in it.

What is read here must be what the kernel reads. So each name may occur once, and only those types
are accepted that ``zfs send`` writes.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Mapping

from snaporch.errors import RefusedError
from snaporch.replication.stream_header import HEADER_BYTES

MAX_PAYLOAD_BYTES = 1 << 16
"""Of the first record; that of a raw stream has less than 2 KiB."""
_KEY = "crypt_keydata"
_OF_SNAPSHOT = {
    "portable_mac",
    "mdn_checksum",
    "mdn_compress",
    "mdn_nlevels",
    "mdn_blksz",
    "mdn_indblkshift",
    "mdn_nblkptr",
    "mdn_maxblkid",
    "to_ivset_guid",
    "from_ivset_guid",
}
"""In ``crypt_keydata``, what belongs to the snapshot and not to the key."""
_PACKED = bytes([0, sys.byteorder == "little", 0, 0])
"""``nvs_header_t``: not XDR, and the byte order of this machine; ZFS accepts no other."""
_LIST = struct.Struct("=iI")
"""Version and flags of an ``nvlist_t``; a nested one has 16 bytes more."""
_PAIR = struct.Struct("=ihhii")
"""``nvpair_t``: size, size of the name, unused, number of elements, type."""
_NESTED_BYTES = 24
_NVLIST = 19
_UINT64 = 8
_SIZES = {_UINT64: 8, 16: 8, 26: 1}
"""Bytes of an element: ``DATA_TYPE_UINT64``, ``…_UINT64_ARRAY`` and ``…_UINT8_ARRAY``."""


def payload_bytes(header: bytes) -> int:
    """How many bytes follow the first record of a raw stream, before the next one.

    Args:
        header: the first :data:`~snaporch.replication.stream_header.HEADER_BYTES` bytes, which
            :func:`~snaporch.replication.stream_header.sent_snapshot` has accepted.

    Raises:
        RefusedError: they are more than any raw stream has.
    """
    order = "<" if header[8] else ">"  # the magic follows
    (size,) = struct.unpack_from(order + "I", header, 4)
    if size > MAX_PAYLOAD_BYTES:
        raise _refused(f"its first record has {size} bytes")
    return int(size)


def key_in(payload: bytes) -> dict[str, bytes]:
    """The key in the payload of the first record, as ZFS would store it: values by name.

    Raises:
        RefusedError: it has none, or is not as ``zfs send`` of this byte order writes it.
    """
    try:
        pairs = _whole(payload)
    except (ValueError, struct.error) as error:
        raise _refused(f"its key cannot be read ({error})") from error
    key = {name: value for name, value in pairs.items() if name not in _OF_SNAPSHOT}
    if not key:
        raise _refused("it has no key")
    return key


def key_digest(sent: Mapping[str, bytes], own: Mapping[str, bytes]) -> str:
    """What names the key of a stream if it is another one than that of the copy; empty if not.

    Args:
        sent: the key in the stream.
        own: the key of the copy, as this machine's ZFS sends it. Only what it knows counts.
    """
    if all(sent.get(name) == value for name, value in own.items()):
        return ""
    text = b"".join(
        b"%s %d %s" % (name.encode(), len(sent.get(name, b"")), sent.get(name, b""))
        for name in sorted(own)
    )
    return hashlib.sha256(text).hexdigest()[:32]


def payload_of(beginning: bytes) -> bytes:
    """The payload behind the first record of a stream."""
    return beginning[HEADER_BYTES:]


def _whole(payload: bytes) -> dict[str, bytes]:
    if payload[: len(_PACKED)] != _PACKED:
        raise ValueError("byte order or encoding")
    pairs, end = _pairs(payload, len(_PACKED) + _LIST.size, nested=False)
    if end != len(payload):
        raise ValueError("bytes behind the end")
    return pairs


def _pairs(data: bytes, at: int, *, nested: bool) -> tuple[dict[str, bytes], int]:
    """The values of a nested list, or of those nested in this one; and where the list ends."""
    found: dict[str, bytes] = {}
    inner: dict[str, bytes] = {}
    while True:
        (size,) = struct.unpack_from("=i", data, at)
        if size == 0:
            return found if nested else inner, at + 4
        _, name_size, _, count, kind = _PAIR.unpack_from(data, at)
        start, end = at + _PAIR.size, at + size
        name = data[start : start + name_size]
        value = (start + name_size + 7 - at) // 8 * 8 + at
        if not _PAIR.size + name_size <= size <= len(data) - at:
            raise ValueError("sizes")
        text = name[:-1].decode("ascii")
        if name[-1:] != b"\0" or not text or "\0" in text or text in found:
            raise ValueError("names")
        at = end
        if kind == _NVLIST and not nested and text == _KEY and end - value == _NESTED_BYTES:
            inner, at = _pairs(data, end, nested=True)
            found[text] = b""
            continue
        if kind not in _SIZES or not 0 <= _SIZES[kind] * count <= end - value:
            raise ValueError("types")
        if kind == _UINT64 and count != 1:
            raise ValueError("numbers")
        size = _SIZES[kind] * count
        found[text] = struct.pack("=ii", kind, count) + data[value : value + size]


def _refused(reason: str) -> RefusedError:
    return RefusedError("zfs receive", f"the raw stream is refused: {reason}")
