"""The guardian's calls to libvirt: they check whether a guest runs, and release it.

When a guest is released is decided by :mod:`snaporch.recovery.hold_limits`.

Only the standard library is imported until libvirt is needed.
"""

from __future__ import annotations

import contextlib
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from snaporch.default_paths import FENCES
from snaporch.recovery.hold_limits import GuestHold, is_frozen, is_suspended, last_noted

if TYPE_CHECKING:
    from snaporch.hypervisor import Hypervisor
    from snaporch.zfs import Pool

_BY_ITS_OWNER = "user"
"""libvirt's reason for a pause that a client asked for: the guest's owner, or the run, which notes
it."""
_ASKED_WHILE_SAVING = (_BY_ITS_OWNER, "snapshot")
"""libvirt's reasons for a pause that a client asked for while RAM is saved. During a live save
libvirt uses ``snapshot`` for nothing else."""


def _open_hypervisor(uri: str) -> Hypervisor:
    from snaporch.hypervisor import open_hypervisor

    return open_hypervisor(uri)


def _open_pool() -> Pool:
    from snaporch.zfs.open_pool import open_pool

    return open_pool(read_only=True)


def _await_exit(process: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class Host(NamedTuple):
    """The clock, libvirt, ZFS and the watched process."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    await_exit: Callable[[int, float], bool] = _await_exit
    """Waits for a process, by its pidfd, at most so many seconds; whether it has exited."""
    open_hypervisor: Callable[[str], Hypervisor] = _open_hypervisor
    open_pool: Callable[[], Pool] = _open_pool
    fences: Path = FENCES


class RunningPoll(threading.Thread):
    """A thread that asks libvirt, every so many seconds, whether the guest runs.

    No answer counts as paused.

    libvirt answers from its own state, without QEMU's monitor, which does not answer while a full
    pipe blocks QEMU. Only while libvirt opens the pipe, with the guest paused, does it not answer.
    """

    def __init__(self, uri: str, uuid: str, host: Host, seconds: float) -> None:
        super().__init__(name="pulse", daemon=True)
        self._host = host
        self._seconds = seconds
        self.ran_at = host.monotonic()
        self.ours = False
        """Whether the run suspended the guest. Otherwise a pause may be its owner's."""
        self.over = threading.Event()
        self._uri = uri
        self._uuid = uuid
        self.start()

    def run(self) -> None:
        """Poll until ``over`` is set."""
        from snaporch.errors import SnaporchError

        hypervisor = None
        while not self.over.wait(self._seconds):
            asked = self._host.monotonic()
            try:
                hypervisor = hypervisor or self._host.open_hypervisor(self._uri)
                reason = hypervisor.paused_by(self._uuid)
                if reason is None or (reason in _ASKED_WHILE_SAVING and not self.ours):
                    self.ran_at = asked
            except SnaporchError:
                continue


def _ignore_full_disk(note: Callable[[Any], None]) -> Callable[[Any], None]:
    """A ``note`` that ignores a failed write: a full disk must not keep a guest on overlays."""

    def attempt(text: Any) -> None:
        with contextlib.suppress(OSError):
            note(text)

    return attempt


def complain(error: Exception) -> None:
    """Report an error on standard error, if that can be written."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"snaporch: guardian: {error}\n")


def release(
    hold: GuestHold,
    lines: Sequence[dict[str, Any]],
    uri: str,
    journal: Path,
    host: Host,
    *,
    run_ended: bool = False,
) -> bool:
    """Release the guest: end the save or commit the overlays, thaw it, resume it.

    Args:
        hold: how the run holds the guest.
        lines: the journal's lines.
        uri: libvirt's.
        host: where libvirt and ZFS are reached.
        run_ended: the run was killed; otherwise it may still be alive.

    Returns: False if the release must be tried again.
    """
    from snaporch.command_log import set_fields
    from snaporch.errors import SnaporchError
    from snaporch.hypervisor import HypervisorError, OverlayDisk
    from snaporch.hypervisor.commit_timeouts import CommitTimeouts
    from snaporch.journal import Note, append_note, note_stages
    from snaporch.recovery.drain_pipe import reader_of
    from snaporch.recovery.release_guest import abort_snapshot_job, restore_vcpu_quotas, resume
    from snaporch.waiting_times import LibvirtTimes

    facts = lines[0]["facts"]
    set_fields(DOMAIN=facts["domain"], RUN=facts["run"], SNAPSHOT=facts["snapshot"], STEP="guard")
    saving, times = hold is GuestHold.SAVING_RAM, LibvirtTimes()
    try:
        # libvirt waits for a reader of the RAM pipe, and the run's own reader may hang
        with reader_of(Path(facts["ram_pipe"])) if saving else contextlib.nullcontext():
            hypervisor = host.open_hypervisor(uri)
            domain = hypervisor.find(facts["uuid"])
            if domain is None or not domain.active or domain.boot != facts["boot"]:
                return True  # another emulator: recovery handles RAM it may have started from
            with contextlib.suppress(HypervisorError):
                restore_vcpu_quotas(hypervisor, facts["uuid"], facts.get("vcpu_quotas", {}))
            if saving:
                abort_snapshot_job(hypervisor, facts["uuid"], facts["domain"], times=times)
            elif hold is GuestHold.ON_OVERLAYS:
                overlays = [OverlayDisk.from_json(disk) for disk in facts["overlays"]]
                # no suspend: if the guardian were killed then, the guest would stay paused
                unsuspended = CommitTimeouts(running=float("inf"))
                note = note_stages(_ignore_full_disk(lambda note: append_note(journal, note)))
                with _noted_commit(facts["datasets"], journal, host):
                    hypervisor.commit(facts["uuid"], overlays, note, unsuspended)
            elif facts["strategy"] == "quiesced":
                hypervisor.thaw_file_systems(facts["uuid"], 10)
            reason = hypervisor.paused_by(facts["uuid"])
            asked_for = reason in (_ASKED_WHILE_SAVING if saving else (_BY_ITS_OWNER,))
            # a freeze that ended has paused it, also if the note of the suspend was lost
            suspended = facts["strategy"] == "paused" and is_frozen(lines)
            held = bool(last_noted(lines, ("held",)))
            ours = (not asked_for or is_suspended(lines) or suspended) and not held
            paused = facts["was"] == "running" and reason is not None
            if paused and ours:
                resume(hypervisor, facts["uuid"], times=times)
            if facts["strategy"] == "paused" and reason is None and not is_frozen(lines):
                return False  # it is not paused yet: no check would follow when it is
            unexplained = paused and not ours and _may_lack_its_suspend(journal)
            # a later pause is not the run's
            if (run_ended or hold is GuestHold.STOPPED) and not unexplained:
                with contextlib.suppress(OSError):
                    append_note(journal, Note.RELEASED)
    except (SnaporchError, OSError) as error:
        complain(error)
        return False
    return True


def end_slowing(facts: dict[str, Any], uri: str, host: Host) -> None:
    """Give the guest's vCPUs the CPU time back that its run took, which takes too long."""
    from snaporch.errors import SnaporchError
    from snaporch.recovery.release_guest import restore_vcpu_quotas

    try:
        hypervisor = host.open_hypervisor(uri)
        restore_vcpu_quotas(hypervisor, facts["uuid"], facts["vcpu_quotas"])
    except SnaporchError as error:
        complain(error)


def _may_lack_its_suspend(journal: Path) -> bool:
    """Whether the journal may have lost the note of a suspend, as recovery decides it."""
    from snaporch.journal import SnapshotJournal, explains_no_pause, read_journal

    there = read_journal(journal)
    if not isinstance(there, SnapshotJournal):
        return True
    return explains_no_pause(there.facts, there.notes)


def _noted_commit(
    datasets: Sequence[str], journal: Path, host: Host
) -> AbstractContextManager[Any]:
    """Note when a commit begins and ends; without notes every later snapshot counts as torn."""
    from snaporch.catalog.torn import recorded_commit
    from snaporch.zfs import PoolError

    try:
        return recorded_commit(host.open_pool(), datasets, journal)
    except PoolError as error:  # a failed pool must not keep the guest on its overlays
        complain(error)
        return contextlib.nullcontext()
