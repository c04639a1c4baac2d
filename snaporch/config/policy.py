"""Options of ``[policy.NAME]`` and ``[group.NAME]``; part of the schema.

Which policies a guest has is decided by :mod:`snaporch.schedule.policy_assignment`.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    model_validator,
)

from snaporch.config.duration import Duration

if TYPE_CHECKING:
    from apscheduler.triggers.cron import CronTrigger

RULES = ("last", "hourly", "daily", "weekly", "monthly", "yearly")
RESERVED = ("manual", "none")
"""Not allowed as names: the suffix of snapshots by hand, and the word for "no policy"."""
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_MOST = 100_000
_CRON_FIELDS = 5
VERIFY_WORDS = {"daily": "1d", "weekly": "1w", "monthly": "0 0 1 * *"}
"""Words for how often to verify: a duration, or a line of crontab(5)."""
CHECKSUMS = "checksums"
_VERIFY_TEXTS = (
    "'checksums', 'daily', 'weekly', 'monthly', a duration such as '3d', or a line of crontab"
)
_EVERY = Duration("1m")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_WEEKDAY_PART = re.compile(r"(\*|[a-z0-9]+)(?:-([a-z0-9]+))?(?:/([1-9]))?")


@lru_cache
def cron_trigger(expression: str) -> CronTrigger:
    """The times of a line of crontab(5), on a clock without changes (UTC).

    apscheduler's own time zones are not used: after a change of the clock it can skip days.
    :mod:`snaporch.schedule.recurrence` applies the zone. Weekdays are passed by name, because
    apscheduler counts them from Monday and cron from Sunday.

    Raises:
        ValueError: the line is invalid, has no time, or cron would understand it differently.
    """
    from apscheduler.triggers.cron import CronTrigger

    fields = expression.lower().split()
    if len(fields) != _CRON_FIELDS:
        raise ValueError("must have five fields: minute, hour, day, month, weekday")
    minute, hour, day, month, weekday = fields
    if day != "*" and weekday != "*":
        raise ValueError("must leave the day of the month or the weekday to '*'")
    trigger = CronTrigger(
        minute=minute,
        hour=hour,
        day=day,
        month=month,
        day_of_week=_weekdays(weekday),
        timezone=UTC,
    )
    if trigger.get_next_fire_time(None, datetime(2000, 1, 1, tzinfo=UTC)) is None:
        raise ValueError("must be a time that exists")
    return trigger


def _weekdays(field: str) -> str:
    """cron's weekdays (0 and 7 are Sunday) as a list of names."""
    days: set[int] = set()
    for part in field.split(","):
        found = _WEEKDAY_PART.fullmatch(part)
        if found is None:
            raise ValueError(f"has the weekday {part!r}, which does not exist")
        first, last = _weekday(found[1]), _weekday(found[2] or found[1])
        if found[1] == "*":
            first, last = 0, 6
        elif found[3] and not found[2]:
            last = 6
        if last < first:
            last += 7
        days.update(day % 7 for day in range(first, last + 1, int(found[3] or 1)))
    return ",".join(_WEEKDAYS[day] for day in sorted(days))


def _weekday(text: str) -> int:
    if text == "*":
        return 0
    if text in _WEEKDAYS:
        return _WEEKDAYS.index(text)
    if text not in tuple("01234567"):
        raise ValueError(f"has the weekday {text!r}, which does not exist")
    return int(text)


def _cron(text: str) -> str:
    if text:
        cron_trigger(text)
    return text


def _verify(value: object) -> bool | str:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be true, false, {_VERIFY_TEXTS}")
    if value == CHECKSUMS or value in VERIFY_WORDS:
        return value
    try:
        if " " in value.strip():
            return _cron(value)
        _EVERY.validate(value)
        return value
    except ValueError as error:
        raise ValueError(f"must be {_VERIFY_TEXTS}: it {error}") from error


def _policy_name(name: str) -> str:
    if name in RESERVED or not _NAME.fullmatch(name):
        raise ValueError("must be small letters, digits and hyphens, and not 'manual' or 'none'")
    return name


PolicyName = Annotated[str, AfterValidator(_policy_name)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _count(what: str) -> int:
    number: int = Field(default=0, ge=0, le=_MOST, description=what)
    return number


class Keep(_Section):
    """How many of a policy's snapshots are kept."""

    last: int = _count("The newest ones, whenever they were taken.")
    hourly: int = _count("The newest one of each of this many hours that have any.")
    daily: int = _count("The newest one of each of this many days that have any.")
    weekly: int = _count("The newest one of each of this many weeks (from Monday on).")
    monthly: int = _count("The newest one of each of this many months that have any.")
    yearly: int = _count("The newest one of each of this many years that have any.")

    @model_validator(mode="after")
    def _something(self) -> Keep:
        if not any(getattr(self, rule) for rule in RULES):
            raise ValueError("must keep something: give at least one count")
        return self

    def describe(self) -> str:
        """The rules for messages: ``hourly=24 daily=7``."""
        counts = ((rule, getattr(self, rule)) for rule in RULES)
        return " ".join(f"{rule}={count}" for rule, count in counts if count)


class Policy(_Section):
    """When to take snapshots, at which level, and how many to keep."""

    every: Annotated[timedelta | None, Duration("1m")] = Field(
        default=None,
        description="Interval between snapshots: `15m`, `1h`, `1d`, `1w`, counted in UTC from a "
        "Monday on, so that `1h` is the full hour. Without `every` and `cron` no snapshots are "
        "scheduled.",
    )
    cron: Annotated[str, AfterValidator(_cron)] = Field(
        default="",
        description="Take snapshots at the times of this line of crontab(5): minute, hour, day of "
        "the month, month, weekday; in `schedule.timezone`. Either the day of the month or the "
        "weekday must be `*`.",
    )
    stagger: Annotated[timedelta, Duration()] = Field(
        default=timedelta(),
        description="Spread the starts of domains over this duration; the delay of each domain "
        "is always the same.",
    )
    level: Literal["auto", "ram", "quiesced", "paused", "crash"] = Field(
        default="auto",
        description="Level of these snapshots; `auto` is the level configured for the domain.",
    )
    domains: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = Field(
        default=(),
        strict=False,
        description="Domains this policy is for: names, UUIDs, or patterns of names with `*`, `?` "
        "and `[…]`.",
    )
    verify: Annotated[bool | str, PlainValidator(_verify)] = Field(
        default=False,
        description="`true` or `checksums`: read every bundle back after it was written and "
        "compare its checksums; a snapshot that fails counts as a failed run. `daily`, `weekly`, "
        "`monthly`, a duration (`3d`) or a line of crontab(5): verify the newest snapshot of "
        "each domain that often, as `snaporch verify` does, one at a time.",
    )
    verify_disks: bool = Field(
        default=False,
        description="Whether these verifications also read all data of the disks, as `snaporch "
        "verify --disks` does.",
    )
    replicate: tuple[PolicyName, ...] = Field(
        default=(),
        strict=False,
        description="Replicas (`[replica.NAME]`) to which each snapshot is copied after it was "
        "taken.",
    )
    keep: Keep | None = Field(
        default=None, description="How many are kept; without it no snapshot is deleted."
    )

    @property
    def reads_back(self) -> bool:
        """Whether every bundle is read back after it was written."""
        return self.verify is True or self.verify == CHECKSUMS

    @property
    def verify_rule(self) -> str:
        """How often to verify: a duration or a line of crontab(5); empty for never."""
        if isinstance(self.verify, bool) or self.reads_back:
            return ""
        return VERIFY_WORDS.get(self.verify, self.verify)

    @model_validator(mode="after")
    def _one_time(self) -> Policy:
        if self.every and self.cron:
            raise ValueError("must have every or cron, not both")
        return self

    @model_validator(mode="after")
    def _some_test_restore(self) -> Policy:
        if self.verify_disks and not self.verify_rule:
            raise ValueError("must say in verify how often verify_disks is done")
        return self


class Group(_Section):
    """Domains that are frozen and snapshotted together, or not at all."""

    domains: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = Field(
        strict=False,
        min_length=1,
        description="Its domains: names, UUIDs, or patterns of names with `*`, `?` and `[…]`. "
        "Patterns mean no clones.",
    )
