"""The admin's note on a snapshot: a property of its ZFS snapshots."""

from __future__ import annotations

from collections.abc import Sequence

from snaporch.errors import UsageError
from snaporch.zfs import PREFIX, Pool

MAX_NOTE_BYTES = 1024
"""ZFS allows 8191 bytes in a user property (zfsprops(7)); a list should stay readable."""
NOTE_PROPERTY = f"{PREFIX}note"


def check_note(text: str) -> None:
    """Refuse a note that is not one line of printable text of a sensible length.

    Raises:
        UsageError: with the reason.
    """
    if not text.isprintable():
        raise UsageError("note", "has a line break or another control character", "use one line")
    if len(text.encode("utf-8", "surrogateescape")) > MAX_NOTE_BYTES:
        raise UsageError("note", f"is longer than {MAX_NOTE_BYTES} bytes", "shorten it")


def set_note(pool: Pool, names: Sequence[str], text: str) -> None:
    """Set the note of snapshots; an empty text removes it.

    Args:
        pool: ZFS.
        names: full names of all ZFS snapshots of a snapshot.
        text: the note.

    Raises:
        UsageError: the text cannot be a note.
        PoolError: a snapshot does not exist; repeat it.
    """
    check_note(text)
    if text:
        pool.set_properties(names, {NOTE_PROPERTY: text})
    else:
        pool.clear_properties(names, [NOTE_PROPERTY])
