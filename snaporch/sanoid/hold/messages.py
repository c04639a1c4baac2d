"""Messages between hooks and the processes that hold guests: JSON objects over a Unix socket.

The sockets keep message boundaries (SOCK_SEQPACKET in unix(7)): a message arrives whole or not at
all, and a receiver waits for no rest.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from snaporch.errors import RunFailedError
from snaporch.recovery.hold_socket import connect as connect_socket
from snaporch.recovery.hold_socket import starter_lock

_MAX_BYTES = 1 << 20
"""Of a message; a longer one arrives truncated, and is no JSON."""
_POLL_SECONDS = 0.02
_ATTEMPTS = 20

Message = dict[str, Any]


class JsonConnection:
    """A connection over which JSON objects are sent and received."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            OSError: the peer has gone or, if the socket does not block, reads too slowly.
        """
        self.socket.send(json.dumps(message).encode())

    def try_send(self, message: Message) -> None:
        """Send a message; if the peer has gone, :meth:`receive` reports it."""
        with suppress(OSError):
            self.send(message)

    def receive(self) -> Message | None:
        """The next message; ``None`` if the peer has gone or sent no JSON object."""
        try:
            message = json.loads(self._receive())
        except (OSError, ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def _receive(self) -> bytes:
        try:
            return self.socket.recv(_MAX_BYTES)
        except ConnectionResetError:  # it comes before messages that the peer sent before it went
            return self.socket.recv(_MAX_BYTES)

    def shut_down(self) -> None:
        """End the conversation; a thread in :meth:`receive` returns."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def connect(path: Path) -> JsonConnection | None:
    """Connect to the process that holds a guest; ``None`` if there is none."""
    connection = connect_socket(path)
    return None if connection is None else JsonConnection(connection)


def ask(path: Path, message: Message) -> Message | None:
    """Send one message to a hold process; its reply, or ``None`` if no hold process replies."""
    connection = connect(path)
    if connection is None:
        return None
    with closing(connection):
        connection.try_send(message)
        return connection.receive()


def join(
    path: Path,
    message: Message,
    start: Callable[[], None],
    seconds: float,
    start_seconds: float,
) -> tuple[JsonConnection, Message]:
    """Join the window of the hold process at ``path``; start one if there is none.

    Args:
        start: starts a hold process.
        seconds: to wait for the first reply.
        start_seconds: to wait until a hold process that was started listens.

    Returns: the connection and the first reply: an estimate of what freezing the guest takes; or
    that it is frozen already; or that it cannot be frozen.

    Raises:
        RunFailedError: the hold process cannot be started, has exited, or does not reply.
    """
    for _ in range(_ATTEMPTS):
        connection = _connect_or_start(path, message, start, start_seconds)
        end = time.monotonic() + seconds
        connection.socket.settimeout(seconds)
        reply = connection.receive()
        connection.socket.settimeout(None)
        if reply is not None and not reply.get("late"):
            return connection, reply
        connection.close()
        if reply is None and time.monotonic() >= end:
            reason = f"the process that is to freeze it has no plan after {seconds:.0f} s"
            raise RunFailedError(path.stem, reason, "see `journalctl -t snaporch`")
        if reply is None:
            raise RunFailedError(
                path.stem, "the process that froze it has exited", "see `snaporch recover`"
            )
    raise RunFailedError(path.stem, "its windows close before they can be joined", "try again")


def _connect_or_start(
    path: Path, message: Message, start: Callable[[], None], seconds: float
) -> JsonConnection:
    """One hook at a time, or two hooks would each start a hold process."""
    try:
        with starter_lock(path, wait=True):
            connection = connect(path)
            if connection is None:
                path.unlink(missing_ok=True)  # left by a hold process that was killed
                start()
                connection = _await_hold_process(path, seconds)
            connection.send(message)
            return connection
    except OSError as error:
        raise RunFailedError(str(path), f"cannot be joined ({error.strerror})") from error


def _await_hold_process(path: Path, seconds: float) -> JsonConnection:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection = connect(path)
        if connection is not None:
            return connection
        time.sleep(_POLL_SECONDS)
    reason = f"the process that is to freeze it did not start within {seconds:.0f} s"
    raise RunFailedError(path.stem, reason, "see `journalctl -t snaporch`")
