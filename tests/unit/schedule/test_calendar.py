"""Times of cron against an oracle that knows nothing but clocks: minute by minute, as they show.

It goes through every minute and reads the zone's clock; what the clock jumps over comes as many
minutes after the jump. All zones of the host's database are asked whose clock is ever changed.
"""

import os
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaporch.config import Config
from snaporch.schedule.when import times

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
YEAR = 2026
ALL = bool(os.environ.get("RANDOM_EXAMPLES"))
YEARS = (2000, 2035) if ALL else (2026, 2028)
RULES = (
    "0 0 * * *",
    "30 2 * * *",
    "0 3 * * 0",
    "0 0 1 * *",
    "59 23 * * 1-5",
    "15 1 29-31 * *",
    "45 */2 1 3,10,11 *",
    "0 0-3 * * 6,7",
)
REMARKABLE = (
    "Africa/Cairo",
    "Antarctica/Troll",
    "Australia/Lord_Howe",
    "Europe/Berlin",
)
"""At midnight, by two hours, by half an hour, and just like many others."""


def numbers(field, lowest, highest):
    """What a field of crontab means."""
    found = set()
    for part in field.split(","):
        numbers, _, step = part.partition("/")
        first, _, last = numbers.partition("-")
        if numbers == "*":
            first, last = lowest, highest
        elif not last:
            last = highest if step else first
        found |= set(range(int(first), int(last) + 1, int(step or 1)))
    return found


class Oracle:
    """Which minutes of a zone's clock a rule means."""

    def __init__(self, rule):
        minute, hour, day, month, weekday = rule.split()
        self.minutes, self.hours = numbers(minute, 0, 59), numbers(hour, 0, 23)
        self.days, self.months = numbers(day, 1, 31), numbers(month, 1, 12)
        self.weekdays = {number % 7 for number in numbers(weekday, 0, 6)}

    def matches(self, shown):
        return (
            shown.minute in self.minutes
            and shown.hour in self.hours
            and shown.day in self.days
            and shown.month in self.months
            and shown.isoweekday() % 7 in self.weekdays
        )


def due(rules, zone_name, start, end):
    """When each rule is due: minute by minute, by what the zone's clock shows."""
    oracles, zone = {rule: Oracle(rule) for rule in rules}, ZoneInfo(zone_name)
    found = {rule: set() for rule in rules}
    moment, before = start, shown_at(start - MINUTE, zone)
    while moment < end:
        shown = shown_at(moment, zone)
        seen = [(moment, shown)]
        left_out, later = before + MINUTE, moment
        while left_out < shown:
            seen.append((later, left_out))
            left_out, later = left_out + MINUTE, later + MINUTE
        for rule, oracle in oracles.items():
            found[rule] |= {at for at, each in seen if oracle.matches(each)}
        before, moment = shown, moment + MINUTE
    return {rule: sorted(at for at in each if at < end) for rule, each in found.items()}


def shown_at(moment, zone):
    return moment.astimezone(zone).replace(tzinfo=None)


def said(rule, zone_name, start, end):
    """What snaporch says, each time asked from the one before."""
    schedule = {"schedule": {"timezone": zone_name}, "policy": {"p": {"cron": rule}}}
    when = times(Config.model_validate(schedule), "p", "u")
    found, moment = [], when.after(start - timedelta(seconds=1))
    while moment < end:
        found.append(moment)
        moment = when.after(moment)
    return found


@cache
def changes(zone_name, first, last):
    """Minutes in which the clock is changed, by looking at every quarter of an hour."""
    zone, found = ZoneInfo(zone_name), []
    day = datetime(first, 1, 1, tzinfo=UTC)
    while day.year < last:
        if day.astimezone(zone).utcoffset() != (day + DAY).astimezone(zone).utcoffset():
            quarters = [day + n * timedelta(minutes=15) for n in range(97)]
            offsets = [each.astimezone(zone).utcoffset() for each in quarters]
            found += [quarters[n] for n in range(1, 97) if offsets[n] != offsets[n - 1]]
        day += DAY
    return found


@cache
def zones_that_change(first, last):
    """One zone for all that change their clocks alike."""
    alike = {}
    for name in sorted(available_timezones() - {"localtime"}):
        if found := changes(name, first, last):
            zone = ZoneInfo(name)
            key = tuple((each, each.astimezone(zone).utcoffset()) for each in found)
            alike.setdefault(key, name)
    return sorted(alike.values())


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
    name = draw(st.sampled_from(zones_that_change(*YEARS)))
    moment = draw(st.sampled_from(changes(name, *YEARS)))
    return name, moment + timedelta(minutes=draw(st.integers(-400, 200)))


@given(around_a_change(), LINES)
def test_any_rule_around_any_change_of_any_clock(place, rule):
    name, start = place
    end = start + timedelta(minutes=300)
    assert said(rule, name, start, end) == due([rule], name, start, end)[rule]


@given(around_a_change(), LINES, st.integers(1, 59))
def test_asking_between_minutes_skips_nothing(place, rule, seconds):
    name, start = place
    schedule = {"schedule": {"timezone": name}, "policy": {"p": {"cron": rule}}}
    when = times(Config.model_validate(schedule), "p", "u")
    later = when.after(start)
    between = start + timedelta(seconds=seconds)
    assert when.after(between) == (later if later > between else when.after(later))
