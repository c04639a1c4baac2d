"""The room that an archive, or an imported guest, leaves on a file system for what is there."""

_MOST = 1 << 30
_PART = 20


def reserve(total: int) -> int:
    """The bytes to leave free on a file system: a twentieth of it, at most 1 GiB.

    Args:
        total: its size in bytes.
    """
    return min(total // _PART, _MOST)
