"""The few settings a hook needs to find out that it has nothing to do, without the schema."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from snaporch import default_paths


@dataclass(frozen=True, slots=True)
class HookSettings:
    """Where to look."""

    config: Path | None
    """The configuration file that was named, if any."""
    libvirt_uri: str
    runtime: Path
    overlays: Path


def peek(environment: Mapping[str, str]) -> HookSettings:
    """What the configuration says, as far as it can be told without checking it.

    Raises:
        ConfigError: it cannot be read; the schema then says what is wrong.
    """
    named = environment.get("SNAPORCH_CONFIG")
    path = Path(named) if named else None
    try:
        document = tomllib.loads((path or default_paths.CONFIG).read_text("utf-8"))
        uri, paths = document.get("libvirt_uri", default_paths.LIBVIRT), document.get("paths", {})
        runtime = Path(paths.get("runtime", default_paths.RUNTIME))
        overlays = Path(paths.get("overlays", default_paths.OVERLAYS))
        if isinstance(uri, str):
            return HookSettings(path, uri, runtime, overlays)
    except FileNotFoundError:
        if path is None:
            return HookSettings(
                None, default_paths.LIBVIRT, default_paths.RUNTIME, default_paths.OVERLAYS
            )
    except (OSError, ValueError, TypeError, AttributeError):
        pass
    from snaporch.config import load_config

    config = load_config(path)
    return HookSettings(path, config.libvirt_uri, config.paths.runtime, config.paths.overlays)
