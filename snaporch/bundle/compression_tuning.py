"""Who held up the saving of RAM, and what a compressor's level should be for that.

Three work at once: QEMU gives RAM away, the compressor takes it, the store takes what comes out.
The fastest level that keeps up is the one at which neither QEMU waits for the compressor nor the
compressor for the store.
"""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = (-7, -5, -3, -1, 1, 3, 5)
"""Of zstd. Beyond them RAM becomes hardly smaller, and takes much longer."""
FIRST_LEVEL = 1
_STORE_IS_SLOW = 0.25
_STORE_IS_FAST = 0.05
_RAM_IS_SLOW = 0.15
_SHORTEST_SECONDS = 1.0
"""Less tells of start-up and chance."""


@dataclass(frozen=True, slots=True)
class RamSaveTimes:
    """How RAM was saved while the guest ran; times in seconds."""

    level: int
    seconds: float
    waited_for_ram: float
    """In which there was nothing to take: QEMU was the slowest."""
    waited_for_store: float
    """In which the compressor could not go on, because the store had not taken what came before."""


def next_level(pace: RamSaveTimes | None) -> int:
    """What the level should be for a guest whose RAM was saved like that.

    A step up if the store was too slow for what it got; a step down if the compressor was, and
    the store has room for more; else the same. Always one of :data:`LEVELS`.
    """
    if pace is None:
        return FIRST_LEVEL
    level = max((each for each in LEVELS if each <= pace.level), default=LEVELS[0])
    if pace.seconds < _SHORTEST_SECONDS:
        return level
    if pace.waited_for_store > _STORE_IS_SLOW * pace.seconds:
        return min((each for each in LEVELS if each > level), default=level)
    compressor_is_slow = pace.waited_for_ram < _RAM_IS_SLOW * pace.seconds
    if compressor_is_slow and pace.waited_for_store < _STORE_IS_FAST * pace.seconds:
        return max((each for each in LEVELS if each < level), default=level)
    return level
