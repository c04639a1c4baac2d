"""A world with policies, and how it stands."""

import pytest
from fakes.schedule import NOW, Scheduled

from snaporch.schedule.forecast import look
from snaporch.status.collect import gather


@pytest.fixture
def scheduled(world, monkeypatch):
    monkeypatch.setattr("snaporch.status.collect.unit_states", dict)
    world.add_guest()
    return Scheduled(world)


@pytest.fixture
def standing(scheduled):
    """How it stands at a time."""

    def stand(now=NOW):
        return gather(scheduled.context, look(scheduled.context, now), now)

    return stand
