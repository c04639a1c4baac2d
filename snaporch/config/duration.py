"""Durations of ``snaporch.toml``: text such as ``"250ms"``, ``"90s"``, ``"5m"``, ``"14d"``.

Options whose duration is handed on to libvirt, a lock or a process hold whole seconds; all others
hold a :class:`~datetime.timedelta`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta

from pydantic_core import CoreSchema, core_schema

_UNITS = {
    "w": timedelta(weeks=1),
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
}
"""The largest first: :func:`duration_text` takes the first that fits."""
_TEXT = re.compile(r"(0|[1-9][0-9]{0,8})(ms|[smhdw])")
_LONGEST = "36500d"
_SECOND = timedelta(seconds=1)


def parse_duration(value: object) -> timedelta:
    """The duration that a text such as ``90s`` means.

    Raises:
        ValueError: ``value`` is not such a text, or is longer than a hundred years.
    """
    found = _TEXT.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(
            'must be a duration, a number with its unit in quotes: "250ms", "90s", "5m", "2h", '
            '"14d", "1w"'
        )
    number, unit = int(found[1]), _UNITS[found[2]]
    if number > _UNITS["d"] * int(_LONGEST[:-1]) // unit:
        raise ValueError(f'must be a duration of no more than "{_LONGEST}"')
    return number * unit


def duration_text(length: timedelta) -> str:
    """The text that means ``length``, in the largest unit of which it is a multiple."""
    unit = next((name for name, one in _UNITS.items() if length and not length % one), "s")
    return f"{length // _UNITS[unit]}{unit}"


@dataclass(frozen=True)
class Duration:
    """Annotates an option that is a duration from ``low`` to ``high``, and holds a timedelta."""

    low: str = "0s"
    high: str = _LONGEST

    def __get_pydantic_core_schema__(self, _source: object, _handler: object) -> CoreSchema:
        """How pydantic validates the option, and writes it as text again."""
        return core_schema.no_info_plain_validator_function(
            self.validate, serialization=core_schema.plain_serializer_function_ser_schema(self.text)
        )

    def validate(self, value: object) -> timedelta | int:
        """What the option holds for ``value``.

        Raises:
            ValueError: ``value`` is not a duration, or not between the limits.
        """
        length = parse_duration(value)
        if not parse_duration(self.low) <= length <= parse_duration(self.high):
            raise ValueError(f'must be a duration from "{self.low}" to "{self.high}"')
        return length

    def text(self, held: timedelta | int | None) -> str | None:
        """The text for a value that the option holds; ``None`` for ``None``."""
        if held is None:
            return None
        return duration_text(held if isinstance(held, timedelta) else held * _SECOND)


class Seconds(Duration):
    """Annotates an option that is a duration in whole seconds, and holds their number."""

    def validate(self, value: object) -> int:
        """As of :class:`Duration`; also refuses what is not a multiple of a second."""
        length = parse_duration(value)
        if length % _SECOND:
            raise ValueError('must be a duration in whole seconds, such as "2s"')
        super().validate(value)
        return length // _SECOND
