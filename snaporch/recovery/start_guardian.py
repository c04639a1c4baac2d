"""Starting the guardian: a process of its own that lets a guest go when its run cannot.

Under systemd it is a unit of its own (``systemd-run``), because the children of a service may be
killed with it; elsewhere a process in a session of its own. What it does is in ``watch.py``.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from snaporch import default_paths
from snaporch.command_log import LoggedCommand
from snaporch.context import Context
from snaporch.errors import UnavailableError
from snaporch.journal import RunFacts, read_journals
from snaporch.locks import held_by
from snaporch.model import Strategy

_UNGUARDED = (Strategy.CRASH, Strategy.OFF)
_START_SECONDS = 60
_POLL_SECONDS = 0.01
SYSTEMD = Path("/run/systemd/system")


def start_guardian(
    context: Context, facts: RunFacts, journal: Path, *, process: int | None = None
) -> None:
    """Watch over a run; the guardian ends by itself when the journal is gone.

    Args:
        process: the run's, 0 for one that is gone; this one when ``None``.
    """
    if facts.strategy in _UNGUARDED:
        return
    deadline = context.config.settings(facts.domain, facts.uuid).freeze_deadline
    pid = str(os.getpid() if process is None else process)
    arguments = [pid, str(journal), str(deadline), context.config.libvirt_uri]
    if context.config_path is not None:
        arguments.append(str(context.config_path.absolute()))
    command = [sys.executable, "-P", "-m", "snaporch.recovery.guardian", *arguments]
    start_detached(f"snaporch-guardian-{facts.run}", command)


def guard_leftovers(context: Context) -> None:
    """Have a guardian again for each run that may hold its guest, was cut short and has none.

    Guardians may be killed: whoever comes by sees to it that somebody goes on trying.
    """
    for journal in read_journals(context.config.paths.journal):
        if not journal.held or held_by(default_paths.LOCKS, journal.uuid) is not None:
            continue  # who has the lock is at it, and has one
        try:
            with journal.path.open("r+b") as stream:
                guarded = _is_locked(stream.fileno())
        except OSError:  # settled meanwhile
            continue
        if not guarded:
            start_guardian(context, journal.facts, journal.path, process=0)


def await_guardian(context: Context, facts: RunFacts, journal: Path) -> None:
    """Until the guardian watches: it holds a lock on the journal, and lets go when it ends.

    Raises:
        UnavailableError: it did not begin; no guest may stand still without it.
        InterruptedRunError: a signal came first.
    """
    if facts.strategy in _UNGUARDED:
        return
    end = time.monotonic() + _START_SECONDS
    with journal.open("r+b") as stream:  # NFS locks for writing only what is open for it
        while not _is_locked(stream.fileno()):
            context.interrupt.check(facts.domain)
            if time.monotonic() > end:
                raise UnavailableError(
                    facts.domain,
                    f"the guardian of its run did not begin within {_START_SECONDS} s",
                    f"see journalctl -u snaporch-guardian-{facts.run}, and the host's load",
                )
            time.sleep(_POLL_SECONDS)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def start_detached(unit: str, command: list[str]) -> None:
    """Start a process that outlives this one and its control group; not being able to is no error.

    What sanoid told its hook stays here: it comes from outside, and nobody else needs it.
    """
    if SYSTEMD.is_dir() and shutil.which("systemd-run"):
        options = ["--quiet", "--no-block", "--collect", "--property=OOMPolicy=continue"]
        launch = ["systemd-run", *options, f"--unit={unit}", *command]
        if _works(launch):
            return
    with suppress(OSError):
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name[:7] != "SANOID_"},
        )


def _works(command: list[str]) -> bool:
    """Without a bus or the right to it, there is no unit; a process of our own is better then."""
    try:
        with LoggedCommand(*command) as log:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=10
            )
            log.exited(done.returncode)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
