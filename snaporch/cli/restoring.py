"""Asking, restoring and telling, behind ``snaporch restore``."""

from __future__ import annotations

import json as json_format
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from snaporch import default_paths
from snaporch.context import Context
from snaporch.errors import RefusedError, UsageError
from snaporch.locks import domain_lock
from snaporch.model import iso
from snaporch.output.terminal import print_error, print_result
from snaporch.recovery.settle import recover_leftovers, recover_runs
from snaporch.restore.losses import losses
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.plan_model import RestorePlan
from snaporch.restore.run import Restored, check_as_shown, check_bundle, restore
from snaporch.restore.select import newest_until, others_of_group, parse_moment, split_name


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """What was asked for."""

    name: str
    """``DOMAIN@SNAPSHOT``, or the domain with a time."""
    to_time: str | None
    cold: bool
    paused: bool
    disks_only: bool
    bundle: Path | None
    discard_newer: bool
    keep_running: bool
    safety: bool
    apart: bool = False
    also_roll_back: bool = False
    keep_definition: bool = False
    despite_damage: bool = False

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            UsageError: it does.
        """
        endings = {"--cold": self.cold, "--paused": self.paused, "--disks-only": self.disks_only}
        self._exclusive([name for name, wanted in endings.items() if wanted])
        sources = {"--to-time": self.to_time is not None, "--bundle": self.bundle is not None}
        self._exclusive([name for name, wanted in sources.items() if wanted])
        keeping = {"--keep-running-state": self.keep_running, "--no-safety": not self.safety}
        self._exclusive([name for name, wanted in keeping.items() if wanted])

    def _exclusive(self, given: list[str]) -> None:
        if len(given) > 1:
            raise UsageError(" and ".join(given), "exclude one another", "choose one")

    def choose(self, context: Context) -> tuple[str, str]:
        """The domain, and a snapshot or the run that took it.

        Raises:
            UsageError, NotFoundError: there is no such thing.
        """
        if self.to_time is None:
            return split_name(self.name)
        record = newest_until(context, self.name, parse_moment(self.to_time))
        context.progress.note(record.domain, f"chose @{record.snapshot} of {iso(record.created)}")
        return record.uuid, record.run


def restore_one(
    context: Context, wishes: RestoreRequest, *, yes: bool, wait: int | None, json: bool
) -> int:
    """Restore one domain; 0 when it was done."""
    wishes.check()
    if wishes.to_time is None:
        split_name(wishes.name)
    else:
        parse_moment(wishes.to_time)
    recover_leftovers(context)
    domain, snapshot = wishes.choose(context)

    def plan() -> RestorePlan:
        return make_restore_plan(
            context,
            domain,
            snapshot,
            cold=wishes.cold,
            paused=wishes.paused,
            disks_only=wishes.disks_only,
            discard_newer=wishes.discard_newer,
            bundle=wishes.bundle,
            apart=wishes.apart,
            also_roll_back=wishes.also_roll_back,
            keep_definition=wishes.keep_definition,
        )

    shown = plan()
    record = shown.record
    if not yes:  # nobody has to wait for a human who may be at lunch
        shown = check_bundle(context, shown, despite_damage=wishes.despite_damage)
        _ask(context, shown, wishes)
    settings = context.config.settings(record.domain, record.uuid)
    with domain_lock(
        default_paths.LOCKS,
        record.domain,
        record.uuid,
        "restore",
        wait=settings.wait if wait is None else wait,
        interrupt=context.interrupt,
    ):
        for done in recover_runs(context, record.uuid):
            context.progress.note(record.domain, done)
        current = check_bundle(context, plan(), despite_damage=wishes.despite_damage)
        if yes:
            _note_group(context, current)
        else:
            check_as_shown(shown, current)
        restored = restore(
            context,
            current,
            safety=wishes.safety,
            keep_running=wishes.keep_running,
            wait=settings.wait if wait is None else wait,
        )
    if json:
        print_result(json_format.dumps(restored.as_json(), indent=2, ensure_ascii=False))
    else:
        print_result(_line(restored))
    tell_way_back(context, restored)
    return 0


def _note_group(context: Context, plan: RestorePlan) -> None:
    if (others := others_of_group(context, plan.record)) is not None:
        context.progress.note(plan.record.domain, others)


def tell_way_back(context: Context, restored: Restored) -> None:
    """The last words: the command that takes it back."""
    if restored.undo is not None:
        command = shlex.join(["snaporch", "undo", restored.record.domain])
        context.progress.step(restored.record.domain, f"undo it with: {command}")


def _ask(context: Context, plan: RestorePlan, wishes: RestoreRequest) -> None:
    """Say what will be lost and wait for a yes.

    Raises:
        RefusedError: no, or nobody there to ask.
    """
    _note_group(context, plan)
    print_error(f"restoring {plan.thing} discards:")
    for loss in losses(context, plan):
        print_error(f"  {loss}")
    if wishes.safety:
        kept = "the disks and the RAM" if wishes.keep_running else "the disks"
        print_error(f"  (a copy of {kept} is kept; snaporch undo brings it back)")
    confirm(plan.thing)


def confirm(thing: str) -> None:
    """Wait for a yes to what was said on standard error.

    Raises:
        RefusedError: no, or nobody there to ask.
    """
    if not sys.stdin.isatty():
        raise RefusedError(thing, "not confirmed, and no terminal to ask on", "use --yes")
    sys.stderr.write("Go on? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RefusedError(thing, "not confirmed; nothing was touched")


def _line(restored: Restored) -> str:
    record = restored.record
    text = f"{record.full_name}  restored, {restored.state}"
    if restored.resumed:
        text += ", resumed from RAM"
    if restored.clock_set:
        text += ", clock set"
    return text
