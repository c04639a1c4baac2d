"""Whether a stream of ``zfs send`` may be received: its first record is checked before ZFS gets it.

Its size and SHA-256 are checked only for restic, by :mod:`snaporch.replication.restic_stream`.

Only a stream of one snapshot is accepted. A package of streams (``zfs send -p``, ``-R``, ``-I``)
can contain properties, renames and a list of what to destroy. A clone would pin its origin, which
then cannot be pruned. The rest of a stream is checked by ZFS.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from snaporch.errors import RefusedError
from snaporch.model import PoolSnapshot
from snaporch.zfs_names import is_snapshot, quoted

CLOCK_SECONDS = 86_400
"""How far the clock of a sender may be ahead."""
HEADER_BYTES = 312
"""Of a ``dmu_replay_record`` (zfs_ioctl.h), whatever its type."""
_MAGIC = 0x2F5BACBAC
_LAYOUT = "IIQQQIIQQ256s"
"""``DRR_BEGIN``: type, payload; magic, version, time, kind, flags, two GUIDs, name."""
_BEGIN = 0
_ONE_SNAPSHOT = 1
"""``DMU_SUBSTREAM``, of the two lowest bits of the version; a package has 2."""
_HEADER_TYPE = 3
_CLONE = 1
"""``DRR_FLAG_CLONE``"""


_RAW = 1 << 24
"""``DMU_BACKUP_FEATURE_RAW``, of the 30 bits above the two lowest ones of the version."""


class SentSnapshot(NamedTuple):
    """The snapshot that a stream contains."""

    name: str
    """Without its dataset."""
    guid: int
    created: int
    """Seconds since the epoch, by the clock of the sender."""
    is_raw: bool
    """Its blocks are encrypted, and it sets the key of the dataset that receives it."""
    base: int
    """The GUID of the snapshot that it follows; 0 for a full stream."""


def sent_snapshot(header: bytes) -> SentSnapshot:
    """The snapshot that a stream contains.

    Args:
        header: the first :data:`HEADER_BYTES` bytes of the stream.

    Raises:
        RefusedError: it is not the beginning of a stream of one snapshot.
    """
    if len(header) != HEADER_BYTES:
        raise _refused("the stream is too short")
    for order in "<>":
        found = struct.unpack(order + _LAYOUT, header)
        kind, _, magic, version, created, _, flags, guid, base, name = found
        if (kind, magic) == (_BEGIN, _MAGIC):
            break
    else:
        raise _refused("it is no stream of zfs send")
    if version & _HEADER_TYPE != _ONE_SNAPSHOT:
        raise _refused("it is a package, which could contain properties, renames and deletions")
    if flags & _CLONE:
        raise _refused("it is a clone of another copy")
    text, end, rest = name.partition(b"\0")
    snapshot: str = text.decode("ascii", "replace").partition("@")[2]
    if end and not rest.strip(b"\0") and is_snapshot(snapshot):
        return SentSnapshot(snapshot, guid, created, bool(version >> 2 & _RAW), base)
    raise _refused(f"{quoted(snapshot)} is no name of a snapshot")


def check_sent(thing: str, sent: SentSnapshot, copies: Iterable[PoolSnapshot], now: float) -> None:
    """Check a snapshot that comes against those that the copy has.

    Args:
        thing: the snapshot's full name here, for errors.
        sent: the snapshot.
        copies: all snapshots of the copy.
        now: seconds since the epoch.

    Raises:
        RefusedError: it is of the future, or one of the copy has its GUID, by which a restore would
            find it.
    """
    if sent.created > now + CLOCK_SECONDS:
        raise RefusedError(thing, "was taken in the future", "check the clocks of both machines")
    guids = {each.guid: each.name for each in copies}
    if sent.guid in guids:
        reason = f"has the GUID of @{guids[sent.guid]}, which is there already"
        raise RefusedError(thing, reason)
    if sent.guid == 0:
        raise RefusedError(thing, "has no GUID")


def _refused(reason: str) -> RefusedError:
    return RefusedError("zfs receive", f"the stream is refused: {reason}")
