import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaporch.bundle.compression_tuning import FIRST_LEVEL, LEVELS, RamSaveTimes, next_level


def test_nothing_to_go_by():
    assert next_level(None) == FIRST_LEVEL


@pytest.mark.parametrize(
    ("level", "waited_for_ram", "waited_for_store", "then"),
    [
        (1, 0.0, 0.0, -1),  # the compressor held it up
        (1, 1.4, 0.4, -1),
        (1, 1.6, 0.0, 1),  # QEMU did
        (1, 9.0, 0.0, 1),
        (1, 0.0, 0.6, 1),  # the store has not much room for more
        (1, 0.0, 2.4, 1),
        (1, 0.0, 2.6, 3),  # the store held it up
        (1, 5.0, 4.0, 3),
        (-7, 0.0, 0.0, -7),  # there is no faster one
        (5, 0.0, 9.0, 5),  # nor one that would help
        (-3, 0.0, 9.0, -1),
        (3, 0.0, 0.0, 1),
        (19, 0.0, 0.0, 3),  # one that was set, as are those below
        (2, 0.0, 9.0, 3),
        (2, 5.0, 0.0, 1),
        (0, 5.0, 0.0, -1),
    ],
)
def test_a_step_towards_what_keeps_up(level, waited_for_ram, waited_for_store, then):
    assert next_level(RamSaveTimes(level, 10.0, waited_for_ram, waited_for_store)) == then


def test_a_short_save_changes_nothing():
    assert next_level(RamSaveTimes(3, 0.9, 0.0, 0.0)) == 3
    assert next_level(RamSaveTimes(3, 1.0, 0.0, 0.0)) == 1


def saved_at(level, ram, compressor, store):
    """The time of three parties with speeds in MiB/s of RAM; the faster ones wait."""
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
def test_it_comes_to_a_level_near_the_fastest(ram, first, factor, store):
    """Whatever the machine: one level on, at most, from a level at which nothing is faster."""
    speeds = {level: first / factor**index for index, level in enumerate(LEVELS)}
    rooms = {level: store * (1 + 0.05 * index) for index, level in enumerate(LEVELS)}
    level = FIRST_LEVEL
    for _ in range(3 * len(LEVELS)):
        level = next_level(saved_at(level, ram, speeds[level], rooms[level]))
    near = range(max(LEVELS.index(level) - 1, 0), min(LEVELS.index(level) + 2, len(LEVELS)))
    reached = max(min(ram, speeds[LEVELS[n]], rooms[LEVELS[n]]) for n in near)
    best = max(min(ram, speeds[each], rooms[each]) for each in LEVELS)
    assert reached >= 0.7 * best
