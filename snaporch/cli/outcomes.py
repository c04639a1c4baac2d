"""Outcomes of one thing after the other: printed as they come, or all as one JSON document."""

from __future__ import annotations

import json as json_format

from snaporch.errors import SnaporchError
from snaporch.output.terminal import print_error, print_result


class Outcomes:
    """Those that were told so far, and the first failure's exit code.

    Args:
        json: only failures are printed at once; the rest is in :attr:`documents`.
    """

    def __init__(self, *, json: bool) -> None:
        self.documents: list[dict[str, object]] = []
        self.code = 0
        self._json = json

    def add(self, document: dict[str, object], line: str) -> None:
        """What is to be told of one: in the document, or as a line."""
        self.documents.append(document)
        if not self._json:
            print_result(line)

    def fail(self, error: SnaporchError) -> None:
        """Tell of a failure, in either case."""
        print_error(error.line())
        self.code = self.code or int(error.exit_code)

    def print_documents(self) -> None:
        """All of them, as JSON if that was wanted."""
        if self._json:
            print_result(json_format.dumps(self.documents, indent=2, ensure_ascii=False))
