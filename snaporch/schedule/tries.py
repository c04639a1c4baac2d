"""What snapshots do not tell: tries that failed, so that the next ones are not made at once.

Those of captures, verifications and replications have a file each, for each is written by somebody
else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from snaporch.bundle.store import explained_store, private_directory, replace_private
from snaporch.model import iso

CAPTURES = "failed.json"
VERIFICATIONS = "unverified.json"
REPLICATIONS = "unreplicated.json"


@dataclass(frozen=True, slots=True)
class Failed:
    """A try that failed."""

    at: datetime
    reason: str


def read_failed(directory: Path, name: str = CAPTURES) -> dict[str, Failed]:
    """Failed tries by ``UUID/POLICY``; none in a file that cannot be understood."""
    try:
        document = json.loads((directory / name).read_bytes())
        return {
            key: Failed(
                datetime.strptime(at, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC), str(reason)
            )
            for key, (at, reason) in document.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def remember_try(directory: Path, key: str, reason: str | None, name: str) -> None:
    """Note that a try failed just now, or (without a reason) that it did not.

    Raises:
        UnavailableError: the directory cannot be written.
    """
    known = read_failed(directory, name)
    changed = {each: failed for each, failed in known.items() if each != key}
    if reason is not None:
        changed[key] = Failed(datetime.now(UTC), reason)
    if changed != known:
        write_failed(directory, changed, name)


def write_failed(directory: Path, failed: Mapping[str, Failed], name: str = CAPTURES) -> None:
    """Replace what is remembered, in one step.

    Raises:
        UnavailableError: the directory cannot be written.
    """
    document = {key: [iso(each.at), each.reason] for key, each in failed.items()}
    with explained_store(directory):
        private_directory(directory)
        replace_private(directory / name, json.dumps(document, indent=1).encode())
