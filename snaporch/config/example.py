"""Writes a configuration file that has every option with its default, commented out."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from snaporch.config.reference import SECTIONS_OF_THEIR_OWN, default_text
from snaporch.config.schema import Config, DomainSettings

_WIDTH = 88
_HEAD = """\
# snaporch's configuration. Each option is shown with its default: remove the # of those that you
# change. `snaporch check` finds mistakes; docs/reference/configuration.md describes each option.
"""
_EXAMPLES = """\
# A domain's own settings, by its name or UUID; they override [defaults].
#[domain."web"]
#level = "quiesced"

# A policy: when `snaporch run-due` or `snaporch daemon` takes snapshots, and how many of them are
# kept.
#[policy.hourly]
#every = "1h"
#domains = ["web", "db*"]
#keep = { hourly = 24, daily = 7, weekly = 4 }
#verify = "weekly"
#replicate = ["offsite"]

# A replica: where a policy's snapshots and their bundles are copied to.
#[replica.offsite]
#host = "root@nas"
#dataset = "backup/kvm"
#bundles = "/backup/snaporch"

# A source: a host whose guests this machine copies.
#[source.vm1]
#host = "root@vm1"
#dataset = "backup/vm1"
#bundles = "/backup/vm1"
#every = "1h"
#keep = { daily = 90 }

# Copies on this machine that another one sends, of which old ones are deleted.
#[copies.vm2]
#dataset = "backup/vm2"
#bundles = "/backup/vm2"
#keep = { hourly = 720, daily = 90 }

# A group: guests that are snapshotted together, at the same instant.
#[group.shop]
#domains = ["web", "db"]
"""


def example_text() -> str:
    """The text of the file; unedited, it sets nothing."""
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
