"""The socket of a window: answers the hooks while the run freezes and holds the guest.

A thread beside the run. The run waits for orders here and reports its progress; the thread stops
the run when no hook needs it any more. Every reply follows from the state of the window and of the
run. The thread never waits for a peer, so a hook that is stopped cannot delay it. It
watches sanoid by a pidfd: when sanoid ends or is killed between its hooks, the guest is released.
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

from snaporch.errors import RunFailedError
from snaporch.interrupt import Interrupt
from snaporch.recovery.hold_socket import address
from snaporch.sanoid.hold.messages import JsonConnection, Message
from snaporch.sanoid.hold.window import HoldRequest, HoldWindow, Key, WindowPhase, window_end

_POLL_SECONDS = 0.5
_WITHDRAWN: Message = {"ok": True, "withdrawn": True}


class HoldServer:
    """Listens from the start of the hold process until the window closes."""

    def __init__(
        self, path: Path, interrupt: Interrupt, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic = monotonic
        self.window = HoldWindow()
        self._path = path
        self._interrupt = interrupt
        self._changed = threading.Condition()
        self._outcome: Message | None = None
        self._notes: list[str] = []
        self._waiting: dict[JsonConnection, str] = {}
        """Peers that wait for a reply, and the request of each."""
        self._joined: dict[JsonConnection, Key] = {}
        self._progress: Message = {}
        self._sent: dict[JsonConnection, Message] = {}
        """The progress that was last sent to a peer."""
        self._order: Message | None = None
        self._frozen_at = 0.0
        self._begun_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with address(path) as name:
            self._listener.bind(name)
        self._listener.listen()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._on_readable(self._listener, self._accept)
        self._on_readable(self._wake_reader, lambda reader: reader.recv(4096))
        self._ending = False
        self._thread = threading.Thread(target=self._serve, name="hold-server", daemon=True)
        self._thread.start()

    # -- for the run ------------------------------------------------------------------------

    def first_request(self, seconds: float) -> HoldRequest | None:
        """The first call that joins within this time and has not withdrawn; else ``None``."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.window.joins), seconds)
            return self.window.joins[0] if self.window.joins else None

    def await_order(self, thing: str, estimate: Message, seconds: float) -> Message:
        """Send the estimate to all hooks that have joined, and wait for the order of one.

        Args:
            estimate: what freezing the guest takes.
            seconds: to wait for the order, so that a hook that hangs does not keep the guest's
                lock for ever.

        Returns: the order: ``freeze``; or ``refuse``, with a ``reason`` and a ``step``.

        Raises:
            InterruptedRunError: all hooks have gone, or a signal came.
            RunFailedError: no order came in time.
        """
        end = self._monotonic() + seconds
        with self._changed:
            self.window.set_opening()
            self._order, attempt = None, self._progress.get("attempt", 0) + 1
            self._progress = {"estimate": estimate, "attempt": attempt, "ordered": False}
            self._waiting |= dict.fromkeys(self._joined, "join")
            self._wake()
            while self._order is None:
                self._interrupt.check(thing)
                if self._monotonic() > end:
                    raise RunFailedError(
                        thing,
                        f"no hook has given the order to freeze it for {seconds:.0f} s",
                        "see whether sanoid and its hooks hang",
                    )
                self._changed.wait(_POLL_SECONDS)
            return self._order

    def report_left(self, left: int) -> None:
        """Report how many bytes of RAM are still to be saved."""
        with self._changed:
            self._progress = self._progress | {"left": left}
        self._wake()

    def report_frozen(self, notes: list[str]) -> None:
        """Report to all hooks that have joined that the guest is frozen."""
        with self._changed:
            self.window.set_open()
            self._notes, self._frozen_at = notes, self._monotonic()
            self._sent = dict.fromkeys(self._joined, self._progress)  # never sent later
        self._wake()

    @property
    def begun(self) -> bool:
        """Whether all guests of a hook were frozen, so that sanoid may take its snapshots."""
        return self._begun_at is not None

    def await_snapshots(self, hook_deadline: float, max_frozen: float) -> bool:
        """Wait until no call needs the frozen guest any more.

        Args:
            hook_deadline: in seconds, with ``max_frozen`` as for
                :func:`~snaporch.sanoid.hold.window.window_end`.

        Returns: False if the time was up first, or a signal came.
        """
        with self._changed:
            while not (self.window.over or self.window.all_withdrawn):
                end = window_end(self._frozen_at, self._begun_at, hook_deadline, max_frozen)
                left = end - self._monotonic()
                if left <= 0 or self._interrupt.signum is not None:
                    if self.begun:
                        self._close_window()
                    else:
                        self.window.set_opening()  # for another attempt, or for its failure
                    return False
                self._changed.wait(min(left, _POLL_SECONDS))
            self._close_window()
            return True

    def report_outcome(self, outcome: Message) -> None:
        """Report the outcome of the run to all hooks that wait, and to those still to ask."""
        with self._changed:
            self._close_window()
            self._outcome = outcome
            self._waiting |= dict.fromkeys(self._joined, "join")
        self._wake()

    def close(self) -> None:
        """Stop the thread after it has sent every reply."""
        with self._changed:
            self._close_window()
            self._wake()  # before the flag: the thread closes the sockets when it sees the flag
            self._ending = True
        self._thread.join()

    # -- the thread -------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._ending:
            ready = self._selector.select()
            with self._changed:
                for key, _ in ready:
                    key.data(key.fileobj)
                self._send_replies()
                self._changed.notify_all()
        for key in list(self._selector.get_map().values()):
            source: Any = key.fileobj
            with suppress(OSError):
                os.close(source) if isinstance(source, int) else source.close()
        self._selector.close()
        self._wake_writer.close()

    def _on_readable(self, source: Any, act: Callable[[Any], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, act)

    def _wake(self) -> None:
        self._wake_writer.send(b"!")

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        peer = JsonConnection(connection)
        self._on_readable(connection, lambda _connection: self._receive(peer))

    def _receive(self, peer: JsonConnection) -> None:
        message = peer.receive()
        if message is None:
            self._drop(peer)
        else:
            self._handle(peer, message)

    def _drop(self, peer: JsonConnection) -> None:
        """A hook that exits before all its guests are frozen takes no snapshots."""
        self._waiting.pop(peer, None)
        self._sent.pop(peer, None)
        key = self._joined.pop(peer, None)
        if key is not None:
            self._withdraw(key)
        self._selector.unregister(peer.socket)
        peer.close()

    def _handle(self, peer: JsonConnection, message: Message) -> None:
        try:
            key = int(message["sanoid"]), str(message["target"])
            action = str(message["do"])
            if action == "join":
                self._join(peer, message, key)
            elif action in ("freeze", "refuse"):
                self._take_order(message)
            elif action == "begin":
                self._begin(peer)
            elif action in ("leave", "withdraw"):
                self._joined.pop(peer, None)
                known = self._withdraw(key) if action == "withdraw" else self.window.leave(key)
                if known:
                    self._waiting[peer] = action
                else:
                    self._send(peer, {"ok": False, "unknown": True})
        except (KeyError, TypeError, ValueError):
            self._send(peer, {"ok": False, "unknown": True})

    def _join(self, peer: JsonConnection, message: Message, key: Key) -> None:
        request = HoldRequest(
            *key,
            frozenset(message["datasets"]),
            frozenset(message["promised"]),
            tuple(message["names"]),
        )
        if not self.window.join(request):
            self._send(peer, {"ok": False, "late": True})
            return
        self._waiting[peer] = "join"
        self._joined[peer] = key
        if request.sanoid:
            self._watch(request.sanoid)

    def _take_order(self, order: Message) -> None:
        """Take the first order for the current attempt, and report it to all hooks."""
        if self._order is None and order["attempt"] == self._progress.get("attempt"):
            self._order = order
            self._progress = self._progress | {"ordered": True}

    def _begin(self, peer: JsonConnection) -> None:
        """All guests of this hook are frozen: sanoid's time for its snapshots begins."""
        known = self._joined.pop(peer, None) is not None
        begins = known and self.window.phase is WindowPhase.OPEN
        if begins:
            self._begun_at = self._begun_at or self._monotonic()
        self._send(peer, {"begun": begins})

    def _watch(self, sanoid: int) -> None:
        """Have the kernel report the exit of a process."""
        try:
            process = os.pidfd_open(sanoid)
        except OSError:
            self._sanoid_ended(sanoid)
            return

        def exited(pidfd: int) -> None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
            self._sanoid_ended(sanoid)

        self._on_readable(process, exited)

    def _sanoid_ended(self, sanoid: int) -> None:
        self.window.ended(sanoid)
        self._stop_if_abandoned()

    def _withdraw(self, key: Key) -> bool:
        known = self.window.withdraw(key)
        self._stop_if_abandoned()
        return known

    def _stop_if_abandoned(self) -> None:
        """Stop the run if no sanoid is left before the guest is frozen."""
        if self.window.abandoned and self.window.phase is WindowPhase.OPENING:
            self._close_window()
            self._interrupt.signum = signal.SIGTERM

    def _close_window(self) -> None:
        """Remove the socket's name: the next hold process may use it."""
        if self.window.phase is not WindowPhase.CLOSED:
            self.window.close()
            self._path.unlink(missing_ok=True)

    def _send_replies(self) -> None:
        if self.window.phase is WindowPhase.OPENING and self._progress:
            for peer in self._joined:
                if self._sent.get(peer) is not self._progress:
                    self._sent[peer] = self._progress
                    self._send(peer, self._progress)
        for peer, request in list(self._waiting.items()):
            reply = self._reply_to(request)
            if reply is not None:
                del self._waiting[peer]
                self._send(peer, reply)

    def _reply_to(self, request: str) -> Message | None:
        """The reply that is possible now; ``None`` if the peer has to wait."""
        if self._outcome is not None:
            return _WITHDRAWN if request == "withdraw" else self._outcome
        if request == "join":
            frozen = self.window.phase is WindowPhase.OPEN
            return {"ok": True, "notes": self._notes} if frozen else None
        if request == "withdraw":
            return None if self.window.all_withdrawn else _WITHDRAWN
        waits_for_others = self.window.phase is WindowPhase.OPEN and not self.window.over
        return {"ok": True, "notes": []} if waits_for_others else None

    def _send(self, peer: JsonConnection, message: Message) -> None:
        """Send a message; a peer that reads so slowly that it does not fit is dropped."""
        try:
            peer.send(message)
        except OSError:
            peer.shut_down()
