"""Remembers failed attempts, so that they are not repeated at once: when each is repeated.

How long after a failure is the option ``schedule.retry`` (:mod:`snaporch.config.schema`), which
:mod:`snaporch.schedule.forecast` applies to snapshots, :mod:`snaporch.schedule.verification_due` to
verifications and :mod:`snaporch.schedule.replication_due` to replications.

Snapshots, verifications and replications have one file each, because different processes write
them. If the disk is full, a frequent cause of failures, the file is written to the runtime
directory, which is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from snaporch.context import Context
from snaporch.errors import UnavailableError
from snaporch.model import iso, parse_iso
from snaporch.private_files import private_directory, replace_private, store_errors

SNAPSHOTS = "failed.json"
VERIFICATIONS = "unverified.json"
REPLICATIONS = "unreplicated.json"
STOPPED = "stopped.json"
"""Replications that ended with their window, and are to be continued."""
COMPLETED = "completed.json"
"""When the last replication that had no failure ended; the reason is empty."""
WAITING = "waiting.json"
"""Since when a replica lacks a snapshot; the reason is the time of ``COMPLETED`` before that."""


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """A failed attempt."""

    at: datetime
    reason: str

    def repeated_at(self, retry: timedelta) -> datetime:
        """When the next attempt is due.

        Args:
            retry: the time between a failed attempt and the next one; ``schedule.retry``.
        """
        return self.at + retry

    @property
    def repeated_because(self) -> str:
        """Why the next attempt is due then."""
        return f"retry after a failure: {self.reason}"


def read_failed(
    directory: Path, name: str = SNAPSHOTS, *, spare: Path | None = None
) -> dict[str, FailedAttempt]:
    """Failed attempts by ``UUID/POLICY`` or ``UUID/REPLICA``; none if the file is not readable.

    Args:
        spare: where the file was written if ``directory`` was not writable; it takes precedence.
    """
    place = spare if spare is not None and (spare / name).is_file() else directory
    try:
        document = json.loads((place / name).read_bytes())
        return {
            key: FailedAttempt(parse_iso(at), str(reason)) for key, (at, reason) in document.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def record_attempt(context: Context, key: str, reason: str | None, name: str) -> None:
    """Record that an attempt failed now, or succeeded if ``reason`` is ``None``.

    A write error is printed as a note and ignored.
    """
    paths = context.config.paths
    known = read_failed(paths.schedule, name, spare=paths.runtime)
    changed = {each: failed for each, failed in known.items() if each != key}
    if reason is not None:
        changed[key] = FailedAttempt(datetime.now(UTC), reason)
    if changed == known:
        return
    try:
        write_failed(paths.schedule, changed, name, spare=paths.runtime)
    except UnavailableError as error:
        context.progress.note("snaporch", error.line())


def write_failed(
    directory: Path,
    failed: Mapping[str, FailedAttempt],
    name: str = SNAPSHOTS,
    *,
    spare: Path | None = None,
) -> None:
    """Replace the file atomically.

    Args:
        spare: directory to write to if ``directory`` is not writable.

    Raises:
        UnavailableError: ``directory`` is not writable, even if the spare directory was.
    """
    document = {key: [iso(each.at), each.reason] for key, each in failed.items()}
    data = json.dumps(document, indent=1).encode()
    try:
        _write(directory, name, data)
    except UnavailableError:
        if spare is not None:
            _write(spare, name, data)
        raise
    if spare is not None:
        (spare / name).unlink(missing_ok=True)


def _write(directory: Path, name: str, data: bytes) -> None:
    with store_errors(directory):
        private_directory(directory)
        replace_private(directory / name, data)
