"""Which bytes of a bundle are still to be sent, after an interrupted transfer, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from snaporch.replication.receive_request import SentFile


class UnsentFiles(NamedTuple):
    """Which bytes of a bundle to send."""

    files: list[SentFile]
    """All files, in the order of the stream."""
    partial: SentFile | None
    """The file whose end is sent first."""
    whole: list[str]
    """The files that are sent from their beginning, after it."""

    @property
    def bytes(self) -> int:
        """The bytes to send."""
        return sum(each.bytes - each.offset for each in self.files)


def unsent_files(
    sizes: Mapping[str, int], sums: Mapping[str, str], there: Mapping[str, int]
) -> UnsentFiles:
    """Continue where an interrupted transfer stopped; the sums show whether that was right.

    Args:
        sizes: the bytes of each file.
        sums: the SHA-256 of each file.
        there: the bytes of each file that have arrived.
    """
    files: list[SentFile] = []
    partial: SentFile | None = None
    whole: list[str] = []
    for name in sorted(sizes):
        size, has = sizes[name], there.get(name, 0)
        can_continue = has == size or (0 < has < size and not whole and partial is None)
        sent = SentFile(name, size, sums[name], has if can_continue else 0)
        files.append(sent)
        if 0 < sent.offset < size:
            partial = sent
        elif sent.offset < size:
            whole.append(name)
    return UnsentFiles(files, partial, whole)
