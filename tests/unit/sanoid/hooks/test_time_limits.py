"""How long hooks and holders wait for one another."""

import pytest

from snaporch.config import Config
from snaporch.sanoid.hooks.time_limits import order_seconds, patience, plan_seconds


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"defaults": {"wait": 500, "hook_deadline": 100}},
        {"domain": {"db": {"wait": 500}, "web": {"ram_budget_seconds": 7200}}},
        {"domain": {"db": {"hook_deadline": 3000, "ram_budget_seconds": 0}}},
    ],
)
def test_a_wait_for_others_is_longer_than_each_of_them_may_take(config):
    known = Config.model_validate(config)
    for settings in (known.defaults, *(known.settings(name, "") for name in known.domain)):
        assert plan_seconds(settings) > patience(settings) >= settings.hook_deadline
        others = plan_seconds(settings) + settings.ram_budget_seconds + settings.hook_deadline
        assert order_seconds(known) > others
