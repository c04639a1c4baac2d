"""The turns of the tests in the lab."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from turns import todays


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 1), (7, 3), (10, 4), (18, 6)])
def test_each_case_runs_within_as_many_days_as_the_matrix_needs(count, size):
    days = -(-count // size)
    for first in (0, 5, 739_000):
        runs = [todays(range(count), size, first + day) for day in range(days)]
        assert {len(each) for each in runs} == {size}
        assert {case for each in runs for case in each} == set(range(count))


def test_a_day_is_always_the_same():
    assert todays("abcdefg", 3, 4) == todays("abcdefg", 3, 4) != todays("abcdefg", 3, 5)
