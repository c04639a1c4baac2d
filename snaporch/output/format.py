"""Sizes, ages and pauses as short text."""

from __future__ import annotations

from datetime import datetime, timedelta

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEP = 1024
_LONG_PAUSE_MS = 10_000


def size(count: int | None) -> str:
    """Format bytes in the largest unit that gives at least one: ``1.5 GiB``; ``-`` for ``None``."""
    if count is None:
        return "-"
    value = float(count)
    for unit in _UNITS:
        if round(value, 1) < _STEP or unit == _UNITS[-1]:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= _STEP
    raise AssertionError("unreachable")


def age(moment: datetime, now: datetime) -> str:
    """Format the time since ``moment`` in at most two units: ``3d 4h``."""
    seconds = max(int((now - moment) / timedelta(seconds=1)), 0)
    lengths = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    counts = []
    for unit, length in lengths.items():
        count, seconds = divmod(seconds, length)
        counts.append((count, unit))
    first = next((index for index, (count, _) in enumerate(counts) if count), len(counts) - 1)
    shown = [f"{count}{unit}" for count, unit in counts[first : first + 2] if count]
    return " ".join(shown) or "0s"


def pause(milliseconds: float | None) -> str:
    """Format a pause: ``84 ms``, or ``12.3 s`` from ten seconds on; ``-`` for ``None``."""
    if milliseconds is None:
        return "-"
    return (
        f"{milliseconds:.0f} ms"
        if round(milliseconds) < _LONG_PAUSE_MS
        else f"{milliseconds / 1000:.1f} s"
    )


def compact(text: str) -> str:
    """Shorten a size or pause for a narrow column: ``1.5G``, ``84ms``."""
    return text.replace("iB", "").replace(" ", "")
