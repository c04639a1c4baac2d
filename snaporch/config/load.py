"""Loads ``snaporch.toml``; every error names the file, the key and the allowed values.

Which options exist, and that an unknown one is refused, is decided by
:mod:`snaporch.config.schema` (``extra="forbid"``).
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import ValidationError

from snaporch.config.replica import ENGINE
from snaporch.config.schema import Config, DomainSettings
from snaporch.default_paths import CONFIG
from snaporch.errors import ConfigError

DEFAULT_PATH = CONFIG
_STEP = "see docs/reference/configuration.md"


def load_config(path: Path | None, default: Path | None = None) -> Config:
    """The configuration in ``path``; with ``None``, in the default file if it exists.

    Args:
        default: the default file; :data:`DEFAULT_PATH` if it is not given.

    Raises:
        ConfigError: the file is not readable, not TOML, or does not match the schema.
    """
    chosen = path or default or DEFAULT_PATH
    try:
        text = chosen.read_text("utf-8")
    except FileNotFoundError as error:
        if path is None:
            return Config()
        raise ConfigError(
            str(chosen), "no such file", "give the path of a snaporch.toml"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise ConfigError(str(chosen), reason, "check its type and permissions") from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(chosen), f"is not TOML: {error}", _STEP) from error
    return validate_config(chosen, document)


def validate_config(path: Path, document: dict[str, object]) -> Config:
    """The configuration that was read from ``path``.

    Raises:
        ConfigError: the schema does not allow it.
    """
    prefix: list[str] = []
    try:
        config = Config.model_validate(document)
        for name, section in config.domain.items():
            prefix = ["domain", name]
            DomainSettings.model_validate(section)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        steps = [*prefix, *map(str, first["loc"])]
        key = ".".join(step for step in steps if not step.startswith(ENGINE)) or "document"
        raise ConfigError(f"{path}: {key}", _allowed(dict(first)), _STEP) from error
    return config


def _allowed(problem: dict[str, object]) -> str:
    """Pydantic's message, with the value."""
    if problem["type"] == "extra_forbidden":
        return "is not an option of snaporch"
    message = str(problem["msg"]).removeprefix("Value error, ")
    text = f"{message[:1].lower()}{message[1:]}"
    about_many = isinstance(problem["input"], dict) and problem["type"] == "value_error"
    return text if about_many else f"{text}, not {problem['input']!r}"
