"""Starts processes that outlive this one: units of systemd, or without it plain processes.

How long such a unit may take to stop is set in :mod:`snaporch.systemd.unit_settings`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from snaporch.command_log import LoggedCommand
from snaporch.systemd.unit_settings import AFTER, STOP_TIME

SYSTEMD = Path("/run/systemd/system")
_SETTINGS = {
    "After": " ".join(AFTER),
    "OOMPolicy": "continue",
    "KillMode": "mixed",
    "TimeoutStopSec": STOP_TIME,
}
"""SIGTERM goes to the main process only: a compressor or a recovery that gets it fails."""


def start_detached(
    unit: str, command: list[str], *, systemd: Path = SYSTEMD
) -> subprocess.Popen[bytes] | None:
    """Start a process that outlives this one and its control group; a failure is no error.

    The ``SANOID_`` variables are not passed on: they come from outside, and only hooks need them.

    Args:
        unit: the systemd unit's name.
        systemd: a directory that exists while systemd runs the host.

    Returns: the process, ``None`` if it is a unit or could not be started.
    """
    if systemd.is_dir() and shutil.which("systemd-run"):
        settings = [f"--property={name}={value}" for name, value in _SETTINGS.items()]
        options = ["--quiet", "--no-block", "--collect", *settings, f"--unit={unit}"]
        launch = ["systemd-run", *options, *command]
        if _works(launch):
            return None
    with suppress(OSError):
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name[:7] != "SANOID_"},
        )
    return None


def _works(command: list[str]) -> bool:
    """Whether systemd started the unit; without a bus or permission a plain process is started."""
    try:
        with LoggedCommand(*command) as log:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=10
            )
            log.exited(done.returncode)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
