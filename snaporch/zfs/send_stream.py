"""The records of a ``zfs send`` stream of this host (OpenZFS: ``dmu_replay_record_t``).

What a stream of another machine says of itself is read by
:mod:`snaporch.replication.stream_header`.
"""

from __future__ import annotations

import struct
from typing import IO

END = 5
"""``DRR_END``: the last record."""
_RECORD_BYTES = 312
_TYPE_AND_PAYLOAD = struct.Struct("=II")


def beginning(stream: IO[bytes]) -> bytes | None:
    """The first record and its payload; ``None`` if the stream ends."""
    first = stream.read(_RECORD_BYTES)
    if len(first) < _RECORD_BYTES:
        return None
    _, size = _TYPE_AND_PAYLOAD.unpack_from(first)
    payload = stream.read(size)
    return first + payload if len(payload) == size else None


def second_record(stream: IO[bytes]) -> int | None:
    """The type of the record behind the first one and its payload; ``None`` if the stream ends."""
    if beginning(stream) is None:
        return None
    second = stream.read(_RECORD_BYTES)
    if len(second) < _RECORD_BYTES:
        return None
    kind, _ = _TYPE_AND_PAYLOAD.unpack_from(second)
    return int(kind)
