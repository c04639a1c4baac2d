from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from fakes.schedule import NOW
from hypothesis import given
from hypothesis import strategies as st

from snaporch.config import Config
from snaporch.schedule.forecast import make_forecasts
from snaporch.schedule.recurrence import read_zone_again, times, zone_of

BERLIN = ZoneInfo("Europe/Berlin")
MONDAY = datetime(2026, 6, 8, tzinfo=UTC)
MOMENTS = st.integers(0, 3 * 365 * 86400).map(lambda n: MONDAY + timedelta(seconds=n))


def when(uuid="u", **policy):
    document = {"schedule": {"timezone": "Europe/Berlin"}, "policy": {"p": policy}}
    return times(Config.model_validate(document), "p", uuid)


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ("15m", MONDAY + timedelta(minutes=15)),
        ("1h", MONDAY + timedelta(hours=1)),
        ("1d", MONDAY + timedelta(days=1)),
        ("1w", MONDAY + timedelta(weeks=1)),
    ],
)
def test_every_counts_from_a_monday(every, expected):
    assert when(every=every).after(MONDAY) == expected
    assert when(every=every).after(MONDAY + timedelta(seconds=1)) == expected


def test_cron_is_by_the_clock_of_the_zone():
    assert when(cron="0 3 * * *").after(MONDAY) == MONDAY + timedelta(hours=1)


def test_all_times_that_were_missed_are_made_up_for_by_one():
    hourly, back = when(every="1h"), MONDAY + timedelta(days=3, minutes=10)
    due = hourly.next_due([MONDAY - timedelta(days=2), MONDAY])
    assert due == MONDAY + timedelta(hours=1)
    assert due < back  # the host is on again: due at once
    assert hourly.next_due([MONDAY, back]) > back


def test_without_a_snapshot_no_time_is_due():
    assert when(every="1h").next_due([]) is None


def test_a_policy_without_times_has_none():
    assert not when().known


@given(
    MOMENTS,
    st.sampled_from([{"every": "7h"}, {"cron": "30 4 * * *"}, {"cron": "*/20 4-6 * * 7"}]),
    st.sampled_from(["0m", "45m"]),
    st.uuids(),
)
def test_the_next_time_is_later_and_none_lies_between(moment, policy, stagger, uuid):
    found = when(str(uuid), stagger=stagger, **policy)
    later = found.after(moment)
    assert later > moment
    assert found.after(later - timedelta(seconds=1)) == later
    between = moment + (later - moment) / 2
    assert found.after(between) == later


def a_week(start):
    """The times of a week, if each snapshot is taken a few seconds after its time."""
    moment, found = start, []
    for _ in range(6):
        moment = when(cron="30 2 * * *").after(moment) + timedelta(seconds=7)
        found.append(moment.astimezone(BERLIN).strftime("%d %H:%M %z"))
    return found


def test_a_time_that_the_clock_skips_comes_an_hour_later():
    assert a_week(datetime(2026, 3, 27, 12, tzinfo=UTC))[:3] == [
        "28 02:30 +0100",
        "29 03:30 +0200",
        "30 02:30 +0200",
    ]


def test_a_time_that_the_clock_shows_twice_comes_twice():
    assert a_week(datetime(2026, 10, 23, 12, tzinfo=UTC))[:4] == [
        "24 02:30 +0200",
        "25 02:30 +0200",
        "25 02:30 +0100",
        "26 02:30 +0100",
    ]


def test_stagger_spreads_domains_and_keeps_their_places():
    places = [when(f"u{n}", every="1h", stagger="10m").after(MONDAY) for n in range(50)]
    assert places == [when(f"u{n}", every="1h", stagger="10m").after(MONDAY) for n in range(50)]
    assert len(set(places)) > 30
    offsets = [(place - MONDAY) % timedelta(hours=1) for place in places]
    assert max(offsets) < timedelta(minutes=10)


def test_the_zone_is_that_of_the_host_unless_one_is_configured():
    assert zone_of(Config.model_validate({"schedule": {"timezone": "Asia/Tokyo"}})) == ZoneInfo(
        "Asia/Tokyo"
    )
    assert zone_of(Config()).utcoffset(MONDAY) == datetime.now().astimezone().utcoffset()


def test_a_forecast_uses_a_zone_that_was_changed_meanwhile(scheduled, monkeypatch):
    for name in ("Asia/Tokyo", "Europe/Berlin"):
        monkeypatch.setenv("TZ", name)
        make_forecasts(scheduled.context, NOW)
        assert str(zone_of(Config())) == name
    monkeypatch.undo()
    read_zone_again()
