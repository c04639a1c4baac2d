"""The configuration: its schema, which is also its documentation, and its loading."""

from snaporch.config.load import DEFAULT_PATH, load_config
from snaporch.config.policy import Keep, Policy, Schedule
from snaporch.config.schema import Config, DomainSettings, Paths

__all__ = [
    "DEFAULT_PATH",
    "Config",
    "DomainSettings",
    "Keep",
    "Paths",
    "Policy",
    "Schedule",
    "load_config",
]
