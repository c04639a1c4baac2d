"""Having guests frozen, several at a time; all or none."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from snaporch.bundle.store import explained_store, private_directory
from snaporch.config import Config, load_config
from snaporch.errors import RunFailedError, SnaporchError
from snaporch.places import WINDOW
from snaporch.run.guardian import start_detached
from snaporch.sanoid.caller import Caller, find_sanoid
from snaporch.sanoid.coverage import conf_of, promised, takes_children
from snaporch.sanoid.guests import Guest
from snaporch.sanoid.hook import tell
from snaporch.sanoid.peek import Peek
from snaporch.sanoid.request import Request
from snaporch.sanoid.talk import Line, Message, enter


class NotFrozenError(SnaporchError):
    """A guest could not be frozen; the line and the code are its run's."""

    def __init__(self, line: str, code: int) -> None:
        super().__init__("", line)
        self.exit_code = code  # type: ignore[assignment]

    def line(self) -> str:
        """As the run said it."""
        return self.reason


@dataclass(frozen=True, slots=True)
class Entry:
    """A guest to be frozen for a target."""

    guest: Guest
    message: Message


def freeze(request: Request, guests: Sequence[Guest], peeked: Peek) -> None:
    """Have every guest frozen that has a disk on what will be snapshotted.

    Raises:
        SnaporchError: one could not be; the others were let go again.
    """
    config = load_config(peeked.config)
    entries = _entries(request, [_without_excluded(config, guest) for guest in guests])
    if not entries:
        return
    runtime = config.paths.runtime
    with explained_store(runtime):
        private_directory(runtime)
    with ThreadPoolExecutor(config.jobs) as workers:
        futures = [workers.submit(_enter, entry, runtime, peeked.config) for entry in entries]
        error = _first_error(futures)
    entered = [future.result() for future in futures if _succeeded(future)]
    begin_together(entered, error)


def begin_together(
    entered: Sequence[tuple[Line, Entry]], error: BaseException | None = None
) -> None:
    """Let every window begin that was entered; none, if one cannot, or for ``error``.

    Raises:
        SnaporchError: one was over already.
    """
    for line, entry in entered:
        error = error or _begin(line, entry)
    if error is not None:
        for line, entry in entered:
            line.try_say(entry.message | {"do": "withdraw"})
        for line, _ in entered:
            line.hear()
    for line, _ in entered:
        line.close()
    if error is not None:
        raise error


def _begin(line: Line, entry: Entry) -> SnaporchError | None:
    """Say that all guests are frozen; what is wrong if this one is not any more."""
    line.try_say(entry.message | {"do": "go"})
    reply = line.hear()
    if reply is not None and reply.get("ok"):
        return None
    return RunFailedError(
        entry.guest.domain.name,
        "was let go before all guests were frozen, so none is to be snapshotted",
        "raise hook_deadline (freeze_deadline for guests that stand still) or jobs",
    )


def _without_excluded(config: Config, guest: Guest) -> Guest:
    excluded = config.settings(guest.domain.name, guest.domain.uuid).exclude_disks
    disks = {target: where for target, where in guest.disks.items() if target not in excluded}
    return Guest(guest.domain, disks)


def _entries(request: Request, guests: Sequence[Guest]) -> list[Entry]:
    caller = find_sanoid()
    entries = []
    for target in request.targets:
        for guest in guests:
            if guest.on([target], below=True):
                entries += _entry(caller, request, target, guest)
    return entries


def _entry(caller: Caller, request: Request, target: str, guest: Guest) -> list[Entry]:
    conf = conf_of(caller) if guest.datasets != {target} else None  # nothing else will come
    below = conf is not None and takes_children(conf, target)
    datasets = guest.on([target], below=below)
    if not datasets:
        return []
    later = promised(conf, target, guest.datasets) if conf is not None else frozenset()
    message = {
        "sanoid": caller.pid,
        "target": target,
        "datasets": sorted(datasets),
        "promised": sorted(later),
        "names": request.names,
    }
    return [Entry(guest, message)]


def _enter(entry: Entry, runtime: Path, config: Path | None) -> tuple[Line, Entry]:
    uuid = entry.guest.domain.uuid
    door = runtime / f"{uuid}{WINDOW}"

    def start() -> None:
        words = [sys.executable, "-P", "-m", "snaporch.sanoid.holder", uuid, str(door)]
        if config is not None:
            words.append(str(config.absolute()))
        start_detached(f"snaporch-window-{uuid}-{secrets.token_hex(4)}", words)

    line, reply = enter(door, entry.message | {"do": "join"}, start)
    if not reply.get("ok"):
        line.close()
        raise NotFrozenError(str(reply.get("line", "cannot be frozen")), int(reply.get("code", 8)))
    for note in reply.get("notes", ()):
        tell(str(note))
    return line, entry


def _first_error(
    futures: Sequence[Future[tuple[Line, Entry]]],
) -> BaseException | None:
    """The first failure; what has not begun by then is not begun."""
    first = None
    for future in futures:
        error = None if future.cancelled() else future.exception()
        if error is not None and first is None:
            first = error
            for other in futures:
                other.cancel()
    return first


def _succeeded(future: Future[tuple[Line, Entry]]) -> bool:
    return not future.cancelled() and future.exception() is None
