"""The run's part of a window: the guest is frozen, and sanoid takes the snapshots.

No guest is frozen before the runs of all guests of sanoid's call have their locks and plans. Then
they are frozen in the order of :mod:`snaporch.sanoid.hooks.freeze_order`.
"""

from __future__ import annotations

from collections.abc import Mapping

from snaporch.context import Context
from snaporch.errors import RunFailedError
from snaporch.model import GroupRun, Level, PoolSnapshot
from snaporch.sanoid.hold.server import HoldServer
from snaporch.sanoid.hold.window import longest_window
from snaporch.sanoid.hooks.freeze_order import FreezeEstimate
from snaporch.snapshot.choose_strategy import is_lower
from snaporch.snapshot.plan import Plan
from snaporch.snapshot.strategies.base import StrategyUnavailableError
from snaporch.snapshot.strategies.ram_limits import effective_rate

_DEFAULT_MIB_PER_SECOND = 200
"""The expected rate for saving the RAM of a guest that has no bundle yet."""


class SanoidSnapshotter:
    """A :class:`~snaporch.snapshot.snapshotter.Snapshotter` that waits for sanoid's snapshots."""

    taken_by_other_program = True
    group: GroupRun | None = None

    def __init__(
        self,
        context: Context,
        server: HoldServer,
        notes: list[str],
        seconds: int,
        order_seconds: float,
    ) -> None:
        self.window_seconds = longest_window(seconds)
        self._context = context
        self._server = server
        self._notes = notes
        self._seconds = seconds
        self._order_seconds = order_seconds
        self._before: set[int] = set()
        self._found: list[PoolSnapshot] = []
        self._complete = False

    def prepare(self, plan: Plan) -> None:
        """Wait for the guest's turn, and note which snapshots exist: these are not sanoid's.

        Raises:
            StrategyUnavailableError: its plan does not fit with the other guests.
            InterruptedRunError: no hook needs it any more.
            RunFailedError: no hook gave an order in time.
        """
        name = plan.domain.name
        estimate = estimate_freeze(self._context, plan).as_json()
        order = self._server.await_order(name, estimate, self._order_seconds)
        if order["do"] == "refuse":
            raise StrategyUnavailableError(name, str(order["reason"]), str(order["step"]))
        existing = self._context.pool.snapshots(plan.facts.datasets)
        self._before = {snapshot.guid for snapshot in existing}

    def take(self, plan: Plan, properties: Mapping[str, str]) -> None:
        """Report to the hooks that the guest is frozen, and wait for sanoid's snapshots.

        Raises:
            RunFailedError: no snapshot was taken.
            StrategyUnavailableError: the guest may not be paused until all others are frozen.
            PoolError: the snapshots cannot be listed.
        """
        self._server.report_frozen(list(self._notes))
        del self._notes[:]
        in_time = self._server.await_snapshots(self._seconds, plan.max_frozen)
        if self._server.window.all_withdrawn:
            raise RunFailedError("the snapshot", "was cancelled: no hook needs it any more")
        if not in_time and not self._server.begun:
            raise self._too_early(plan)
        if not in_time:
            self._note(
                plan, "released before sanoid had finished; see hook_deadline and freeze_deadline"
            )
        self._find_snapshots(plan)

    def _too_early(self, plan: Plan) -> RunFailedError | StrategyUnavailableError:
        """The error for a guest that has to be released before all guests are frozen."""
        self._context.interrupt.check(plan.domain.name)
        window, reason = "its window", "ended before all guests were frozen"
        if plan.max_frozen < self._seconds:
            return StrategyUnavailableError(window, reason, "raise freeze_deadline")
        return RunFailedError(window, reason, "raise hook_deadline or sanoid_hook_jobs")

    def _find_snapshots(self, plan: Plan) -> None:
        """Find sanoid's snapshots, while the guest is still frozen."""
        announced = self._server.window.expected
        snapshots = self._context.pool.snapshots(plan.facts.datasets)
        expected = {
            (dataset, name)
            for dataset in plan.facts.datasets
            for name in announced.get(dataset, ())
        }
        self._found = [
            each
            for each in snapshots
            if each.guid not in self._before
            and {(each.dataset, name) for name in _announced_as(each.name)} & expected
        ]
        if not self._found:
            raise RunFailedError("sanoid", "has taken none of its snapshots")
        found = {(s.dataset, name) for s in self._found for name in _announced_as(s.name)}
        without = set(plan.facts.datasets) - {snapshot.dataset for snapshot in self._found}
        self._complete = not without
        missing = sorted(f"{dataset}@{name}" for dataset, name in expected - found)
        if missing:
            self._note(plan, f"sanoid has not taken {', '.join(missing)}")
        if without:
            names = ", ".join(sorted(without))
            self._note(plan, f"no snapshot of {names} in the same instant: incomplete, no RAM")

    def _note(self, plan: Plan, text: str) -> None:
        self._context.progress.note(plan.domain.name, text)

    def others_wait(self) -> bool:
        """Not known here: each guest is held by a process of its own."""
        return False

    def level(self, reached: Level) -> Level:
        """At most ``crash`` unless every dataset has a snapshot."""
        lower = is_lower(reached, Level.CRASH)
        return reached if self._complete or lower else Level.CRASH

    def released(self) -> None:
        """Reply to the post hooks, so that sanoid continues; the rest of the run is not urgent."""
        self._server.report_outcome({"ok": True, "notes": list(self._notes)})
        self._context.lower_priority("seal")

    def taken(self, plan: Plan, properties: Mapping[str, str]) -> list[PoolSnapshot]:
        """Set the run's properties on the snapshots."""
        names = [snapshot.full_name for snapshot in self._found]
        self._context.pool.set_properties(names, properties)
        return self._found


def estimate_freeze(context: Context, plan: Plan) -> FreezeEstimate:
    """Estimate what freezing a guest takes, by the last time its RAM was saved."""
    patience = min(plan.settings.hook_deadline, plan.max_frozen)
    if plan.level is not Level.RAM:
        return FreezeEstimate(plan.strategy, 0, 0.0, patience)
    ram = context.hypervisor.ram_in_use(plan.domain.uuid)
    last = context.store.last_save_times(plan.domain.uuid)
    seconds = last.seconds if last else (ram >> 20) / _DEFAULT_MIB_PER_SECOND
    if rate := effective_rate(plan.settings, ram):
        seconds = max(seconds, (ram >> 20) / rate)
    return FreezeEstimate(plan.strategy, ram, seconds, patience, plan.yields_to_other_program)


def _announced_as(name: str) -> tuple[str, ...]:
    """The names by which sanoid may have announced a snapshot.

    When the clock is set back and the name exists, sanoid takes ``…dst_hourly`` instead of
    ``…_hourly``, and reports it to no hook.
    """
    if "dst_" in name:
        return name, "_".join(name.rsplit("dst_", 1))
    return (name,)
