"""``snaporch hook sanoid PHASE``: from a phase to the function that answers it.

sanoid calls its hooks for every dataset, most of which hold no guest. So this module, and what a
hook needs to find that out, is near bare Python: no command line parser, no schema, no colours.
Heavy things are imported where they turn out to be needed.
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
    """Do what sanoid asks for in ``environment``; the exit code, with one line why if not 0."""
    try:
        return _function(phase)(environment)
    except SnaporchError as error:
        tell(error.line())
        return int(error.exit_code)
    except KeyboardInterrupt:
        tell("stopped by SIGINT")
        return 130
    except Exception as error:
        if environment.get("SNAPORCH_DEBUG"):
            raise
        tell(
            f"a bug in snaporch: {type(error).__name__}: {error}; "
            "run it again with SNAPORCH_DEBUG=1 and report the output"
        )
        return int(ExitCode.BUG)


def _function(phase: str) -> Callable[[Mapping[str, str]], int]:
    module, name = PHASES[phase]
    function: Callable[[Mapping[str, str]], int] = getattr(import_module(module), name)
    return function


def tell(text: str) -> None:
    """A line on standard error, which may be gone."""
    try:
        sys.stderr.write(f"snaporch: {one_line(text)}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end
