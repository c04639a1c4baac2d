"""What the guardian asks of libvirt: whether a guest runs, and to release it.

Only the standard library is imported until there is something to ask.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from snaporch.recovery.frozen_window import Window, is_frozen, is_suspended, last_noted

_POLL_SECONDS = 1.0
_BY_ITS_OWNER = "user"
"""libvirt's reason for a pause that somebody asked for: its owner, or the run, which notes it."""
_ASKED_WHILE_SAVING = (_BY_ITS_OWNER, "snapshot")
"""The same while RAM is saved: saved live, libvirt gives this reason to nothing else."""


class RunningPoll(threading.Thread):
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
        """Poll until ``over`` is set."""
        from snaporch.errors import SnaporchError
        from snaporch.hypervisor import open_hypervisor

        hypervisor = None
        while not self.over.wait(_POLL_SECONDS):
            asked = time.monotonic()
            try:
                hypervisor = hypervisor or open_hypervisor(self._uri)
                reason = hypervisor.paused_by(self._uuid)
                if reason is None or (reason in _ASKED_WHILE_SAVING and not self.ours):
                    self.ran_at = asked
            except SnaporchError:
                continue


def _ignore_full_disk(note: Callable[[Any], None]) -> Callable[[Any], None]:
    """A full disk must not keep the guest on its overlays."""

    def attempt(text: Any) -> None:
        with contextlib.suppress(OSError):
            note(text)

    return attempt


def complain(error: Exception) -> None:
    """Report an error on standard error, if that can be written."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"snaporch: guardian: {error}\n")


def release(
    window: Window,
    lines: Sequence[dict[str, Any]],
    uri: str,
    journal: Path,
    *,
    run_ended: bool = False,
) -> bool:
    """Let the guest go; False to try again."""
    from snaporch.errors import SnaporchError
    from snaporch.hypervisor import OverlayDisk, Patience, open_hypervisor
    from snaporch.journal import Note, append_note, noting
    from snaporch.recovery.drain_pipe import reader_of
    from snaporch.recovery.release_guest import end_job, resume

    facts = lines[0]["facts"]
    saving = window is Window.SAVING
    try:
        # whoever saves RAM waits for a reader, and the run's own may stand still
        with reader_of(Path(facts["ram_pipe"])) if saving else contextlib.nullcontext():
            hypervisor = open_hypervisor(uri)
            domain = hypervisor.find(facts["uuid"])
            if domain is None or not domain.active or domain.boot != facts["boot"]:
                return True  # another emulator's; its recovery knows what RAM it may go on from
            if saving:
                end_job(hypervisor, facts["uuid"], facts["domain"])
            elif window is Window.ON_OVERLAYS:
                overlays = [OverlayDisk.from_json(disk) for disk in facts["overlays"]]
                unsuspended = Patience(running=float("inf"))  # killed then, it would stay so
                told = noting(_ignore_full_disk(lambda note: append_note(journal, note)))
                with _noted_commit(facts["datasets"], journal):
                    hypervisor.commit(facts["uuid"], overlays, told, unsuspended)
            elif facts["strategy"] == "quiesced":
                hypervisor.thaw_file_systems(facts["uuid"], 10)
            reason = hypervisor.paused_by(facts["uuid"])
            asked_for = reason in (_ASKED_WHILE_SAVING if saving else (_BY_ITS_OWNER,))
            ours = not asked_for or is_suspended(lines)
            ours = ours and not last_noted(lines, ("held",))
            if facts["was"] == "running" and reason is not None and ours:
                resume(hypervisor, facts["uuid"])
            if facts["strategy"] == "paused" and reason is None and not is_frozen(lines):
                return False  # it does not stand still yet: nobody would look when it does
            if run_ended or window is Window.STILL:  # whatever stands still later is not the run's
                with contextlib.suppress(OSError):
                    append_note(journal, Note.LET_GO)
    except (SnaporchError, OSError) as error:
        complain(error)
        return False
    return True


def _noted_commit(datasets: Sequence[str], journal: Path) -> AbstractContextManager[Any]:
    """Note when a commit begins and ends; one that nobody notes tears whatever is taken later."""
    from snaporch.catalog.torn import noted_commit
    from snaporch.zfs import PoolError, open_pool

    try:
        return noted_commit(open_pool(to_look=True), datasets, journal)
    except PoolError as error:  # which must not keep the guest on its overlays
        complain(error)
        return contextlib.nullcontext()
