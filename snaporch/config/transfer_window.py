"""Times of day in which transfers start by themselves: ``"22:00-06:00"``.

Which replication is due is decided by :mod:`snaporch.schedule.replication_due`.

The clock on the wall decides, minute by minute, so a change of the clock needs no rule of its own:
an hour that the clock shows twice is open twice, and one that it skips is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Annotated, Protocol

from pydantic import PlainSerializer, PlainValidator

_FORM = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])-(?:([01][0-9]|2[0-3]):([0-5][0-9])|24:00)")
_DAY_MINUTES = 24 * 60
_MINUTE = timedelta(minutes=1)
_LONGEST = timedelta(days=3)
"""A window that the clock skips today opens tomorrow."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Times of day; always open if there are none.

    Moments are aware of their time zone; ``zone`` is the machine's own if it is ``None``.
    """

    spans: tuple[tuple[int, int], ...] = ()
    """The first minute of the day of each, and the one after its last, which may be smaller."""

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __str__(self) -> str:
        return ", ".join(f"{_text(begin)}-{_text(end)}" for begin, end in self.spans)

    def is_open(self, moment: datetime, zone: tzinfo | None = None) -> bool:
        """Whether transfers may start at a moment."""
        if not self.spans:
            return True
        local = moment.astimezone(zone)
        minute = local.hour * 60 + local.minute
        return any(_is_in(minute, each) for each in self.spans)

    def opens(self, moment: datetime, zone: tzinfo | None = None) -> datetime:
        """The moment itself if it is in a window, or else when the next one opens."""
        return moment if self.is_open(moment, zone) else _change(self, _minute(moment), zone)

    def closes(self, moment: datetime, zone: tzinfo | None = None) -> datetime | None:
        """When the window of a moment ends; ``None`` if it never does, or the moment is in none."""
        if not self.spans or not self.is_open(moment, zone):
            return None
        found = _change(self, _minute(moment), zone)
        return found if found < moment + _LONGEST else None

    def had_one(self, since: datetime, now: datetime, zone: tzinfo | None = None) -> bool:
        """Whether a whole window has passed: one that opened after ``since``, and has closed."""
        if not self.spans:
            return True
        begin = self.closes(since, zone) or since
        end = self.closes(self.opens(begin, zone), zone)
        return end is None or end <= now


ALWAYS = Windows()


def _minute(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(second=0, microsecond=0)


@lru_cache(maxsize=1024)
def _change(windows: Windows, start: datetime, zone: tzinfo | None) -> datetime:
    """When a window opens or closes next, at most three days later; both happen at full minutes."""
    before, moment = windows.is_open(start, zone), start
    while windows.is_open(moment, zone) == before and moment < start + _LONGEST:
        moment += _MINUTE
    return moment


def _text(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


def parse_windows(value: object) -> Windows:
    """The windows of a text, or of a list of texts; an empty text is no window.

    Raises:
        ValueError: one has another form, or no length, or all together leave no time of day out.
    """
    if isinstance(value, Windows):
        return value
    if value == "":
        return ALWAYS
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not texts:
        raise ValueError("must be a time of day such as '22:00-06:00', or a list of such")
    found = Windows(tuple(_spans(texts)))
    if all(any(_is_in(minute, each) for each in found.spans) for minute in range(_DAY_MINUTES)):
        raise ValueError("has the whole day: leave it out")
    return found


def _spans(texts: list[object] | tuple[object, ...]) -> Iterator[tuple[int, int]]:
    for text in texts:
        match = _FORM.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"has {text!r}, and must be a time of day such as '22:00-06:00'")
        begin = int(match[1]) * 60 + int(match[2])
        end = int(match[3]) * 60 + int(match[4]) if match[3] else 0
        if begin == end:
            raise ValueError(f"has {text!r}, which has no length")
        yield begin, end


def _is_in(minute: int, span: tuple[int, int]) -> bool:
    begin, end = span
    return begin <= minute < end if begin < end else minute >= begin or minute < end


def _texts(windows: Windows) -> str | list[str]:
    return str(windows).split(", ") if windows else ""


WindowOption = Annotated[Windows, PlainValidator(parse_windows), PlainSerializer(_texts)]


def rate_at(windows: Windows, rate: int, rate_outside: int | None, moment: datetime) -> int:
    """The most MiB a second at a moment; 0 for no limit.

    Args:
        windows: when transfers start by themselves.
        rate: the rate in them, 0 for no limit.
        rate_outside: the rate outside; ``None`` if none starts there.
        moment: the time.
    """
    return rate if rate_outside is None or windows.is_open(moment) else rate_outside


class _Rates(Protocol):
    """Options of a section that says when and how fast transfers run."""

    @property
    def window(self) -> Windows: ...
    @property
    def rate(self) -> int: ...
    @property
    def rate_outside(self) -> int | None: ...


class Paced:
    """What the options ``window``, ``rate`` and ``rate_outside`` of a section mean together."""

    def check_rates(self: _Rates) -> None:
        """Check that the rate outside of windows has an effect.

        Raises:
            ValueError: it has none.
        """
        if self.rate_outside is not None and not self.window:
            raise ValueError("rate_outside needs window: without it there is no time outside")

    def rate_now(self: _Rates) -> int:
        """The most MiB a second at this moment; 0 for no limit."""
        return rate_at(self.window, self.rate, self.rate_outside, datetime.now(UTC))

    @property
    def start_window(self: _Rates) -> Windows:
        """When a transfer may start by itself."""
        return self.window if self.rate_outside is None else ALWAYS
