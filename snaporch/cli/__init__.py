"""The command line. Each command is a module that parses, calls and prints; it decides nothing."""

from __future__ import annotations

import sys
from typing import Any


def _import_typer_without_rich() -> None:
    """Import typer as if rich were not installed.

    Help is plain text, but typer below 0.17 imports rich's Markdown, which takes longer than the
    rest of a command's start.
    """
    modules: dict[str, Any] = sys.modules
    if "rich" in modules:
        return
    modules["rich"] = None  # an import of it fails
    try:
        import typer  # noqa: F401
    finally:
        del modules["rich"]


_import_typer_without_rich()
