"""The guardian itself: ``python3 -m snaporch.run.watch PID JOURNAL DEADLINE URI [CONFIG]``.

It waits for the end of the run's process. If the journal is still there then, the run was killed,
and the guardian recovers the domain. If the run hangs in the frozen window, so that the guest stays
frozen for longer than the deadline or its overlays outgrow their limits, the guardian lets the
guest go (resume, thaw, commit) without asking for the domain's lock; the run will find that the
guest did not stay as it was, and record the snapshot as crash-consistent.

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
    since: float | None = None
    while journal.exists() and not poll.poll(_LOOK_SECONDS * 1000):
        if not _in_window(journal):
            since = None
            continue
        since = since or time.monotonic()
        facts = _facts(journal)
        if not released and _too_much(facts, time.monotonic() - since, deadline):
            let_go_mark(journal).touch()  # first: the run must not take it for its own doing
            released = _let_go(facts, uri)


def _lines(journal: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    with suppress(OSError, ValueError):
        lines.extend(json.loads(text) for text in journal.read_text("utf-8").splitlines())
    return lines


def _facts(journal: Path) -> dict[str, Any]:
    lines = _lines(journal)
    return dict(lines[0]["facts"]) if lines else {}


def _in_window(journal: Path) -> bool:
    """Whether the guest is being kept still: from the end of the freeze to that of the release.

    Overlays only to the beginning of the release, since a commit takes its time.
    """
    lines = _lines(journal)
    ended = {line["step"] for line in lines if line.get("event") == "end"}
    begun = {line["step"] for line in lines if line.get("event") == "begin"}
    if "freeze" not in ended:
        return False
    still = lines[0]["facts"]["strategy"] in _STANDING_STILL
    return "release" not in (ended if still else begun)


def _too_much(facts: dict[str, Any], seconds: float, deadline: float) -> bool:
    """Frozen for too long; or on overlays that grow too large or have no room left."""
    if facts["strategy"] in _STANDING_STILL:
        return seconds > deadline
    paths = [disk["overlay"] for disk in facts["overlays"]]
    try:
        size = sum(os.stat(path).st_blocks * 512 for path in paths)
        room = os.statvfs(facts["overlay_dir"])
    except OSError:  # committed and removed meanwhile
        return False
    limit, floor = facts["overlay_max_mib"], facts["overlay_floor_mib"]
    return bool(limit and size >> 20 > limit) or room.f_bavail * room.f_frsize >> 20 < floor


def let_go_mark(journal: Path) -> Path:
    """As in ``journal.py``, which is too much to import for a process that mostly waits."""
    return journal.with_suffix(".let-go")


def _let_go(facts: dict[str, Any], uri: str) -> bool:
    """Let the guest go; False to try again."""
    from snaporch.errors import SnaporchError
    from snaporch.hypervisor import OverlayDisk, open_hypervisor

    try:
        hypervisor = open_hypervisor(uri)
        if facts["strategy"] == "overlay":
            overlays = [OverlayDisk(**disk) for disk in facts["overlays"]]
            hypervisor.commit(facts["uuid"], overlays, lambda: None)
        elif facts["strategy"] == "quiesced":
            hypervisor.thaw_file_systems(facts["uuid"], 10)
        if facts["was"] == "running" and hypervisor.paused_by(facts["uuid"]) is not None:
            hypervisor.resume(facts["uuid"])
    except SnaporchError:
        return False
    return True


def _recover(facts: dict[str, Any], config: list[str]) -> None:
    if "uuid" not in facts:
        return  # cut short before anything was touched; the next run removes it
    options = ["--config", config[0]] if config else []
    command = [sys.executable, "-P", "-m", "snaporch", *options]
    command += ["recover", "--wait", _RECOVER_WAIT, facts["uuid"]]
    os.execv(sys.executable, command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main(sys.argv[1:])
