"""Bulk work that policies have due, for all domains: one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Protocol, TypeVar

from snaporch.context import Context
from snaporch.schedule.forecast import Forecast, look


class QueueItem(Protocol):
    """Something to be done for a domain."""

    @property
    def key(self) -> str:
        """What tells it from others of its kind."""

    @property
    def at(self) -> datetime:
        """When it is to be done."""

    def due(self, now: datetime) -> bool:
        """Whether its time has come."""


T = TypeVar("T", bound=QueueItem)


def due_items(
    context: Context, doing: str, wanted: Callable[[Forecast], Iterable[T]]
) -> Iterator[tuple[Forecast, T]]:
    """What is due, each once, what has waited longest first, with its domain's forecast.

    Looks anew after each, for each takes its time: snapshots come and go meanwhile.

    Raises:
        InterruptedRunError: a signal came.
    """
    done: set[str] = set()
    while True:
        context.interrupt.check(doing)
        now = datetime.now(UTC)
        left = [
            (forecast, work)
            for forecast in look(context, now)
            for work in wanted(forecast)
            if work.due(now) and work.key not in done
        ]
        if not left:
            return
        first = min(left, key=lambda pair: (pair[1].at, pair[0].domain.name, pair[1].key))
        done.add(first[1].key)
        yield first
