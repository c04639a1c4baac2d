"""The run's side of a window: the guest is frozen, and sanoid takes the snapshots."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress

from snaporch.errors import RunFailedError
from snaporch.model import Level, PoolSnapshot, Strategy
from snaporch.run.context import Context
from snaporch.run.guardian import SYSTEMD
from snaporch.run.plan import Plan
from snaporch.sanoid.door import Door

_STANDING_STILL = (Strategy.MANUAL, Strategy.PAUSED, Strategy.QUIESCED)
_MARGIN_SECONDS = 2
_LOW_WEIGHT = "20"
_MANAGER = (
    "org.freedesktop.systemd1",
    "/org/freedesktop/systemd1",
    "org.freedesktop.systemd1.Manager",
)


class Awaited:
    """A :class:`~snaporch.run.taking.Taker` that waits for sanoid."""

    awaited = True

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
        lower_priority()

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


def lower_priority() -> None:
    """Behind everything else on the host, for processor and disks alike.

    Under systemd also in ``snaporch.slice``, by a scope around this process (org.freedesktop.
    systemd1(5), ``StartTransientUnit``): until now it was not to be kept from letting a guest go.
    """
    with suppress(OSError):
        os.nice(10)
    _try("ionice", "-c", "3", "-p", str(os.getpid()))
    if SYSTEMD.is_dir():
        _try("busctl", "--quiet", "call", *_MANAGER, "StartTransientUnit", *_scope(os.getpid()))


def _scope(pid: int) -> list[str]:
    """The arguments of ``StartTransientUnit``, as busctl(1) wants them: types, then values."""
    properties = [
        ["PIDs", "au", "1", str(pid)],
        ["Slice", "s", "snaporch.slice"],
        ["CPUWeight", "t", _LOW_WEIGHT],
        ["IOWeight", "t", _LOW_WEIGHT],
        ["CollectMode", "s", "inactive-or-failed"],
    ]
    words = [word for each in properties for word in each]
    name = f"snaporch-seal-{pid}.scope"
    return ["ssa(sv)a(sa(sv))", name, "fail", str(len(properties)), *words, "0"]


def _try(*command: str) -> None:
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=10
        )
