"""Writing files and telling, behind ``snaporch install`` and ``snaporch uninstall``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from snaporch.config import load_config
from snaporch.config.example import sample
from snaporch.errors import UsageError
from snaporch.output.terminal import print_error, print_result
from snaporch.systemd.units import (
    Change,
    Done,
    install,
    install_config,
    install_hook,
    render_units,
    uninstall,
)

_HINTS = (
    "next: systemctl daemon-reload",
    "then: systemctl enable snaporch-recover",
    "then: systemctl try-restart libvirtd virtqemud  # guests go on; a host has one of the two",
    "and either: systemctl enable --now snaporch-run-due.timer",
    "or: systemctl enable --now snaporch.service",
)


def install_units(root: Path, command: str | None, config: Path | None) -> int:
    """Write them below ``root``.

    Raises:
        UsageError: what they shall start is no absolute path.
    """
    program = command or _own_command()
    if not program.startswith("/") or not program.isprintable() or set(program) & set(" '\"\\$"):
        raise UsageError("--command", f"{program!r} is not a plain absolute path")
    words = [program] if config is None else [program, "--config", str(config.absolute())]
    _tell(install(root, render_units(load_config(config), words)))
    _tell([install_hook(root)])
    if config is None:
        _tell([install_config(root, sample())])
    if root == Path("/"):
        for hint in _HINTS:
            print_error(hint)
    return 0


def uninstall_units(root: Path) -> int:
    """Remove them below ``root``."""
    done = _tell(uninstall(root))
    if not done:
        print_error(f"no units of snaporch below {root}")
    elif root == Path("/") and any(each.change is Change.REMOVED for each in done):
        print_error("next: systemctl daemon-reload")
    return 0


def _own_command() -> str:
    """The executable people call, rather than a file within an environment that may go."""
    return shutil.which("snaporch") or str(Path(sys.argv[0]).absolute())


def _tell(steps: Iterable[Done]) -> list[Done]:
    done = []
    for each in steps:
        done.append(each)
        print_result(f"{each.path}  {each.change}{f' {each.saved}' if each.saved else ''}")
    return done
