"""The times of a policy on a domain, from ``every`` or ``cron`` and ``stagger``, in any time zone.

It decides which times exist where summer time (daylight saving time, DST) begins or ends.

:meth:`Times.next_due` has the rule for times that were missed, as while the host was off.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

from snaporch.config import Config, Policy
from snaporch.config.duration import duration_text, parse_duration
from snaporch.config.policy import cron_trigger

_MONDAY = datetime(1970, 1, 5, tzinfo=UTC)
_NEVER = datetime.max.replace(tzinfo=UTC)
_CHANGE = timedelta(hours=26)
"""Longer than any change of a zone's clock ever was."""


def zone_of(config: Config) -> tzinfo:
    """The time zone of ``schedule.timezone``."""
    if config.schedule.timezone != "local":
        return ZoneInfo(config.schedule.timezone)
    from tzlocal import get_localzone

    return get_localzone()


def read_zone_again() -> None:
    """Make :func:`zone_of` read the host's time zone again, which may have changed."""
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
    """How much later the domain's times are, within the policy's ``stagger``."""

    @property
    def known(self) -> bool:
        """Whether there are times; a policy may be for snapshots by hand only."""
        return bool(self.every or self.cron)

    @property
    def rule(self) -> str:
        """The rule for messages: ``every 1h`` or ``cron 0 3 * * *``."""
        return f"every {duration_text(self.every)}" if self.every else f"cron {self.cron}"

    def after(self, moment: datetime) -> datetime:
        """The first time after ``moment``."""
        return self._slot_after(moment - self.offset) + self.offset

    def next_due(self, met: Iterable[datetime]) -> datetime | None:
        """When the next snapshot is due: the first time after the policy was last met.

        If that has passed, it is due at once. However many times were missed since, as while the
        host was off, the one snapshot makes up for all.

        Args:
            met: when snapshots met the policy, none of them in the future.

        Returns: ``None`` if none did: then it is due at once, too.
        """
        last = max(met, default=None)
        return None if last is None else self.after(last)

    def _slot_after(self, moment: datetime) -> datetime:
        if self.every:
            return _MONDAY + ((moment - _MONDAY) // self.every + 1) * self.every
        return _cron_after(self.cron, self.zone, moment)


def _cron_after(expression: str, zone: tzinfo, moment: datetime) -> datetime:
    """The first moment after ``moment`` at which the zone's clock shows a time of the rule.

    A time that the zone's clock skips comes later by as much as the clock was put forward; a time
    that it shows twice comes twice. The rule is evaluated on a clock without changes (UTC). The
    search begins early enough for every offset of the zone, and ends when no later time of the
    rule can be an earlier moment.
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
    """The zone's offsets from UTC before, at and after a moment, to notice a change."""
    near = (moment - _CHANGE, moment, moment + _CHANGE)
    return [each.astimezone(zone).utcoffset() or timedelta(0) for each in near]


def _moments_of(shown: datetime, zone: tzinfo) -> list[datetime]:
    """Moments at which the zone's clock shows a time (given as UTC); also if it is skipped."""
    local = shown.replace(tzinfo=zone)
    first, second = (local.replace(fold=fold).utcoffset() or timedelta(0) for fold in (0, 1))
    return [shown - first] if second >= first else [shown - first, shown - second]


def times(config: Config, name: str, place: str) -> Times:
    """The times of the policy ``name``.

    Args:
        place: determines the offset within ``stagger``: a domain's UUID, or the name of its group,
            so that all domains of the group have the same times.
    """
    policy = config.policy[name]
    return Times(policy.every, policy.cron, zone_of(config), _place(policy, name, place))


def verify_times(config: Config, name: str, uuid: str) -> Times:
    """When the policy ``name`` verifies the domain ``uuid``."""
    policy = config.policy[name]
    rule = policy.verify_rule
    every = parse_duration(rule) if rule and " " not in rule else None
    return Times(every, "" if every else rule, zone_of(config), _place(policy, name, uuid))


def _place(policy: Policy, name: str, uuid: str) -> timedelta:
    length = policy.stagger // timedelta(seconds=1)
    digest = hashlib.sha256(f"{uuid}/{name}".encode()).digest()
    return timedelta(seconds=int.from_bytes(digest[:8]) % length if length else 0)
