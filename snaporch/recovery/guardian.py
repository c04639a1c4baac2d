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
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Any

_LOOK_SECONDS = 1.0
_GRACE_SECONDS = 30
_RECOVER_WAIT = "600"
_BY_ITS_OWNER = "user"
"""libvirt's reason for a pause that somebody asked for: its owner, or the run, which notes it."""
_ASKED_WHILE_SAVING = (_BY_ITS_OWNER, "snapshot")
"""The same while RAM is saved: saved live, libvirt gives this reason to nothing else."""
_RETRY_SECONDS = 2.0
_MAX_HELD_SECONDS = 60.0
"""Between two tries for a guest that may be paused or frozen."""
_MAX_RETRY_SECONDS = 3600.0
"""Between two tries for one that is not, and for saying the same again."""
_RECOVER_SECONDS = 3600.0
"""For one recovery; twice as long for the next. What QEMU commits goes on without it."""
_SAVING_RAM = ("manual", "overlay")
_STANDING_STILL = ("manual", "paused", "quiesced")
_ASKED = ("paused", "quiesced")
_BEGINNINGS = ("suspended", "freezing")
"""Notes of those strategies, made before the guest is asked to stand still."""
_ENDS = ("resumed", "let-go")
"""Notes of a guest that stands still no more."""


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
        self._since: float | None = None
        """When the guest was last known not to stand still."""
        self._released: tuple[_Window, bool] | None = None
        """What the guest was last let go from, and whether its freeze had ended."""
        self._tries = _Tries(_MAX_HELD_SECONDS)
        """To let the guest go while its run is alive."""
        self._pulse: _Pulse | None = None

    def watch(self, process: int) -> None:
        """Until the process has ended, or its journal is gone."""
        poll = select.poll()
        poll.register(process, select.POLLIN)
        while self._is_there() and not poll.poll(_LOOK_SECONDS * 1000):
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - whatever it is, the guest needs its guardian
                _complain(error)

    def recover(self, config: list[str]) -> None:
        """Have a run that was killed settled, again and again if that fails."""
        held, freed = _Tries(_MAX_HELD_SECONDS), _Tries(_MAX_RETRY_SECONDS)
        limit, said = _RECOVER_SECONDS, _Said()
        while self._is_there():
            lines = self._read()
            if not lines:
                return  # cut short before anything was touched; the next run removes it
            self._let_go_first(lines)
            options = ["--config", config[0]] if config else []
            command = [sys.executable, "-P", "-m", "snaporch", *options]
            command += ["recover", "--wait", _RECOVER_WAIT, "--notify", lines[0]["facts"]["uuid"]]
            try:
                said.say(_run(command, limit, self._look_meanwhile))
            except subprocess.TimeoutExpired as error:
                _complain(error)
                limit *= 2
            except OSError as error:
                _complain(error)
            tries = held if self._is_held() else freed
            tries.failed()
            while self._is_there() and not tries.again():
                time.sleep(_LOOK_SECONDS)

    def _let_go_first(self, lines: list[dict[str, Any]]) -> None:
        """A recovery also needs a configuration and ZFS, for which no guest has to wait."""
        window = _window(lines)
        if window in (None, _Window.ON_OVERLAYS) or not self._is_held():
            return
        try:
            _let_go(window, lines, self._uri, self._journal, run_ended=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is to be recovered
            _complain(error)

    def _is_held(self) -> bool:
        """Whether the guest may be paused or frozen."""
        try:
            from snaporch.journal import SnapshotJournal, read_journal

            journal = read_journal(self._journal)
            return isinstance(journal, SnapshotJournal) and journal.held
        except Exception as error:  # noqa: BLE001 - whatever it is, the guest needs its guardian
            _complain(error)
            return True

    def _is_there(self) -> bool:
        """The journal; a file system that fails is no sign that it is not."""
        try:
            os.lstat(self._journal)
        except FileNotFoundError:
            return False
        except OSError as error:
            _complain(error)
        return True

    def _read(self) -> list[dict[str, Any]]:
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

    def _look(self) -> None:
        lines = self._read()
        window = _window(lines)
        if window is None:
            self._since, self._released = None, None
            self._tries = _Tries(_MAX_HELD_SECONDS)
            self._end_pulse()
            return
        facts = lines[0]["facts"]
        if window is _Window.SAVING:
            self._pulse = self._pulse or _Pulse(self._uri, facts["uuid"])
            self._pulse.ours = _is_suspended(lines)
            self._since = self._pulse.ran_at
        else:
            self._since = self._since or time.monotonic()
            self._end_pulse()
        held = window, _is_frozen(lines)
        if not _too_much(window, facts, time.monotonic() - self._since, self._deadline):
            self._released = None
        elif self._released != held and self._tries.again():
            self._mark()
            let_go = _let_go(window, lines, self._uri, self._journal)
            self._released = held if let_go else None
            self._tries.failed()

    def _look_meanwhile(self) -> None:
        """A recovery too may hang while it has the guest suspended for its commit."""
        try:
            if _window(self._read()) is _Window.COMMITTING:
                self._look()
            else:
                self._since, self._released = None, None
        except Exception as error:  # noqa: BLE001 - whatever it is, the guest needs its guardian
            _complain(error)

    def _mark(self) -> None:
        """First of all, for the run must not take it for its own doing."""
        try:
            let_go_mark(self._journal).touch()
        except OSError as error:
            _complain(error)

    def _end_pulse(self) -> None:
        if self._pulse is not None:
            self._pulse.over.set()
            self._pulse = None


class _Tries:
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


class _Said:
    """Passes on what a recovery says, but the same again only later each time."""

    def __init__(self) -> None:
        self._last = b""
        self._tries = _Tries(_MAX_RETRY_SECONDS)

    def say(self, text: bytes | None) -> None:
        """On standard error."""
        if text != self._last:
            self._tries = _Tries(_MAX_RETRY_SECONDS)
        if text and self._tries.again():
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(text.decode("utf-8", "replace"))
            self._tries.failed()
        self._last = text or b""


class _Pulse(threading.Thread):
    """Asks libvirt now and then whether the guest runs; an answer that does not come is a no.

    libvirt answers from what it knows, without QEMU's monitor, which says nothing while a full pipe
    holds QEMU up. Only while it opens the pipe, with the guest paused, does it answer nobody.
    """

    def __init__(self, uri: str, uuid: str) -> None:
        super().__init__(name="pulse", daemon=True)
        self.ran_at = time.monotonic()
        self.ours = False
        """Whether the run has suspended it; else its owner may have, who knows why."""
        self.over = threading.Event()
        self._uri = uri
        self._uuid = uuid
        self.start()

    def run(self) -> None:
        from snaporch.errors import SnaporchError
        from snaporch.hypervisor import open_hypervisor

        hypervisor = None
        while not self.over.wait(_LOOK_SECONDS):
            asked = time.monotonic()
            try:
                hypervisor = hypervisor or open_hypervisor(self._uri)
                reason = hypervisor.paused_by(self._uuid)
                if reason is None or (reason in _ASKED_WHILE_SAVING and not self.ours):
                    self.ran_at = asked
            except SnaporchError:
                continue


def _run(command: Sequence[str], limit: float, look: Callable[[], None]) -> bytes:
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
                    return process.communicate(timeout=_LOOK_SECONDS)[1]
                if time.monotonic() > end:
                    raise subprocess.TimeoutExpired(command, limit)
                look()
        finally:
            process.kill()


def _attempt(note: Callable[[Any], None]) -> Callable[[Any], None]:
    """A full disk must not keep the guest on its overlays."""

    def attempt(text: Any) -> None:
        with contextlib.suppress(OSError):
            note(text)

    return attempt


def _complain(error: Exception) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"snaporch: guardian: {error}\n")


class _Window(Enum):
    """What the guardian may have to let go."""

    STILL = "still"
    """A guest that is paused, or whose file systems are frozen."""
    SAVING = "saving"
    """A guest whose RAM is saved: it runs, but for the end, or if it changes RAM too fast."""
    ON_OVERLAYS = "on overlays"
    """A guest that runs, over bases that stand still."""
    COMMITTING = "committing"
    """A guest that is suspended for its commit to catch up with it."""


def _window(lines: Sequence[dict[str, Any]]) -> _Window | None:
    """What may be kept still, from the beginning of the freeze to the end of the release.

    Overlays only to the beginning of the release, since a commit takes its time.
    """
    if not lines:
        return None
    facts = lines[0]["facts"]
    strategy = facts["strategy"]
    ended = {line["step"] for line in lines if line.get("event") == "end"}
    begun = {line["step"] for line in lines if line.get("event") == "begin"}
    if "release" in ended:
        return None
    if _last_noted(lines, _BEGINNINGS, _ENDS) == "let-go" and strategy != "overlay":
        return None
    if "freeze" not in ended and strategy in _SAVING_RAM:
        return _Window.SAVING if "freeze" in begun and facts["was"] == "running" else None
    if strategy in _STANDING_STILL:
        if _last_noted(lines, ("held",)):
            return None
        asked = strategy in _ASKED and _last_noted(lines, _BEGINNINGS, _ENDS) in _BEGINNINGS
        return _Window.STILL if asked or "freeze" in ended else None
    if _is_suspended(lines):
        return _Window.COMMITTING
    if "release" in begun:
        return None
    return _Window.ON_OVERLAYS if "freeze" in ended else None


def _is_suspended(lines: Sequence[dict[str, Any]]) -> bool:
    """Whether the run has noted that it suspends the guest, and not that it runs again."""
    return _last_noted(lines, ("suspended",), _ENDS) == "suspended"


def _is_frozen(lines: Sequence[dict[str, Any]]) -> bool:
    """Whether the freeze has ended."""
    return any(line.get("event") == "end" and line["step"] == "freeze" for line in lines)


def _last_noted(lines: Sequence[dict[str, Any]], *wanted: Sequence[str]) -> str:
    """The last of these notes; a guest that came to stand still after it was let go, was not."""
    for at, line in reversed(list(enumerate(lines))):
        note = line.get("note", "")
        undone = note == "let-go" and _is_frozen(lines[at:])
        if any(note in each for each in wanted) and not undone:
            return str(note)
    return ""


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


def _let_go(
    window: _Window,
    lines: Sequence[dict[str, Any]],
    uri: str,
    journal: Path,
    *,
    run_ended: bool = False,
) -> bool:
    """Let the guest go; False to try again."""
    from snaporch.command_log import set_fields
    from snaporch.errors import SnaporchError
    from snaporch.hypervisor import OverlayDisk, Patience, open_hypervisor
    from snaporch.journal import Note, append_note, noting
    from snaporch.recovery.drain_pipe import reader_of
    from snaporch.recovery.release_guest import end_job, resume

    facts = lines[0]["facts"]
    set_fields(DOMAIN=facts["domain"], RUN=facts["run"], SNAPSHOT=facts["snapshot"], STEP="guard")
    saving = window is _Window.SAVING
    try:
        # whoever saves RAM waits for a reader, and the run's own may stand still
        with reader_of(Path(facts["ram_pipe"])) if saving else contextlib.nullcontext():
            hypervisor = open_hypervisor(uri)
            domain = hypervisor.find(facts["uuid"])
            if domain is None or not domain.active or domain.boot != facts["boot"]:
                return True  # another emulator's; its recovery knows what RAM it may go on from
            if saving:
                end_job(hypervisor, facts["uuid"], facts["domain"])
            elif window is _Window.ON_OVERLAYS:
                overlays = [OverlayDisk.from_json(disk) for disk in facts["overlays"]]
                unsuspended = Patience(running=float("inf"))  # killed then, it would stay so
                told = noting(_attempt(lambda note: append_note(journal, note)))
                with _noted_commit(facts["datasets"], journal):
                    hypervisor.commit(facts["uuid"], overlays, told, unsuspended)
            elif facts["strategy"] == "quiesced":
                hypervisor.thaw_file_systems(facts["uuid"], 10)
            reason = hypervisor.paused_by(facts["uuid"])
            asked_for = reason in (_ASKED_WHILE_SAVING if saving else (_BY_ITS_OWNER,))
            ours = not asked_for or _is_suspended(lines)
            ours = ours and not _last_noted(lines, ("held",))
            if facts["was"] == "running" and reason is not None and ours:
                resume(hypervisor, facts["uuid"])
            if facts["strategy"] == "paused" and reason is None and not _is_frozen(lines):
                return False  # it does not stand still yet: nobody would look when it does
            if run_ended or window is _Window.STILL:  # whatever stands still later is not the run's
                with contextlib.suppress(OSError):
                    append_note(journal, Note.LET_GO)
    except (SnaporchError, OSError) as error:
        _complain(error)
        return False
    return True


def _noted_commit(datasets: Sequence[str], journal: Path) -> AbstractContextManager[Any]:
    """Note when a commit begins and ends; one that nobody notes tears whatever is taken later."""
    from snaporch.catalog.torn import noted_commit
    from snaporch.zfs import PoolError, open_pool

    try:
        return noted_commit(open_pool(to_look=True), datasets, journal)
    except PoolError as error:  # which must not keep the guest on its overlays
        _complain(error)
        return contextlib.nullcontext()


if __name__ == "__main__":
    main(sys.argv[1:])
