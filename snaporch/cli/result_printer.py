"""Results of a command on several objects, printed one by one or as one JSON document."""

from __future__ import annotations

from snaporch.errors import ExitCode, SnaporchError, one_line
from snaporch.output.terminal import print_error, print_json, print_result

_WORST = (ExitCode.FAILED, ExitCode.ATTENTION)


class ResultPrinter:
    """The results so far, and the exit code of the worst failure.

    That is 8, since something was found to be wrong, before all but 9; else the first one.

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
        code = int(error.exit_code)
        is_worse = code in _WORST and self.code not in _WORST
        self.code = code if is_worse or not self.code else self.code

    def print_documents(self) -> None:
        """Print all results as a JSON array, if JSON was requested."""
        if self._json:
            print_json(self.documents)
