"""Decides after how long the next snapshot of a policy counts as missed: a pure function.

The option is ``status.grace`` in :mod:`snaporch.config.monitoring`.

How grave that is, as all other problems, is decided in :mod:`snaporch.status.problems`.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from snaporch.schedule.forecast import NextSnapshot
from snaporch.schedule.recurrence import Times


def missed(coming: NextSnapshot | None, times: Times, grace: timedelta, now: datetime) -> int:
    """How many times of a policy passed without a snapshot: 0, 1, or 2 for more.

    Args:
        coming: the next snapshot, if one is planned.
        times: of the policy on the domain, or on its group.
        grace: ``status.grace``; a time less long ago does not count yet.
        now: the time, with a time zone.
    """
    if coming is None or coming.scheduled is None or coming.scheduled + grace >= now:
        return 0
    return 1 if times.after(coming.scheduled) + grace >= now else 2
