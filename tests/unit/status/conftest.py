"""A world with policies, and its status."""

import pytest
from fakes.schedule import NOW, Scheduled

from snaporch.schedule.forecast import make_forecasts
from snaporch.status.collect import collect_status


@pytest.fixture
def scheduled(world):
    world.add_guest()
    return Scheduled(world)


@pytest.fixture
def standing(scheduled):
    """Collects the status at a time."""

    def stand(now=NOW):
        return collect_status(scheduled.context, make_forecasts(scheduled.context, now), now)

    return stand
