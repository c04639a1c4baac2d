"""The question of commands that discard data."""

from __future__ import annotations

import sys

from snaporch.errors import RefusedError


def confirm(thing: str) -> None:
    """Ask on standard error whether to go on, and wait for a yes.

    Args:
        thing: the subject of the error.

    Raises:
        RefusedError: the answer is no, or standard input is no terminal.
    """
    if not sys.stdin.isatty():
        raise RefusedError(thing, "not confirmed, and no terminal to ask on", "use --yes")
    sys.stderr.write("Go on? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RefusedError(thing, "not confirmed; nothing was touched")
