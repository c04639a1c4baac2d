"""The guardian: ``python3 -m snaporch.recovery.guardian PID JOURNAL DEADLINE URI [CONFIG]``.

When a guest is held for too long is decided by :mod:`snaporch.recovery.hold_limits`.

The guardian opens a pidfd of the run's process at its start, so a PID that is used again is not
mistaken for the run. It waits until that process exits; PID 0 stands for a process that has exited.
If the journal still exists then, the run was killed, and the guardian runs ``snaporch recover``.

A run may hang, so that its guest is held longer than the deadline or its overlays outgrow their
limits. Then the guardian releases the guest (resume, thaw, commit) without the domain's lock. The
run finds that the guest's state changed, and records the snapshot as crash-consistent.

The guardian exits when the journal is removed. A full disk, a libvirtd that does not answer and its
own errors are printed on stderr, and it retries, each time later. It writes one file, the mark that
it released the guest, and works without it.

systemd stops the guardian at shutdown, and libvirt-guests after it. So after SIGTERM the guardian
stays until the run has released its guest. The guest of a killed run is recovered once more.

Only the standard library is imported until there is something to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from snaporch.recovery.guardian_actions import Host, RunningPoll, complain, end_slowing, release
from snaporch.recovery.hold_limits import (
    GuestHold,
    exceeds_limits,
    facts_of,
    hold_of,
    is_frozen,
    is_released,
    is_suspended,
    last_noted,
    slows_too_long,
)

_RECOVER_WAIT = "600s"


class GuardianTimes(NamedTuple):
    """Intervals and time limits, in seconds."""

    poll: float = 1.0
    retry: float = 2.0
    """The pause after the first try."""
    max_held: float = 60.0
    """The longest pause between two tries for a guest that may be paused or frozen."""
    max_retry: float = 3600.0
    """The longest pause between two tries for a guest that runs, and between two equal messages."""
    recover: float = 3600.0
    """The limit of the first recovery; doubled after each. QEMU's commit continues without it."""


def main(
    arguments: list[str],
    host: Host | None = None,
    times: GuardianTimes | None = None,
    actions: Actions | None = None,
) -> None:
    """Watch the run until its journal is removed, or after SIGTERM until it needs no guardian."""
    pid, journal, deadline, uri = (
        int(arguments[0]),
        Path(arguments[1]),
        float(arguments[2]),
        arguments[3],
    )
    guardian = _Guardian(
        journal, deadline, uri, host or Host(), times or GuardianTimes(), actions or Actions()
    )
    with contextlib.ExitStack() as alive:
        before = signal.signal(signal.SIGTERM, lambda *_signal: guardian.stop())
        alive.callback(signal.signal, signal.SIGTERM, before)
        with contextlib.suppress(OSError):
            fcntl.flock(alive.enter_context(journal.open("rb")), fcntl.LOCK_SH)
        with contextlib.suppress(ProcessLookupError):
            if pid:
                guardian.watch(os.pidfd_open(pid))
        guardian.recover(arguments[4:5])


class _Guardian:
    def __init__(
        self,
        journal: Path,
        deadline: float,
        uri: str,
        host: Host,
        times: GuardianTimes,
        actions: Actions,
    ) -> None:
        self._host = host
        self._times = times
        self._actions = actions
        self._journal = journal
        self._deadline = deadline
        self._uri = uri
        self._lines: list[dict[str, Any]] = []
        self._damaged = False
        self._saving_since: float | None = None
        """When saving RAM was first seen."""
        self._held_since: float | None = None
        """When the guest was last known to run."""
        self._released: tuple[GuestHold, bool] | None = None
        """How the guest was held when it was last released, and whether its freeze had ended."""
        self._tries = self._backoff(times.max_held)
        """Releases of the guest while its run is alive."""
        self._running_poll: RunningPoll | None = None
        self._stopping = False

    def stop(self) -> None:
        """End as soon as the guest needs no guardian. Signal-safe."""
        self._stopping = True

    def watch(self, process: int) -> None:
        """Check the guest until the process exits or the guardian is not needed."""
        while self._is_needed() and not self._host.await_exit(process, self._times.poll):
            try:
                self._check()
            except Exception as error:  # noqa: BLE001 - after any error the guest needs its guardian
                complain(error)

    def recover(self, config: list[str]) -> None:
        """Run ``snaporch recover`` until the journal is removed; after SIGTERM once more."""
        held, freed = self._backoff(self._times.max_held), self._backoff(self._times.max_retry)
        limit = self._times.recover
        output = _RepeatFilter(lambda: self._backoff(self._times.max_retry))
        while self._is_needed():
            lines = self._read_journal()
            if not lines:
                return  # killed before anything was touched; the next run removes the journal
            self._release_first(lines)
            options = ["--config", config[0]] if config else []
            command = [sys.executable, "-P", "-m", "snaporch", *options]
            command += ["recover", "--wait", _RECOVER_WAIT, "--notify"]
            if uuid := facts_of(lines).get("uuid"):  # without one it reports this journal
                command.append(uuid)
            try:
                check = self._check_during_recovery
                output.write(self._actions.recover(command, limit, check, self._times.poll))
            except subprocess.TimeoutExpired as error:
                complain(error)
                limit *= 2
            except OSError as error:
                complain(error)
            if self._stopping:
                return
            tries = held if self._may_be_held() else freed
            tries.failed()
            while self._journal_exists() and not (tries.is_over() or self._stopping):
                self._host.sleep(self._times.poll)

    def _release_first(self, lines: list[dict[str, Any]]) -> None:
        """Release the guest before the recovery, which also needs a configuration and ZFS."""
        try:
            hold = hold_of(lines)
            if last_noted(lines, ("ending",)) and not self._is_fenced(lines):
                hold = GuestHold.STOPPED  # killed before its fence: it goes on here
            if hold in (None, GuestHold.ON_OVERLAYS) or not self._may_be_held():
                return
            self._actions.release(hold, lines, self._uri, self._journal, self._host, run_ended=True)
        except Exception as error:  # noqa: BLE001 - after any error the recovery follows
            complain(error)

    def _is_fenced(self, lines: list[dict[str, Any]]) -> bool:
        """Whether the guest has a fence, or may have one."""
        try:
            os.lstat(self._host.fences / facts_of(lines)["uuid"])
        except FileNotFoundError:
            return False
        return True

    def _may_be_held(self) -> bool:
        """Whether the guest may be paused or frozen."""
        try:
            from snaporch.journal import SnapshotJournal, UnreadableJournal, read_journal

            journal = read_journal(self._journal)
            lines = self._read_journal()
            if self._damaged or isinstance(journal, UnreadableJournal):
                return hold_of(lines) not in (None, GuestHold.ON_OVERLAYS)
            return isinstance(journal, SnapshotJournal) and journal.held
        except Exception as error:  # noqa: BLE001 - after any error the guest needs its guardian
            complain(error)
            return True

    def _is_needed(self) -> bool:
        """Whether the run may still hold its guest; until SIGTERM, whether its journal exists."""
        if not self._journal_exists():
            return False
        return not (self._stopping and is_released(self._read_journal()))

    def _journal_exists(self) -> bool:
        """Whether the journal exists; also when the file system cannot answer."""
        try:
            os.lstat(self._journal)
        except FileNotFoundError:
            return False
        except OSError as error:
            complain(error)
        return True

    def _read_journal(self) -> list[dict[str, Any]]:
        """The complete lines of the journal, and those read before that are damaged now."""
        lines: list[dict[str, Any]] = []
        try:
            text = self._journal.read_text("utf-8", "replace")
        except OSError:
            return self._lines
        for line in text.splitlines():
            with contextlib.suppress(ValueError):  # an incomplete line; the next one is complete
                lines.append(json.loads(line))
        lines = [line for line in lines if isinstance(line, dict)]
        known = self._lines
        self._damaged = lines[: len(known)] != known  # no process changes a line of a journal
        if self._damaged:
            lines = known + [line for line in lines if line not in known]
        self._lines = lines
        return lines

    def _check(self) -> None:
        lines = self._read_journal()
        hold = hold_of(lines)
        if hold is None:
            self._held_since, self._released = None, None
            self._tries = self._backoff(self._times.max_held)
            self._end_running_poll()
            return
        facts = lines[0]["facts"]
        if hold is GuestHold.SAVING_RAM:
            self._running_poll = self._running_poll or RunningPoll(
                self._uri, facts["uuid"], self._host, self._times.poll
            )
            self._running_poll.ours = is_suspended(lines)
            self._held_since = self._running_poll.ran_at
            self._saving_since = self._saving_since or self._host.monotonic()
            if slows_too_long(facts, self._host.monotonic() - self._saving_since):
                self._actions.end_slowing(facts, self._uri, self._host)
        else:
            self._held_since = self._held_since or self._host.monotonic()
            self._end_running_poll()
        held = hold, is_frozen(lines)
        seconds = self._host.monotonic() - self._held_since
        if not exceeds_limits(hold, facts, seconds, self._deadline):
            self._released = None
        elif self._released != held and self._tries.is_over():
            self._mark_released()
            if hold_of(self._read_journal()) is None:
                return  # the run looks for the mark after it noted that it ends the guest
            done = self._actions.release(hold, lines, self._uri, self._journal, self._host)
            self._released = held if done else None
            self._tries.failed()

    def _check_during_recovery(self) -> None:
        """Check a guest that the recovery suspended for its commit: the recovery too may hang."""
        try:
            if hold_of(self._read_journal()) is GuestHold.SUSPENDED_FOR_COMMIT:
                self._check()
            else:
                self._held_since, self._released = None, None
        except Exception as error:  # noqa: BLE001 - after any error the guest needs its guardian
            complain(error)

    def _mark_released(self) -> None:
        """Write the mark before the release, so that the run does not take it for its own."""
        try:
            release_mark(self._journal).touch()
        except OSError as error:
            complain(error)

    def _end_running_poll(self) -> None:
        if self._running_poll is not None:
            self._running_poll.over.set()
            self._running_poll = None

    def _backoff(self, longest: float) -> _Backoff:
        return _Backoff(self._host.monotonic, self._times.retry, longest)


class _Backoff:
    """When a failing action may be retried: the pause doubles after each failure."""

    def __init__(self, monotonic: Callable[[], float], first: float, longest: float) -> None:
        self._monotonic = monotonic
        self._longest = longest
        self._pause = first
        self._at = 0.0

    def is_over(self) -> bool:
        """Whether the pause is over."""
        return self._monotonic() >= self._at

    def failed(self) -> None:
        """Begin a pause; the next one is twice as long."""
        self._at = self._monotonic() + self._pause
        self._pause = min(self._pause * 2, self._longest)


class _RepeatFilter:
    """Prints the output of recoveries; equal output only after pauses that double."""

    def __init__(self, backoff: Callable[[], _Backoff]) -> None:
        self._backoff = backoff
        self._last = b""
        self._tries = backoff()

    def write(self, text: bytes | None) -> None:
        """Print the output on standard error, unless it is repeated too soon."""
        if text != self._last:
            self._tries = self._backoff()
        if text and self._tries.is_over():
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(text.decode("utf-8", "replace"))
            self._tries.failed()
        self._last = text or b""


def run_recovery(
    command: Sequence[str], limit: float, check: Callable[[], None], interval: float
) -> bytes:
    """Run a recovery, and check the guest meanwhile.

    Args:
        limit: seconds.
        check: called again and again, after ``interval`` seconds each.

    Returns: what the recovery printed on standard error.

    Raises:
        OSError: it cannot be run.
        subprocess.TimeoutExpired: it took longer than ``limit`` seconds and was killed.
    """
    end = time.monotonic() + limit
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.communicate(timeout=interval)[1]
                if time.monotonic() > end:
                    raise subprocess.TimeoutExpired(command, limit)
                check()
        finally:
            process.kill()


class Actions(NamedTuple):
    """What the guardian does for a guest."""

    release: Callable[..., bool] = release
    """See :func:`~snaporch.recovery.guardian_actions.release`."""
    end_slowing: Callable[[dict[str, Any], str, Host], None] = end_slowing
    """See :func:`~snaporch.recovery.guardian_actions.end_slowing`."""
    recover: Callable[[Sequence[str], float, Callable[[], None], float], bytes] = run_recovery
    """See :func:`run_recovery`."""


def release_mark(journal: Path) -> Path:
    """``journal.release_mark``; the guardian does not import ``journal`` to save memory."""
    return journal.with_suffix(".released")


if __name__ == "__main__":
    main(sys.argv[1:])
