"""The post hook: sanoid has taken its snapshots, the guests may go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from snaporch.default_paths import WINDOW
from snaporch.sanoid.hooks.caller import Caller, find_sanoid
from snaporch.sanoid.hooks.dispatch import tell
from snaporch.sanoid.hooks.guests import guests_at
from snaporch.sanoid.hooks.request import Request, read_request
from snaporch.sanoid.hooks.settings import peek


def post(environment: Mapping[str, str]) -> int:
    """Let the guests go; 0 when all of them had stood still.

    Raises:
        SnaporchError: libvirt or ZFS do not answer.
    """
    request = read_request("post", environment)
    peeked = peek(environment)
    caller = find_sanoid()
    replies = _leave(request, caller, sorted(peeked.runtime.glob(f"*{WINDOW}")))
    if request.pre_failed:
        return 0
    code = 0
    for reply in replies.values():
        for note in reply.get("notes", ()):
            tell(str(note))
        if not reply.get("ok"):
            tell(str(reply.get("line", "failed")))
            code = code or int(reply.get("code", 8))
    guests = guests_at(peeked, request.targets)
    unheld = [guest for guest in guests if not replies.get(guest.domain.uuid, {}).get("ok")]
    if unheld:
        from snaporch.sanoid.hooks.record_unfrozen import record_unheld

        recorded = record_unheld(request, caller, unheld, peeked.config)
        code = code or recorded
    return code


def _leave(request: Request, caller: Caller, doors: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """What the holders of windows answer that knew of this call's pre hook, by domain."""
    if not doors:
        return {}
    from concurrent.futures import ThreadPoolExecutor

    from snaporch.sanoid.hold.client import ask

    word = "withdraw" if request.pre_failed else "leave"
    calls = [(door, target) for door in doors for target in request.targets]

    def leave(call: tuple[Path, str]) -> dict[str, Any] | None:
        door, target = call
        return ask(door, {"do": word, "sanoid": caller.pid, "target": target})

    with ThreadPoolExecutor(len(calls)) as workers:
        answers = list(workers.map(leave, calls))
    return {
        door.stem: answer
        for (door, _), answer in zip(calls, answers, strict=True)
        if answer is not None and not answer.get("unknown")
    }
