"""Having guests frozen, in the order of :mod:`snaporch.sanoid.hooks.freeze_order`; all or none.

First every guest has a holder, which has its lock and its plan. When all are ready, and what they
take fits into their deadlines, the hook gives the word to one after the other.
"""

from __future__ import annotations

import math
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from snaporch.bundle.store import explained_store, private_directory
from snaporch.config import Config, DomainSettings, load_config
from snaporch.default_paths import WINDOW
from snaporch.errors import RunFailedError, SnaporchError
from snaporch.recovery.start_guardian import start_detached
from snaporch.sanoid.config.coverage import conf_of, promised, takes_children
from snaporch.sanoid.hold.client import JsonConnection, Message, enter
from snaporch.sanoid.hooks.caller import Caller, find_sanoid
from snaporch.sanoid.hooks.dispatch import tell
from snaporch.sanoid.hooks.freeze_order import (
    FreezeEstimate,
    GuestPosition,
    find_misfit,
    next_places,
)
from snaporch.sanoid.hooks.guests import GuestDatasets
from snaporch.sanoid.hooks.request import Request
from snaporch.sanoid.hooks.settings import HookSettings
from snaporch.sanoid.hooks.time_limits import plan_seconds

_LOOK_SECONDS = 1.0
_LAST = {"withdrawn", "unknown"}


class NotFrozenError(SnaporchError):
    """A guest could not be frozen; the line and the code are its run's."""

    def __init__(self, line: str, code: int) -> None:
        super().__init__("", line)
        self.exit_code = code  # type: ignore[assignment]

    def line(self) -> str:
        """As the run said it."""
        return self.reason


@dataclass(frozen=True, slots=True)
class FreezeEntry:
    """A guest to be frozen for a target."""

    guest: GuestDatasets
    message: Message
    seconds: float = math.inf
    """In which its holder has a plan, or answers otherwise."""


def freeze(request: Request, guests: Sequence[GuestDatasets], peeked: HookSettings) -> None:
    """Have every guest frozen that has a disk on what will be snapshotted.

    Raises:
        SnaporchError: one could not be; the others were let go again.
    """
    config = load_config(peeked.config)
    entries = [
        replace(entry, seconds=plan_seconds(_settings(config, entry.guest)))
        for entry in _entries(request, [_without_excluded(config, guest) for guest in guests])
    ]
    if not entries:
        return
    runtime = config.paths.runtime
    with explained_store(runtime):
        private_directory(runtime)
    with ThreadPoolExecutor(config.sanoid_hook_jobs) as workers:
        futures = [workers.submit(_enter, entry, runtime, peeked.config) for entry in entries]
        error = _first_error(futures)
    visits = [future.result() for future in futures if _succeeded(future)]
    freeze_together(visits, config.sanoid_hook_jobs, error)


@dataclass
class HoldClient:
    """The window of one guest, as the hook sees it."""

    entry: FreezeEntry
    line: JsonConnection
    place: GuestPosition | None = None
    """Once its plan is made."""
    attempt: int = 0
    """Which of its plans that is."""
    refused: bool = False
    """Whether it was told that its plan does not fit, and has not made another one yet."""
    frozen: bool = False
    begun: bool = False
    error: SnaporchError | None = None

    @property
    def name(self) -> str:
        """The guest's."""
        return self.entry.guest.domain.name

    def say(self, what: str, **more: str) -> None:
        """Send the holder a word about the plan it has told."""
        self.line.try_say(self.entry.message | {"do": what, "attempt": self.attempt} | more)

    def take(self, reply: Message) -> None:
        """What the holder says."""
        if "prospect" in reply:
            self._take_news(reply)
        elif "begun" in reply:
            self.begun = bool(reply["begun"])
            self.error = self.error or (None if self.begun else self._let_go())
        elif reply.get("ok"):
            self.frozen = True
            if self.place is not None:
                self.place.frozen = True
            for note in reply.get("notes", ()):
                tell(str(note))
        else:
            line, code = str(reply.get("line", "cannot be frozen")), int(reply.get("code", 8))
            self.error = self.error or NotFrozenError(line, code)

    def _take_news(self, reply: Message) -> None:
        if reply["attempt"] != self.attempt or self.place is None:
            self.attempt, self.refused, self.frozen = reply["attempt"], False, False
            self.place = GuestPosition(FreezeEstimate.from_json(reply["prospect"]))
        self.place.asked = self.place.asked or bool(reply["ordered"])
        self.place.left = int(reply.get("left", self.place.prospect.ram))

    def leave(self) -> None:
        """The holder has hung up."""
        self.error = self.error or self._let_go()

    def _let_go(self) -> SnaporchError:
        return RunFailedError(
            self.name,
            "was let go before all guests were frozen, so none is to be snapshotted",
            "raise hook_deadline (freeze_deadline for guests that stand still) or sanoid_hook_jobs",
        )


def freeze_together(
    visits: Sequence[HoldClient], jobs: int, error: BaseException | None = None
) -> None:
    """Have all windows opened and begun that were entered; none, if one cannot, or for ``error``.

    Raises:
        SnaporchError: one cannot be opened, or was over before the others were open.
    """
    changed = threading.Condition()
    listeners = [
        threading.Thread(target=_listen, args=(visit, changed), daemon=True) for visit in visits
    ]
    for listener in listeners:
        listener.start()
    try:
        _raise_first(visits, error)
        with changed:
            _freeze_all(visits, jobs, changed)
            _begin_all(visits, changed)
    except BaseException:
        for visit in visits:
            visit.say("withdraw")
        end = time.monotonic() + max((visit.entry.seconds for visit in visits), default=0.0)
        for listener in listeners:  # the holder answers when its guest goes on
            listener.join(min(max(end - time.monotonic(), 0), threading.TIMEOUT_MAX))
        raise
    finally:
        for visit, listener in zip(visits, listeners, strict=True):
            visit.line.hang_up()
            listener.join()
            visit.line.close()


def _listen(visit: HoldClient, changed: threading.Condition) -> None:
    try:
        while (reply := visit.line.hear()) is not None and not reply.keys() & _LAST:
            with changed:
                visit.take(reply)
                changed.notify_all()
    except (KeyError, TypeError, ValueError):
        pass  # a holder that talks nonsense is as good as gone
    finally:
        with changed:
            visit.leave()
            changed.notify_all()


def _freeze_all(visits: Sequence[HoldClient], jobs: int, changed: threading.Condition) -> None:
    planned = time.monotonic()
    while not all(visit.frozen for visit in visits):
        _raise_first(visits)
        late = [v for v in visits if not v.frozen and (v.place is None or v.refused)]
        if not late:
            planned = time.monotonic()
            _give_word(visits, jobs)
        _raise_late(late, planned)
        changed.wait(_LOOK_SECONDS)
    _raise_first(visits)


def _give_word(visits: Sequence[HoldClient], jobs: int) -> None:
    """To those whose turn it is; or to one whose plan does not fit, to make another one."""
    places = {visit.name: visit.place for visit in visits if visit.place is not None}
    if not any(place.asked for place in places.values()):
        prospects = {name: place.prospect for name, place in places.items()}
        misfit = find_misfit(prospects, jobs)
        if misfit is not None:
            for visit in visits:
                if visit.name == misfit.guest:
                    visit.refused = True
                    visit.say("refuse", reason=misfit.reason, step=misfit.step)
            return
    due = next_places(places.values(), jobs)
    for visit in visits:
        if visit.place is not None and any(places[visit.name] is place for place in due):
            visit.place.asked = True
            visit.place.left = visit.place.prospect.ram
            visit.say("freeze")


def _begin_all(visits: Sequence[HoldClient], changed: threading.Condition) -> None:
    """Say that all are frozen."""
    for visit in visits:
        visit.say("go")
    since = time.monotonic()
    while not all(visit.begun for visit in visits):
        _raise_first(visits)
        _raise_late([visit for visit in visits if not visit.begun], since)
        changed.wait(_LOOK_SECONDS)


def _raise_late(visits: Sequence[HoldClient], since: float) -> None:
    """For the first that owes an answer, and has not given it for too long."""
    for visit in visits:
        if time.monotonic() - since > visit.entry.seconds:
            reason = f"its holder has not answered for {visit.entry.seconds:.0f} s"
            raise RunFailedError(visit.name, reason, "see `journalctl -t snaporch`")


def _raise_first(visits: Sequence[HoldClient], error: BaseException | None = None) -> None:
    first = error or next((visit.error for visit in visits if visit.error is not None), None)
    if first is not None:
        raise first


def _settings(config: Config, guest: GuestDatasets) -> DomainSettings:
    return config.settings(guest.domain.name, guest.domain.uuid)


def _without_excluded(config: Config, guest: GuestDatasets) -> GuestDatasets:
    excluded = _settings(config, guest).exclude_disks
    disks = {target: where for target, where in guest.disks.items() if target not in excluded}
    return GuestDatasets(guest.domain, disks)


def _entries(request: Request, guests: Sequence[GuestDatasets]) -> list[FreezeEntry]:
    caller = find_sanoid()
    entries = []
    for target in request.targets:
        for guest in guests:
            if guest.on([target], below=True):
                entries += _entry(caller, request, target, guest)
    return entries


def _entry(
    caller: Caller, request: Request, target: str, guest: GuestDatasets
) -> list[FreezeEntry]:
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
    return [FreezeEntry(guest, message)]


def _enter(entry: FreezeEntry, runtime: Path, config: Path | None) -> HoldClient:
    uuid = entry.guest.domain.uuid
    door = runtime / f"{uuid}{WINDOW}"

    def start() -> None:
        words = [sys.executable, "-P", "-m", "snaporch.sanoid.hold.process", uuid, str(door)]
        if config is not None:
            words.append(str(config.absolute()))
        start_detached(f"snaporch-window-{uuid}-{secrets.token_hex(4)}", words)

    line, reply = enter(door, entry.message | {"do": "join"}, start, entry.seconds)
    visit = HoldClient(entry, line)
    visit.take(reply)
    if visit.error is not None:
        line.close()
        raise visit.error
    return visit


def _first_error(futures: Sequence[Future[HoldClient]]) -> BaseException | None:
    """The first failure; what has not begun by then is not begun."""
    first = None
    for future in futures:
        error = None if future.cancelled() else future.exception()
        if error is not None and first is None:
            first = error
            for other in futures:
                other.cancel()
    return first


def _succeeded(future: Future[HoldClient]) -> bool:
    return not future.cancelled() and future.exception() is None
