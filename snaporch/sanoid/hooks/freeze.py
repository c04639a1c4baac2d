"""Has guests frozen, in the order of :mod:`snaporch.sanoid.hooks.freeze_order`; all or none.

First each guest gets a hold process, which takes its lock and makes its plan. When all have plans
that fit into the deadlines, the hook orders one after the other to freeze its guest.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache

from snaporch.config import Config
from snaporch.errors import RunFailedError, SnaporchError
from snaporch.private_files import private_directory, store_errors
from snaporch.sanoid.config.datasets_of_round import conf_of, promised, takes_children
from snaporch.sanoid.hold.messages import JsonConnection, Message, join
from snaporch.sanoid.hooks.dispatch import print_line
from snaporch.sanoid.hooks.freeze_order import (
    FreezeEstimate,
    FreezeProgress,
    find_conflict,
    next_to_freeze,
)
from snaporch.sanoid.hooks.guests import GuestDatasets
from snaporch.sanoid.hooks.host import HookHost
from snaporch.sanoid.hooks.request import Request

_POLL_SECONDS = 1.0
_FINAL = {"withdrawn", "unknown"}


class NotFrozenError(SnaporchError):
    """A guest could not be frozen; the line and the exit code are those of its run."""

    def __init__(self, line: str, code: int) -> None:
        super().__init__("", line)
        self.exit_code = code  # type: ignore[assignment]

    def line(self) -> str:
        """The line of the run's error."""
        return self.reason


@dataclass(frozen=True, slots=True)
class FreezeEntry:
    """A guest to be frozen for one dataset of a request."""

    guest: GuestDatasets
    message: Message
    """The call, for the guest's hold process."""
    seconds: float = math.inf
    """Within which its hold process must reply."""


def freeze(request: Request, guests: Sequence[GuestDatasets], host: HookHost) -> None:
    """Have every guest frozen that has a disk on a dataset that sanoid will snapshot.

    Raises:
        SnaporchError: one guest could not be frozen; the others were released.
    """
    entries = _entries(request, guests, host)
    if not entries:
        return
    runtime = host.config.paths.runtime
    with store_errors(runtime):
        private_directory(runtime)
    with ThreadPoolExecutor(host.config.sanoid_hook_jobs) as workers:
        futures = [workers.submit(_join, entry, host) for entry in entries]
        for future in wait(futures, return_when=FIRST_EXCEPTION).not_done:
            future.cancel()  # unless it has begun
    done = [future for future in futures if not future.cancelled()]
    error = next((error for future in done if (error := future.exception())), None)
    clients = [future.result() for future in done if not future.exception()]
    freeze_together(clients, host.config.sanoid_hook_jobs, error)


def _entries(
    request: Request, guests: Sequence[GuestDatasets], host: HookHost
) -> list[FreezeEntry]:
    conf = cache(lambda: conf_of(host.caller))
    guests = [_without_excluded(host.config, guest) for guest in guests]
    entries = []
    for target in request.targets:
        for guest in guests:
            if not guest.on([target], below=True):
                continue
            config = conf() if guest.datasets != {target} else None  # no other dataset to handle
            below = config is not None and takes_children(config, target)
            datasets = guest.on([target], below=below)
            if not datasets:
                continue
            later = promised(config, target, guest.datasets) if config is not None else ()
            message = {
                "sanoid": host.caller.pid,
                "target": target,
                "datasets": sorted(datasets),
                "promised": sorted(later),
                "names": request.names,
            }
            settings = host.config.settings(guest.domain.name, guest.domain.uuid)
            entries.append(FreezeEntry(guest, message, host.plan_seconds(settings)))
    return entries


def _without_excluded(config: Config, guest: GuestDatasets) -> GuestDatasets:
    excluded = config.settings(guest.domain.name, guest.domain.uuid).exclude_disks
    disks = {target: dataset for target, dataset in guest.disks.items() if target not in excluded}
    return GuestDatasets(guest.domain, disks)


def _join(entry: FreezeEntry, host: HookHost) -> HoldClient:
    uuid = entry.guest.domain.uuid
    connection, reply = join(
        host.hold_socket(uuid),
        entry.message | {"do": "join"},
        lambda: host.start_hold_process(uuid),
        entry.seconds,
        host.start_seconds,
    )
    client = HoldClient(entry, connection)
    client.handle(reply)
    if client.error is not None:
        connection.close()
        raise client.error
    return client


@dataclass
class HoldClient:
    """The hook's connection to the hold process of one guest."""

    entry: FreezeEntry
    connection: JsonConnection
    progress: FreezeProgress | None = None
    """``None`` until the hold process has a plan."""
    attempt: int = 0
    """The number of that plan."""
    refused: bool = False
    """Whether its plan was refused, and the hold process has not made another one yet."""
    frozen: bool = False
    begun: bool = False
    error: SnaporchError | None = None

    @property
    def name(self) -> str:
        """The guest's name."""
        return self.entry.guest.domain.name

    def send(self, action: str, **more: str) -> None:
        """Send the hold process an order that refers to its current plan."""
        order = {"do": action, "attempt": self.attempt}
        self.connection.try_send(self.entry.message | order | more)

    def handle(self, reply: Message) -> None:
        """Take a message of the hold process.

        Raises:
            KeyError, TypeError, ValueError: it is no message of a hold process.
        """
        if "estimate" in reply:
            self._handle_progress(reply)
        elif "begun" in reply:
            self.begun = bool(reply["begun"])
            self.error = self.error or (None if self.begun else self._released())
        elif reply.get("ok"):
            self.frozen = True
            if self.progress is not None:
                self.progress.frozen = True
            for note in reply.get("notes", ()):
                print_line(str(note))
        else:
            line, code = str(reply.get("line", "cannot be frozen")), int(reply.get("code", 8))
            self.error = self.error or NotFrozenError(line, code)

    def _handle_progress(self, reply: Message) -> None:
        if reply["attempt"] != self.attempt or self.progress is None:
            self.attempt, self.refused, self.frozen = reply["attempt"], False, False
            self.progress = FreezeProgress(FreezeEstimate.from_json(reply["estimate"]))
        self.progress.ordered = self.progress.ordered or bool(reply["ordered"])
        self.progress.left = int(reply.get("left", self.progress.estimate.ram))

    def closed(self) -> None:
        """The hold process has closed the connection."""
        self.error = self.error or self._released()

    def _released(self) -> SnaporchError:
        return RunFailedError(
            self.name,
            "was released before all guests were frozen, so none is to be snapshotted",
            "raise hook_deadline (freeze_deadline for guests that are paused) or sanoid_hook_jobs",
        )


def freeze_together(
    clients: Sequence[HoldClient], jobs: int, error: BaseException | None = None
) -> None:
    """Have all guests frozen, and report to all hold processes that all are.

    Args:
        error: an error from before: then all guests are released, and it is raised.

    Raises:
        SnaporchError: one guest could not be frozen, or was released before all were frozen; no
            guest is frozen any more.
    """
    changed = threading.Condition()
    listeners = [
        threading.Thread(target=_listen, args=(client, changed), daemon=True) for client in clients
    ]
    for listener in listeners:
        listener.start()
    try:
        _raise_first(clients, error)
        with changed:
            _freeze_all(clients, jobs, changed)
            _begin_all(clients, changed)
    except BaseException:
        for client in clients:
            client.send("withdraw")
        end = time.monotonic() + max((client.entry.seconds for client in clients), default=0.0)
        for listener in listeners:  # the hold process replies when its guest is released
            listener.join(min(max(end - time.monotonic(), 0), threading.TIMEOUT_MAX))
        raise
    finally:
        for client, listener in zip(clients, listeners, strict=True):
            client.connection.shut_down()
            listener.join()
            client.connection.close()


def _listen(client: HoldClient, changed: threading.Condition) -> None:
    try:
        while (reply := client.connection.receive()) is not None and not reply.keys() & _FINAL:
            with changed:
                client.handle(reply)
                changed.notify_all()
    except (KeyError, TypeError, ValueError):
        pass  # no message of a hold process: treated as a closed connection
    finally:
        with changed:
            client.closed()
            changed.notify_all()


def _freeze_all(clients: Sequence[HoldClient], jobs: int, changed: threading.Condition) -> None:
    planned = time.monotonic()
    while not all(client.frozen for client in clients):
        _raise_first(clients)
        unplanned = [c for c in clients if not c.frozen and (c.progress is None or c.refused)]
        if not unplanned:
            planned = time.monotonic()
            _give_orders(clients, jobs)
        _raise_late(unplanned, planned)
        changed.wait(_POLL_SECONDS)
    _raise_first(clients)


def _give_orders(clients: Sequence[HoldClient], jobs: int) -> None:
    """Order the next guests to be frozen; or refuse the plan of one that does not fit."""
    guests = {client.name: client.progress for client in clients if client.progress is not None}
    if not any(guest.ordered for guest in guests.values()):
        estimates = {name: guest.estimate for name, guest in guests.items()}
        conflict = find_conflict(estimates, jobs)
        if conflict is not None:
            for client in clients:
                if client.name == conflict.guest:
                    client.refused = True
                    client.send("refuse", reason=conflict.reason, step=conflict.step)
            return
    due = next_to_freeze(guests.values(), jobs)
    for client in clients:
        if client.progress is not None and any(guests[client.name] is guest for guest in due):
            client.progress.ordered = True
            client.progress.left = client.progress.estimate.ram
            client.send("freeze")


def _begin_all(clients: Sequence[HoldClient], changed: threading.Condition) -> None:
    """Report to all hold processes that all guests are frozen, and await their confirmation."""
    for client in clients:
        client.send("begin")
    since = time.monotonic()
    while not all(client.begun for client in clients):
        _raise_first(clients)
        _raise_late([client for client in clients if not client.begun], since)
        changed.wait(_POLL_SECONDS)


def _raise_late(clients: Sequence[HoldClient], since: float) -> None:
    """Raise an error for the first hold process that owes a reply for longer than its limit."""
    for client in clients:
        if time.monotonic() - since > client.entry.seconds:
            reason = f"its hold process has not replied for {client.entry.seconds:.0f} s"
            raise RunFailedError(client.name, reason, "see `journalctl -t snaporch`")


def _raise_first(clients: Sequence[HoldClient], error: BaseException | None = None) -> None:
    first = error or next((client.error for client in clients if client.error is not None), None)
    if first is not None:
        raise first
