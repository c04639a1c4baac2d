"""A world with policies."""

import pytest
from fakes.schedule import Scheduled


@pytest.fixture
def scheduled(world):
    world.add_guest()
    return Scheduled(world)
