"""The configuration: its schema, from which its documentation is generated, and its loading."""

from snaporch.config.copies import Copies
from snaporch.config.load import DEFAULT_PATH, load_config
from snaporch.config.monitoring import EmailOptions, MetricsOptions, NotifyOptions, StatusOptions
from snaporch.config.policy import Keep, Policy
from snaporch.config.replica import AnyReplica, Replica, ResticReplica
from snaporch.config.schema import Config, DomainSettings, Paths, Schedule
from snaporch.config.source import Source

__all__ = [
    "DEFAULT_PATH",
    "AnyReplica",
    "Config",
    "Copies",
    "DomainSettings",
    "EmailOptions",
    "Keep",
    "MetricsOptions",
    "NotifyOptions",
    "Paths",
    "Policy",
    "Replica",
    "ResticReplica",
    "Schedule",
    "Source",
    "StatusOptions",
    "load_config",
]
