"""Compares the schedule of cron's rules with :mod:`fakes.calendar`, which knows only clocks.

``make calendar`` prints a table of all zones.
"""

import os
from datetime import UTC, datetime, timedelta

import pytest
from fakes import calendar
from fakes.calendar import RULES, YEAR, changes, due, said, zones_that_change
from hypothesis import given
from hypothesis import strategies as st

from snaporch.config import Config
from snaporch.schedule.recurrence import times

HOUR = timedelta(hours=1)
ALL = bool(os.environ.get("RANDOM_EXAMPLES"))
YEARS = (2000, 2035) if ALL else (2026, 2028)
REMARKABLE = (
    "Africa/Cairo",
    "Antarctica/Troll",
    "Australia/Lord_Howe",
    "Europe/Berlin",
)
"""At midnight, by two hours, by half an hour, and just like many others."""


def a_year(zone_name, start=datetime(YEAR, 1, 1, tzinfo=UTC)):
    end = start.replace(year=start.year + 1)
    expected = due(RULES, zone_name, start, end)
    for rule in RULES:
        assert said(rule, zone_name, start, end) == expected[rule], rule
    return sum(map(len, expected.values()))


@pytest.mark.parametrize(
    "zone_name",
    zones_that_change(YEAR, YEAR + 1) if ALL else REMARKABLE,
)
def test_a_year_by_the_clock_of_a_zone(zone_name):
    assert a_year(zone_name) > 1000


def field(lowest, highest):
    number = st.integers(lowest, highest)
    span = st.tuples(number, number).map(lambda ends: "-".join(map(str, sorted(ends))))
    step = st.integers(1, highest).map(lambda n: f"*/{n}")
    return st.one_of(
        st.just("*"),
        step,
        st.lists(st.one_of(number.map(str), span), min_size=1, max_size=3).map(",".join),
    )


DATES = st.one_of(
    st.just(("*", "*")),
    field(1, 28).map(lambda day: (day, "*")),
    field(0, 6).filter(lambda text: "/" not in text).map(lambda weekday: ("*", weekday)),
)
LINES = st.builds(
    lambda minute, hour, dates, month: f"{minute} {hour} {dates[0]} {month} {dates[1]}",
    field(0, 59),
    field(0, 23),
    DATES,
    st.sampled_from(["*", "*", "1-11/2", "3,4,9,10"]),
)


@st.composite
def around_a_change(draw):
    name = draw(st.sampled_from([*zones_that_change(*YEARS)]))
    moment = draw(st.sampled_from(changes(name, *YEARS)))
    return name, moment + timedelta(minutes=draw(st.integers(-100, 120)))


@given(around_a_change(), LINES)
def test_any_rule_around_any_change_of_any_clock(place, rule):
    name, start = place
    end = start + HOUR  # which the start may be anywhere around; dense rules take long
    assert said(rule, name, start, end) == due([rule], name, start, end)[rule]


@given(around_a_change(), LINES, st.integers(1, 59))
def test_asking_between_minutes_skips_nothing(place, rule, seconds):
    name, start = place
    schedule = {"schedule": {"timezone": name}, "policy": {"p": {"cron": rule}}}
    when = times(Config.model_validate(schedule), "p", "u")
    later = when.after(start)
    between = start + timedelta(seconds=seconds)
    assert when.after(between) == (later if later > between else when.after(later))


def test_the_table_counts_what_is_skipped_and_what_is_doubled(monkeypatch, capsys):
    first, second, third = (datetime(YEAR, 5, day, tzinfo=UTC) for day in (1, 2, 3))
    monkeypatch.setattr(calendar, "due", lambda *_: {"rule": [first, second]})
    monkeypatch.setattr(calendar, "said", lambda *_: [second, third])
    monkeypatch.setattr(calendar, "zones_that_change", lambda *_: {"Asia/Beirut": ["x", "y"]})
    assert calendar.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["all", "1", "2", "2", "1", "1"]
    assert f"Asia/Beirut: rule: {YEAR}-05-01 00:00 UTC is skipped" in lines
    assert f"Asia/Beirut: rule: {YEAR}-05-03 00:00 UTC is doubled" in lines
    monkeypatch.setattr(calendar, "said", lambda *_: [first, second])
    assert calendar.main([]) == 0
