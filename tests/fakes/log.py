"""A handler that keeps the lines of the command log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from snaporch import command_log


class Records(logging.Handler):
    """A handler that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.records.append(record)

    @property
    def lines(self) -> list[str]:
        """The text of each record."""
        return [record.getMessage() for record in self.records]


@contextmanager
def recorded_commands() -> Iterator[Records]:
    """Keep the lines of the commands that run meanwhile, none of whose fields are set yet."""
    records = Records()
    with command_log.fields(**dict.fromkeys(command_log.FIELD_NAMES, "")):
        command_log.log_to([records])
        try:
            yield records
        finally:
            command_log.log_to([])
