"""The rule for names of datasets and snapshots, wherever a name comes from.

The length is checked by :mod:`snaporch.snapshot.snapshot_name`, :mod:`snaporch.clone.clone` and the
hooks.

It is ZFS's own (zfsprops(7), "ZFS Component Naming Requirements"; zfs_namecheck.c), so that each
name that exists is accepted, also with a leading hyphen. Blanks are accepted only inside a name,
where a reader sees them. The module imports only ``re``, because hooks have to start quickly.
"""

from __future__ import annotations

import re

_COMPONENT = re.compile(r"[A-Za-z0-9_.:-]([A-Za-z0-9_.: -]*[A-Za-z0-9_.:-])?")
MAX_FULL_NAME = 255
"""ZFS_MAX_DATASET_NAME_LEN without the terminating NUL."""
SHOWN = 40
"""Characters of a wrong value that a message repeats."""


def is_dataset(text: str) -> bool:
    """Return whether ``text`` can be the name of a dataset."""
    pool_begins_well = text[:1].isascii() and text[:1].isalpha()
    return (
        len(text) <= MAX_FULL_NAME
        and pool_begins_well
        and all(_is_component(each) for each in text.split("/"))
    )


def is_snapshot(text: str) -> bool:
    """Return whether ``text`` can be the name of a snapshot, behind the ``@``."""
    return len(text) <= MAX_FULL_NAME and _is_component(text)


def _is_component(text: str) -> bool:
    return _COMPONENT.fullmatch(text) is not None and text not in (".", "..")


def quoted(text: str) -> str:
    """Quote and shorten a value from outside, for a message."""
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}…")
