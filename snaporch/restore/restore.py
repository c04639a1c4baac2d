"""Carrying a restore out: safety, stop, roll back, define, resume."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from snaporch.bundle.manifest import Part, Role
from snaporch.bundle.ramimage import read_header
from snaporch.bundle.store import BundleError, write_private
from snaporch.errors import AttentionError, RefusedError, RunFailedError, SnaporchError
from snaporch.model import DomainState, SnapshotRecord
from snaporch.restore.plan import RestorePlan, is_safety
from snaporch.restore.safety import Safety
from snaporch.run.context import Context


@dataclass(frozen=True, slots=True)
class Restored:
    """What came of it."""

    record: SnapshotRecord
    state: DomainState
    resumed: bool
    """From RAM, to the very instant."""
    clock_set: bool
    undo: str | None
    """The script that undoes the restore."""

    def as_json(self) -> dict[str, object]:
        """The documented JSON object: the snapshot's, and what was done with it."""
        return self.record.as_json() | {
            "domain_state": self.state.value,
            "resumed": self.resumed,
            "clock_set": self.clock_set,
            "undo": self.undo,
        }


def check_bundle(context: Context, plan: RestorePlan) -> RestorePlan:
    """Read the whole bundle and compare it with its manifest; before anything is touched.

    Returns: the plan, knowing which parts are damaged; those are not put back.

    Raises:
        RefusedError: what the restore needs is damaged.
    """
    if plan.manifest is None or plan.record.bundle is None:
        return plan
    context.progress.step(plan.record.domain, "checking the bundle's SHA-256")
    troubles = context.store.damage(f"{plan.record.uuid}/{plan.record.run}")
    try:
        if plan.ram is not None:
            for trouble in troubles.values():
                raise trouble
            read_header(plan.ram)
    except SnaporchError as error:
        raise RefusedError(error.thing, error.reason, "boot from the disks with --cold") from error
    for trouble in troubles.values():
        context.progress.note(plan.record.domain, f"{trouble}; it is not put back")
    checked = replace(plan, damaged=frozenset(troubles))
    current = plan.domain.inactive_xml if plan.domain else None
    if plan.boot and current is None and _definition(checked) is None:
        raise RefusedError(
            plan.record.domain, "the definition in its bundle is damaged", "define it by hand first"
        )
    return checked


def restore(context: Context, plan: RestorePlan, *, safety: bool) -> Restored:
    """Restore; the caller holds the domain's lock and the user's consent.

    A guest that is off stays off until its disks are back; once the first dataset was rolled back
    the only way is forward, so a signal is looked at only before that.

    Raises:
        RunFailedError: nothing was rolled back.
        AttentionError: the disks were, and the rest was not; says the command that finishes.
    """
    record, progress = plan.record, context.progress
    context.interrupt.check(record.domain)
    copy = _begin_safety(context, plan) if safety else None
    undo = _stop(context, plan, copy)
    try:
        progress.step(record.domain, f"rolling back {', '.join(record.datasets)}")
        _roll_back(context, plan)
        _put_back_files(plan)
        _define(context, plan)
        state = _bring_up(context, plan)
    except (SnaporchError, OSError) as error:
        raise AttentionError(
            f"{record.domain}@{record.snapshot}",
            f"the restore stopped half way ({error}); the guest is {_state(context, record.uuid)}",
            f"mend the cause, then: {_again(plan)}",
        ) from error
    clock = False
    if state is DomainState.RUNNING and plan.ram is not None:
        clock = context.hypervisor.set_guest_clock(record.uuid)
    return Restored(record, state, plan.ram is not None, clock, str(undo) if undo else None)


def _state(context: Context, uuid: str) -> str:
    try:
        return context.hypervisor.state(uuid)
    except SnaporchError:
        return "out of reach"


def _again(plan: RestorePlan) -> str:
    """The one command that finishes the job."""
    words = ["snaporch", "restore", "--yes"]
    words += ["--cold"] if plan.cold else []
    words += ["--discard-newer"] if plan.discard_newer else []
    return shlex.join([*words, f"{plan.record.domain}@{plan.record.snapshot}"])


def _begin_safety(context: Context, plan: RestorePlan) -> Safety:
    """The long part of the safety copy, while the guest still runs."""
    context.progress.step(plan.record.domain, "saving what will be discarded")
    safety = Safety.begin(context, plan.record.uuid, plan.snapshots)
    try:
        safety.save()
        context.interrupt.check(plan.record.domain)
    except BaseException:
        _forget_safety(context, safety, plan)
        raise
    return safety


def _stop(context: Context, plan: RestorePlan, safety: Safety | None) -> Path | None:
    """Stop the guest and complete the safety copy; the script that undoes the restore.

    Raises:
        RunFailedError: the guest is off, its disks are as they were.
    """
    record = plan.record
    was_active = plan.domain is not None and plan.domain.active
    try:
        _check_unchanged(context, plan)
    except SnaporchError:
        if safety is not None:
            _forget_safety(context, safety, plan)
        raise
    if was_active:
        context.progress.step(record.domain, "stopping the guest")
        try:
            context.hypervisor.destroy(record.uuid)
        except SnaporchError:
            if safety is not None:
                _forget_safety(context, safety, plan)
            raise
    if safety is None:
        return None
    try:
        if was_active:
            safety.save()
        script = safety.write_script(plan.domain)
    except (SnaporchError, OSError) as error:
        _forget_safety(context, safety, plan)
        raise RunFailedError(
            record.domain,
            f"the safety copy could not be completed ({error}); the guest is off, its disks are "
            "as they were",
            "start it again with virsh, or restore with --no-safety",
        ) from error
    context.progress.step(record.domain, f"undo with {script}")
    return script


def _forget_safety(context: Context, safety: Safety, plan: RestorePlan) -> None:
    """The restore did not begin: leave no trace of its safety copy."""
    stamp = safety.directory.name.removeprefix("safety-")
    datasets = [snapshot.dataset for snapshot in plan.snapshots]
    for snapshot in context.pool.snapshots(datasets):
        if stamp in snapshot.name:
            context.pool.destroy_snapshots([snapshot.full_name])
    for path in safety.directory.iterdir():
        path.unlink()
    safety.directory.rmdir()


def _check_unchanged(context: Context, plan: RestorePlan) -> None:
    """What consent was given to is still what there is; before anything is stopped or destroyed.

    Raises:
        RefusedError: the guest was started meanwhile, or snapshots have appeared.
    """
    domain = context.hypervisor.find(plan.record.uuid)
    runs = domain is not None and domain.active
    if runs and not (plan.domain is not None and plan.domain.active):
        raise RefusedError(plan.record.domain, "was started meanwhile", "restore it again")
    _check_nothing_new(context, plan)


def _check_nothing_new(context: Context, plan: RestorePlan) -> None:
    for target in plan.snapshots:
        newer = context.pool.newer(target.full_name)
        unknown = [name for name in newer if name not in plan.newer and not is_safety(name)]
        if unknown:
            raise RefusedError(
                target.dataset, f"{', '.join(unknown)} appeared meanwhile", "restore it again"
            )


def _roll_back(context: Context, plan: RestorePlan) -> None:
    """Newer snapshots and bookmarks first, pool by pool; consent was given for each by name."""
    _check_nothing_new(context, plan)  # of any dataset, before the first is rolled back
    for target in plan.snapshots:
        domain = context.hypervisor.find(plan.record.uuid)
        if domain is not None and domain.active:
            raise RunFailedError(plan.record.domain, "was started by someone in the middle of it")
        newer = context.pool.newer(target.full_name)
        context.pool.destroy_snapshots([name for name in newer if "@" in name])
        for name in newer:
            if "#" in name:
                context.pool.destroy_bookmark(name)
        context.pool.rollback(target.full_name)


def _put_back_files(plan: RestorePlan) -> None:
    """NVRAM and TPM state, as they were and whose they were."""
    if plan.manifest is None or plan.record.bundle is None:
        return
    for part in plan.manifest.parts:
        if part.role in (Role.NVRAM, Role.TPM) and part.name not in plan.damaged:
            _put_back(Path(plan.record.bundle), part)


def _put_back(bundle: Path, part: Part) -> None:
    if part.source is None:
        raise BundleError(str(bundle / part.name), "the manifest does not say where it belongs")
    target = Path(part.source)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.snaporch")
    temporary.unlink(missing_ok=True)
    write_private(temporary, (bundle / part.name).read_bytes())
    if part.uid is not None and part.gid is not None and part.mode is not None:
        os.chown(temporary, part.uid, part.gid)
        temporary.chmod(part.mode)
    temporary.replace(target)


def _define(context: Context, plan: RestorePlan) -> None:
    xml = _definition(plan)
    if xml is not None:
        context.hypervisor.define(xml)


def _definition(plan: RestorePlan) -> str | None:
    """The persistent definition; a transient domain has none, its RAM image carries its XML."""
    if plan.manifest is None or plan.record.bundle is None:
        return None
    part = plan.manifest.part(Role.INACTIVE_XML)
    if part is None or part.name in plan.damaged:
        return None
    return (Path(plan.record.bundle) / part.name).read_text("utf-8")


def _bring_up(context: Context, plan: RestorePlan) -> DomainState:
    record, hypervisor = plan.record, context.hypervisor
    if hypervisor.find(record.uuid) is not None:
        hypervisor.drop_managed_save(record.uuid)
    if plan.ram is not None:
        context.progress.step(record.domain, "resuming from RAM")
        hypervisor.restore(plan.ram, running=plan.running)
    elif plan.boot:
        context.progress.step(record.domain, "booting")
        hypervisor.start(record.uuid, paused=False)
    return hypervisor.state(record.uuid)
