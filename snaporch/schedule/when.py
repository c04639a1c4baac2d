"""When a policy's snapshots are due: times that follow from the policy and the domain alone."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

from snaporch.config import Config, Policy
from snaporch.config.policy import cron_trigger, span

_MONDAY = datetime(1970, 1, 5, tzinfo=UTC)
_NEVER = datetime.max.replace(tzinfo=UTC)


def zone_of(config: Config) -> tzinfo:
    """The time zone of the schedule."""
    if config.schedule.timezone != "local":
        return ZoneInfo(config.schedule.timezone)
    from tzlocal import get_localzone

    return get_localzone()


@dataclass(frozen=True, slots=True)
class Times:
    """The times of one policy on one domain."""

    every: str
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
        return f"every {self.every}" if self.every else f"cron {self.cron}"

    def after(self, moment: datetime) -> datetime:
        """The first of them that is later than ``moment``."""
        return self._slot_after(moment - self.offset) + self.offset

    def _slot_after(self, moment: datetime) -> datetime:
        if self.every:
            length = span(self.every)
            return _MONDAY + ((moment - _MONDAY) // length + 1) * length
        trigger = cron_trigger(self.cron, self.zone)
        found = trigger.get_next_fire_time(None, moment + timedelta(microseconds=1))
        return found.astimezone(UTC) if found else _NEVER


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
    by_clock = " " in rule
    every, cron = ("", rule) if by_clock else (rule, "")
    return Times(every, cron, zone_of(config), _place(policy, name, uuid))


def _place(policy: Policy, name: str, uuid: str) -> timedelta:
    length = span(policy.stagger) // timedelta(seconds=1)
    digest = hashlib.sha256(f"{uuid}/{name}".encode()).digest()
    return timedelta(seconds=int.from_bytes(digest[:8]) % length if length else 0)
