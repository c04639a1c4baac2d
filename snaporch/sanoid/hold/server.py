"""The door of a window: where hooks knock, and who tells them how it went.

A thread beside the run, which it asks nothing and tells only that everybody has gone. What is
answered follows from the window and from how far the run has got; nothing else is remembered.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from snaporch.context import Interrupt
from snaporch.errors import RunFailedError
from snaporch.recovery.stale_sockets import address
from snaporch.sanoid.hold.client import JsonConnection, Message
from snaporch.sanoid.hold.window import HoldRequest, HoldWindow, Key, WindowPhase

_LOOK_SECONDS = 0.5
_WITHDRAWN: Message = {"ok": True, "withdrawn": True}


class HoldServer:
    """Open from the beginning of the holder until the window closes."""

    def __init__(self, path: Path, interrupt: Interrupt) -> None:
        self.window = HoldWindow()
        self._path = path
        self._interrupt = interrupt
        self._changed = threading.Condition()
        self._outcome: Message | None = None
        self._notes: list[str] = []
        self._asked: dict[JsonConnection, tuple[str, Key]] = {}
        self._joined: dict[JsonConnection, Key] = {}
        self._news: Message = {}
        self._heard: dict[JsonConnection, Message] = {}
        self._order: Message | None = None
        self._opened = 0.0
        self._began: float | None = None
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with address(path) as name:
            self._listener.bind(name)
        self._listener.listen()
        self._bell, self._button = socket.socketpair()
        self._on(self._listener, self._let_in)
        self._on(self._bell, self._rung)
        self._ending = False
        self._thread = threading.Thread(target=self._serve, name="door", daemon=True)
        self._thread.start()

    # -- for the run ------------------------------------------------------------------------

    def first(self, seconds: float) -> HoldRequest | None:
        """The join that the window is opened for, if one comes in time and stays."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.window.joins), seconds)
            return self.window.joins[0] if self.window.joins else None

    def await_order(self, thing: str, prospect: Message, seconds: float) -> Message:
        """Say to all who have joined what freezing will take, and wait for the word of one.

        Args:
            seconds: to wait for the word; a hook that hangs must not have the guest for ever.

        Returns: the word: ``freeze``; or ``refuse``, with a ``reason`` and a ``step``.

        Raises:
            InterruptedRunError: everybody has gone, or a signal came.
            RunFailedError: no word came in time.
        """
        end = time.monotonic() + seconds
        with self._changed:
            self.window.opening()
            self._order, attempt = None, self._news.get("attempt", 0) + 1
            self._news = {"prospect": prospect, "attempt": attempt, "ordered": False}
            self._asked |= {line: ("join", key) for line, key in self._joined.items()}
            self._ring()
            while self._order is None:
                self._interrupt.check(thing)
                if time.monotonic() > end:
                    raise RunFailedError(
                        thing,
                        f"no hook has given the word to freeze it for {seconds:.0f} s",
                        "see whether sanoid and its hooks hang",
                    )
                self._changed.wait(_LOOK_SECONDS)
            return self._order

    def saving(self, left: int) -> None:
        """So many bytes of RAM are still to be saved."""
        with self._changed:
            self._news = self._news | {"left": left}
        self._ring()

    def opened(self, notes: list[str]) -> None:
        """The guest is frozen: say so to all who have joined."""
        with self._changed:
            self.window.opened()
            self._notes, self._opened = notes, time.monotonic()
            self._heard = dict.fromkeys(self._joined, self._news)  # nothing of it is news later
        self._ring()

    @property
    def began(self) -> bool:
        """Whether all guests of a hook were frozen, so that its snapshots may be taken."""
        return self._began is not None

    def wait(self, seconds: float, still: float) -> bool:
        """Until there is nobody to wait for any more; False when the time was up first.

        A signal to the holder ends it too.

        Args:
            seconds: for which the guest is held until all are frozen, and again from then on.
            still: for which it is held in all.
        """
        with self._changed:
            while not (self.window.over or self.window.deserted):
                end = min(self._opened + still, (self._began or self._opened) + seconds)
                left = end - time.monotonic()
                if left <= 0 or self._interrupt.signum is not None:
                    if self.began:
                        self._close()
                    else:
                        self.window.opening()  # for another try, or for its failure
                    return False
                self._changed.wait(min(left, _LOOK_SECONDS))
            self._close()
            return True

    def answer(self, outcome: Message) -> None:
        """How it went, to all who wait and who still ask."""
        with self._changed:
            self._close()
            self._outcome = outcome
            self._asked |= {line: ("join", key) for line, key in self._joined.items()}
        self._ring()

    def end(self) -> None:
        """Everything has been answered."""
        with self._changed:
            self._close()
            self._ring()  # first: the thread closes the bell when it sees that this is the end
            self._ending = True
        self._thread.join()

    # -- the thread -------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._ending:
            ready = self._selector.select()
            with self._changed:
                for key, _ in ready:
                    key.data(key.fileobj)
                self._reply()
                self._changed.notify_all()
        for key in list(self._selector.get_map().values()):
            source: Any = key.fileobj
            with suppress(OSError):
                os.close(source) if isinstance(source, int) else source.close()
        self._selector.close()
        self._button.close()

    def _on(self, source: Any, act: Callable[[Any], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, act)

    def _ring(self) -> None:
        self._button.send(b"!")

    def _rung(self, bell: socket.socket) -> None:
        bell.recv(4096)

    def _let_in(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)  # who stops in the middle of a message holds up no one
        line = JsonConnection(connection)
        self._on(connection, lambda _connection: self._listen(line))

    def _listen(self, line: JsonConnection) -> None:
        there = line.take_in()
        while there and line.has_more:
            message = line.hear()
            there = message is not None
            if message is not None:
                self._take(line, message)
        if not there:
            self._hang_up(line)

    def _hang_up(self, line: JsonConnection) -> None:
        """Who goes before all his guests are frozen has not begun."""
        self._asked.pop(line, None)
        self._heard.pop(line, None)
        key = self._joined.pop(line, None)
        if key is not None:
            self._withdraw(key)
        self._selector.unregister(line.connection)
        line.close()

    def _take(self, line: JsonConnection, message: Message) -> None:
        try:
            key = int(message["sanoid"]), str(message["target"])
            what = str(message["do"])
            if what == "join":
                self._join(line, message, key)
            elif what in ("freeze", "refuse"):
                self._take_order(message)
            elif what == "go":
                self._begin(line)
            elif what in ("leave", "withdraw"):
                self._joined.pop(line, None)
                known = self._withdraw(key) if what == "withdraw" else self.window.leave(key)
                if known:
                    self._asked[line] = what, key
                else:
                    self._say(line, {"ok": False, "unknown": True})
        except (KeyError, TypeError, ValueError):
            self._say(line, {"ok": False, "unknown": True})

    def _join(self, line: JsonConnection, message: Message, key: Key) -> None:
        join = HoldRequest(
            *key,
            frozenset(message["datasets"]),
            frozenset(message["promised"]),
            tuple(message["names"]),
        )
        if not self.window.join(join):
            self._say(line, {"ok": False, "late": True})
            return
        self._asked[line] = "join", key
        self._joined[line] = key
        if join.sanoid:
            self._watch(join.sanoid)

    def _take_order(self, order: Message) -> None:
        """The first one counts, and all hear of it; one that crossed its news does not."""
        if self._order is None and order["attempt"] == self._news.get("attempt"):
            self._order = order
            self._news = self._news | {"ordered": True}

    def _begin(self, line: JsonConnection) -> None:
        """From now on snapshots may be taken: the time for them begins, for all of this hook."""
        known = self._joined.pop(line, None) is not None
        begins = known and self.window.phase is WindowPhase.OPEN
        if begins:
            self._began = self._began or time.monotonic()
        self._say(line, {"begun": begins})

    def _watch(self, sanoid: int) -> None:
        try:
            process = os.pidfd_open(sanoid)
        except OSError:
            self.window.ended(sanoid)
            self._stop_if_abandoned()
            return
        self._on(process, lambda source: self._gone(source, sanoid))

    def _gone(self, process: int, sanoid: int) -> None:
        self._selector.unregister(process)
        os.close(process)
        self.window.ended(sanoid)
        self._stop_if_abandoned()

    def _withdraw(self, key: Key) -> bool:
        known = self.window.withdraw(key)
        self._stop_if_abandoned()
        return known

    def _stop_if_abandoned(self) -> None:
        """No snapshot will be taken of a guest that is not frozen yet."""
        if self.window.abandoned and self.window.phase is WindowPhase.OPENING:
            self._close()
            self._interrupt.signum = signal.SIGTERM

    def _close(self) -> None:
        """Nobody finds the door any more, and the next holder may have his there."""
        if self.window.phase is not WindowPhase.CLOSED:
            self.window.close()
            self._path.unlink(missing_ok=True)

    def _reply(self) -> None:
        if self.window.phase is WindowPhase.OPENING and self._news:
            for line in self._joined:
                self._tell_news(line)
        for line, (what, _key) in list(self._asked.items()):
            answer = self._answer_to(what)
            if answer is not None:
                del self._asked[line]
                self._say(line, answer)

    def _tell_news(self, line: JsonConnection) -> None:
        """What comes of the guest, to one who waits for it to be frozen."""
        if self._heard.get(line) is not self._news:
            self._heard[line] = self._news
            self._say(line, self._news)

    def _answer_to(self, what: str) -> Message | None:
        """What can be said by now to whom; ``None`` to wait."""
        if self._outcome is not None:
            return _WITHDRAWN if what == "withdraw" else self._outcome
        if what == "join":
            opened = self.window.phase is WindowPhase.OPEN
            return {"ok": True, "notes": self._notes} if opened else None
        if what == "withdraw":
            return None if self.window.deserted else _WITHDRAWN
        waits_for_others = self.window.phase is WindowPhase.OPEN and not self.window.over
        return {"ok": True, "notes": []} if waits_for_others else None

    def _say(self, line: JsonConnection, message: Message) -> None:
        """Who does not read what he is told, for so long that no more has room, has gone."""
        try:
            line.say(message)
        except OSError:
            line.hang_up()
