"""The log on standard error, for ``--verbose``; imported only when it is asked for."""

from __future__ import annotations

import logging

from snaporch.output.terminal import print_log


class TerminalLogHandler(logging.Handler):
    """One line of standard error for each record, below the bytes that are shown in place."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record."""
        print_log(self.format(record))
