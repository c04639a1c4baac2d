"""The pre hook: freezes every guest with a disk on the datasets that sanoid will snapshot."""

from __future__ import annotations

from collections.abc import Mapping

from snaporch.sanoid.hooks.guests import guests_on
from snaporch.sanoid.hooks.host import HookHost
from snaporch.sanoid.hooks.request import read_request


def pre(environment: Mapping[str, str], host: HookHost | None = None) -> int:
    """Freeze the guests, and return when all of them are frozen.

    Returns: the exit code, 0.

    Raises:
        SnaporchError: one guest could not be frozen; all others were released.
    """
    request = read_request("pre", environment)
    host = host or HookHost(environment)
    guests = guests_on(host, request.targets)
    if not guests:
        host.check_exist(request.targets)
        return 0
    from snaporch.sanoid.hooks.freeze import freeze

    freeze(request, guests, host)
    return 0
