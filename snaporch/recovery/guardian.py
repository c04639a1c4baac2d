"""The guardian itself: ``python3 -m snaporch.recovery.guardian PID JOURNAL DEADLINE URI [CONFIG]``.

It waits for the end of the run's process; PID 0 is that of one that is gone already. If the journal
is still there then, the run was killed, and the guardian has the domain recovered. If the run
hangs, so that the guest stands still for longer than the deadline or its overlays outgrow their
limits, the guardian lets the guest go (resume, thaw, commit) without asking for the domain's lock;
the run will find that the guest did not stay as it was, and record the snapshot as
crash-consistent.

It ends when the journal is gone, and for nothing else: a full disk, a libvirtd that does not answer
or a fault of its own are said on stderr, and it tries again, later each time. It writes one file,
the mark that the guest was let go, and can do without it.

Only the standard library is imported until there is something to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from snaporch.recovery.frozen_window import (
    Window,
    exceeds_limits,
    is_frozen,
    is_suspended,
    window_of,
)
from snaporch.recovery.guardian_actions import RunningPoll, complain, release

_POLL_SECONDS = 1.0
_RECOVER_WAIT = "600"
_RETRY_SECONDS = 2.0
_MAX_HELD_SECONDS = 60.0
"""Between two tries for a guest that may be paused or frozen."""
_MAX_RETRY_SECONDS = 3600.0
"""Between two tries for one that is not, and for saying the same again."""
_RECOVER_SECONDS = 3600.0
"""For one recovery; twice as long for the next. What QEMU commits goes on without it."""


def main(arguments: list[str]) -> None:
    """Watch until the run is over, one way or the other."""
    pid, journal, deadline, uri = (
        int(arguments[0]),
        Path(arguments[1]),
        float(arguments[2]),
        arguments[3],
    )
    guardian = _Guardian(journal, deadline, uri)
    with contextlib.ExitStack() as alive:
        with contextlib.suppress(OSError):
            fcntl.flock(alive.enter_context(journal.open("rb")), fcntl.LOCK_SH)
        with contextlib.suppress(ProcessLookupError):
            if pid:
                guardian.watch(os.pidfd_open(pid))
        guardian.recover(arguments[4:5])


class _Guardian:
    def __init__(self, journal: Path, deadline: float, uri: str) -> None:
        self._journal = journal
        self._deadline = deadline
        self._uri = uri
        self._lines: list[dict[str, Any]] = []
        self._held_since: float | None = None
        """When the guest was last known not to stand still."""
        self._released: tuple[Window, bool] | None = None
        """What the guest was last let go from, and whether its freeze had ended."""
        self._tries = _Backoff(_MAX_HELD_SECONDS)
        """To let the guest go while its run is alive."""
        self._running_poll: RunningPoll | None = None

    def watch(self, process: int) -> None:
        """Until the process has ended, or its journal is gone."""
        poll = select.poll()
        poll.register(process, select.POLLIN)
        while self._journal_exists() and not poll.poll(_POLL_SECONDS * 1000):
            try:
                self._check()
            except Exception as error:  # noqa: BLE001 - whatever it is, the guest needs its guardian
                complain(error)

    def recover(self, config: list[str]) -> None:
        """Have a run that was killed settled, again and again if that fails."""
        held, freed = _Backoff(_MAX_HELD_SECONDS), _Backoff(_MAX_RETRY_SECONDS)
        limit, said = _RECOVER_SECONDS, _RepeatFilter()
        while self._journal_exists():
            lines = self._read_journal()
            if not lines:
                return  # cut short before anything was touched; the next run removes it
            self._release_first(lines)
            options = ["--config", config[0]] if config else []
            command = [sys.executable, "-P", "-m", "snaporch", *options]
            command += ["recover", "--wait", _RECOVER_WAIT, "--notify", lines[0]["facts"]["uuid"]]
            try:
                said.say(_run_recovery(command, limit, self._check_during_recovery))
            except subprocess.TimeoutExpired as error:
                complain(error)
                limit *= 2
            except OSError as error:
                complain(error)
            tries = held if self._may_be_held() else freed
            tries.failed()
            while self._journal_exists() and not tries.again():
                time.sleep(_POLL_SECONDS)

    def _release_first(self, lines: list[dict[str, Any]]) -> None:
        """A recovery also needs a configuration and ZFS, for which no guest has to wait."""
        window = window_of(lines)
        if window in (None, Window.ON_OVERLAYS) or not self._may_be_held():
            return
        try:
            release(window, lines, self._uri, self._journal, run_ended=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is to be recovered
            complain(error)

    def _may_be_held(self) -> bool:
        """Whether the guest may be paused or frozen."""
        try:
            from snaporch.journal import SnapshotJournal, read_journal

            journal = read_journal(self._journal)
            return isinstance(journal, SnapshotJournal) and journal.held
        except Exception as error:  # noqa: BLE001 - whatever it is, the guest needs its guardian
            complain(error)
            return True

    def _journal_exists(self) -> bool:
        """The journal; a file system that fails is no sign that it is not."""
        try:
            os.lstat(self._journal)
        except FileNotFoundError:
            return False
        except OSError as error:
            complain(error)
        return True

    def _read_journal(self) -> list[dict[str, Any]]:
        """The whole lines of the journal; those read last, if it cannot be read."""
        lines: list[dict[str, Any]] = []
        try:
            text = self._journal.read_text("utf-8", "replace")
        except OSError:
            return self._lines
        for line in text.splitlines():
            with contextlib.suppress(ValueError):  # cut short, and the next one is whole again
                lines.append(json.loads(line))
        self._lines = lines
        return lines

    def _check(self) -> None:
        lines = self._read_journal()
        window = window_of(lines)
        if window is None:
            self._held_since, self._released = None, None
            self._tries = _Backoff(_MAX_HELD_SECONDS)
            self._end_running_poll()
            return
        facts = lines[0]["facts"]
        if window is Window.SAVING:
            self._running_poll = self._running_poll or RunningPoll(self._uri, facts["uuid"])
            self._running_poll.ours = is_suspended(lines)
            self._held_since = self._running_poll.ran_at
        else:
            self._held_since = self._held_since or time.monotonic()
            self._end_running_poll()
        held = window, is_frozen(lines)
        if not exceeds_limits(window, facts, time.monotonic() - self._held_since, self._deadline):
            self._released = None
        elif self._released != held and self._tries.again():
            self._mark_released()
            let_go = release(window, lines, self._uri, self._journal)
            self._released = held if let_go else None
            self._tries.failed()

    def _check_during_recovery(self) -> None:
        """A recovery too may hang while it has the guest suspended for its commit."""
        try:
            if window_of(self._read_journal()) is Window.COMMITTING:
                self._check()
            else:
                self._held_since, self._released = None, None
        except Exception as error:  # noqa: BLE001 - whatever it is, the guest needs its guardian
            complain(error)

    def _mark_released(self) -> None:
        """First of all, for the run must not take it for its own doing."""
        try:
            release_mark(self._journal).touch()
        except OSError as error:
            complain(error)

    def _end_running_poll(self) -> None:
        if self._running_poll is not None:
            self._running_poll.over.set()
            self._running_poll = None


class _Backoff:
    """When something that fails may be tried again: later each time."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._pause = _RETRY_SECONDS
        self._at = 0.0

    def again(self) -> bool:
        """Whether it is time."""
        return time.monotonic() >= self._at

    def failed(self) -> None:
        """Wait, next time twice as long."""
        self._at = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, self._longest)


class _RepeatFilter:
    """Passes on what a recovery says, but the same again only later each time."""

    def __init__(self) -> None:
        self._last = b""
        self._tries = _Backoff(_MAX_RETRY_SECONDS)

    def say(self, text: bytes | None) -> None:
        """On standard error."""
        if text != self._last:
            self._tries = _Backoff(_MAX_RETRY_SECONDS)
        if text and self._tries.again():
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(text.decode("utf-8", "replace"))
            self._tries.failed()
        self._last = text or b""


def _run_recovery(command: Sequence[str], limit: float, look: Callable[[], None]) -> bytes:
    """Run a recovery, and look after the guest meanwhile; what it said on standard error.

    Raises:
        OSError: it cannot be run.
        subprocess.TimeoutExpired: it took longer than ``limit`` seconds, and was ended.
    """
    end = time.monotonic() + limit
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.communicate(timeout=_POLL_SECONDS)[1]
                if time.monotonic() > end:
                    raise subprocess.TimeoutExpired(command, limit)
                look()
        finally:
            process.kill()


def release_mark(journal: Path) -> Path:
    """As in ``journal.py``, which is too much to import for a process that mostly waits."""
    return journal.with_suffix(".let-go")


if __name__ == "__main__":
    main(sys.argv[1:])
