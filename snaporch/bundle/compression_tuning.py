"""Adjust the compressor's level to the bottleneck of the previous RAM save.

The times that it compares are measured by :mod:`snaporch.bundle.ram_pipe`.

Three parties work at the same time: QEMU emits RAM, the compressor compresses it, the store writes
the result. The best level is the fastest at which neither QEMU waits for the compressor nor the
compressor for the store.
"""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = (-7, -5, -3, -1, 1, 3, 5)
"""Levels of zstd. Higher ones hardly make RAM smaller, and take much longer."""
FIRST_LEVEL = 1
_STORE_IS_SLOW = 0.25
_STORE_IS_FAST = 0.05
_RAM_IS_SLOW = 0.15
SHORTEST_SECONDS = 1.0
"""A shorter save says more about start-up and chance than about the bottleneck."""


@dataclass(frozen=True, slots=True)
class RamSaveTimes:
    """How long the parts of a RAM save took while the guest ran, in seconds."""

    level: int
    seconds: float
    waited_for_ram: float
    """The compressor had no input: QEMU was the slowest."""
    waited_for_store: float
    """The compressor was blocked, because the store had not yet written its earlier output."""


def next_level(pace: RamSaveTimes | None) -> int:
    """The compressor's level for the next save, from the times of the previous one.

    One step up if the store was the bottleneck. One step down if the compressor was the bottleneck
    and the store has spare capacity. Else the same level.

    Args:
        pace: the times of the previous save of this guest; ``None`` if there was none.

    Returns: always one of :data:`LEVELS`.
    """
    if pace is None:
        return FIRST_LEVEL
    level = max((each for each in LEVELS if each <= pace.level), default=LEVELS[0])
    if pace.seconds < SHORTEST_SECONDS:
        return level
    if pace.waited_for_store > _STORE_IS_SLOW * pace.seconds:
        return min((each for each in LEVELS if each > level), default=level)
    compressor_is_slow = pace.waited_for_ram < _RAM_IS_SLOW * pace.seconds
    if compressor_is_slow and pace.waited_for_store < _STORE_IS_FAST * pace.seconds:
        return max((each for each in LEVELS if each < level), default=level)
    return level
