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
from enum import Enum
from pathlib import Path
from typing import Any

_LOOK_SECONDS = 1.0
_GRACE_SECONDS = 30
_RECOVER_WAIT = "600"
_STANDING_STILL = ("manual", "paused", "quiesced")
_ASKED = ("paused", "quiesced")
_BEGINNINGS = ("suspended", "freezing")
"""Notes of those strategies, made before the guest is asked to stand still."""


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
        window = _window(journal)
        if window is None:
            since, released = None, False
            continue
        since = since or time.monotonic()
        if not released and _too_much(window, _facts(journal), time.monotonic() - since, deadline):
            let_go_mark(journal).touch()  # first: the run must not take it for its own doing
            released = _let_go(window, _facts(journal), uri)


def _lines(journal: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    with suppress(OSError, ValueError):
        lines.extend(json.loads(text) for text in journal.read_text("utf-8").splitlines())
    return lines


def _facts(journal: Path) -> dict[str, Any]:
    lines = _lines(journal)
    return dict(lines[0]["facts"]) if lines else {}


class _Window(Enum):
    """What the guardian may have to let go."""

    STILL = "still"
    """A guest that is paused, or whose file systems are frozen."""
    ON_OVERLAYS = "on overlays"
    """A guest that runs, over bases that stand still."""
    COMMITTING = "committing"
    """A guest that is suspended for its commit to catch up with it."""


def _window(journal: Path) -> _Window | None:
    """What is being kept still, from the freeze to the end of the release.

    Overlays only to the beginning of the release, since a commit takes its time. While RAM is being
    saved nobody is kept still but by the budget's wish, and libvirt must not be asked.
    """
    lines = _lines(journal)
    if not lines:
        return None
    strategy = lines[0]["facts"]["strategy"]
    ended = {line["step"] for line in lines if line.get("event") == "end"}
    begun = {line["step"] for line in lines if line.get("event") == "begin"}
    noted = [line["note"] for line in lines if line.get("event") == "note"]
    if "release" in ended:
        return None
    if strategy in _STANDING_STILL:
        asked = strategy in _ASKED and any(note in _BEGINNINGS for note in noted)
        return _Window.STILL if asked or "freeze" in ended else None
    if "release" in begun:
        last = next((note for note in reversed(noted) if note in ("suspended", "resumed")), "")
        return _Window.COMMITTING if last == "suspended" else None
    return _Window.ON_OVERLAYS if "freeze" in ended else None


def _too_much(window: _Window, facts: dict[str, Any], seconds: float, deadline: float) -> bool:
    """Frozen for too long; or on overlays that grow too large or have no room left."""
    if window is not _Window.ON_OVERLAYS:
        return seconds > deadline
    held = facts.get("window_seconds")
    if held and seconds > held + _GRACE_SECONDS:
        return True  # the run had its time to let the guest go by itself
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


def _let_go(window: _Window, facts: dict[str, Any], uri: str) -> bool:
    """Let the guest go; False to try again."""
    from snaporch.errors import SnaporchError
    from snaporch.hypervisor import OverlayDisk, Patience, open_hypervisor

    try:
        hypervisor = open_hypervisor(uri)
        if window is _Window.ON_OVERLAYS:
            overlays = [OverlayDisk.from_json(disk) for disk in facts["overlays"]]
            unsuspended = Patience(running=float("inf"))  # killed then, it would stay so
            hypervisor.commit(facts["uuid"], overlays, lambda _stage: None, unsuspended)
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
