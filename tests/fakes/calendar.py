"""Times of cron by an oracle that only reads clocks, minute by minute.

It goes through every minute and reads the zone's clock; what the clock jumps over comes as many
minutes after the jump. All zones of the host's database are asked whose clock is ever changed.

``python -m fakes.calendar`` prints, for each zone, one of those that change their clocks alike, the
slots that the rules have in a year, how many of them the schedule skips, and how many it has beside
them, so that something is taken twice. Exits with 1 if there is any of either.
"""

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo, available_timezones

from snaporch.config import Config
from snaporch.schedule.recurrence import times

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
YEAR = 2026
RULES = (
    "0 0 * * *",
    "30 2 * * *",
    "0 3 * * 0",
    "0 0 1 * *",
    "59 23 * * 1-5",
    "15 1 29-31 * *",
    "45 */2 1 3,10,11 *",
    "0 0-3 * * 6,7",
    "20,35 2 * * *",
)


def numbers(field, lowest, highest):
    """The numbers that a field of crontab stands for."""
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
    """The minutes of a zone's clock that a rule stands for."""

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
    """When each rule is due, found by reading the zone's clock minute by minute."""
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
    """The times that snaporch computes, each from the one before."""
    schedule = {"schedule": {"timezone": zone_name}, "policy": {"p": {"cron": rule}}}
    when = times(Config.model_validate(schedule), "p", "u")
    found, moment = [], when.after(start - timedelta(seconds=1))
    while moment < end:
        found.append(moment)
        moment = when.after(moment)
    return found


@cache
def changes(zone_name, first, last):
    """Minutes in which the clock is changed, found by checking every quarter of an hour."""
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
    """One zone for all that change their clocks at the same times, with their names."""
    alike = {}
    for name in sorted(available_timezones() - {"localtime"}):
        if found := changes(name, first, last):
            zone = ZoneInfo(name)
            key = tuple((each, each.astimezone(zone).utcoffset()) for each in found)
            alike.setdefault(key, []).append(name)
    return {names[0]: names for names in sorted(alike.values())}


ROW = "{:32} {:>5} {:>8} {:>8} {:>8} {:>8}"


def differences(zone_name: str, year: int) -> tuple[int, int, int]:
    """The numbers of slots, of skipped ones and of doubled ones; prints each skipped or doubled
    slot.
    """
    start, end = (datetime(each, 1, 1, tzinfo=UTC) for each in (year, year + 1))
    slots = skipped = doubled = 0
    for rule, expected in due(RULES, zone_name, start, end).items():
        found = said(rule, zone_name, start, end)
        for what, moments in (
            ("skipped", sorted({*expected} - {*found})),
            ("doubled", sorted({*found} - {*expected})),
        ):
            for moment in moments:
                print(f"{zone_name}: {rule}: {moment:%Y-%m-%d %H:%M} UTC is {what}")
        slots += len(expected)
        skipped += len({*expected} - {*found})
        doubled += len(found) - len({*found} & {*expected})
    return slots, skipped, doubled


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, a line for each zone as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("year", type=int, nargs="?", default=YEAR)
    year = parser.parse_args(arguments).year
    print(f"{year}, rules: {'; '.join(RULES)}")
    print(ROW.format("zone", "alike", "changes", "slots", "skipped", "doubled"))
    zones = zones_that_change(year, year + 1)
    total = [0, 0, 0]
    for zone_name, alike in zones.items():
        counts = differences(zone_name, year)
        total = [sum(pair) for pair in zip(total, counts, strict=True)]
        changed = len(changes(zone_name, year, year + 1))
        print(ROW.format(zone_name, len(alike), changed, *counts), flush=True)
    everywhere = f"all {len(zones)}"
    print(ROW.format(everywhere, sum(map(len, zones.values())), "", *total))
    return 1 if any(total[1:]) else 0


if __name__ == "__main__":
    sys.exit(main())
