"""Returns a run's disks to their base images, as decided for each.

The decisions are made by :mod:`snaporch.recovery.decision`.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path

from snaporch.catalog.torn import Commit, recorded_commit
from snaporch.context import Context
from snaporch.disks import overlay_files
from snaporch.errors import AttentionError
from snaporch.hypervisor import OverlayDisk
from snaporch.hypervisor.commit_timeouts import CommitTimeouts
from snaporch.journal import Note, RunFacts, append_note, note_stages
from snaporch.model import Domain
from snaporch.recovery.decision import Action, UserDecision, decide
from snaporch.recovery.images_above import check_nothing_above
from snaporch.recovery.observe import find_domain, observe
from snaporch.recovery.overlay_removal import check_unused, paths_of
from snaporch.recovery.release_guest import FULL, journal_of, resume_if_ours
from snaporch.recovery.result import Effect, RecoveryResult


def recover_disks(
    context: Context,
    facts: RunFacts,
    notes: Collection[Note],
    *,
    alive: bool,
    take: UserDecision | None,
) -> tuple[list[RecoveryResult], list[Commit]]:
    """Return each disk of a run to its base.

    Args:
        alive: the run itself asks, and has held the domain's lock all the time.
        take: the admin's decision for undecided disks.

    Returns: what was done, and the commit if there was one.

    Raises:
        AttentionError: the admin has to decide or act.
        SnaporchError, OSError: it failed.
    """
    domain = find_domain(context, facts)  # it may have been shut off since its release
    actions: dict[Action, list[OverlayDisk]] = {}
    taken = False
    for disk in facts.overlays:
        observation = observe(context, domain, facts, disk, notes, alive=alive)
        taken = taken or decide(observation) is Action.UNDECIDED
        actions.setdefault(decide(observation, take), []).append(disk)
    if missing := actions.get(Action.ATTENTION):
        raise AttentionError(
            facts.domain,
            f"its definition names {paths_of(missing)}, which is missing; the guest's "
            "last writes are in it",
            f"restore that file and run: snaporch recover {facts.uuid}; or define the domain on "
            "its base images",
        )
    if undecided := actions.get(Action.UNDECIDED):
        first = "shut it off, " if domain is not None and domain.active else ""
        raise AttentionError(
            facts.domain,
            f"QEMU exited while {_targets(undecided)} was being switched from "
            f"{paths_of(undecided)} back to the base; the two differ, and either may be the newer",
            f"{first}compare both (docs/how-to/recovery.md, Undecided), then run: snaporch recover "
            f"{facts.uuid} --take overlay|base",
        )
    _check_saved_ram(context, domain, facts, actions.get(Action.QUARANTINE, []))
    done = [Effect.NOT_UNDECIDED.of()] if take is not None and not taken else []
    online, offline = actions.get(Action.COMMIT, []), actions.get(Action.COMMIT_OFFLINE, [])
    full = bool(online) and context.hypervisor.paused_by(facts.uuid) == FULL
    if online and not full and domain is not None and context.hypervisor.is_confined(facts.uuid):
        # at a pivot libvirt rewrites the AppArmor profile, which then denies writes to all images
        # below a disk: a program with an image over a run's overlay could not commit it any more
        # (images over other disks are not checked). A guest paused for want of room is more urgent.
        check_nothing_above(context.resolver, domain, facts, facts.overlays)
    own_commit: list[Commit] = []
    if online or offline:
        with recorded_commit(context.pool, facts.datasets, journal_of(context, facts)) as noted:
            done += _commit_all(context, facts, online, offline)
        own_commit = noted
    if domain is not None:
        if context.hypervisor.rebase_managed_save(facts.uuid, facts.overlays):
            done.append(Effect.SAVED_REBASED.of())
        context.hypervisor.rebase_inactive(facts.uuid, facts.overlays)
    done += resume_if_ours(context, facts, notes)
    check_unused(context, facts)
    for disk in actions.get(Action.QUARANTINE, []):
        kept = overlay_files.quarantine(
            disk, context.config.paths.overlays / overlay_files.QUARANTINE / facts.run
        )
        done.append(Effect.QUARANTINED.of(kept, disk.target))
    overlay_files.remove(Path(facts.overlay_dir), facts.overlays)
    return done, own_commit


def _check_saved_ram(
    context: Context, domain: Domain | None, facts: RunFacts, quarantined: list[OverlayDisk]
) -> None:
    """Check that the RAM that libvirt saved does not need an overlay that is to be quarantined."""
    saved = context.hypervisor.saved_sources(facts.uuid) if domain is not None else None
    if needed := [disk for disk in quarantined if (saved or {}).get(disk.target) == disk.overlay]:
        raise AttentionError(
            facts.domain,
            f"the RAM that libvirt saved of it needs {paths_of(needed)}",
            f"to discard that RAM, run: virsh managedsave-remove {shlex.quote(facts.domain)}; "
            f"then: snaporch recover {facts.uuid}",
        )


def _commit_all(
    context: Context, facts: RunFacts, online: list[OverlayDisk], offline: list[OverlayDisk]
) -> list[RecoveryResult]:
    done = []
    if online:
        _commit(context, facts, online)
        done.append(Effect.COMMITTED.of(_targets(online)))
    for disk in offline:
        context.overlay_images.commit_offline(disk, facts.emulator)
    if offline:
        done.append(Effect.COMMITTED_OFFLINE.of(_targets(offline)))
    return done


def _commit(context: Context, facts: RunFacts, disks: list[OverlayDisk]) -> None:
    """Commit as the run would have; a full disk must not keep the guest on its overlays.

    A suspend that cannot be noted is not done: after a kill it would count as the owner's.
    """
    journal = journal_of(context, facts)

    def note(text: Note) -> None:
        try:
            append_note(journal, text)
        except OSError:
            if text is Note.SUSPENDED:
                raise

    settings = context.config.settings(facts.domain, facts.uuid)
    patience = CommitTimeouts(running=settings.commit_patience)
    context.hypervisor.commit(facts.uuid, disks, note_stages(note), patience)
    note(Note.COMMITTED)


def _targets(disks: list[OverlayDisk]) -> str:
    return ", ".join(disk.target for disk in disks)
