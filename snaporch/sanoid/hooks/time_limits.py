"""How long hooks and the holders of windows wait for one another, by the configuration."""

from __future__ import annotations

from snaporch.config import Config, DomainSettings

_START_SECONDS = 120
"""In which a holder starts and makes its plan, on a host with much to do."""
_DAY = 86400


def patience(settings: DomainSettings) -> int:
    """Seconds for which a holder waits for another run on its domain."""
    return max(settings.wait, settings.hook_deadline)


def plan_seconds(settings: DomainSettings) -> int:
    """In which a holder has its lock and its plan."""
    return patience(settings) + _START_SECONDS


def word_seconds(config: Config) -> int:
    """In which a hook gives a holder the word, be its guest the last one of a call.

    Until then others get their locks and plans, maybe two of them, and their RAM is saved.
    """
    known = [config.defaults, *(config.settings(name, name) for name in config.domain)]
    plans = 2 * max(map(plan_seconds, known))
    ram = max(each.ram_time_budget or _DAY for each in known)
    return plans + ram + max(each.hook_deadline for each in known)
