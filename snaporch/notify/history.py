"""Which problems were notified, so that a persistent one is not notified at each retry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from snaporch.model import iso, parse_iso
from snaporch.notify.notification import Notification
from snaporch.private_files import private_directory, replace_private, store_errors

_NAME = "notified.json"
_PROBLEMS = ("failure", "attention")


@dataclass(frozen=True, slots=True)
class NotificationRecord:
    """The last notification of a problem of a policy on a domain."""

    at: datetime
    kind: str
    text: str


def should_notify(
    event: Notification,
    known: Mapping[str, NotificationRecord],
    repeat: timedelta,
    succeeded: datetime | None = None,
) -> bool:
    """Whether to send an event; the same problem only if ``repeat`` has passed since.

    Args:
        event: the event.
        known: the history.
        repeat: of the configuration.
        succeeded: when what failed now succeeded last; a problem before that is over.
    """
    last = known.get(event.key)
    if event.kind not in _PROBLEMS or last is None or last.at > event.at:
        return True
    if succeeded is not None and last.at < succeeded:
        return True
    same = (last.kind, last.text) == (event.kind, event.text)
    return not same or last.at + repeat <= event.at


def remembered(
    event: Notification, known: Mapping[str, NotificationRecord]
) -> dict[str, NotificationRecord]:
    """The history after an event; without a problem that no longer exists."""
    others = {key: record for key, record in known.items() if key != event.key}
    if event.kind in _PROBLEMS:
        others[event.key] = NotificationRecord(event.at, event.kind, event.text)
    return others


def read_history(directory: Path) -> dict[str, NotificationRecord]:
    """The history; empty if the file is not readable."""
    try:
        document = json.loads((directory / _NAME).read_bytes())
        return {
            key: NotificationRecord(parse_iso(at), str(kind), str(text))
            for key, (at, kind, text) in document.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def write_history(directory: Path, known: Mapping[str, NotificationRecord]) -> None:
    """Replace the history atomically.

    Raises:
        UnavailableError: the directory is not writable.
    """
    document = {key: [iso(each.at), each.kind, each.text] for key, each in known.items()}
    with store_errors(directory):
        private_directory(directory)
        replace_private(directory / _NAME, json.dumps(document, indent=1).encode())
