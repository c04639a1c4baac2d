"""The pre hook: every guest with a disk on what sanoid is about to snapshot stands still."""

from __future__ import annotations

from collections.abc import Mapping

from snaporch.sanoid.hooks.guests import check_exist, guests_at
from snaporch.sanoid.hooks.request import read_request
from snaporch.sanoid.hooks.settings import peek


def pre(environment: Mapping[str, str]) -> int:
    """Freeze the guests; back when all of them are.

    Raises:
        SnaporchError: one could not be frozen; none is.
    """
    request = read_request("pre", environment)
    peeked = peek(environment)
    guests = guests_at(peeked, request.targets)
    if not guests:
        check_exist(request.targets)
        return 0
    from snaporch.sanoid.hooks.freeze import freeze

    freeze(request, guests, peeked)
    return 0
