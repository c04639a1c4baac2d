"""Names that sanoid's environment may hold: checked before anything else is done with them.

``re`` alone: hooks have to be quick.
"""

from __future__ import annotations

import re

_DATASET = re.compile(r"[A-Za-z][A-Za-z0-9_.: -]*(/[A-Za-z0-9_.:-][A-Za-z0-9_.: -]*)*")
_SNAPSHOT = re.compile(r"[A-Za-z0-9_.:][A-Za-z0-9_.: -]*")
MAX_FULL_NAME = 255
"""ZFS_MAX_DATASET_NAME_LEN less the terminating NUL."""
SHOWN = 40
"""Characters of what is wrong that a message repeats."""


def is_dataset(text: str) -> bool:
    """Whether a dataset may be called so."""
    if len(text) > MAX_FULL_NAME or not _DATASET.fullmatch(text):
        return False
    return {".", ".."}.isdisjoint(text.split("/")) and text == text.strip()


def is_snapshot(text: str) -> bool:
    """Whether a snapshot may be called so, behind its ``@``."""
    if len(text) > MAX_FULL_NAME or not _SNAPSHOT.fullmatch(text):
        return False
    return text not in (".", "..")


def shown(text: str) -> str:
    """Something that came from outside, for a message: quoted, and cut short."""
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}…")
