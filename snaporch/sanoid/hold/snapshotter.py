"""The run's side of a window: the guest is frozen, and sanoid takes the snapshots.

Nobody is frozen before the runs of all guests that sanoid's call concerns have their locks and
plans, and then in the order of :mod:`snaporch.sanoid.hooks.freeze_order`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from snaporch.context import Context
from snaporch.errors import RunFailedError
from snaporch.model import GroupRun, Level, PoolSnapshot, Strategy
from snaporch.sanoid.hold.server import HoldServer
from snaporch.sanoid.hooks.freeze_order import FreezeEstimate
from snaporch.sanoid.hooks.time_limits import word_seconds
from snaporch.snapshot.choose_strategy import is_lower
from snaporch.snapshot.plan import Plan
from snaporch.snapshot.strategies.base import StrategyUnavailableError
from snaporch.snapshot.strategies.ram_limits import fair_rate
from snaporch.systemd.low_priority import lower_priority

_STANDING_STILL = (Strategy.MANUAL, Strategy.PAUSED, Strategy.QUIESCED)
_MARGIN_SECONDS = 2
_MIB_A_SECOND = 200
"""At which RAM of a guest is expected to be saved that has no bundle to go by."""


class SanoidSnapshotter:
    """A :class:`~snaporch.snapshot.snapshotter.Snapshotter` that waits for sanoid."""

    awaited = True
    group: GroupRun | None = None

    def __init__(self, context: Context, door: HoldServer, notes: list[str], seconds: int) -> None:
        self.window_seconds = 2 * seconds
        """Once until all guests of a call are frozen, and once for the snapshots."""
        self._context = context
        self._door = door
        self._notes = notes
        self._seconds = seconds
        self._before: set[int] = set()
        self._found: list[PoolSnapshot] = []
        self._complete = False

    def prepare(self, plan: Plan) -> None:
        """Wait for the guest's turn, and remember what there is.

        Only what is not there yet can be of the window.

        Raises:
            StrategyUnavailableError: it does not fit with the other guests.
            InterruptedRunError: nobody wants it any more.
            RunFailedError: no hook has said for too long what to do.
        """
        name = plan.domain.name
        ahead, most = (
            estimate_freeze(self._context, plan).as_json(),
            word_seconds(self._context.config),
        )
        order = self._door.await_order(name, ahead, most)
        if order["do"] == "refuse":
            raise StrategyUnavailableError(name, str(order["reason"]), str(order["step"]))
        there = self._context.pool.snapshots(plan.facts.datasets)
        self._before = {snapshot.guid for snapshot in there}

    def take(self, plan: Plan, properties: Mapping[str, str]) -> None:
        """Tell the hooks that the guest is frozen, and wait until they are through.

        Raises:
            RunFailedError: no snapshot was taken.
            StrategyUnavailableError: others were not frozen in the time that it may stand still.
            PoolError: nobody can say.
        """
        self._door.opened(list(self._notes))
        del self._notes[:]
        in_time = self._door.wait(self._seconds, _still(plan))
        if self._door.window.deserted:
            raise RunFailedError("the snapshot", "was called off")
        if not in_time and not self._door.began:
            raise self._too_early(plan)
        if not in_time:
            self._note(plan, "let go before sanoid was through, which takes too long")
        self._look(plan)

    def _too_early(self, plan: Plan) -> RunFailedError | StrategyUnavailableError:
        """It was frozen, and has to go on before all are."""
        self._context.interrupt.check(plan.domain.name)
        window, reason = "its window", "ended before all guests were frozen"
        if _still(plan) < self._seconds:
            return StrategyUnavailableError(window, reason, "raise freeze_deadline")
        return RunFailedError(window, reason, "raise hook_deadline or jobs")

    def _look(self, plan: Plan) -> None:
        """Inside the window: which of the snapshots that were to be taken are there."""
        expected = self._door.window.expected
        there = self._context.pool.snapshots(plan.facts.datasets)
        fresh = [snapshot for snapshot in there if snapshot.guid not in self._before]
        wanted = {
            (dataset, name) for dataset in plan.facts.datasets for name in expected.get(dataset, ())
        }
        self._found = [s for s in fresh if {(s.dataset, n) for n in _asked_as(s.name)} & wanted]
        if not self._found:
            raise RunFailedError("sanoid", "has taken none of its snapshots")
        got = {(s.dataset, name) for s in self._found for name in _asked_as(s.name)}
        bare = set(plan.facts.datasets) - {snapshot.dataset for snapshot in self._found}
        self._complete = not bare
        missing = sorted(f"{dataset}@{name}" for dataset, name in wanted - got)
        if missing:
            self._note(plan, f"sanoid has not taken {', '.join(missing)}")
        if bare:
            names = ", ".join(sorted(bare))
            self._note(plan, f"no snapshot of {names} in the same instant: incomplete, no RAM")

    def _note(self, plan: Plan, text: str) -> None:
        self._context.progress.note(plan.domain.name, text)

    def level(self, reached: Level) -> Level:
        """Without a snapshot of every dataset nobody can go back to the instant: at most that."""
        lower = is_lower(reached, Level.CRASH)
        return reached if self._complete or lower else Level.CRASH

    def released(self) -> None:
        """Let sanoid go on too; what is left to do has time."""
        self._door.answer({"ok": True, "notes": list(self._notes)})
        lower_priority("seal")

    def taken(self, plan: Plan, properties: Mapping[str, str]) -> list[PoolSnapshot]:
        """Mark the snapshots as the run's, for what they are worth until the bundle is sealed."""
        names = [snapshot.full_name for snapshot in self._found]
        self._context.pool.set_properties(names, properties)
        return self._found


def estimate_freeze(context: Context, plan: Plan) -> FreezeEstimate:
    """What freezing a guest by ``plan`` will take, going by how its RAM was saved the last time."""
    patience = min(plan.settings.hook_deadline, _still(plan))
    if plan.level is not Level.RAM:
        return FreezeEstimate(plan.strategy, 0, 0.0, patience)
    ram = context.hypervisor.ram_in_use(plan.domain.uuid)
    pace = context.store.last_pace(plan.domain.uuid)
    seconds = pace.seconds if pace else (ram >> 20) / _MIB_A_SECOND
    if rate := fair_rate(plan.settings, ram):
        seconds = max(seconds, (ram >> 20) / rate)
    return FreezeEstimate(plan.strategy, ram, seconds, patience, plan.gives_way)


def _still(plan: Plan) -> float:
    """For how long a guest may stand still; the guardian comes a moment later."""
    if plan.strategy not in _STANDING_STILL:
        return math.inf
    return max(plan.settings.freeze_deadline - _MARGIN_SECONDS, 1)


def _asked_as(name: str) -> tuple[str, ...]:
    """By which names a snapshot may have been announced.

    When the clock goes back and the name exists, sanoid takes ``…dst_hourly`` instead of
    ``…_hourly``, and tells nobody.
    """
    if "dst_" in name:
        return name, "_".join(name.rsplit("dst_", 1))
    return (name,)
