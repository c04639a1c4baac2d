"""How hooks and the holders of windows talk: one JSON object per line over a Unix socket."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from snaporch.errors import RunFailedError
from snaporch.recovery.stale_sockets import connect, only_visitor

_BLOCK = 65536
_LONGEST_LINE = 1 << 20
_POLL_SECONDS = 0.02
_START_SECONDS = 60.0
_ROUNDS = 20

Message = dict[str, Any]


class JsonConnection:
    """One end of a conversation."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._read = b""

    def say(self, message: Message) -> None:
        """Send a message; who has gone does not hear it.

        Raises:
            OSError: nobody is there any more.
        """
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def try_say(self, message: Message) -> None:
        """Send a message to one who may have gone, which :meth:`hear` will tell."""
        with suppress(OSError):
            self.say(message)

    def hear(self) -> Message | None:
        """The next message; ``None`` when the other end has gone or talks nonsense."""
        while not self.has_more:
            if not self.take_in():
                return None
        text, _, self._read = self._read.partition(b"\n")
        try:
            message = json.loads(text)
        except ValueError:
            return None
        return message if isinstance(message, dict) else None

    def take_in(self) -> bool:
        """Read what has arrived, be it half a message; False when the other end has gone.

        Waits for something only if the connection blocks.
        """
        try:
            block = self.connection.recv(_BLOCK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._read += block
        return bool(block) and len(self._read) <= _LONGEST_LINE + _BLOCK

    @property
    def has_more(self) -> bool:
        """Whether a whole message has been read and not heard yet."""
        return b"\n" in self._read

    def hang_up(self) -> None:
        """End the conversation, also for a thread that listens."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up."""
        self.connection.close()


def call(door: Path) -> JsonConnection | None:
    """Connect to the holder of a window; ``None`` when there is none."""
    connection = connect(door)
    return None if connection is None else JsonConnection(connection)


def ask(door: Path, message: Message) -> Message | None:
    """One question; ``None`` when nobody answers."""
    line = call(door)
    if line is None:
        return None
    with closing(line):
        try:
            line.say(message)
        except OSError:
            return None
        return line.hear()


def enter(
    door: Path, message: Message, start: Callable[[], None], seconds: float
) -> tuple[JsonConnection, Message]:
    """Join the window behind ``door``; have a holder started when there is none.

    Args:
        seconds: to wait for the first answer.

    Returns: the line, and the first answer: what freezing the guest will take; that it is frozen
    already; or that it cannot be.

    Raises:
        RunFailedError: no holder can be started, it went away, or it does not answer.
    """
    for _ in range(_ROUNDS):
        line = _knock(door, message, start)
        end = time.monotonic() + seconds
        line.connection.settimeout(seconds)
        reply = line.hear()
        line.connection.settimeout(None)
        if reply is not None and not reply.get("late"):
            return line, reply
        line.close()
        if reply is None and time.monotonic() >= end:
            reason = f"the process that is to freeze it has no plan after {seconds:.0f} s"
            raise RunFailedError(door.stem, reason, "see `journalctl -t snaporch`")
        if reply is None:
            raise RunFailedError(
                door.stem, "the process that froze it has gone", "see `snaporch recover`"
            )
    raise RunFailedError(door.stem, "its windows close before they can be joined", "try again")


def _knock(door: Path, message: Message, start: Callable[[], None]) -> JsonConnection:
    """One hook at a time, until there is a holder: of two, each would start its own."""
    try:
        with only_visitor(door, wait=True):
            line = call(door)
            if line is None:
                door.unlink(missing_ok=True)  # of a holder that was killed
                start()
                line = _await_holder(door)
            line.say(message)
            return line
    except OSError as error:
        raise RunFailedError(str(door), f"cannot be joined ({error.strerror})") from error


def _await_holder(door: Path) -> JsonConnection:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        line = call(door)
        if line is not None:
            return line
        time.sleep(_POLL_SECONDS)
    raise RunFailedError(
        door.stem, f"the process that is to freeze it did not start within {_START_SECONDS:.0f} s"
    )
