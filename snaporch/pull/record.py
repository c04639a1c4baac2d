"""What pulls recorded: the last one of each guest of each source, and of each source as a whole.

When a pull is late is decided by :mod:`snaporch.status.problems`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from snaporch.model import iso, parse_iso
from snaporch.private_files import private_directory, replace_private, store_errors

FILE_NAME = "pulls.json"


@dataclass(frozen=True, slots=True)
class PullRecord:
    """The pulls of a guest, or of a whole source."""

    domain: str
    """The guest's name; empty for a whole source."""
    pulled: datetime | None = None
    """When the last pull without a failure ended."""
    newest: datetime | None = None
    """When the newest snapshot that is here as a whole was taken, by the source's clock."""
    tried: datetime | None = None
    """When the last pull ended, with or without a failure."""
    failed: str = ""
    """Why the last pull failed; empty if it did not."""
    skipped: int = 0
    """How many snapshots the last pull could not copy, apart from those that wait."""
    waiting: int = 0
    """How many snapshots wait until a run on the source has ended."""
    waiting_since: datetime | None = None
    """Since when some wait, and no pull has brought any."""

    def as_json(self) -> dict[str, object]:
        """The object in the file."""
        return {
            key: iso(value) if isinstance(value, datetime) else value
            for key, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, document: Mapping[str, object]) -> PullRecord:
        """Read an object of the file.

        Raises:
            TypeError, ValueError, KeyError: it has another form.
        """
        times = {
            key: None if document[key] is None else parse_iso(str(document[key]))
            for key in ("pulled", "newest", "tried", "waiting_since")
        }
        return cls(
            domain=str(document["domain"]),
            failed=str(document["failed"]),
            skipped=int(str(document["skipped"])),
            waiting=int(str(document["waiting"])),
            **times,
        )


def record_key(source: str, uuid: str = "") -> str:
    """The key of a record: ``SOURCE/UUID``, or ``SOURCE/`` for a whole source."""
    return f"{source}/{uuid}"


def read_records(directory: Path) -> dict[str, PullRecord]:
    """All records by their keys; none if the file is missing or not readable.

    Args:
        directory: ``paths.schedule`` of the configuration.
    """
    try:
        document = json.loads((directory / FILE_NAME).read_bytes())
        return {key: PullRecord.from_json(each) for key, each in document.items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return {}


def write_records(
    directory: Path, records: Mapping[str, PullRecord], gone: Collection[str] = ()
) -> None:
    """Replace records, and remove those whose keys are in ``gone``.

    The caller holds the lock of pulls.

    Raises:
        UnavailableError: the directory is not writable.
    """
    known = {key: each for key, each in read_records(directory).items() if key not in gone}
    document = {key: each.as_json() for key, each in {**known, **records}.items()}
    with store_errors(directory):
        private_directory(directory)
        replace_private(directory / FILE_NAME, json.dumps(document, indent=1).encode())


def after_success(before: PullRecord | None, record: PullRecord) -> PullRecord:
    """A record whose ``newest`` is never older than before."""
    older = before.newest if before else None
    newest = max(filter(None, (older, record.newest)), default=None)
    return replace(record, newest=newest)


def after_failure(before: PullRecord | None, record: PullRecord) -> PullRecord:
    """A record that keeps when the last pull without a failure ended."""
    kept = after_success(before, record)
    return replace(kept, pulled=before.pulled if before else None)


def choose_guests(
    guests: Mapping[str, str], wanted: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """The guests to pull, and the wanted names that no guest has.

    Args:
        guests: the names of a source's guests, by UUID.
        wanted: names and UUIDs; all guests if it is empty.
    """
    if not wanted:
        return dict(guests), []
    chosen = {uuid: domain for uuid, domain in guests.items() if uuid in wanted or domain in wanted}
    known = {*chosen, *chosen.values()}
    return chosen, [each for each in dict.fromkeys(wanted) if each not in known]
