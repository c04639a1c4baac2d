"""Bringing a guest back to its base images, whatever happened.

The same code ends a run that failed and mends one that was killed. It goes by what it sees: live
and inactive XML, block jobs, the domain's state, the files. The journal only says which overlays
and snapshots were the run's own, and what cannot be seen.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from xml.sax.saxutils import escape

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from snaporch import default_paths
from snaporch.catalog.properties import destroy_snapshots, finish_snapshots, own_snapshots
from snaporch.catalog.torn import (
    Commit,
    commits_in,
    commits_of_all,
    mark_torn,
    noted_commit,
    torn_text,
)
from snaporch.command_log import set_fields
from snaporch.context import Context
from snaporch.disks import overlay_files
from snaporch.errors import AttentionError, BusyError, SnaporchError, UnavailableError
from snaporch.hypervisor import HypervisorError, OverlayDisk, Patience, domain_xml
from snaporch.hypervisor.apparmor import is_confined
from snaporch.journal import (
    Note,
    RunFacts,
    SnapshotJournal,
    UnreadableJournal,
    append_note,
    forget,
    journals_of,
    let_go_mark,
    list_journals,
    noting,
)
from snaporch.locks import RECOVERING, domain_lock
from snaporch.model import BundleState, Domain, Level
from snaporch.recovery.decision import (
    Action,
    EmulatorState,
    ImageRef,
    Observation,
    OverlayState,
    UserDecision,
    decide,
)
from snaporch.recovery.drain_pipe import reader_of
from snaporch.recovery.foreign_snapshot import check_nothing_above
from snaporch.recovery.other_kinds import finish_others, foresee_others
from snaporch.recovery.release_guest import FULL, is_ours_to_resume, journal_of, let_go, wake
from snaporch.recovery.stale_sockets import remove_if_dead
from snaporch.recovery.start_guardian import guard_leftovers

_POLL_SECONDS = 0.2
_RECONNECT_SECONDS = 60
_QUARANTINE = "quarantine"
SET_ASIDE = "set aside"
LOOK = 'compare it with its base, then commit or delete it: docs/recovery.md, "By hand"'


def settle(
    context: Context,
    facts: RunFacts,
    notes: Collection[Note],
    *,
    keep_snapshots: bool | None = None,
    alive: bool = False,
    take: UserDecision | None = None,
) -> list[str]:
    """Undo what a run left; what was done, in words.

    No pool is asked for anything before the guest is let go and on its bases.

    Args:
        keep_snapshots: the run had taken all its ZFS snapshots: they stay, as level ``crash``;
            ``None`` to see.
        alive: the run itself asks, which has held the domain's lock all the time.
        take: what a human has decided of disks that are undecided.

    Raises:
        AttentionError: safety cannot be proven; everything was kept.
    """
    set_fields(DOMAIN=facts.domain, RUN=facts.run, SNAPSHOT=facts.snapshot, STEP="recover")
    try:
        with reader_of(Path(facts.ram_pipe)):
            done = let_go(context, _find(context, facts), facts, notes)
        unnoted = not commits_in(journal_of(context, facts))
        own_commit: list[Commit] = []
        done += _settle_disks(context, facts, notes, own_commit, alive=alive, take=take)
    except AttentionError:
        raise
    except (SnaporchError, OSError) as error:
        raise AttentionError(
            facts.domain,
            f"could not be brought back to its base images ({error})",
            f"nothing was removed; mend the cause and run: snaporch recover {facts.uuid}",
        ) from error
    commits = commits_of_all(context.config.paths.journal) + own_commit
    if unnoted:  # before the run's own are destroyed
        commits += _unnoted_commit(context, facts, notes)
    if keep_snapshots is None:
        own = own_snapshots(context, facts)
        keep_snapshots = facts.awaited or len(own) == len(facts.datasets)
    done += (
        finish_snapshots(context, facts) if keep_snapshots else destroy_snapshots(context, facts)
    )
    torn = mark_torn(context.pool, facts.datasets, commits)
    done += [torn_text(snapshot.full_name) for snapshot in torn]
    context.store.discard_partial(facts.uuid, facts.run)
    Path(facts.ram_pipe).unlink(missing_ok=True)
    remove_if_dead(context.config.paths.runtime, facts.uuid)
    return done


def _find(context: Context, facts: RunFacts) -> Domain | None:
    """The domain, with patience for a libvirtd that is just being restarted."""

    def look() -> tuple[bool, Domain | None]:
        try:
            return True, context.hypervisor.find(facts.uuid)
        except (UnavailableError, HypervisorError):
            return False, None

    patience = Retrying(
        stop=stop_after_delay(_RECONNECT_SECONDS),
        wait=wait_fixed(_POLL_SECONDS),
        retry=retry_if_result(lambda answer: not answer[0]),
        retry_error_callback=lambda _state: (True, context.hypervisor.find(facts.uuid)),
    )
    found: tuple[bool, Domain | None] = patience(look)
    return found[1]


# -- bringing the disks home --------------------------------------------------------------------


def _settle_disks(
    context: Context,
    facts: RunFacts,
    notes: Collection[Note],
    own_commit: list[Commit],
    *,
    alive: bool,
    take: UserDecision | None,
) -> list[str]:
    domain = _find(context, facts)  # which may have been shut off while it was let go
    actions: dict[Action, list[OverlayDisk]] = {}
    for disk in facts.overlays:
        sight = _see(context, domain, facts, disk, notes, alive=alive)
        actions.setdefault(decide(sight, take), []).append(disk)
    if missing := actions.get(Action.ATTENTION):
        raise AttentionError(
            facts.domain,
            f"its definition names {_paths(missing)}, which is not there; the guest's last writes "
            "are in it",
            "put it back and run `snaporch recover`, or define the domain on its base images",
        )
    if undecided := actions.get(Action.UNDECIDED):
        first = "shut it off, " if domain is not None and domain.active else ""
        raise AttentionError(
            facts.domain,
            f"it ended while {_targets(undecided)} was being switched from {_paths(undecided)} "
            "back to the base: the two differ, and either may be the newer",
            f"{first}look at both (docs/recovery.md, Undecided), and then run: snaporch recover "
            f"{facts.uuid} --take overlay|base",
        )
    _check_saved_ram(context, domain, facts, actions.get(Action.QUARANTINE, []))
    done = []
    online, offline = actions.get(Action.COMMIT, []), actions.get(Action.COMMIT_OFFLINE, [])
    full = bool(online) and context.hypervisor.paused_by(facts.uuid) == FULL
    if online and not full and domain is not None and is_confined(facts.uuid):
        # a pivot has libvirt write its profile anew, which denies it whatever lies below a disk:
        # whoever put an image over an overlay of the run could not commit it any more (images over
        # other disks are not looked for); that a guest without room runs comes first
        check_nothing_above(domain, facts, facts.overlays)
    if online or offline:
        with noted_commit(context.pool, facts.datasets, journal_of(context, facts)) as noted:
            done += _commit_all(context, facts, online, offline)
        own_commit += noted
    if domain is not None:
        if context.hypervisor.rebase_managed_save(facts.uuid, facts.overlays):
            done.append("had the RAM that libvirt saved of it go on on its bases")
        context.hypervisor.rebase_inactive(facts.uuid, facts.overlays)
    done += wake(context, facts, notes)
    _check_unused(context, facts)
    for disk in actions.get(Action.QUARANTINE, []):
        kept = overlay_files.quarantine(
            disk, context.config.paths.overlays / _QUARANTINE / facts.run
        )
        done.append(f"{SET_ASIDE} {kept}, which may hold writes of {disk.target}")
    overlay_files.remove(Path(facts.overlay_dir), facts.overlays)
    return done


def _check_saved_ram(
    context: Context, domain: Domain | None, facts: RunFacts, aside: list[OverlayDisk]
) -> None:
    """See that no overlay is set aside which RAM saved by libvirt goes with."""
    saved = context.hypervisor.saved_sources(facts.uuid) if domain is not None else None
    if needed := [disk for disk in aside if (saved or {}).get(disk.target) == disk.overlay]:
        raise AttentionError(
            facts.domain,
            f"the RAM that libvirt saved of it goes with {_paths(needed)} and with no other image",
            f"run: virsh managedsave-remove {shlex.quote(facts.domain)}, and recover it again",
        )


def _commit_all(
    context: Context, facts: RunFacts, online: list[OverlayDisk], offline: list[OverlayDisk]
) -> list[str]:
    done = []
    if online:
        _commit(context, facts, online)
        done.append(f"committed {_targets(online)}")
    for disk in offline:
        overlay_files.commit_offline(disk, facts.emulator)
    if offline:
        done.append(f"committed {_targets(offline)} while the guest is off")
    return done


def _unnoted_commit(context: Context, facts: RunFacts, notes: Collection[Note]) -> list[Commit]:
    """The disk or the pool did not let it be noted: all since the run's own snapshots counts."""
    begun = {Note.PIVOTING, Note.COMMITTED} & set(notes)
    begun_by_guardian = let_go_mark(journal_of(context, facts)).exists()
    if not facts.overlays or not (begun or begun_by_guardian):
        return []
    own = own_snapshots(context, facts)
    return [Commit({snapshot.dataset: snapshot.createtxg for snapshot in own})] if own else []


def _commit(context: Context, facts: RunFacts, disks: list[OverlayDisk]) -> None:
    """Commit as the run would have; a full disk must not keep the guest on its overlays."""
    journal = journal_of(context, facts)

    def note(text: Note) -> None:
        try:
            append_note(journal, text)
        except OSError:
            if text is Note.SUSPENDED:  # killed then, nobody would know that it is not the owner's
                raise

    settings = context.config.settings(facts.domain, facts.uuid)
    patience = Patience(running=settings.commit_patience)
    context.hypervisor.commit(facts.uuid, disks, noting(note), patience)
    note(Note.COMMITTED)


def _see(
    context: Context,
    domain: Domain | None,
    facts: RunFacts,
    disk: OverlayDisk,
    notes: Collection[Note],
    *,
    alive: bool = False,
) -> Observation:
    xmls = (domain.live_xml, domain.inactive_xml) if domain is not None else (None, None)
    live, inactive = map(domain_xml.sources, xmls)
    power, where = _power(domain, facts), _points(live, disk)
    if power is EmulatorState.OFF:  # RAM that libvirt saved is what a start goes by
        inactive = context.hypervisor.saved_sources(facts.uuid) or inactive
    settled = where is ImageRef.OVERLAY or (
        power is EmulatorState.ACTIVE and where is ImageRef.BASE
    )
    sight = Observation(
        power=power,
        live=where,
        inactive=_points(inactive, disk),
        file=OverlayState.WRITTEN,
        pivoting=Note.PIVOTING in notes,
        unused=alive and power is EmulatorState.GONE and _is_unused(context, disk),
    )
    if settled:
        return sight
    # read only where it decides something: comparing a large disk takes its time
    compare = decide(sight) is not decide(replace(sight, file=OverlayState.COMMITTED))
    return replace(sight, file=_file(facts, disk, notes, compare=compare))


def _power(domain: Domain | None, facts: RunFacts) -> EmulatorState:
    if domain is None:
        return EmulatorState.GONE
    if not domain.active:
        return EmulatorState.OFF
    return EmulatorState.ACTIVE if domain.boot == facts.boot else EmulatorState.RESTARTED


def _points(sources: dict[str, str] | None, disk: OverlayDisk) -> ImageRef:
    if sources is None:
        return ImageRef.NOWHERE
    known = {disk.base: ImageRef.BASE, disk.overlay: ImageRef.OVERLAY}
    return known.get(sources.get(disk.target, ""), ImageRef.ELSEWHERE)


def _file(
    facts: RunFacts, disk: OverlayDisk, notes: Collection[Note], *, compare: bool
) -> OverlayState:
    if not os.path.lexists(disk.overlay):
        return OverlayState.MISSING
    if Note.COMMITTED in notes:
        return OverlayState.COMMITTED
    try:
        if not overlay_files.holds_writes(disk, facts.emulator):
            return OverlayState.EMPTY
        same = compare and overlay_files.holds_what_base_holds(disk, facts.emulator)
    except (SnaporchError, OSError, ValueError):
        return OverlayState.WRITTEN
    return OverlayState.COMMITTED if same else OverlayState.WRITTEN


def _targets(disks: list[OverlayDisk]) -> str:
    return ", ".join(disk.target for disk in disks)


def _paths(disks: list[OverlayDisk]) -> str:
    return ", ".join(disk.overlay for disk in disks)


def remove_unused(context: Context, facts: RunFacts) -> None:
    """Remove the run's overlays after seeing that neither live nor inactive XML names one.

    Raises:
        AttentionError: one is still in use.
    """
    _check_unused(context, facts)
    overlay_files.remove(Path(facts.overlay_dir), facts.overlays)


def _check_unused(context: Context, facts: RunFacts) -> None:
    """No domain names one of the overlays, anywhere in a chain, and no process has one open."""
    there = [disk for disk in facts.overlays if os.path.lexists(disk.overlay)]
    if not there:
        return
    for domain in context.hypervisor.domains():
        if domain.uuid == facts.uuid:
            check_nothing_above(domain, facts, there)
        xml = f"{domain.live_xml}{domain.inactive_xml}"
        named = [disk for disk in there if escape(disk.overlay, {"'": "&apos;"}) in xml]
        if named:
            raise _still_used(facts, named, f"the domain {domain.name}")
    opened = overlay_files.open_somewhere([Path(disk.overlay) for disk in there])
    if opened:
        raise _still_used(facts, there, f"the process {opened}")


def _is_unused(context: Context, disk: OverlayDisk) -> bool:
    """No domain has the disk's base, and no process the base or the overlay."""
    if not os.path.lexists(disk.overlay) or not os.path.exists(disk.base):
        return False
    base = os.path.realpath(disk.base)
    for domain in context.hypervisor.domains():
        xmls = [xml for xml in (domain.live_xml, domain.inactive_xml) if xml]
        if any(escape(name, {"'": "&apos;"}) in xml for name in (disk.base, base) for xml in xmls):
            return False
    return not overlay_files.open_somewhere([Path(base), Path(disk.overlay)])


def _still_used(facts: RunFacts, disks: list[OverlayDisk], by: str) -> AttentionError:
    return AttentionError(
        facts.domain,
        f"{by} still uses {_paths(disks)}",
        f"nothing was removed; run: snaporch recover {facts.uuid}",
    )


# -- runs that were killed ----------------------------------------------------------------------


def recover(context: Context, uuid: str, take: UserDecision | None = None) -> list[str]:
    """Settle the runs on a domain that were killed, of any kind; the caller holds its lock.

    Args:
        take: what a human has decided of disks that are undecided.

    Raises:
        AttentionError: one cannot be settled.
        JournalError: one cannot be understood.
    """
    return recover_runs(context, uuid, take) + finish_others(context, uuid)


def recover_runs(context: Context, uuid: str, take: UserDecision | None = None) -> list[str]:
    """Settle the snapshot runs on a domain that were killed; the caller holds its lock.

    Raises:
        AttentionError: one cannot be settled.
        JournalError: one cannot be understood.
    """
    done: list[str] = []
    for journal in journals_of(context.config.paths.journal, uuid, sweep=True):
        done += _recover_one(context, journal, take)
    return done


def recover_leftovers(context: Context) -> None:
    """Settle every snapshot run that was killed, before anything is asked about its domain.

    libvirt may be holding a domain while it waits to open the pipe of a run that is gone. A run
    that holds its lock is alive; one that cannot be settled is left for its guardian, and for its
    own domain's commands.
    """
    names = {}
    for journal in list_journals(context.config.paths.journal, sweep=True):
        if isinstance(journal, UnreadableJournal):
            context.progress.note("snaporch", journal.error.line())
        elif isinstance(journal, SnapshotJournal):
            names[journal.facts.uuid] = journal.facts.domain
    for uuid, name in names.items():
        lock = domain_lock(
            default_paths.LOCKS,
            name,
            uuid,
            RECOVERING,
            wait=0,
            interrupt=context.interrupt,
        )
        try:
            with lock:
                for text in recover_runs(context, uuid):
                    context.progress.note(name, text)
        except BusyError:
            continue
        except SnaporchError as error:
            context.progress.note(name, error.line())
    guard_leftovers(context)


def _recover_one(
    context: Context, journal: SnapshotJournal, take: UserDecision | None
) -> list[str]:
    facts = journal.facts
    texts = settle(context, facts, journal.notes, take=take)
    forget(journal.path)
    texts.append(f"settled the run {facts.run}, which had been cut short")
    domain = context.hypervisor.find(facts.uuid)
    if domain is not None and not domain.active and context.hypervisor.starts_at_boot(facts.uuid):
        texts.append("is off, and libvirt may have been kept from starting it: virsh start")
    return [f"{facts.domain}: {text}" for text in texts]


def foresee(context: Context, uuid: str, take: UserDecision | None = None) -> list[str]:
    """What :func:`recover` would do, without doing it."""
    lines = []
    for journal in journals_of(context.config.paths.journal, uuid):
        facts = journal.facts
        domain = _find(context, facts)
        for disk in facts.overlays:
            action = decide(_see(context, domain, facts, disk, journal.notes), take)
            lines.append(f"{facts.domain}: {disk.target}: {action} {disk.overlay}")
        if domain is not None and domain.active and domain.boot == facts.boot:
            if Note.FREEZING in journal.notes and Note.LET_GO not in journal.notes:
                lines.append(f"{facts.domain}: thaw the guest")
            if is_ours_to_resume(context, facts, journal.notes):
                lines.append(f"{facts.domain}: resume the guest")
        lines += [f"{facts.domain}: {text}" for text in _foresee_snapshots(context, facts)]
        lines.append(f"{facts.domain}: settle the run {facts.run}, which was cut short")
    return lines + foresee_others(context, uuid)


def _foresee_snapshots(context: Context, facts: RunFacts) -> list[str]:
    marked = own_snapshots(context, facts)
    if len(marked) < len(facts.datasets):
        return [f"destroy {snapshot.full_name}" for snapshot in marked]
    state, manifest = context.store.state(f"{facts.uuid}/{facts.run}")
    level = manifest.level if manifest and state is BundleState.COMPLETE else Level.CRASH
    return [f"keep @{facts.snapshot} as {level}"]
