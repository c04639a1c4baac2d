"""The ``snaporch restore`` command that repeats a restore, with the options that it needs now."""

from __future__ import annotations

import shlex
from contextlib import suppress

from snaporch.context import Context
from snaporch.errors import SnaporchError
from snaporch.restore.journal import Ending, RestoreFacts
from snaporch.restore.newer_snapshot_checks import needs_consent
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.plan_model import RestorePlan


def restore_command(context: Context, facts: RestoreFacts) -> str:
    """Return the command that does an interrupted restore again, as it would not be refused now.

    Args:
        facts: of the restore, which was no undo.
    """
    words = ["snaporch", "restore", facts.thing]
    for each in facts.accepted:
        words += ["--accept", each]
    with suppress(SnaporchError):  # a restore that is impossible prints the reason itself
        words += _options(context, facts)
    return shlex.join(words)


def _options(context: Context, facts: RestoreFacts) -> list[str]:
    plain = None
    with suppress(SnaporchError):
        plain = _plan(context, facts)
    ending = plain and plain.ending
    cold = facts.ending is Ending.BOOT and ending is not Ending.BOOT
    disks_only = facts.ending is Ending.OFF and ending is not Ending.OFF
    paused = facts.ending is Ending.RESUME and bool(plain and plain.running) and not facts.running
    plan = _plan(context, facts, cold=cold, disks_only=disks_only)
    discard_newer = bool(needs_consent(plan))

    def is_refused(*, also_roll_back: bool, despite_other_disks: bool) -> bool:
        try:
            make_restore_plan(
                context,
                facts.uuid,
                facts.snapshot,
                cold=cold,
                paused=paused,
                disks_only=disks_only,
                discard_newer=discard_newer,
                also_roll_back=also_roll_back,
                despite_other_disks=despite_other_disks,
                accepted=facts.accepted,
            )
        except SnaporchError:
            return True
        return False

    ways = ((False, False), (True, False), (False, True), (True, True))
    possible = (
        (roll_back, despite)
        for roll_back, despite in ways
        if not is_refused(also_roll_back=roll_back, despite_other_disks=despite)
    )
    roll_back, despite = next(possible, ways[0])
    needed = {
        "--cold": cold,
        "--paused": paused,
        "--disks-only": disks_only,
        "--discard-newer": discard_newer,
        "--also-roll-back": roll_back,
        "--despite-other-disks": despite,
    }
    return [option for option, is_needed in needed.items() if is_needed]


def _plan(
    context: Context, facts: RestoreFacts, *, cold: bool = False, disks_only: bool = False
) -> RestorePlan:
    """The plan, whether or not it would be refused."""
    return make_restore_plan(
        context,
        facts.uuid,
        facts.snapshot,
        cold=cold,
        disks_only=disks_only,
        refusals=suppress(SnaporchError),
    )
