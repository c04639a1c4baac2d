"""What systemd says about the units that carry policies out."""

from __future__ import annotations

import subprocess
from pathlib import Path

from snaporch.command_log import LoggedCommand

CARRIERS = ("snaporch.service", "snaporch-run-due.timer")
"""Of these, one active is enough."""
RUN_DUE = "snaporch-run-due.service"
"""What the timer starts."""
UNITS = (*CARRIERS, RUN_DUE)
SYSTEMD = Path("/run/systemd/system")
"""Is there when systemd is the init (sd_booted(3))."""
_SECONDS = 10


def unit_states() -> dict[str, str]:
    """``ActiveState`` of each unit there is; none without systemd, or if it does not answer."""
    if not SYSTEMD.is_dir():
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
    """What ``systemctl show`` prints of several units: a paragraph for each."""
    found = {}
    for paragraph in text.split("\n\n"):
        pairs = dict(line.split("=", 1) for line in paragraph.splitlines() if "=" in line)
        if pairs.get("LoadState") == "loaded":
            found[pairs.get("Id", "")] = pairs.get("ActiveState", "")
    return found
