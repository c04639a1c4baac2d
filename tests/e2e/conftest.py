"""Fixtures of the lab tests. They run inside the lab, as root, one module per fresh lab."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

pytestmark = pytest.mark.lab


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.lab)
        item.add_marker(pytest.mark.timeout(900))
