from datetime import UTC, datetime

import pytest

from snaporch.config.policy import Keep, Policy, cron_trigger
from snaporch.config.schema import Schedule

MONDAY = datetime(2026, 6, 1, tzinfo=UTC)


def fires(expression, count, start=MONDAY):
    found, previous = [], None
    for _ in range(count):
        previous = cron_trigger(expression).get_next_fire_time(previous, start)
        found.append(previous)
        start = previous
    return found


def weekdays(field):
    return sorted({moment.isoweekday() for moment in fires(f"0 0 * * {field}", 14)})


@pytest.mark.parametrize(
    ("field", "days"),
    [
        ("0", [7]),
        ("7", [7]),
        ("1", [1]),
        ("1-5", [1, 2, 3, 4, 5]),
        ("mon-fri", [1, 2, 3, 4, 5]),
        ("5-7", [5, 6, 7]),
        ("sat-mon", [1, 6, 7]),
        ("6,sun", [6, 7]),
        ("*/2", [2, 4, 6, 7]),
        ("1-5/2", [1, 3, 5]),
        ("*", [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_weekdays_are_those_of_cron(field, days):
    assert weekdays(field) == days


@pytest.mark.parametrize("field", ["8", "someday", "1-", "-1", "1-5/0", ""])
def test_what_is_no_weekday(field):
    with pytest.raises(ValueError, match=r"weekday|five fields"):
        cron_trigger(f"0 0 * * {field}")


def test_rules_are_named():
    assert Keep(hourly=24, yearly=1).describe() == "hourly=24 yearly=1"


@pytest.mark.parametrize("text", ["0m", "59s"])
def test_a_try_is_not_made_again_at_once(text):
    with pytest.raises(ValueError, match='must be a duration from "1m"'):
        Schedule(retry=text)


@pytest.mark.parametrize("verify", [False, True, "checksums"])
def test_disks_are_read_by_test_restores_only(verify):
    assert Policy(verify="weekly", verify_disks=True).verify_disks
    with pytest.raises(ValueError, match="how often verify_disks is done"):
        Policy(verify=verify, verify_disks=True)
