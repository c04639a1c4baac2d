"""Results of a command on several objects, printed one by one or as one JSON document."""

from __future__ import annotations

from snaporch.errors import SnaporchError, one_line
from snaporch.output.terminal import print_error, print_json, print_result


class ResultPrinter:
    """The results so far, and the exit code of the first failure.

    Args:
        json: collect results in :attr:`documents` instead of printing them; failures are printed
            at once in either case.
    """

    def __init__(self, *, json: bool) -> None:
        self.documents: list[dict[str, object]] = []
        self.code = 0
        self._json = json

    def add(self, document: dict[str, object], line: str) -> None:
        """Add a result: ``document`` for JSON, ``line`` to be printed otherwise."""
        self.documents.append(document)
        if not self._json:
            print_result(one_line(line))

    def fail(self, error: SnaporchError) -> None:
        """Print a failure and keep its exit code."""
        print_error(error.line())
        self.code = self.code or int(error.exit_code)

    def print_documents(self) -> None:
        """Print all results as a JSON array, if JSON was requested."""
        if self._json:
            print_json(self.documents)
