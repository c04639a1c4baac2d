"""The settings that a hook needs before it knows of any guest, read without the schema.

The options and their defaults, such as ``hook_deadline``, are in :mod:`snaporch.config.schema`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snaporch import default_paths

if TYPE_CHECKING:
    from snaporch.config import Config


@dataclass(frozen=True, slots=True)
class HookSettings:
    """A configuration file that was read once, and is validated only if it is needed."""

    path: Path | None
    """The file that the environment names; ``None`` for the default file."""
    document: dict[str, Any]
    libvirt_uri: str
    runtime: Path
    overlays: Path
    bundles: Path

    def validated(self) -> Config:
        """The whole configuration. Imports the schema, which takes time.

        Raises:
            ConfigError: the schema does not allow it.
        """
        from snaporch.config.load import validate_config

        return validate_config(self.path or default_paths.CONFIG, self.document)


def read_settings(environment: Mapping[str, str]) -> HookSettings:
    """Read the configuration file.

    Args:
        environment: ``SNAPORCH_CONFIG`` names the file.

    Raises:
        ConfigError: it cannot be read, or one of these settings is not valid.
    """
    named = environment.get("SNAPORCH_CONFIG")
    path = Path(named) if named else None
    try:
        document = tomllib.loads((path or default_paths.CONFIG).read_text("utf-8"))
        settings = _settings(path, document)
        if isinstance(settings.libvirt_uri, str):
            return settings
    except FileNotFoundError:
        if path is None:
            return _settings(None, {})
    except (OSError, ValueError, TypeError, AttributeError):
        pass
    from snaporch.config import load_config

    config = load_config(path)  # its error names the setting
    return _settings(path, config.model_dump(exclude_unset=True))


def _settings(path: Path | None, document: dict[str, Any]) -> HookSettings:
    paths = document.get("paths", {})
    return HookSettings(
        path,
        document,
        document.get("libvirt_uri", default_paths.LIBVIRT_URI),
        Path(paths.get("runtime", default_paths.RUNTIME)),
        Path(paths.get("overlays", default_paths.OVERLAYS)),
        Path(paths.get("bundles", default_paths.BUNDLES)),
    )
