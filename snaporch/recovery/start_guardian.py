"""Starts the guardian, a process of its own that releases a guest when its run cannot.

The deadline, ``freeze_deadline`` of the guest's configuration, is handed over here; it is compared
in :mod:`snaporch.recovery.hold_limits`.

Under systemd the guardian is a unit of its own (``systemd-run``), because systemd may kill the
children of a service with it. Elsewhere it is a process in a session of its own. Both are started
by :mod:`snaporch.systemd.start_detached`. Its code is in ``guardian.py``.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from snaporch import default_paths
from snaporch.context import Context
from snaporch.errors import UnavailableError
from snaporch.journal import RunFacts, read_journals
from snaporch.locks import held_by
from snaporch.model import Strategy

_UNGUARDED = (Strategy.CRASH, Strategy.OFF)
_START_SECONDS = 60
_POLL_SECONDS = 0.01


def start_guardian(
    context: Context,
    facts: RunFacts,
    journal: Path,
    *,
    process: int | None = None,
) -> None:
    """Start the guardian of a run; it exits when the journal is removed.

    Args:
        process: the run's process ID, 0 if the run has exited; this process when ``None``.
    """
    if facts.strategy in _UNGUARDED:
        return
    deadline = context.config.settings(facts.domain, facts.uuid).freeze_deadline
    pid = str(os.getpid() if process is None else process)
    arguments = [pid, str(journal), str(deadline), context.config.libvirt_uri]
    if context.config_path is not None:
        arguments.append(str(context.config_path.absolute()))
    command = [sys.executable, "-P", "-m", "snaporch.recovery.guardian", *arguments]
    context.start_detached(f"snaporch-guardian-{facts.run}", command)


def guard_leftovers(context: Context) -> None:
    """Start a guardian for each interrupted run that may hold its guest and has no guardian.

    A guardian may be killed; so the daemon, ``run-due`` and ``recover`` call this.
    """
    for journal in read_journals(context.config.paths.journal):
        if not journal.held or held_by(default_paths.LOCKS, journal.uuid) is not None:
            continue  # the lock's holder works on the domain, and its run has a guardian
        with suppress(OSError):  # recovered meanwhile
            if not is_guarded(journal.path):
                start_guardian(context, journal.facts, journal.path, process=0)


def is_guarded(journal: Path) -> bool:
    """Whether a guardian watches a run.

    Raises:
        OSError: its journal is gone, or cannot be opened.
    """
    with journal.open("r+b") as stream:
        return _is_locked(stream.fileno())


def await_guardian(
    context: Context, facts: RunFacts, journal: Path, *, seconds: float = _START_SECONDS
) -> None:
    """Wait until the guardian watches the run; it then holds a lock on the journal.

    Args:
        seconds: how long to wait.

    Raises:
        UnavailableError: the guardian did not start; no guest may be frozen without it.
        InterruptedRunError: a signal came first.
    """
    if facts.strategy in _UNGUARDED:
        return
    end = context.clock.monotonic() + seconds
    with journal.open("r+b") as stream:  # NFS grants a write lock only on a file open for writing
        while not _is_locked(stream.fileno()):
            context.interrupt.check(facts.domain)
            if context.clock.monotonic() > end:
                raise UnavailableError(
                    facts.domain,
                    f"the guardian of its run did not start within {seconds} s",
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
