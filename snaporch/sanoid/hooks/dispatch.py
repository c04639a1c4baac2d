"""``snaporch hook sanoid PHASE``: calls the function for the phase.

sanoid calls its hooks for every dataset, and most datasets hold no guest. So this module, and what
a hook needs to find no guest, imports little: no command line parser, no schema, no colours. Heavy
modules are imported where they are needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from snaporch.errors import ExitCode, SnaporchError, one_line

PHASES: dict[str, tuple[str, str]] = {
    "pre": ("snaporch.sanoid.hooks.pre_snapshot", "pre"),
    "post": ("snaporch.sanoid.hooks.post_snapshot", "post"),
    "pre-prune": ("snaporch.sanoid.hooks.prune", "pre_prune"),
    "prune": ("snaporch.sanoid.hooks.prune", "prune"),
}
"""Phase → module and function; each takes the environment and returns an exit code."""


def answer(phase: str, environment: Mapping[str, str]) -> int:
    """Do what sanoid requests in ``environment``.

    Returns: the exit code; if it is not 0, one line on standard error has the reason.
    """
    try:
        return _function(phase)(environment)
    except SnaporchError as error:
        print_line(error.line())
        return int(error.exit_code)
    except KeyboardInterrupt:
        print_line("stopped by SIGINT")
        return 130
    except Exception as error:
        if environment.get("SNAPORCH_DEBUG"):
            raise
        print_line(
            f"a bug in snaporch: {type(error).__name__}: {error}; "
            "run it again with SNAPORCH_DEBUG=1 and report the output"
        )
        return int(ExitCode.BUG)


def _function(phase: str) -> Callable[[Mapping[str, str]], int]:
    module, name = PHASES[phase]
    function: Callable[[Mapping[str, str]], int] = getattr(import_module(module), name)
    return function


def print_line(text: str) -> None:
    """Print a line on standard error, which may be closed."""
    try:
        sys.stderr.write(f"snaporch: {one_line(text)}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end
