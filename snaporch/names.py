"""What ZFS takes as a name: one rule, for what people, files and sanoid say alike.

As ZFS's own check has it (zfsprops(7), "ZFS Component Naming Requirements"; zfs_namecheck.c), so
that what exists can be named: a leading hyphen, too. Blanks only inside, where a person sees them.
``re`` alone: hooks have to be quick.
"""

from __future__ import annotations

import re

_COMPONENT = re.compile(r"[A-Za-z0-9_.:-]([A-Za-z0-9_.: -]*[A-Za-z0-9_.:-])?")
MAX_FULL_NAME = 255
"""ZFS_MAX_DATASET_NAME_LEN less the terminating NUL."""
SHOWN = 40
"""Characters of what is wrong that a message repeats."""


def is_dataset(text: str) -> bool:
    """Whether a dataset may be called so."""
    pool_begins_well = text[:1].isascii() and text[:1].isalpha()
    return (
        len(text) <= MAX_FULL_NAME
        and pool_begins_well
        and all(_is_component(each) for each in text.split("/"))
    )


def is_snapshot(text: str) -> bool:
    """Whether a snapshot may be called so, behind its ``@``."""
    return len(text) <= MAX_FULL_NAME and _is_component(text)


def _is_component(text: str) -> bool:
    return _COMPONENT.fullmatch(text) is not None and text not in (".", "..")


def shown(text: str) -> str:
    """Something that came from outside, for a message: quoted, and cut short."""
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}…")
