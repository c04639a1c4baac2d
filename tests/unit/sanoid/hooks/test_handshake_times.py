"""How long hooks and hold processes wait for one another."""

import pytest

from snaporch.config import Config
from snaporch.sanoid.hooks.handshake_times import order_seconds, patience, plan_seconds


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"defaults": {"wait": "500s", "hook_deadline": "100s"}},
        {"domain": {"db": {"wait": "500s"}, "web": {"ram_time_budget": "7200s"}}},
        {"domain": {"db": {"hook_deadline": "3000s", "ram_time_budget": "0s"}}},
    ],
)
def test_a_wait_for_others_is_longer_than_each_of_them_may_take(config):
    known = Config.model_validate(config)
    for settings in (known.defaults, *(known.settings(name, "") for name in known.domain)):
        assert plan_seconds(settings) > patience(settings) >= settings.hook_deadline
        others = plan_seconds(settings) + settings.ram_time_budget + settings.hook_deadline
        assert order_seconds(known) > others
