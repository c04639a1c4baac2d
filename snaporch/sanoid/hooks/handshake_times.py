"""How long hooks and hold processes wait for one another, by the configuration.

How long a guest is held is decided by :mod:`snaporch.sanoid.hold.window`.
"""

from __future__ import annotations

from snaporch.config import Config, DomainSettings

_START_SECONDS = 120
"""For a hold process to start and to make its plan, on a busy host."""
_DAY = 86400


def patience(settings: DomainSettings) -> int:
    """Seconds for which a hold process waits for another run on its domain."""
    return max(settings.wait, settings.hook_deadline)


def plan_seconds(settings: DomainSettings) -> int:
    """Seconds within which a hold process must have its lock and its plan."""
    return patience(settings) + _START_SECONDS


def order_seconds(config: Config) -> int:
    """Seconds within which a hook must give a hold process its order, even the call's last one.

    Before it, other guests get their locks and plans, maybe two of them, and their RAM is saved.
    """
    known = [config.defaults, *(config.settings(name, name) for name in config.domain)]
    plans = 2 * max(map(plan_seconds, known))
    ram = max(each.ram_time_budget or _DAY for each in known)
    return plans + ram + max(each.hook_deadline for each in known)
