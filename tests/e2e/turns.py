"""A plugin of pytest: of the tests that are marked ``daily``, some run each day, in turns.

Of a matrix ``daily(n)`` only n tests run. Tests of a module that are marked ``daily(n, NAME)`` with
one name are one matrix. With DAY in the environment, those of another day run; with LONG, all.
"""

import os
import random
from collections.abc import Sequence
from datetime import date
from typing import TypeVar

import pytest

Case = TypeVar("Case")


def todays(cases: Sequence[Case], size: int, day: int) -> list[Case]:
    """The cases of a matrix that run on a day: each one at least every ``len(cases) / size`` days.

    Args:
        cases: all of them, in an order that does not change from day to day.
        size: how many run each day.
        day: the number of the day.
    """
    shuffled = random.Random(0).sample(cases, len(cases))
    begin = day * size
    return [shuffled[(begin + number) % len(cases)] for number in range(size)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other days."""
    if os.environ.get("LONG"):
        return
    day = int(os.environ.get("DAY") or date.today().toordinal())  # noqa: DTZ011 - any day will do
    matrices: dict[object, tuple[int, list[pytest.Item]]] = {}
    for item in items:
        mark = item.get_closest_marker("daily")
        if mark is not None:
            function = item.function  # type: ignore[attr-defined]
            key = mark.args if mark.args[1:] else (*mark.args, function)
            matrices.setdefault(key, (mark.args[0], []))[1].append(item)
    rest = {
        item
        for size, cases in matrices.values()
        for item in set(cases) - set(todays(cases, size, day))
    }
    items[:] = [item for item in items if item not in rest]
    config.hook.pytest_deselected(items=list(rest))
