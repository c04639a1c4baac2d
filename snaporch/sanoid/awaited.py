"""The run's side of a window: the guest is frozen, and sanoid takes the snapshots."""

from __future__ import annotations

from collections.abc import Mapping

from snaporch.errors import RunFailedError
from snaporch.model import GroupRun, Level, PoolSnapshot, Strategy
from snaporch.run.background import lower_priority
from snaporch.run.context import Context
from snaporch.run.plan import Plan
from snaporch.sanoid.door import Door

_STANDING_STILL = (Strategy.MANUAL, Strategy.PAUSED, Strategy.QUIESCED)
_MARGIN_SECONDS = 2


class Awaited:
    """A :class:`~snaporch.run.taking.Taker` that waits for sanoid."""

    awaited = True
    group: GroupRun | None = None

    def __init__(self, context: Context, door: Door, notes: list[str], seconds: int) -> None:
        self.window_seconds = seconds
        self._context = context
        self._door = door
        self._notes = notes
        self._before: set[int] = set()
        self._found: list[PoolSnapshot] = []
        self._complete = False

    def prepare(self, plan: Plan) -> None:
        """Remember what there is: only what is not there yet can be of the window."""
        there = self._context.pool.snapshots(plan.facts.datasets)
        self._before = {snapshot.guid for snapshot in there}

    def take(self, plan: Plan, properties: Mapping[str, str]) -> None:
        """Tell the hooks that the guest is frozen, and wait until they are through.

        Raises:
            RunFailedError: no snapshot was taken.
            PoolError: nobody can say.
        """
        self._door.opened(list(self._notes))
        del self._notes[:]
        if not self._door.wait(self._patience(plan)):
            self._note(plan, "let go before sanoid was through, which takes too long")
        if self._door.window.deserted:
            raise RunFailedError("the snapshot", "was called off")
        self._look(plan)

    def _patience(self, plan: Plan) -> float:
        if plan.strategy not in _STANDING_STILL:
            return self.window_seconds
        still = max(plan.settings.freeze_deadline - _MARGIN_SECONDS, 1)  # the guardian comes then
        return min(self.window_seconds, still)

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
        """Without a snapshot of every dataset nobody can go back to the instant."""
        return reached if self._complete or reached is Level.OFF else Level.CRASH

    def released(self) -> None:
        """Let sanoid go on too; what is left to do has time."""
        self._door.answer({"ok": True, "notes": list(self._notes)})
        lower_priority("seal")

    def taken(self, plan: Plan, properties: Mapping[str, str]) -> list[PoolSnapshot]:
        """Mark the snapshots as the run's, for what they are worth until the bundle is sealed."""
        names = [snapshot.full_name for snapshot in self._found]
        self._context.pool.set_properties(names, properties)
        return self._found


def _asked_as(name: str) -> tuple[str, ...]:
    """By which names a snapshot may have been announced.

    When the clock goes back and the name exists, sanoid takes ``…dst_hourly`` instead of
    ``…_hourly``, and tells nobody.
    """
    if "dst_" in name:
        return name, "_".join(name.rsplit("dst_", 1))
    return (name,)
