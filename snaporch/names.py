"""The rules for names of datasets and snapshots, in arguments, files and sanoid's settings.

They are the rules of ZFS itself (zfsprops(7), "ZFS Component Naming Requirements";
zfs_namecheck.c), so that every existing dataset can be named; a leading hyphen is allowed, too.
Blanks are allowed only inside a name, where a person sees them. Only ``re`` is imported: hooks must
start fast.
"""

from __future__ import annotations

import re

_COMPONENT = re.compile(r"[A-Za-z0-9_.:-]([A-Za-z0-9_.: -]*[A-Za-z0-9_.:-])?")
MAX_FULL_NAME = 255
"""ZFS_MAX_DATASET_NAME_LEN less the terminating NUL."""
SHOWN = 40
"""Characters of an invalid name that a message repeats."""


def is_dataset(text: str) -> bool:
    """Whether ZFS allows this name for a dataset."""
    pool_begins_well = text[:1].isascii() and text[:1].isalpha()
    return (
        len(text) <= MAX_FULL_NAME
        and pool_begins_well
        and all(_is_component(each) for each in text.split("/"))
    )


def is_snapshot(text: str) -> bool:
    """Whether ZFS allows this name for a snapshot; without the dataset and the ``@``."""
    return len(text) <= MAX_FULL_NAME and _is_component(text)


def _is_component(text: str) -> bool:
    return _COMPONENT.fullmatch(text) is not None and text not in (".", "..")


def shown(text: str) -> str:
    """Text from outside, for a message: quoted, and shortened to :data:`SHOWN` characters."""
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}…")
