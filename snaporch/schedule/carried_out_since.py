"""Records since when each policy is carried out, which matters until its first snapshot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path

from snaporch.model import iso, parse_iso
from snaporch.private_files import private_directory, replace_private, store_errors

_NAME = "carried.json"


def read_first_runs(directory: Path) -> dict[str, datetime]:
    """When each policy was first carried out, by ``UUID/POLICY``; none if not readable."""
    try:
        document = json.loads((directory / _NAME).read_bytes())
        return {key: parse_iso(at) for key, at in document.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def record_first_runs(directory: Path, keys: Iterable[str], now: datetime) -> None:
    """Record that exactly the policies in ``keys`` are carried out now.

    Raises:
        UnavailableError: the directory is not writable.
    """
    known = read_first_runs(directory)
    changed = {key: min(known.get(key, now), now).replace(microsecond=0) for key in keys}
    if changed != known:
        _write(directory, changed)


def _write(directory: Path, carried: Mapping[str, datetime]) -> None:
    document = {key: iso(at) for key, at in carried.items()}
    with store_errors(directory):
        private_directory(directory)
        replace_private(directory / _NAME, json.dumps(document, indent=1).encode())
