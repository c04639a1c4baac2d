from datetime import UTC, datetime, timedelta

import pytest

from snaporch.schedule.forecast import NextSnapshot
from snaporch.schedule.recurrence import Times
from snaporch.status.missed_snapshots import missed

HOUR = timedelta(hours=1)
AT = datetime(2026, 6, 10, 13, tzinfo=UTC)
TIMES = Times(HOUR, "", UTC, timedelta(0))
GRACE = timedelta(minutes=30)


def coming(scheduled):
    return NextSnapshot("hourly", AT + 99 * HOUR, "", scheduled)


@pytest.mark.parametrize(
    ("late", "count"),
    [
        (GRACE, 0),
        (GRACE + timedelta(seconds=1), 1),
        (HOUR + GRACE, 1),
        (HOUR + GRACE + timedelta(seconds=1), 2),
        (99 * HOUR, 2),
    ],
)
def test_a_time_counts_when_its_grace_is_over(late, count):
    assert missed(coming(AT), TIMES, GRACE, AT + late) == count


def test_without_a_time_nothing_is_missed():
    assert missed(None, TIMES, GRACE, AT + 99 * HOUR) == 0
    assert missed(coming(None), TIMES, GRACE, AT + 99 * HOUR) == 0
