"""Log records in the systemd journal, with their fields."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

SOCKET = Path("/run/systemd/journal/socket")


class JournalHandler(logging.Handler):
    """A handler that sends records in the journal's own format and never waits for it.

    A record that the journal does not take at once is dropped: a journal that hangs must not keep a
    guest paused. python3-systemd's handler waits, and blocks all threads meanwhile. The format is
    in https://systemd.io/JOURNAL_NATIVE_PROTOCOL; each value has to be on one line.

    Args:
        identifier: the ``SYSLOG_IDENTIFIER`` of the lines.
        fields: names of the record's attributes that become fields.
        path: the journal's socket.
    """

    def __init__(self, identifier: str, fields: tuple[str, ...], path: Path = SOCKET) -> None:
        super().__init__()
        self._identifier = identifier
        self._fields = fields
        self._path = str(path)
        flags = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_UNIX, flags)

    def emit(self, record: logging.LogRecord) -> None:
        """Send the record, or drop it."""
        values: Mapping[str, object] = {
            "MESSAGE": record.getMessage(),
            "PRIORITY": 6,
            "SYSLOG_IDENTIFIER": self._identifier,
            **{name: vars(record)[name] for name in self._fields if name in vars(record)},
        }
        text = "".join(f"{name}={value}\n" for name, value in values.items())
        with suppress(OSError):
            self._socket.sendto(text.encode("utf-8", "replace"), self._path)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        super().close()
