"""The guardian itself: ``python3 -m snaporch.run.watch PID JOURNAL DEADLINE URI [CONFIG]``.

It waits for the end of the run's process. If the journal is still there then, the run was killed,
and the guardian recovers the domain. If the guest stays frozen for longer than the deadline while
the run is alive, the guardian lets the guest go (resume, thaw) without asking for the domain's
lock; the run will find that the guest did not stay as it was, and record the snapshot as
crash-consistent.

Only the standard library is imported until there is something to do.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_LOOK_SECONDS = 1.0
_RECOVER_WAIT = "600"
_STANDING_STILL = ("manual", "paused", "quiesced")


def main(arguments: list[str]) -> None:
    """Watch until the run is over, one way or the other."""
    pid, journal, deadline, uri = (
        int(arguments[0]),
        Path(arguments[1]),
        float(arguments[2]),
        arguments[3],
    )
    config = arguments[4:5]
    with suppress(ProcessLookupError):
        _watch(os.pidfd_open(pid), journal, deadline, uri)
    if journal.exists():
        _recover(_facts(journal), config)


def _watch(process: int, journal: Path, deadline: float, uri: str) -> None:
    """Until the process has ended, or its journal is gone."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    released = False
    frozen_since: float | None = None
    while journal.exists() and not poll.poll(_LOOK_SECONDS * 1000):
        if not _standing_still(journal):
            frozen_since = None
            continue
        frozen_since = frozen_since or time.monotonic()
        if not released and time.monotonic() - frozen_since > deadline:
            released = True
            _let_go(_facts(journal), uri)


def _lines(journal: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    with suppress(OSError, ValueError):
        lines.extend(json.loads(text) for text in journal.read_text("utf-8").splitlines())
    return lines


def _facts(journal: Path) -> dict[str, Any]:
    lines = _lines(journal)
    return dict(lines[0]["facts"]) if lines else {}


def _standing_still(journal: Path) -> bool:
    """Whether the run is between the end of its freeze and the end of its release."""
    lines = _lines(journal)
    ended = {line["step"] for line in lines if line.get("event") == "end"}
    strategy = lines[0]["facts"]["strategy"] if lines else ""
    return strategy in _STANDING_STILL and "freeze" in ended and "release" not in ended


def _let_go(facts: dict[str, Any], uri: str) -> None:
    from snaporch.errors import SnaporchError
    from snaporch.hypervisor import open_hypervisor

    with suppress(SnaporchError):
        hypervisor = open_hypervisor(uri)
        if facts["strategy"] == "quiesced":
            hypervisor.thaw_file_systems(facts["uuid"], 10)
        elif facts["was"] == "running" and hypervisor.paused_by(facts["uuid"]) is not None:
            hypervisor.resume(facts["uuid"])


def _recover(facts: dict[str, Any], config: list[str]) -> None:
    if "uuid" not in facts:
        return  # cut short before anything was touched; the next run removes it
    options = ["--config", config[0]] if config else []
    command = [sys.executable, "-P", "-m", "snaporch", *options]
    command += ["recover", "--wait", _RECOVER_WAIT, facts["uuid"]]
    os.execv(sys.executable, command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main(sys.argv[1:])
