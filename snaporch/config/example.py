"""A configuration file in which every option stands with its default, to be edited."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from snaporch.config.reference import SECTIONS_OF_THEIR_OWN, default_text
from snaporch.config.schema import Config, DomainSettings

_WIDTH = 88
_HEAD = """\
# snaporch's configuration. Each option stands here with its default: take away the # before what
# you change. `snaporch check` says what is wrong with it, docs/configuration.md has more.
"""
_EXAMPLES = """\
# A domain's own settings, by its name or UUID; they override [defaults].
#[domain."web"]
#level = "quiesced"

# A policy: when snapshots are taken by themselves (by `snaporch run-due` or `snaporch daemon`), and
# how many of them stay.
#[policy.hourly]
#every = "1h"
#domains = ["web", "db*"]
#keep = { hourly = 24, daily = 7, weekly = 4 }
#verify = "weekly"
#replicate = ["offsite"]

# Where a policy's snapshots and their bundles are copied to.
#[replica.offsite]
#host = "root@nas"
#dataset = "backup/kvm"
#bundles = "/backup/snaporch"

# Guests that are snapshotted together, in one instant.
#[group.shop]
#domains = ["web", "db"]
"""


def sample() -> str:
    """The text of the file; as it is, it says nothing but the defaults."""
    parts = [_HEAD, *_options(Config())]
    for title, section in _sections(Config(), ""):
        parts += [f"[{title}]\n", *_options(section)]
    return "\n".join([*parts, _EXAMPLES])


def _sections(model: BaseModel, above: str) -> Iterator[tuple[str, BaseModel]]:
    for name, value in model:
        if isinstance(value, BaseModel):
            yield f"{above}{name}", value
            yield from _sections(value, f"{above}{name}.")


def _options(model: BaseModel) -> Iterator[str]:
    for name, field in type(model).model_fields.items():
        if name in SECTIONS_OF_THEIR_OWN and not isinstance(model, DomainSettings):
            continue
        if not isinstance(field.default, BaseModel):
            yield _option(name, field)


def _option(name: str, field: FieldInfo) -> str:
    words = textwrap.wrap(field.description or "", _WIDTH, break_on_hyphens=False)
    lines = [*(f"# {line}" for line in words), f"#{name} = {default_text(field)}"]
    return "\n".join(lines) + "\n"
