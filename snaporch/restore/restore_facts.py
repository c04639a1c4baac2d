"""Collect what a restore has to know until its end; its journal keeps it."""

from __future__ import annotations

from pathlib import Path

from snaporch.bundle.manifest import Role
from snaporch.bundle.store import BundleError
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.model import Domain, DomainState, Strategy
from snaporch.restore.definition_checks import check_identity
from snaporch.restore.journal import HostFile, InterruptedRestore, RestoreFacts, Target
from snaporch.restore.plan_model import RestorePlan
from snaporch.restore.safety_catalog import safety_copies
from snaporch.restore.safety_copy import SafetyCopyWriter
from snaporch.restore.start_bar import has_bar


def make_facts(
    context: Context,
    plan: RestorePlan,
    run: str,
    older: list[InterruptedRestore],
    *,
    safety: bool,
    keep_running: bool,
) -> RestoreFacts:
    """Return what the journal of a restore begins with.

    Args:
        plan: with the RAM image to resume from.
        run: the name of the restore's run; empty if it is only checked.
        older: interrupted restores of the guest, which this one replaces.
        safety: keep a safety copy.
        keep_running: keep the RAM of a running guest in it.

    Raises:
        BundleError: the manifest does not say where a file belongs.
        RefusedError: the running state cannot be kept, or the definition is of another guest.
    """
    record, domain = plan.record, plan.domain
    runs = domain is not None and domain.active
    if keep_running and not runs:
        context.progress.note(record.domain, "is off, so there is no running state to keep")
    if keep_running and not safety:
        raise RefusedError(record.domain, "its running state is kept with the safety copy only")
    if keep_running and domain is not None and runs:
        _check_savable(context, plan)
    before = domain.inactive_xml if domain is not None else None
    whole = _copy_with_whole_disks(context, domain, older)
    return RestoreFacts(
        run=run,
        domain=record.domain,
        uuid=record.uuid,
        snapshot=record.snapshot,
        targets=tuple(
            Target(each.dataset, each.name, each.guid)
            for each in sorted(plan.snapshots, key=lambda each: each.dataset)
        ),
        newer=plan.newer,
        ending=plan.ending,
        ram=str(plan.ram or ""),
        running=plan.running,
        boot=domain.boot if domain is not None else "",
        ran=domain is not None and domain.state is DomainState.RUNNING,
        before=before,
        after=_definition(plan) or before,
        files=_files(plan),
        safety=str(SafetyCopyWriter.place(context, record.uuid)) if safety else "",
        keep_running=keep_running and runs,
        supersedes=tuple(old.facts.run for old in older),
        kept=plan.kept,
        undoes=plan.undoes,
        half_way=whole is not None,
        whole=whole or "",
        accepted=plan.accepted,
    )


def _definition(plan: RestorePlan) -> str | None:
    """The definition in the bundle.

    Raises:
        RefusedError: it is of another guest, which it would replace.
    """
    xml = plan.text(Role.INACTIVE_XML)
    if xml is not None and plan.manifest is not None and not plan.undoes:
        check_identity(plan.thing, "the definition in its bundle", xml, plan.manifest)
    return xml


def _copy_with_whole_disks(
    context: Context, domain: Domain | None, older: list[InterruptedRestore]
) -> str | None:
    """If the disks are of two instants, return the safety copy made before that.

    Empty if there is no such copy; ``None`` if the disks are of one instant. ``undo.sh`` keeps no
    journal: an interrupted one is recognized by the definition that is still barred.
    """
    for old in older:
        if old.is_half_way:
            return old.facts.way_back
    if older or domain is None or not has_bar(context.config.paths.journal, domain):
        return None
    whole = [each for each in safety_copies(context.store, domain.uuid) if each.is_offered]
    return str(whole[-1].directory) if whole else ""


def _check_savable(context: Context, plan: RestorePlan) -> None:
    """Refuse early if libvirt could not save the guest's RAM.

    Raises:
        RefusedError: with the device or setting that prevents it.
    """
    assert plan.domain is not None
    for blocker in context.hypervisor.blockers(plan.domain):
        if Strategy.MANUAL in blocker.strategies:
            raise RefusedError(
                plan.record.domain,
                f"its running state cannot be kept: {blocker.reason}",
                blocker.step,
            )


def _files(plan: RestorePlan) -> tuple[HostFile, ...]:
    found = []
    for part in plan.parts:
        if part.role not in (Role.NVRAM, Role.TPM):
            continue
        copy = Path(plan.record.bundle or "") / part.name
        if part.source is None:
            raise BundleError(str(copy), "the manifest does not say where it belongs")
        found.append(HostFile(str(copy), part.source, part.uid, part.gid, part.mode))
    return tuple(found)
