"""How well an append-only replica is protected from a host that was taken over: a pure decision."""

from __future__ import annotations

from collections.abc import Collection

from snaporch.known_faults import parse_release

_APPENDING = (2, 3, 2)
"""The first OpenZFS with the permission ``receive:append``."""
_NEEDED = frozenset({"create", "mount", "receive:append", "userprop"})
"""Permissions of ``zfs allow`` that append-only copies need, as ``docs/how-to/replication.md``
has the admin grant them. Others may change copies."""


def weakness(release: str, permissions: Collection[str], *, is_root: bool) -> str:
    """Why only ``snaporch receive`` protects the copies, and ZFS does not; empty if it does, too.

    Args:
        release: of OpenZFS on the replica.
        permissions: what ``zfs allow`` permits to the receiving user.
        is_root: the receiving user is root.
    """
    if is_root:
        return "its receiving user is root, whom ZFS permits everything"
    found = parse_release(release)
    is_old = found is not None and found < _APPENDING
    if more := sorted(set(permissions) - _NEEDED - ({"receive"} if is_old else set())):
        return f"zfs allow there permits more than is needed: {', '.join(more)}"
    if is_old and "receive" in permissions:
        return (
            f"OpenZFS {release} there is older than 2.3.2 and has no permission receive:append; "
            "receive permits zfs receive -F, too"
        )
    return ""
