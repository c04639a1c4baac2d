"""Letting a guest go that a run holds: thawed and resumed first of all, whoever is busy with it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from tenacity import (
    RetryCallState,
    RetryError,
    Retrying,
    retry_if_exception,
    retry_if_result,
    stop_after_delay,
    wait_exponential,
    wait_fixed,
)

from snaporch.context import Context
from snaporch.errors import AttentionError, ChangedError
from snaporch.hypervisor import Hypervisor, HypervisorError
from snaporch.journal import Note, RunFacts, append_note
from snaporch.model import Domain, DomainState, Level, Strategy
from snaporch.recovery.result import Effect, RecoveryResult

_JOB_SECONDS = 120
_POLL_SECONDS = 0.2
_RESUME_SECONDS = 30
_RESUME_FIRST_SECONDS, _RESUME_LATER_SECONDS = 0.1, 2.0
_OURS = "snapshot"
"""libvirt's name for the job of a snapshot with memory, and for a pause that is asked for in it."""
_READ_BACK_SECONDS = 5
"""How long libvirt is given to start a guest, before it is tried again later."""
_STARTING, _READ_BACK = "starting up", "migration"
"""Its reasons for a guest that it starts, and for one whose RAM it has read back and that does not
run: an image of a guest that was paused is left so."""
FULL = "ioerror"
"""Its reason for a guest that QEMU paused because it could not write."""


def journal_of(context: Context, facts: RunFacts) -> Path:
    """Where the run's journal is."""
    return context.config.paths.journal / f"{facts.run}.jsonl"


def let_go(
    context: Context, domain: Domain | None, facts: RunFacts, notes: Collection[Note]
) -> list[RecoveryResult]:
    """Thaw and resume what the run may have frozen or paused, and note it; what was done.

    Of another emulator than the run's, nothing is the run's doing, unless libvirt has saved the
    guest's RAM meanwhile (as libvirt-guests does when the host shuts down): it would be resumed
    paused or frozen.

    Raises:
        SnaporchError: it may still be paused or frozen.
    """
    ours = domain is not None and domain.active and domain.boot == facts.boot
    if ours:
        done = _let_go(context, facts, notes)
    else:
        done = _let_go_saved(context, domain, facts, notes) if domain is not None else []
    if Note.LET_GO not in notes:
        with suppress(OSError):  # only what is told of it depends on that
            append_note(journal_of(context, facts), Note.LET_GO)
    return done


def _let_go(context: Context, facts: RunFacts, notes: Collection[Note]) -> list[RecoveryResult]:
    done: list[RecoveryResult] = []
    if Note.FREEZING in notes and Note.LET_GO not in notes:
        settings = context.config.settings(facts.domain, facts.uuid)
        context.hypervisor.thaw_file_systems(facts.uuid, settings.agent_timeout)
        done.append(Effect.THAWED.of())
    if Note.SAVING in notes and facts.strategy.level is Level.RAM:
        end_job(context.hypervisor, facts.uuid, facts.domain)
    done += wake(context, facts, notes)
    _put_downtime_back(context, facts)
    return done


def _let_go_saved(
    context: Context, domain: Domain, facts: RunFacts, notes: Collection[Note]
) -> list[RecoveryResult]:
    """Have RAM that libvirt saved in the run's window be resumed as the guest was before it.

    Raises:
        AttentionError: its file systems are frozen in there, which only a guest that runs can mend;
            or libvirt is still starting it.
    """
    if facts.was is not DomainState.RUNNING or {Note.LET_GO, Note.HELD} & set(notes):
        return []
    if Note.FREEZING in notes:
        return _thaw_saved(context, domain, facts)
    if Note.SUSPENDED in notes or facts.strategy is Strategy.MANUAL:
        return _wake_saved(context, domain, facts)
    return []


def _thaw_saved(context: Context, domain: Domain, facts: RunFacts) -> list[RecoveryResult]:
    if not domain.active:
        if domain.managed_save:
            why = "libvirt saved its RAM while its file systems were frozen"
            raise _perhaps_frozen(facts, why, "start")
        return []
    hypervisor = context.hypervisor
    if _pause_of(hypervisor, facts.uuid, _STARTING, _READ_BACK) is not None:
        why = "it was started anew and is paused; only when it runs its agent can tell whether its "
        raise _perhaps_frozen(facts, f"{why}file systems are frozen", "resume")
    if hypervisor.was_booted(facts.uuid) or hypervisor.file_systems_frozen(facts.uuid) is False:
        return []
    settings = context.config.settings(facts.domain, facts.uuid)
    try:
        hypervisor.thaw_file_systems(facts.uuid, settings.agent_timeout)
    except HypervisorError as error:  # its agent may need a while
        why = "it was started anew, perhaps from RAM that libvirt saved while its file systems"
        raise _perhaps_frozen(facts, f"{why} were frozen; its agent does not thaw them") from error
    return [Effect.THAWED.of()]


def _wake_saved(context: Context, domain: Domain, facts: RunFacts) -> list[RecoveryResult]:
    if not domain.active:
        if not domain.managed_save:
            return []
        context.hypervisor.unpause_managed_save(facts.uuid)
        return [Effect.SAVED_WILL_RUN.of()]
    reason = _pause_of(context.hypervisor, facts.uuid, _STARTING)
    if reason == _STARTING:
        what = "libvirt is starting it, perhaps from RAM that it saved while the guest was paused"
        raise AttentionError(facts.domain, what, f"run: snaporch recover {facts.uuid}")
    if reason == _READ_BACK:
        resume(context.hypervisor, facts.uuid)
        return [Effect.RESUMED_SAVED.of()]
    return []


def _pause_of(hypervisor: Hypervisor, uuid: str, *passing: str) -> str | None:
    """libvirt's reason for a pause, if any; the end of one that passes is waited for a while."""
    patience = Retrying(
        stop=stop_after_delay(_READ_BACK_SECONDS),
        wait=wait_fixed(_POLL_SECONDS),
        retry=retry_if_result(lambda reason: reason in passing),
        retry_error_callback=lambda _state: hypervisor.paused_by(uuid),
    )
    found: str | None = patience(hypervisor.paused_by, uuid)
    return found


def _perhaps_frozen(facts: RunFacts, why: str, first: str = "") -> AttentionError:
    name = shlex.quote(facts.domain)
    first = f"run: virsh {first} {name}, and " if first else ""
    return AttentionError(
        facts.domain, why, f"{first}when its agent answers: snaporch recover {facts.uuid}"
    )


def wake(context: Context, facts: RunFacts, notes: Collection[Note]) -> list[RecoveryResult]:
    """Resume what the run paused; again after a commit, if a full overlay was what paused it."""
    domain = context.hypervisor.find(facts.uuid)
    if domain is None or not domain.active or domain.boot != facts.boot:
        return []
    if not is_ours_to_resume(context, facts, notes):
        return []
    resume(context.hypervisor, facts.uuid)
    return [Effect.RESUMED.of()]


def suspend(hypervisor: Hypervisor, planned: Domain) -> None:
    """Suspend a guest, but none that was started anew since it was looked at: that one goes on.

    Nobody else would resume it: what another emulator does is not the run's doing.

    Raises:
        ChangedError: it was.
        HypervisorError: it cannot be suspended, or the other one may stay paused.
    """
    hypervisor.suspend(planned.uuid)
    now = hypervisor.find(planned.uuid)
    if now is not None and now.active and now.boot != planned.boot:
        resume(hypervisor, planned.uuid)
        raise ChangedError(planned.name, "it was started anew meanwhile", "run it again")


def resume(
    hypervisor: Hypervisor, uuid: str, told: Callable[[str], None] = lambda _text: None
) -> None:
    """Resume a guest, and try again for a while.

    After saving RAM, QEMU has given up the locks on its images, and whoever looks at one may hold
    it (qemu-img without ``-U``): then it cannot run yet.

    Args:
        told: hears once why it is tried again.

    Raises:
        HypervisorError: it still cannot run.
    """

    def paused(error: BaseException) -> bool:
        return isinstance(error, HypervisorError) and hypervisor.paused_by(uuid) is not None

    def tell(state: RetryCallState) -> None:
        if state.attempt_number == 1 and state.outcome is not None:
            told(f"{state.outcome.exception()}; trying again")

    patience = Retrying(
        stop=stop_after_delay(_RESUME_SECONDS),
        wait=wait_exponential(_RESUME_FIRST_SECONDS, _RESUME_LATER_SECONDS),
        retry=retry_if_exception(paused),
        before_sleep=tell,
        reraise=True,
    )
    patience(hypervisor.resume, uuid)


def is_ours_to_resume(context: Context, facts: RunFacts, notes: Collection[Note]) -> bool:
    """Whether the guest is paused by the run, and not by somebody's wish."""
    if facts.was is not DomainState.RUNNING or Note.HELD in notes:
        return False
    reason = context.hypervisor.paused_by(facts.uuid)
    if Note.LET_GO in notes:
        return reason == FULL  # whoever paused it since knows why, but for an overlay of the run's
    if Note.SUSPENDED in notes:
        return reason is not None
    saving = Note.SAVING in notes and facts.strategy.level is Level.RAM
    # saved live, libvirt gives a pause of its own no reason, but one that somebody asks for then
    return reason not in ((None, "user", _OURS) if saving else (None, "user"))


def end_job(hypervisor: Hypervisor, uuid: str, name: str) -> None:
    """Wait until libvirt has given up the snapshot of a run that is cut short as it saves RAM.

    Such a job is the run's own only as long as its emulator is the run's, and that step is not
    known to have ended. A job of another kind is somebody else's: not ours to abort or to wait for.

    Raises:
        AttentionError: it goes on.
    """

    def busy() -> bool:
        ours = hypervisor.busy_with(uuid) == _OURS
        if ours:
            hypervisor.abort_job(uuid)
        return ours

    patience = Retrying(
        stop=stop_after_delay(_JOB_SECONDS),
        wait=wait_fixed(_POLL_SECONDS),
        retry=retry_if_result(bool),
    )
    try:
        patience(busy)
    except RetryError as error:
        raise AttentionError(
            name,
            f"libvirt still saves its RAM ({_OURS})",
            f"when that has ended, run: snaporch recover {uuid}",
        ) from error


def _put_downtime_back(context: Context, facts: RunFacts) -> None:
    """The emulator's own limit, if a run that was killed left another, and nobody set it since."""
    if facts.downtime_ms and context.hypervisor.downtime_limit(facts.uuid) == facts.downtime_ms:
        context.hypervisor.limit_downtime(facts.uuid, facts.own_downtime_ms)
