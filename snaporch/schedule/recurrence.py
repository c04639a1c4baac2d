"""When a policy's snapshots are due: times that follow from the policy and the domain alone."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

from snaporch.config import Config, Policy
from snaporch.config.duration import duration_text, parse_duration
from snaporch.config.policy import cron_trigger

_MONDAY = datetime(1970, 1, 5, tzinfo=UTC)
_NEVER = datetime.max.replace(tzinfo=UTC)
_CHANGE = timedelta(hours=26)
"""More than a clock was ever put forward or back at once."""


def zone_of(config: Config) -> tzinfo:
    """The time zone of the schedule."""
    if config.schedule.timezone != "local":
        return ZoneInfo(config.schedule.timezone)
    from tzlocal import get_localzone

    return get_localzone()


def read_zone_again() -> None:
    """Have :func:`zone_of` go by the host's zone of now, which may have been changed meanwhile."""
    from tzlocal import reload_localzone

    time.tzset()
    reload_localzone()


@dataclass(frozen=True, slots=True)
class Times:
    """The times of one policy on one domain."""

    every: timedelta | None
    cron: str
    zone: tzinfo
    offset: timedelta
    """The domain's own place in the policy's ``stagger``."""

    @property
    def known(self) -> bool:
        """Whether there are any: a policy may be for snapshots by hand."""
        return bool(self.every or self.cron)

    @property
    def rule(self) -> str:
        """For people: ``every 1h``."""
        return f"every {duration_text(self.every)}" if self.every else f"cron {self.cron}"

    def after(self, moment: datetime) -> datetime:
        """The first of them that is later than ``moment``."""
        return self._slot_after(moment - self.offset) + self.offset

    def _slot_after(self, moment: datetime) -> datetime:
        if self.every:
            return _MONDAY + ((moment - _MONDAY) // self.every + 1) * self.every
        return _cron_after(self.cron, self.zone, moment)


def _cron_after(expression: str, zone: tzinfo, moment: datetime) -> datetime:
    """The first moment later than this one at which the zone's clock shows a time of the rule.

    A time that the clock leaves out comes as much later as the clock is put forward; one that it
    shows twice comes twice. The rule is walked on a clock without changes, from before whatever
    the zone's clock may still make later than ``moment``, until nothing can come earlier than was
    found.
    """
    trigger = cron_trigger(expression)
    shown = moment.astimezone(UTC) + min(_offsets_around(moment, zone))
    found = _NEVER
    while shown < _NEVER - _CHANGE:
        shown = trigger.get_next_fire_time(None, shown + timedelta(microseconds=1)) or _NEVER
        later = [each for each in _moments_of(shown, zone) if each > moment]
        found = min([found, *later])
        if found != _NEVER and shown >= found + max(_offsets_around(found, zone)):
            break
    return found


def _offsets_around(moment: datetime, zone: tzinfo) -> list[timedelta]:
    """Of the zone's clock from UTC, so close to a moment that a change may matter to it."""
    near = (moment - _CHANGE, moment, moment + _CHANGE)
    return [each.astimezone(zone).utcoffset() or timedelta(0) for each in near]


def _moments_of(shown: datetime, zone: tzinfo) -> list[datetime]:
    """When the zone's clock shows a time (written as UTC), or would if it was not put forward."""
    local = shown.replace(tzinfo=zone)
    first, second = (local.replace(fold=fold).utcoffset() or timedelta(0) for fold in (0, 1))
    return [shown - first] if second >= first else [shown - first, shown - second]


def times(config: Config, name: str, place: str) -> Times:
    """The times of the policy ``name``.

    Args:
        place: whose place in ``stagger`` it is: a domain's UUID, or the name of its group, whose
            domains have the same times.
    """
    policy = config.policy[name]
    return Times(policy.every, policy.cron, zone_of(config), _place(policy, name, place))


def verify_times(config: Config, name: str, uuid: str) -> Times:
    """When the policy ``name`` wants a test restore of the domain ``uuid``."""
    policy = config.policy[name]
    rule = policy.verify_rule
    every = parse_duration(rule) if rule and " " not in rule else None
    return Times(every, "" if every else rule, zone_of(config), _place(policy, name, uuid))


def _place(policy: Policy, name: str, uuid: str) -> timedelta:
    length = policy.stagger // timedelta(seconds=1)
    digest = hashlib.sha256(f"{uuid}/{name}".encode()).digest()
    return timedelta(seconds=int.from_bytes(digest[:8]) % length if length else 0)
