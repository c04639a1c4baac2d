"""What snapshots do not tell: tries that failed, so that the next ones are not made at once.

Those of captures, verifications and replications have a file each, for each is written by somebody
else. When the disk is full, which is what makes many a try fail, the file is written to the runtime
directory, which is memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from snaporch.bundle.store import explained_store, private_directory, replace_private
from snaporch.context import Context
from snaporch.errors import UnavailableError
from snaporch.model import iso, parse_iso

CAPTURES = "failed.json"
VERIFICATIONS = "unverified.json"
REPLICATIONS = "unreplicated.json"


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """A try that failed."""

    at: datetime
    reason: str


def read_failed(
    directory: Path, name: str = CAPTURES, *, spare: Path | None = None
) -> dict[str, FailedAttempt]:
    """Failed tries by ``UUID/POLICY``; none in a file that cannot be understood.

    Args:
        spare: a file here was written when ``directory`` could not be, so it is the newer one.
    """
    place = spare if spare is not None and (spare / name).is_file() else directory
    try:
        document = json.loads((place / name).read_bytes())
        return {
            key: FailedAttempt(parse_iso(at), str(reason)) for key, (at, reason) in document.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def remember_try(context: Context, key: str, reason: str | None, name: str) -> None:
    """Note that a try failed just now, or (without a reason) that it did not.

    What cannot be written down is said, and keeps nothing else from being done.
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
    name: str = CAPTURES,
    *,
    spare: Path | None = None,
) -> None:
    """Replace what is remembered, in one step.

    Args:
        spare: written to when ``directory`` cannot be.

    Raises:
        UnavailableError: the directory cannot be written, whether the spare one was or not.
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
    with explained_store(directory):
        private_directory(directory)
        replace_private(directory / name, data)
