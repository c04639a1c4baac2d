"""The configuration: its schema, which is also its documentation, and its loading."""

from snaporch.config.load import DEFAULT_PATH, load_config
from snaporch.config.schema import Config, DomainSettings, Paths

__all__ = ["DEFAULT_PATH", "Config", "DomainSettings", "Paths", "load_config"]
