"""A stream of ``zfs send`` to or from a repository of restic: counted, hashed and checked.

How a stream goes to a replica without restic is in :mod:`snaporch.replication.stream_sender`; which
streams ZFS may receive is decided by :mod:`snaporch.replication.stream_header`.

``python3 -m snaporch.replication.restic_stream NAME GUID BASE --report FILE`` passes on the stream
of this snapshot, which follows the one with the GUID BASE (0 for a full stream), and writes its
size and SHA-256 into a file. With ``--expect BYTES SHA256`` instead,
the last part is withheld unless both are right: so ZFS never has a snapshot that differs.
``--check BYTES SHA256`` passes nothing on.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from snaporch.errors import RefusedError, SnaporchError
from snaporch.replication.stream_header import HEADER_BYTES, sent_snapshot

_BLOCK = 1 << 18


class Digest(NamedTuple):
    """What a stream is."""

    bytes: int
    sha256: str


class Wanted(NamedTuple):
    """The snapshot that a stream must have."""

    name: str
    """Without its dataset."""
    guid: int
    base: int
    """The GUID of the snapshot that the stream follows; 0 for a full stream."""


def pass_on(source: int, target: int, wanted: Wanted, expected: Digest | None) -> Digest:
    """Pass a stream on.

    Args:
        source: the descriptor that is read.
        target: the descriptor that is written.
        wanted: the snapshot that the stream must have.
        expected: without it, any stream of this snapshot is passed on.

    Raises:
        RefusedError: it is the stream of another snapshot, or follows another one, or differs from
            ``expected``; not all of it was written.
        OSError: reading or writing failed.
    """
    digest, size = hashlib.sha256(), 0
    held = b""
    while len(held) < HEADER_BYTES and (block := os.read(source, HEADER_BYTES - len(held))):
        held += block
    sent = sent_snapshot(held)
    if (sent.name, sent.guid) != (wanted.name, wanted.guid):
        raise RefusedError("the stream", "has another snapshot")
    if sent.base != wanted.base:
        raise RefusedError("the stream", "follows another snapshot than it should")
    while True:
        digest.update(held)
        size += len(held)
        if expected is not None and size > expected.bytes:
            raise RefusedError("the stream", f"has over {expected.bytes} bytes")
        block = os.read(source, _BLOCK)
        if not block:
            break
        _write(target, held)
        held = block
    found = Digest(size, digest.hexdigest())
    if expected is not None and found != expected:
        what = f"{found.bytes} bytes instead of {expected.bytes}"
        what = what if found.bytes != expected.bytes else "another SHA-256 than its record"
        raise RefusedError("the stream", f"has {what}")
    _write(target, held)
    return found


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def command(wanted: Wanted, *options: str) -> list[str]:
    """The command line that passes on the stream of a snapshot.

    Args:
        wanted: the snapshot.
        options: ``--report FILE``, ``--expect BYTES SHA256`` or ``--check BYTES SHA256``.
    """
    words = [sys.executable, "-P", "-m", "snaporch.replication.restic_stream"]
    return [*words, *map(str, wanted), *options]


def read_report(path: Path) -> Digest:
    """What ``--report`` wrote.

    Raises:
        ValueError: nothing.
    """
    size, sha256 = path.read_text().split()
    return Digest(int(size), sha256)


def main(words: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    name, guid, base, option, *values = words
    expected = None if option == "--report" else Digest(int(values[0]), values[1])
    try:
        target = os.open(os.devnull, os.O_WRONLY) if option == "--check" else 1
        found = pass_on(0, target, Wanted(name, int(guid), int(base)), expected)
    except BrokenPipeError:
        return 1  # the next command ended, and says why
    except (SnaporchError, OSError) as error:
        text = error.line() if isinstance(error, SnaporchError) else str(error)
        sys.stderr.write(f"snaporch: {text}\n")
        return 1
    if option == "--report":
        Path(values[0]).write_text(f"{found.bytes} {found.sha256}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
