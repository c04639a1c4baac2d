"""Choose and order snapshots for ``snaporch list``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from snaporch.model import Level, SnapshotRecord


class SortKey(StrEnum):
    """What snapshots are ordered by."""

    TIME = "time"
    """Oldest first."""
    NAME = "name"
    """By domain and snapshot."""
    STORED = "stored"
    """The largest bundle first."""


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Which snapshots are listed, and in which order."""

    level: Level | None = None
    """Only of this level."""
    since: datetime | None = None
    """Only those taken at or after this time."""
    policy: str | None = None
    """Only those of this policy; of no policy if it is empty."""
    sort: SortKey = SortKey.TIME

    def apply(self, records: Iterable[SnapshotRecord]) -> list[SnapshotRecord]:
        """The chosen records, in order.

        Args:
            records: oldest first.
        """
        chosen = [record for record in records if self._has(record)]
        match self.sort:
            case SortKey.NAME:
                chosen.sort(key=lambda record: (record.domain, record.snapshot))
            case SortKey.STORED:
                chosen.sort(key=lambda record: record.stored_bytes, reverse=True)
        return chosen

    def _has(self, record: SnapshotRecord) -> bool:
        return (
            (self.level is None or record.level is self.level)
            and (self.since is None or record.created >= self.since)
            and (self.policy is None or (record.policy or "") == self.policy)
        )
