"""Since when policies are carried out: what no snapshot tells of one that never took any."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path

from snaporch.bundle.store import explained_store, private_directory, replace_private
from snaporch.model import iso, parse_iso

_NAME = "carried.json"


def read_first_runs(directory: Path) -> dict[str, datetime]:
    """When each was first carried out, by ``UUID/POLICY``; none in a file not understood."""
    try:
        document = json.loads((directory / _NAME).read_bytes())
        return {key: parse_iso(at) for key, at in document.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def record_first_runs(directory: Path, keys: Iterable[str], now: datetime) -> None:
    """Note that these are carried out, and no others.

    Raises:
        UnavailableError: the directory cannot be written.
    """
    known = read_first_runs(directory)
    changed = {key: min(known.get(key, now), now).replace(microsecond=0) for key in keys}
    if changed != known:
        _write(directory, changed)


def _write(directory: Path, carried: Mapping[str, datetime]) -> None:
    document = {key: iso(at) for key, at in carried.items()}
    with explained_store(directory):
        private_directory(directory)
        replace_private(directory / _NAME, json.dumps(document, indent=1).encode())
