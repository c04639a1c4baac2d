"""``snaporch restore``: choose a snapshot, ask the user, restore under the domain's lock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from snaporch import default_paths
from snaporch.context import Context
from snaporch.errors import RefusedError, UsageError
from snaporch.locks import domain_lock
from snaporch.model import SnapshotRecord, iso
from snaporch.recovery.recover_runs import recover_leftovers, recover_runs
from snaporch.restore.bundle_checks import check_bundle
from snaporch.restore.plan import RAISED, make_restore_plan
from snaporch.restore.plan_model import RestorePlan
from snaporch.restore.preview import Refusals, RestorePreview, make_preview
from snaporch.restore.run import Restored, RestorePoint, check_as_shown, restore
from snaporch.restore.select import newest_until, others_of_group, parse_moment, split_name


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """The options of ``snaporch restore``."""

    name: str
    """``DOMAIN@SNAPSHOT``, or only the domain together with ``to_time``."""
    to_time: str | None = None
    cold: bool = False
    paused: bool = False
    disks_only: bool = False
    bundle: Path | None = None
    discard_newer: bool = False
    keep_running: bool = False
    safety: bool = True
    despite_other_disks: bool = False
    also_roll_back: bool = False
    keep_definition: bool = False
    despite_damage: bool = False
    accepted: tuple[str, ...] = ()
    """What a snapshot that came from another host may name of this one."""

    def check(self) -> None:
        """Refuse options that exclude one another, and a name or a time of the wrong form.

        Raises:
            UsageError: with the options, or the name or time.
        """
        exclusive = (
            {"--cold": self.cold, "--paused": self.paused, "--disks-only": self.disks_only},
            {"--to-time": self.to_time is not None, "--bundle": self.bundle is not None},
            {"--keep-running-state": self.keep_running, "--no-safety": not self.safety},
        )
        for options in exclusive:
            given = [option for option, is_given in options.items() if is_given]
            if len(given) > 1:
                raise UsageError(" and ".join(given), "exclude one another", "choose one")
        if self.to_time is None:
            split_name(self.name)
        else:
            parse_moment(self.to_time)

    def choose(self, context: Context) -> tuple[str, str]:
        """Return the domain, and the name of a snapshot or of the run that took it.

        Raises:
            UsageError: the name or the time has the wrong form.
            NotFoundError: no snapshot of the domain is old enough.
        """
        if self.to_time is None:
            return split_name(self.name)
        record = newest_until(context, self.name, parse_moment(self.to_time))
        context.progress.note(record.domain, f"chose @{record.snapshot} of {iso(record.created)}")
        return record.uuid, record.run

    def plan(
        self,
        context: Context,
        domain: str,
        snapshot: str,
        refusals: AbstractContextManager[object] = RAISED,
    ) -> RestorePlan:
        """Plan the restore of this snapshot with these options; see :func:`make_restore_plan`."""
        return make_restore_plan(
            context,
            domain,
            snapshot,
            cold=self.cold,
            paused=self.paused,
            disks_only=self.disks_only,
            discard_newer=self.discard_newer,
            bundle=self.bundle,
            despite_other_disks=self.despite_other_disks,
            also_roll_back=self.also_roll_back,
            keep_definition=self.keep_definition,
            accepted=self.accepted,
            refusals=refusals,
        )


def preview_restore(context: Context, request: RestoreRequest) -> RestorePreview:
    """Plan a restore, and make every check that changes nothing.

    Raises:
        SnaporchError: there is no plan; as :func:`make_restore_plan`.
    """
    request.check()
    preview = make_preview_of(context, request, request.choose(context))
    _note_group(context, preview.plan)
    return preview


def make_preview_of(
    context: Context, request: RestoreRequest, chosen: tuple[str, str]
) -> RestorePreview:
    """Plan a restore, and make every check that changes nothing.

    Args:
        context: of this host.
        request: the options.
        chosen: the domain, and the snapshot or the run that took it.

    Raises:
        SnaporchError: there is no plan; as :func:`make_restore_plan`.
    """
    refusals = Refusals()
    plan = request.plan(context, *chosen, refusals)
    with refusals:
        plan = check_bundle(context, plan, despite_damage=request.despite_damage)
    return make_preview(
        context, plan, refusals, safety=request.safety, keep_running=request.keep_running
    )


def run_restore(
    context: Context,
    request: RestoreRequest,
    *,
    confirm: Callable[[RestorePlan], None] | None,
    wait: int | None,
) -> Restored:
    """Restore one domain as requested.

    Args:
        confirm: shows the plan to the user, and raises unless the user agrees. It is called without
            the domain's lock, so that other runs do not wait for the answer. ``None``: do not ask.
        wait: seconds to wait for locks; ``None`` for the domain's configured time.

    Raises:
        SnaporchError: as :func:`make_restore_plan`, :func:`check_as_shown` and :func:`restore`.
    """
    request.check()
    recover_leftovers(context)
    domain, snapshot = request.choose(context)
    shown = request.plan(context, domain, snapshot)
    record = shown.record
    if confirm is not None:
        shown = check_bundle(context, shown, despite_damage=request.despite_damage)
        _note_group(context, shown)
        confirm(shown)
    longest = context.config.settings(record.domain, record.uuid).wait if wait is None else wait
    with domain_lock(
        default_paths.LOCKS,
        record.domain,
        record.uuid,
        "restore",
        wait=longest,
        interrupt=context.interrupt,
        can_wait=True,
    ):
        current = plan_under_lock(context, request, record, (domain, snapshot))
        if confirm is None:
            _note_group(context, current)
        else:
            check_as_shown(shown, current)
        return _carry_out(context, request, current, longest)


def restore_under_lock(
    context: Context, request: RestoreRequest, run: str, on_barred: Callable[[], None]
) -> Restored:
    """Restore one domain whose lock the caller holds, without a question.

    Args:
        context: of this host.
        request: the options.
        run: the snapshot's, as the user was shown it.
        on_barred: is called when the guest is off and its definition cannot be started, before the
            first rollback; what it raises undoes the restore.

    Raises:
        SnaporchError: as :func:`run_restore`.
        RefusedError: the snapshot is of another run.
    """
    request.check()
    recover_leftovers(context)
    chosen = request.choose(context)
    record = request.plan(context, *chosen).record
    if record.run != run:
        raise RefusedError(request.name, f"is of run {record.run}, and not of {run}")
    plan = plan_under_lock(context, request, record, chosen)
    _note_group(context, plan)
    wait = context.config.settings(record.domain, record.uuid).wait

    def at_point(point: RestorePoint) -> None:
        if point is RestorePoint.BARRED:
            on_barred()

    return _carry_out(context, request, plan, wait, at_point)


def plan_under_lock(
    context: Context, request: RestoreRequest, record: SnapshotRecord, chosen: tuple[str, str]
) -> RestorePlan:
    """Recover interrupted runs of the domain, then plan its restore, with the bundle's checksums.

    Raises:
        SnaporchError: as :func:`make_restore_plan`.
    """
    for result in recover_runs(context, record.uuid):
        context.progress.note(record.domain, str(result))
    plan = request.plan(context, *chosen)
    return check_bundle(context, plan, despite_damage=request.despite_damage)


def _carry_out(
    context: Context,
    request: RestoreRequest,
    plan: RestorePlan,
    wait: int,
    at_point: Callable[[RestorePoint], None] = lambda _point: None,
) -> Restored:
    return restore(
        context,
        plan,
        safety=request.safety,
        keep_running=request.keep_running,
        wait=wait,
        at_point=at_point,
    )


def _note_group(context: Context, plan: RestorePlan) -> None:
    if (others := others_of_group(context, plan.record)) is not None:
        context.progress.note(plan.record.domain, others)
