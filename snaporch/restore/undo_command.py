"""The ``snaporch undo`` command that undoes a restore, with the options that it needs now."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from snaporch.context import Context
from snaporch.errors import AttentionError, SnaporchError
from snaporch.journal import other_journals_of
from snaporch.model import Domain
from snaporch.restore.journal import KIND, RestoreFacts
from snaporch.restore.newer_snapshot_checks import needs_consent
from snaporch.restore.safety_catalog import RECORD, SafetyCopy, safety_copies
from snaporch.restore.select_undo import choose_copy
from snaporch.restore.start_bar import has_bar
from snaporch.restore.undo_plan import make_undo_plan


def undo_command(
    context: Context, copy: SafetyCopy, *, is_last: bool = False, disks_only: bool = False
) -> str:
    """Return the command that brings back a safety copy, as it would not be refused at present.

    An undo has brought back snapshots that are newer than the base of its own safety copy, and
    files that are not the guest's. To undo it destroys them again, which needs options.

    Args:
        is_last: the copy is that of the last restore, which an undo chooses by itself.
        disks_only: leave the guest off.
    """
    words = ["snaporch", "undo", copy.manifest.domain]
    if not is_last:
        words += ["--copy", copy.name]
    with suppress(SnaporchError):  # an undo that is impossible prints the reason itself
        words += _options(context, copy, disks_only=disks_only)
    return shlex.join(words)


def _options(context: Context, copy: SafetyCopy, *, disks_only: bool) -> list[str]:
    plan = make_undo_plan(context, copy, disks_only=disks_only, refusals=suppress(SnaporchError))
    apart = plan.ram is not None and any(disk.is_apart for disk in copy.manifest.disks)
    disks_only = disks_only or apart
    discard_newer = bool(needs_consent(plan))

    def is_refused(*, also_roll_back: bool) -> bool:
        try:
            make_undo_plan(
                context,
                copy,
                disks_only=disks_only,
                discard_newer=discard_newer,
                also_roll_back=also_roll_back,
            )
        except SnaporchError:
            return True
        return False

    needed = {
        "--disks-only": disks_only,
        "--discard-newer": discard_newer,
        "--also-roll-back": is_refused(also_roll_back=False)
        and not is_refused(also_roll_back=True),
    }
    return [option for option, is_needed in needed.items() if is_needed]


def command_to_go_back(context: Context, facts: RestoreFacts) -> str:
    """Return the command that undoes a restore that may be half done; empty without a copy."""
    directory = Path(facts.way_back)
    if not facts.way_back or not (directory / RECORD).exists():
        return ""
    return command_for(context, facts.domain, facts.uuid, directory.name)


def command_for(
    context: Context,
    domain: str,
    uuid: str,
    name: str,
    *,
    is_last: bool = False,
    disks_only: bool = False,
) -> str:
    """Do the same as :func:`undo_command` for the copy ``name``, which may be unreadable."""
    try:
        copy = choose_copy(context, uuid, name)
    except SnaporchError:  # the undo prints why
        return shlex.join(["snaporch", "undo", domain, "--copy", name])
    return undo_command(context, copy, is_last=is_last, disks_only=disks_only)


def guests_left_barred(
    context: Context, domains: Iterable[Domain] | None = None
) -> list[AttentionError]:
    """Return an error for each guest that is barred although it has no unfinished restore.

    An interrupted ``undo.sh`` leaves a guest so, because it keeps no journal.

    Args:
        domains: the domains to check, which may have changed since; ``None`` for all.
    """
    journal = context.config.paths.journal
    found = []
    for domain in context.hypervisor.domains() if domains is None else domains:
        if not has_bar(journal, domain):
            continue
        if any(each.kind == KIND for each in other_journals_of(journal, domain.uuid)):
            continue
        if not has_bar(journal, context.hypervisor.find(domain.uuid)):
            continue  # a restore has just ended
        copies = [copy for copy in safety_copies(context.store, domain.uuid) if copy.is_offered]
        step = undo_command(context, copies[-1]) if copies else "define it again"
        found.append(
            AttentionError(
                domain.name,
                "cannot be started, because undoing its restore was interrupted",
                f"{step}, or restore it again with snaporch restore",
            )
        )
    return found
