"""States of the systemd units that carry out policies."""

from __future__ import annotations

import subprocess

from snaporch.command_log import LoggedCommand
from snaporch.default_paths import HOST, HostPaths

CARRIERS = ("snaporch.service", "snaporch-run-due.timer")
"""The units of which one must be active."""
RUN_DUE = "snaporch-run-due.service"
"""The unit that the timer starts."""
UNITS = (*CARRIERS, RUN_DUE)
_SECONDS = 10


def unit_states(host: HostPaths = HOST) -> dict[str, str]:
    """``ActiveState`` by loaded unit; empty without systemd, or if it does not answer."""
    if not (host.run / "systemd" / "system").is_dir():  # sd_booted(3)
        return {}
    command = ["systemctl", "show", "--property=Id,LoadState,ActiveState", *UNITS]
    try:
        with LoggedCommand(*command):
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=_SECONDS,
            )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse(done.stdout)


def parse(text: str) -> dict[str, str]:
    """Parse the output of ``systemctl show`` for several units, one paragraph each."""
    found = {}
    for paragraph in text.split("\n\n"):
        pairs = dict(line.split("=", 1) for line in paragraph.splitlines() if "=" in line)
        if pairs.get("LoadState") == "loaded":
            found[pairs.get("Id", "")] = pairs.get("ActiveState", "")
    return found
