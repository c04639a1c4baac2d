"""Copies elsewhere that policies have due: one after the other, one at a time on a host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from snaporch.errors import InterruptedRunError, SnaporchError
from snaporch.model import SnapshotRecord
from snaporch.replicate.destination import Destination
from snaporch.replicate.ship import Shipped, ship
from snaporch.run.context import Context
from snaporch.schedule.outlook import look
from snaporch.schedule.shipments import Shipment
from snaporch.schedule.tries import REPLICATIONS, remember_try

Opened = Callable[[Context, str], Destination]
"""Opens a replica by its name."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What came of one: what has arrived, or why it failed."""

    shipment: Shipment
    outcome: Shipped | SnaporchError


def replicate_due(context: Context, opened: Opened) -> Iterator[Sent]:
    """Copy what is due, what has waited longest first; the caller sees that nobody else does.

    Looks anew after each, for each may take hours.

    Raises:
        InterruptedRunError: a signal came; what had arrived stays.
    """
    done: set[str] = set()
    while True:
        context.interrupt.check("replicate")
        now = datetime.now(UTC)
        outlooks = {each.domain.uuid: each for each in look(context, now)}
        due = [s for each in outlooks.values() for s in each.shipments if s.due(now)]
        left = sorted(
            (shipment for shipment in due if shipment.key not in done),
            key=lambda shipment: (shipment.at, shipment.domain, shipment.replica),
        )
        if not left:
            return
        done.add(left[0].key)
        yield _send(context, outlooks[left[0].uuid].finished, left[0], opened)


def _send(
    context: Context, records: Sequence[SnapshotRecord], shipment: Shipment, opened: Opened
) -> Sent:
    directory = context.config.paths.schedule
    try:
        outcome = ship(context, records, shipment.replica, opened(context, shipment.replica))
    except InterruptedRunError:
        raise
    except SnaporchError as error:
        remember_try(directory, shipment.key, error.line(), REPLICATIONS)
        return Sent(shipment, error)
    remember_try(directory, shipment.key, None, REPLICATIONS)
    return Sent(shipment, outcome)
