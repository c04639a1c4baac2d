"""Fixtures of the lab tests. They run inside the lab, as root, one module per fresh lab."""

import os
import random
import sys
from datetime import date
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

pytestmark = pytest.mark.lab


def pytest_collection_modifyitems(config, items):
    for item in items:
        item.add_marker(pytest.mark.lab)
        item.add_marker(pytest.mark.timeout(900))
    if not os.environ.get("LONG"):
        rest = [item for item in items if not is_todays(item, items)]
        items[:] = [item for item in items if item not in rest]
        config.hook.pytest_deselected(items=rest)


def is_todays(item, items):
    """Whether it is run today: of a matrix ``daily(n)`` only so many are, each in its turn."""
    mark = item.get_closest_marker("daily")
    if mark is None:
        return True
    cases = [each for each in items if each.function is item.function]
    size = mark.args[0]
    shuffled = random.Random(0).sample(cases, len(cases))
    begin = date.today().toordinal() * size  # noqa: DTZ011 - any day will do
    return item in [shuffled[(begin + number) % len(cases)] for number in range(size)]
