"""Recovers runs: releases the guest, returns it to its base images, cleans up.

What is done with each disk is decided by :mod:`snaporch.recovery.decision`.

A run that failed calls :func:`recover_run`; killed runs are recovered from their journals.
Recovery trusts the observed state: live and inactive XML, block jobs, the domain's state, the
files. The journal only says which overlays and snapshots were the run's own, and what cannot be
observed.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path

from snaporch import default_paths
from snaporch.catalog.run_snapshots import (
    destroy_snapshots,
    finish_snapshots,
    own_snapshots,
    page_snapshots,
)
from snaporch.catalog.torn import (
    Commit,
    commits_in,
    commits_of_all,
    mark_torn,
)
from snaporch.command_log import set_fields
from snaporch.context import Context
from snaporch.errors import AttentionError, BusyError, SnaporchError
from snaporch.journal import (
    Note,
    RunFacts,
    SnapshotJournal,
    UnreadableJournal,
    forget,
    journals_of,
    list_journals,
    read_journal,
    release_mark,
)
from snaporch.locks import RECOVERING, domain_lock
from snaporch.model import BundleState, Level
from snaporch.recovery.decision import (
    UserDecision,
    decide,
)
from snaporch.recovery.drain_pipe import reader_of
from snaporch.recovery.finishers import finish_other_runs, preview_other_runs
from snaporch.recovery.hold_socket import remove_if_dead
from snaporch.recovery.observe import find_domain, observe
from snaporch.recovery.recover_disks import recover_disks
from snaporch.recovery.release_guest import (
    is_left_paused,
    is_ours_to_resume,
    journal_of,
    release,
)
from snaporch.recovery.result import Effect, RecoveryResult
from snaporch.recovery.start_guardian import guard_leftovers
from snaporch.zfs import PoolError

QUARANTINE_STEP = (
    'compare it with its base, then commit or delete it: docs/how-to/recovery.md, "By hand"'
)


def recover_run(
    context: Context,
    facts: RunFacts,
    notes: Collection[Note],
    *,
    keep_snapshots: bool | None = None,
    alive: bool = False,
    take: UserDecision | None = None,
) -> list[RecoveryResult]:
    """Release the guest of a run, return it to its base images, and clean up after the run.

    No pool is asked for anything before the guest is released and on its bases.

    Args:
        notes: the run's notes that hold.
        keep_snapshots: keep the run's ZFS snapshots, as level ``crash``; ``None`` to keep them if
            all were taken, or if another program takes them.
        alive: the run itself asks, and has held the domain's lock all the time.
        take: the admin's decision for undecided disks.

    Returns: what was done.

    Raises:
        AttentionError: safety cannot be proven; everything was kept.
    """
    set_fields(DOMAIN=facts.domain, RUN=facts.run, SNAPSHOT=facts.snapshot, STEP="recover")
    try:
        with reader_of(Path(facts.ram_pipe)):
            done = release(context, find_domain(context, facts), facts, notes)
        unnoted = not commits_in(journal_of(context, facts))
        on_disks, own_commit = recover_disks(context, facts, notes, alive=alive, take=take)
    except AttentionError:
        raise
    except (SnaporchError, OSError) as error:
        raise AttentionError(
            facts.domain,
            f"could not be returned to its base images ({error})",
            f"nothing was removed; fix the cause and run: snaporch recover {facts.uuid}",
        ) from error
    done += on_disks
    commits = commits_of_all(context.config.paths.journal) + own_commit
    if unnoted:  # before the run's own snapshots are destroyed
        commits += _unnoted_commit(context, facts, notes)
    if keep_snapshots is None:
        own = own_snapshots(context, facts)
        keep_snapshots = facts.taken_by_other_program or len(own) == len(facts.datasets)
    if not keep_snapshots:
        done += [Effect.DESTROYED.of(name) for name in destroy_snapshots(context, facts)]
    elif (level := finish_snapshots(context, facts)) is not None:
        done.append(Effect.COMPLETED.of(level, facts.snapshot))
    torn = mark_torn(context.pool, facts.datasets, commits)
    done += [Effect.TORN.of(snapshot.full_name) for snapshot in torn]
    done += _destroy_pages(context, facts)
    context.store.discard_partial(facts.uuid, facts.run)
    Path(facts.ram_pipe).unlink(missing_ok=True)
    remove_if_dead(context.config.paths.runtime, facts.uuid)
    return done


def _destroy_pages(context: Context, facts: RunFacts) -> list[RecoveryResult]:
    """Destroy pages of RAM that no bundle will name.

    If that fails, they stay until the run's snapshots are gone, and are pruned then.
    """
    try:
        if pages := _unsealed_pages(context, facts):
            context.pool.destroy_snapshots(pages)
    except PoolError as error:
        context.progress.note(facts.domain, f"pages of RAM may be left: {error}")
        return []
    return [Effect.DESTROYED.of(name) for name in pages]


def _unsealed_pages(context: Context, facts: RunFacts) -> list[str]:
    """Snapshots of pages that a run took whose bundle is certainly not sealed."""
    if facts.strategy.level is not Level.RAM:
        return []
    begun = context.store.has_partial(facts.uuid, facts.run)
    return page_snapshots(context, facts.uuid, facts.run) if begun else []


def _unnoted_commit(context: Context, facts: RunFacts, notes: Collection[Note]) -> list[Commit]:
    """The commit that could not be noted: it counts as begun after the run's own snapshots."""
    begun = {Note.PIVOTING, Note.COMMITTED} & set(notes)
    begun_by_guardian = release_mark(journal_of(context, facts)).exists()
    if not facts.overlays or not (begun or begun_by_guardian):
        return []
    own = own_snapshots(context, facts)
    return [Commit({snapshot.dataset: snapshot.createtxg for snapshot in own})] if own else []


def recover(context: Context, uuid: str, take: UserDecision | None = None) -> list[RecoveryResult]:
    """Recover a domain's killed runs of every kind; the caller holds the domain's lock.

    Args:
        take: the admin's decision for undecided disks.

    Returns: what was done.

    Raises:
        AttentionError: a run cannot be recovered.
        JournalError: a journal cannot be read.
    """
    return recover_runs(context, uuid, take) + finish_other_runs(context, uuid)


def recover_runs(
    context: Context, uuid: str, take: UserDecision | None = None
) -> list[RecoveryResult]:
    """Recover a domain's killed snapshot runs; the caller holds the domain's lock.

    Args:
        take: the admin's decision for undecided disks.

    Returns: what was done.

    Raises:
        AttentionError: a run cannot be recovered.
        JournalError: a journal cannot be read.
    """
    done: list[RecoveryResult] = []
    for journal in journals_of(context.config.paths.journal, uuid, sweep=True):
        done += _recover_one(context, journal, take)
    return done


def recover_leftovers(context: Context) -> None:
    """Recover every killed snapshot run, before libvirt is asked about its domain.

    libvirt may lock a domain while it waits to open the pipe of a killed run. A run that holds its
    domain's lock is alive. A run that cannot be recovered is left to its guardian, and to its own
    domain's commands.
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
                for result in recover_runs(context, uuid):
                    context.progress.note(name, str(result))
        except BusyError:
            continue
        except SnaporchError as error:
            context.progress.note(name, error.line())
    guard_leftovers(context)


def _recover_one(
    context: Context, journal: SnapshotJournal, take: UserDecision | None
) -> list[RecoveryResult]:
    facts = journal.facts
    done = recover_run(context, facts, journal.notes, take=take)
    noted = read_journal(journal.path)  # recovery notes what it does, too
    notes = noted.notes if isinstance(noted, SnapshotJournal) else journal.notes
    if is_left_paused(context, facts, notes):
        raise _left_paused(facts)
    forget(journal.path)
    done.append(Effect.RECOVERED.of(facts.run))
    domain = context.hypervisor.find(facts.uuid)
    is_off = domain is not None and not domain.active and context.fences.find(facts.uuid) is None
    if is_off and context.hypervisor.starts_at_boot(facts.uuid):
        done.append(Effect.STILL_OFF.of())
    return done


def _left_paused(facts: RunFacts) -> AttentionError:
    return AttentionError(
        facts.domain,
        "it is on its base images, but paused, and the journal of its run does not show by whom",
        f"run: virsh resume {shlex.quote(facts.domain)}, then: snaporch recover {facts.uuid}; "
        'if it is to stay paused, see docs/how-to/recovery.md, "A guest stays paused"',
    )


def preview(context: Context, uuid: str, take: UserDecision | None = None) -> list[RecoveryResult]:
    """What :func:`recover` would do, without doing it.

    Args:
        take: the admin's decision for undecided disks.
    """
    found: list[RecoveryResult] = []
    for journal in journals_of(context.config.paths.journal, uuid):
        facts = journal.facts
        domain = find_domain(context, facts)
        for disk in facts.overlays:
            action = decide(observe(context, domain, facts, disk, journal.notes), take)
            found.append(Effect.WILL_HANDLE.of(disk.target, action, disk.overlay))
        if domain is not None and domain.active and domain.boot == facts.boot:
            if Note.FREEZING in journal.notes and Note.RELEASED not in journal.notes:
                found.append(Effect.WILL_THAW.of())
            if is_ours_to_resume(context, facts, journal.notes):
                found.append(Effect.WILL_RESUME.of())
            elif is_left_paused(context, facts, journal.notes):
                found.append(Effect.WILL_STAY_PAUSED.of())
        found += _foresee_snapshots(context, facts)
        found.append(Effect.WILL_RECOVER.of(facts.run))
    return found + preview_other_runs(context, uuid)


def _foresee_snapshots(context: Context, facts: RunFacts) -> list[RecoveryResult]:
    marked = own_snapshots(context, facts)
    pages = [Effect.WILL_DESTROY.of(name) for name in _unsealed_pages(context, facts)]
    if len(marked) < len(facts.datasets):
        return [Effect.WILL_DESTROY.of(snapshot.full_name) for snapshot in marked] + pages
    state, manifest = context.store.state(f"{facts.uuid}/{facts.run}")
    level = manifest.level if manifest and state is BundleState.COMPLETE else Level.CRASH
    return [Effect.WILL_KEEP.of(facts.snapshot, level), *pages]
