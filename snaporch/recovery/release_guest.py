"""Releases a guest that a run holds: thaws and resumes it, before any other recovery step.

How long it waits for libvirt is set by ``LibvirtTimes`` in :mod:`snaporch.waiting_times`, and for
the agent by ``agent_timeout`` in :mod:`snaporch.config.schema`.
"""

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
from snaporch.hypervisor.vcpu_quota import VcpuQuotas, left_reduced
from snaporch.journal import Note, RunFacts, append_note, explains_no_pause
from snaporch.model import Domain, DomainState, Level, Strategy
from snaporch.recovery.result import Effect, RecoveryResult
from snaporch.waiting_times import LibvirtTimes

_OURS = "snapshot"
"""libvirt's name for the job of a snapshot with memory, and for a pause requested during it."""
_STARTING, _READ_BACK = "starting up", "migration"
"""libvirt's reasons for a guest that it is starting, and for a paused guest whose saved RAM it has
loaded: a guest that was saved while paused stays paused."""
FULL = "ioerror"
"""libvirt's reason for a guest that QEMU paused because it could not write."""


def journal_of(context: Context, facts: RunFacts) -> Path:
    """The path of the run's journal."""
    return context.config.paths.journal / f"{facts.run}.jsonl"


def release(
    context: Context, domain: Domain | None, facts: RunFacts, notes: Collection[Note]
) -> list[RecoveryResult]:
    """Thaw and resume a guest that the run may have frozen or paused, and note it.

    A guest in another emulator than the run's is not held by the run, with one exception: libvirt
    saved its RAM while the run held it (as libvirt-guests does when the host shuts down). Then the
    guest would come back paused or frozen.

    A guest that the run itself fenced is ended instead.

    Returns: what was done.

    Raises:
        SnaporchError: it may still be paused or frozen.
    """
    fence = context.fences.find(facts.uuid)
    if fence is not None and Note.ENDING in notes and fence.run in ("", facts.run):
        return _end(context, domain, facts)
    ours = domain is not None and domain.active and domain.boot == facts.boot
    if ours:
        done = _release_active(context, facts, notes)
    else:
        done = _release_saved(context, domain, facts, notes) if domain is not None else []
    if Note.RELEASED not in notes and not is_left_paused(context, facts, notes):
        with suppress(OSError):  # the note only matters for what is reported
            append_note(journal_of(context, facts), Note.RELEASED)
    return done


def _end(context: Context, domain: Domain | None, facts: RunFacts) -> list[RecoveryResult]:
    """End a guest that a failover has fenced: it must not run here any more.

    Raises:
        AttentionError: it runs, so it has written what its last snapshot lacks.
    """
    if domain is None or not domain.active or domain.boot != facts.boot:
        return []
    if context.hypervisor.paused_by(domain.uuid) is None:
        step = f"if no copy runs elsewhere: snaporch fence --remove {domain.uuid}"
        raise AttentionError(facts.domain, "is fenced, and was resumed: it was not ended", step)
    context.hypervisor.destroy(domain.uuid)
    return [Effect.ENDED.of()]


def _release_active(
    context: Context, facts: RunFacts, notes: Collection[Note]
) -> list[RecoveryResult]:
    done: list[RecoveryResult] = []
    with suppress(HypervisorError):  # first of all: nothing else may keep the guest slow
        restore_vcpu_quotas(context.hypervisor, facts.uuid, facts.vcpu_quotas)
    if Note.FREEZING in notes and Note.RELEASED not in notes:
        settings = context.config.settings(facts.domain, facts.uuid)
        context.hypervisor.thaw_file_systems(facts.uuid, settings.agent_timeout)
        done.append(Effect.THAWED.of())
    if Note.SAVING in notes and facts.strategy.level is Level.RAM:
        abort_snapshot_job(
            context.hypervisor, facts.uuid, facts.domain, times=context.libvirt_times
        )
    done += resume_if_ours(context, facts, notes)
    _restore_downtime_limit(context, facts)
    restore_vcpu_quotas(context.hypervisor, facts.uuid, facts.vcpu_quotas)
    return done


def _release_saved(
    context: Context, domain: Domain, facts: RunFacts, notes: Collection[Note]
) -> list[RecoveryResult]:
    """Have a guest whose RAM libvirt saved during the run's freeze resume as it was before.

    Raises:
        AttentionError: its file systems were frozen when it was saved, and only the running guest
            can thaw them; or libvirt is still starting it.
    """
    if facts.was is not DomainState.RUNNING or {Note.RELEASED, Note.HELD} & set(notes):
        return []
    if Note.FREEZING in notes:
        return _thaw_after_managed_save(context, domain, facts)
    if Note.SUSPENDED in notes or facts.strategy is Strategy.MANUAL:
        return _resume_after_managed_save(context, domain, facts)
    return []


def _thaw_after_managed_save(
    context: Context, domain: Domain, facts: RunFacts
) -> list[RecoveryResult]:
    if not domain.active:
        if domain.managed_save:
            why = "libvirt saved its RAM while its file systems were frozen"
            raise _may_be_frozen(facts, why, "start")
        return []
    hypervisor = context.hypervisor
    if _pause_reason(context, facts.uuid, _STARTING, _READ_BACK) is not None:
        why = "it was restarted and is paused; only when it runs can its agent report whether its "
        raise _may_be_frozen(facts, f"{why}file systems are frozen", "resume")
    if hypervisor.was_booted(facts.uuid) or hypervisor.file_systems_frozen(facts.uuid) is False:
        return []
    settings = context.config.settings(facts.domain, facts.uuid)
    try:
        hypervisor.thaw_file_systems(facts.uuid, settings.agent_timeout)
    except HypervisorError as error:  # its agent may not be ready yet
        why = "it was restarted, perhaps from RAM that libvirt saved while its file systems"
        raise _may_be_frozen(facts, f"{why} were frozen; its agent does not thaw them") from error
    return [Effect.THAWED.of()]


def _resume_after_managed_save(
    context: Context, domain: Domain, facts: RunFacts
) -> list[RecoveryResult]:
    if not domain.active:
        if not domain.managed_save:
            return []
        context.hypervisor.unpause_managed_save(facts.uuid)
        return [Effect.SAVED_WILL_RUN.of()]
    reason = _pause_reason(context, facts.uuid, _STARTING)
    if reason == _STARTING:
        what = "libvirt is starting it, perhaps from RAM that it saved while the guest was paused"
        raise AttentionError(facts.domain, what, f"run: snaporch recover {facts.uuid}")
    if reason == _READ_BACK:
        resume(context.hypervisor, facts.uuid, times=context.libvirt_times)
        return [Effect.RESUMED_SAVED.of()]
    return []


def _pause_reason(context: Context, uuid: str, *passing: str) -> str | None:
    """libvirt's reason for a pause, ``None`` if the guest runs.

    Args:
        passing: reasons that end soon; waits for their end.
    """
    times, paused_by = context.libvirt_times, context.hypervisor.paused_by
    patience = Retrying(
        stop=stop_after_delay(times.start),
        wait=wait_fixed(times.poll),
        retry=retry_if_result(lambda reason: reason in passing),
        retry_error_callback=lambda _state: paused_by(uuid),
    )
    found: str | None = patience(paused_by, uuid)
    return found


def _may_be_frozen(facts: RunFacts, why: str, first: str = "") -> AttentionError:
    name = shlex.quote(facts.domain)
    first = f"run: virsh {first} {name}, and " if first else ""
    return AttentionError(
        facts.domain, why, f"{first}when its agent answers: snaporch recover {facts.uuid}"
    )


def resume_if_ours(
    context: Context, facts: RunFacts, notes: Collection[Note]
) -> list[RecoveryResult]:
    """Resume a guest that the run paused, or that a full overlay paused; what was done."""
    domain = context.hypervisor.find(facts.uuid)
    if domain is None or not domain.active or domain.boot != facts.boot:
        return []
    if not is_ours_to_resume(context, facts, notes):
        return []
    resume(context.hypervisor, facts.uuid, times=context.libvirt_times)
    return [Effect.RESUMED.of()]


def suspend(context: Context, planned: Domain) -> None:
    """Suspend a guest, and resume it if it was restarted since the plan was made.

    Recovery would not resume it, because it does not resume another emulator than the run's.

    Args:
        planned: the domain as the plan has it.

    Raises:
        ChangedError: it was restarted; it runs.
        HypervisorError: it cannot be suspended; or it was restarted and may stay paused.
    """
    hypervisor = context.hypervisor
    hypervisor.suspend(planned.uuid)
    now = hypervisor.find(planned.uuid)
    if now is not None and now.active and now.boot != planned.boot:
        resume(hypervisor, planned.uuid, times=context.libvirt_times)
        raise ChangedError(planned.name, "it was restarted meanwhile", "run it again")


def resume(
    hypervisor: Hypervisor,
    uuid: str,
    on_retry: Callable[[str], None] = lambda _text: None,
    *,
    times: LibvirtTimes,
) -> None:
    """Resume a guest, and retry for a while.

    After saving RAM, QEMU has given up the locks on its images. While another program holds such a
    lock (qemu-img without ``-U``), the guest cannot run.

    Args:
        on_retry: called once with the reason for the retries.

    Raises:
        HypervisorError: the guest still cannot run.
    """

    def paused(error: BaseException) -> bool:
        return isinstance(error, HypervisorError) and hypervisor.paused_by(uuid) is not None

    def report(state: RetryCallState) -> None:
        if state.attempt_number == 1 and state.outcome is not None:
            on_retry(f"{state.outcome.exception()}; trying again")

    patience = Retrying(
        stop=stop_after_delay(times.resume),
        wait=wait_exponential(times.first_pause, times.longest_pause),
        retry=retry_if_exception(paused),
        before_sleep=report,
        reraise=True,
    )
    patience(hypervisor.resume, uuid)


def is_ours_to_resume(context: Context, facts: RunFacts, notes: Collection[Note]) -> bool:
    """Whether the run paused the guest, and not its owner or another program."""
    if facts.was is not DomainState.RUNNING or Note.HELD in notes:
        return False
    reason = context.hypervisor.paused_by(facts.uuid)
    if Note.RELEASED in notes:
        return reason == FULL  # a later pause is not the run's, unless its overlay was full
    if Note.SUSPENDED in notes:
        return reason is not None
    saving = Note.SAVING in notes and facts.strategy.level is Level.RAM
    # during a live save libvirt names a reason only for a pause that a client requested
    return reason not in ((None, "user", _OURS) if saving else (None, "user"))


def is_left_paused(context: Context, facts: RunFacts, notes: Collection[Note]) -> bool:
    """Whether the guest is paused since its run, and no note shows by whom."""
    if not explains_no_pause(facts, notes):
        return False
    domain = context.hypervisor.find(facts.uuid)
    if domain is None or not domain.active or domain.boot != facts.boot:
        return False
    return context.hypervisor.paused_by(facts.uuid) is not None


def abort_snapshot_job(
    hypervisor: Hypervisor, uuid: str, name: str, *, times: LibvirtTimes
) -> None:
    """Abort the run's snapshot job, and wait until libvirt has ended it.

    Such a job is the run's only while the emulator is the run's, and saving RAM is not known to
    have ended. A job of another kind belongs to another program: it is not aborted or awaited.

    Raises:
        AttentionError: the job continues.
    """

    def busy() -> bool:
        ours = hypervisor.busy_with(uuid) == _OURS
        if ours:
            hypervisor.abort_job(uuid)
        return ours

    patience = Retrying(
        stop=stop_after_delay(times.job),
        wait=wait_fixed(times.poll),
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


def _restore_downtime_limit(context: Context, facts: RunFacts) -> None:
    """Set the emulator's own downtime limit, if the run has set another one.

    The run adapts the limit while RAM is saved, so its last value is not known.
    """
    if not facts.downtime_ms:
        return
    if context.hypervisor.downtime_limit(facts.uuid) not in (None, facts.own_downtime_ms):
        context.hypervisor.limit_downtime(facts.uuid, facts.own_downtime_ms)


def restore_vcpu_quotas(hypervisor: Hypervisor, uuid: str, own: VcpuQuotas) -> None:
    """Give a guest's vCPUs the CPU time back that a run took, if it has not done so.

    Args:
        own: their quotas before the run.

    Raises:
        HypervisorError: the kernel refuses it.
    """
    now = hypervisor.vcpu_quotas(uuid) if own else {}
    hypervisor.set_vcpu_quotas(left_reduced(own, now))
