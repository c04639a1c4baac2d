"""Which properties an append-only replica sets on a copy's snapshots: pure decisions.

A host sets the marks of a snapshot once, when the snapshot has arrived. The reasons for each rule:

- A mark that has a value keeps it. Otherwise a host that was taken over could call an old torn
  snapshot good, give it another bundle, or hide it under another domain.
- ``copy`` is set with the first marks, and proves that they were set. Without it, retention on the
  replica could count a copy among the replica's own snapshots, and delete those.
- Marks are set in the order of the snapshots. A snapshot without marks, such as one of another
  program, gets none any more when a later one has them: it must not turn into one with RAM.
- ``torn`` and a note may come later. A snapshot that turns out to be torn must not be called good,
  and its level stays beside it. A false ``torn`` hides nothing, and ``zfs inherit`` removes it.
- ``ended`` may come later, too: a failover sets it when the guest has ended. A host that was taken
  over could set it on a new snapshot as well.
- A later result of a verification is not set: no host can say how good an old copy is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from snaporch.catalog.records import COPY, ENDED
from snaporch.model import PoolSnapshot

LATER = ("torn", "note", ENDED)
"""Marks that may be set after the first ones."""


class MarkDecision(NamedTuple):
    """The marks of the snapshots of one copy."""

    new: dict[str, dict[str, str]]
    """What to set, by the snapshot's name."""
    late: list[str]
    """Snapshots that get no first marks any more."""


def decide_marks(
    copies: Sequence[PoolSnapshot], wanted: Mapping[str, Mapping[str, str]]
) -> MarkDecision:
    """Decide which of the wanted marks to set.

    Args:
        copies: all snapshots of one copy, oldest first, with the marks that they have.
        wanted: marks by the snapshot's name; snapshots that do not exist are left out.
    """
    decision = MarkDecision({}, [])
    marked = (number for number, each in enumerate(copies) if COPY in each.properties)
    newest = max(marked, default=0)
    for number, each in enumerate(copies):
        asked, has = wanted.get(each.name, {}), each.properties
        permitted = dict(asked)
        if COPY in has or number < newest:
            permitted = {key: value for key, value in asked.items() if key in LATER}
            if COPY not in has and asked.keys() - set(LATER) - {COPY, "level"}:
                decision.late.append(each.name)
        elif asked:
            permitted.setdefault(COPY, "append-only")
        new = {key: value for key, value in permitted.items() if key not in has}
        if new:
            decision.new[each.name] = new
    return decision
