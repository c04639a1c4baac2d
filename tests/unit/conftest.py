"""Fixtures of the unit tests; the fakes lie beside this directory."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes.world import World


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A host of fakes, with nothing on it yet."""
    made = World(tmp_path)
    made.install(monkeypatch)
    return made
