import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaporch.bundle.compression_tuning import FIRST_LEVEL, LEVELS, RamSaveTimes, next_level


def test_without_measurements_the_level_is_the_default():
    assert next_level(None) == FIRST_LEVEL


@pytest.mark.parametrize(
    ("level", "waited_for_ram", "waited_for_store", "then"),
    [
        (1, 0.0, 0.0, -1),  # the compressor was the bottleneck
        (1, 1.4, 0.4, -1),
        (1, 1.6, 0.0, 1),  # QEMU was the bottleneck
        (1, 9.0, 0.0, 1),
        (1, 0.0, 0.6, 1),  # the store would soon be the bottleneck
        (1, 0.0, 2.4, 1),
        (1, 0.0, 2.6, 3),  # the store was the bottleneck
        (1, 5.0, 4.0, 3),
        (-7, 0.0, 0.0, -7),  # there is no faster level
        (5, 0.0, 9.0, 5),  # no other level would help
        (-3, 0.0, 9.0, -1),
        (3, 0.0, 0.0, 1),
        (19, 0.0, 0.0, 3),  # a configured level, as are those below
        (2, 0.0, 9.0, 3),
        (2, 5.0, 0.0, 1),
        (0, 5.0, 0.0, -1),
    ],
)
def test_the_level_moves_one_step_by_the_previous_bottleneck(
    level, waited_for_ram, waited_for_store, then
):
    assert next_level(RamSaveTimes(level, 10.0, waited_for_ram, waited_for_store)) == then


def test_a_short_save_changes_nothing():
    assert next_level(RamSaveTimes(3, 0.9, 0.0, 0.0)) == 3
    assert next_level(RamSaveTimes(3, 1.0, 0.0, 0.0)) == 1


def saved_at(level, ram, compressor, store):
    """The times of QEMU, compressor and store with speeds in MiB/s of RAM; the faster ones wait."""
    speed = min(ram, compressor, store)
    waited_for_ram = 1 - ram / min(compressor, store) if speed == ram else 0
    waited_for_store = 1 - store / min(compressor, ram) if speed == store else 0
    return RamSaveTimes(level, 10.0, 10 * waited_for_ram, 10 * waited_for_store)


@given(
    ram=st.floats(50, 5000),
    first=st.floats(50, 2000),
    factor=st.floats(1.1, 1.6),
    store=st.floats(20, 5000),
)
def test_the_level_converges_near_the_fastest(ram, first, factor, store):
    """On any machine it ends at most one level from the fastest."""
    speeds = {level: first / factor**index for index, level in enumerate(LEVELS)}
    rooms = {level: store * (1 + 0.05 * index) for index, level in enumerate(LEVELS)}
    level = FIRST_LEVEL
    for _ in range(3 * len(LEVELS)):
        level = next_level(saved_at(level, ram, speeds[level], rooms[level]))
    near = range(max(LEVELS.index(level) - 1, 0), min(LEVELS.index(level) + 2, len(LEVELS)))
    reached = max(min(ram, speeds[LEVELS[n]], rooms[LEVELS[n]]) for n in near)
    best = max(min(ram, speeds[each], rooms[each]) for each in LEVELS)
    assert reached >= 0.7 * best
