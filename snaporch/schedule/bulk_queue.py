"""The queue of due verifications or replications, for all domains, one item at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Protocol, TypeVar

from snaporch.context import Context
from snaporch.schedule.forecast import Forecast, make_forecasts


class QueueItem(Protocol):
    """A verification or replication of one domain."""

    @property
    def key(self) -> str:
        """Identifies the item among those of its kind."""

    @property
    def at(self) -> datetime:
        """When the item is due."""

    @property
    def turn(self) -> tuple[datetime, ...]:
        """The order of those that are due."""

    def due(self, now: datetime) -> bool:
        """Whether the item is due at ``now``."""


T = TypeVar("T", bound=QueueItem)


def due_items(
    context: Context, doing: str, wanted: Callable[[Forecast], Iterable[T]]
) -> Iterator[tuple[Forecast, T]]:
    """Yield the due items with their domains' forecasts, each once, by their turns.

    New forecasts are made after each item, because an item may take hours.

    Args:
        doing: the kind of work, for messages.
        wanted: returns the items of this kind in a forecast.

    Raises:
        InterruptedRunError: a signal was received.
    """
    done: set[str] = set()
    while True:
        context.interrupt.check(doing)
        now = datetime.now(UTC)
        left = [
            (forecast, work)
            for forecast in make_forecasts(context, now)
            for work in wanted(forecast)
            if work.due(now) and work.key not in done
        ]
        if not left:
            return
        first = min(left, key=lambda pair: (pair[1].turn, pair[0].domain.name, pair[1].key))
        done.add(first[1].key)
        yield first
