"""The post hook: sanoid has taken its snapshots, so the guests are released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from snaporch.default_paths import HOLD_SOCKET_SUFFIX
from snaporch.sanoid.hooks.dispatch import print_line
from snaporch.sanoid.hooks.guests import guests_on
from snaporch.sanoid.hooks.host import HookHost
from snaporch.sanoid.hooks.request import Request, read_request


def post(environment: Mapping[str, str], host: HookHost | None = None) -> int:
    """Release the guests, and wait until they are released.

    Returns: the exit code, 0 if all guests had been frozen for the snapshots.

    Raises:
        SnaporchError: libvirt or ZFS do not answer.
    """
    request = read_request("post", environment)
    host = host or HookHost(environment)
    replies = _leave(request, host, sorted(host.settings.runtime.glob(f"*{HOLD_SOCKET_SUFFIX}")))
    if request.pre_failed:
        return 0
    code = 0
    for reply in replies.values():
        for note in reply.get("notes", ()):
            print_line(str(note))
        if not reply.get("ok"):
            print_line(str(reply.get("line", "failed")))
            code = code or int(reply.get("code", 8))
    guests = guests_on(host, request.targets)
    unfrozen = [guest for guest in guests if not replies.get(guest.domain.uuid, {}).get("ok")]
    if unfrozen:
        from snaporch.sanoid.hooks.record_unfrozen import record_unfrozen

        recorded = record_unfrozen(request, host, unfrozen)
        code = code or recorded
    return code


def _leave(request: Request, host: HookHost, sockets: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """By UUID of the domain: the replies of the hold processes that knew this call's pre hook."""
    if not sockets:
        return {}
    from concurrent.futures import ThreadPoolExecutor

    from snaporch.sanoid.hold.messages import ask

    action = "withdraw" if request.pre_failed else "leave"
    calls = [(socket, target) for socket in sockets for target in request.targets]

    def leave(call: tuple[Path, str]) -> dict[str, Any] | None:
        socket, target = call
        return ask(socket, {"do": action, "sanoid": host.caller.pid, "target": target})

    with ThreadPoolExecutor(len(calls)) as workers:
        replies = list(workers.map(leave, calls))
    return {
        socket.stem: reply
        for (socket, _), reply in zip(calls, replies, strict=True)
        if reply is not None and not reply.get("unknown")
    }
