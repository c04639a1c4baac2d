"""``docs/reference/configuration.md`` from the schema: ``python3 -m snaporch.config.reference``."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from snaporch.config.copies import Copies
from snaporch.config.duration import Duration
from snaporch.config.load import DEFAULT_PATH
from snaporch.config.monitoring import EmailOptions, MetricsOptions, NotifyOptions, StatusOptions
from snaporch.config.policy import Group, Keep, Policy
from snaporch.config.replica import Replica, ResticReplica
from snaporch.config.schema import (
    Config,
    DomainSettings,
    Paths,
    PruneOptions,
    RamPagesOptions,
    Schedule,
)
from snaporch.config.source import Source
from snaporch.config.transfer_window import Windows

_HEAD = f"""# Configuration

Generated from `snaporch/config/schema.py`; change it there and run `make docs`.

snaporch works without a configuration file. It reads `{DEFAULT_PATH}`, or the file
named by `--config` or by `SNAPORCH_CONFIG`. The format is TOML; an option that does not exist, or a
value of the wrong type, is an error that names the file and the key.

A duration is a number with its unit, in quotes: `"250ms"`, `"90s"`, `"5m"`, `"2h"`, `"14d"` or
`"1w"`.
"""
_DOMAIN_INTRO = (
    '`[defaults]` holds for every domain; a `[domain."NAME"]` section (the domain\'s name or UUID) '
    "overrides it option by option."
)
_POLICY_INTRO = (
    "When snapshots are taken and how many of them are kept. The name has at most 32 "
    "small letters, digits and hyphens, and is not `manual` or `none`."
)
_GROUP_INTRO = (
    "A consistency group: see [groups](../how-to/groups.md). The name has the same form as a "
    "policy's. If a domain is in several groups, policies use the first in the file."
)
_REPLICA_INTRO = (
    "A replica: see [replication](../how-to/replication.md). "
    "The name has the same form as a policy's."
)
_RESTIC_INTRO = (
    "A replica in a repository of restic: see [object storage](../how-to/object-storage.md)."
)
_SOURCE_INTRO = (
    "A host whose guests this machine copies: see [pull](../how-to/pull.md). "
    "The name has the same form as a policy's. `keep` is as in `[copies.NAME]`; without it no copy "
    "is deleted."
)
_COPIES_INTRO = (
    "Copies on this machine of which `snaporch prune` deletes old ones: see "
    "[replication](../how-to/replication.md#prune-the-replica). Pulled ones have `keep` in their "
    "`[source.NAME]` instead. `keep` is required here, and written as "
    "`keep = { hourly = 24, daily = 30 }`, with the options of `[policy.NAME.keep]`. The snapshots "
    "of all policies count together."
)
_SECTIONS: tuple[tuple[str, type[BaseModel], str], ...] = (
    ("Top level", Config, ""),
    ("`[paths]`", Paths, ""),
    (
        "`[prune]`",
        PruneOptions,
        "Bundles without snapshots, and safety copies: see [pruning](../how-to/pruning.md).",
    ),
    (
        "`[ram_pages]`",
        RamPagesOptions,
        "RAM that costs what changed: see [RAM in pages](../concepts/ram-pages.md).",
    ),
    ('`[defaults]` and `[domain."NAME"]`', DomainSettings, _DOMAIN_INTRO),
    ("`[schedule]`", Schedule, "See [scheduling](../how-to/schedule.md)."),
    ("`[policy.NAME]`", Policy, _POLICY_INTRO),
    ("`[policy.NAME.keep]`", Keep, "At least one of these options."),
    ("`[group.NAME]`", Group, _GROUP_INTRO),
    ("`[replica.NAME]`", Replica, _REPLICA_INTRO),
    ('`[replica.NAME]` with `engine = "restic"`', ResticReplica, _RESTIC_INTRO),
    ("`[source.NAME]`", Source, _SOURCE_INTRO),
    ("`[copies.NAME]`", Copies, _COPIES_INTRO),
    ("`[status]`", StatusOptions, "See [status](../how-to/status.md)."),
    ("`[metrics]`", MetricsOptions, "See [metrics for Prometheus](metrics.md)."),
    ("`[notify]`", NotifyOptions, "See [notifications](../how-to/notify.md)."),
    ("`[notify.email]`", EmailOptions, ""),
)
SECTIONS_OF_THEIR_OWN = ("domain", "policy", "keep", "group", "replica", "source", "copies")
"""Options that are tables with names chosen by the user, or part of one; described separately."""


def reference() -> str:
    """The page ``docs/reference/configuration.md``."""
    parts = [_HEAD]
    for title, model, intro in _SECTIONS:
        parts.append(f"## {title}\n")
        if intro:
            parts.append(intro + "\n")
        for name, field in model.model_fields.items():
            if isinstance(field.default, BaseModel) or name in SECTIONS_OF_THEIR_OWN:
                continue
            parts.append(_entry(name, field))
    return "\n".join(parts)


def _entry(name: str, field: FieldInfo) -> str:
    return f"### `{name}`\n\n{field.description}\n\nType: {_type(field)}. {_default(field)}\n"


def _type(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    if duration := _duration(field):
        return f"duration, {duration.low} to {duration.high}"
    origin = get_origin(annotation)
    if origin is Literal:
        return "one of " + ", ".join(f"`{json.dumps(choice)}`" for choice in get_args(annotation))
    if origin in (tuple, list, types.GenericAlias):
        return "list of strings"
    if annotation is Windows:
        return "string, or list of strings"
    is_optional = origin is types.UnionType and types.NoneType in get_args(annotation)
    if origin is types.UnionType and not is_optional:
        return "integer or string" if int in get_args(annotation) else "true, false or string"
    if annotation is int or is_optional:
        bounds = {type(m).__name__: m for m in field.metadata}
        low, high = bounds.get("Ge"), bounds.get("Le")
        if is_optional and not low and not high:
            return "integer"
        return f"integer, {getattr(low, 'ge', '…')} to {getattr(high, 'le', '…')}"
    if annotation is bool:
        return "true or false"
    return "absolute path" if annotation is Path else "string"


def _duration(field: FieldInfo) -> Duration | None:
    return next((each for each in field.metadata if isinstance(each, Duration)), None)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "Required."
    if field.default is None:
        return "No default."
    return f"Default: `{default_text(field)}`."


def default_text(field: FieldInfo) -> str:
    """The default of an option as it is written in TOML."""
    value, duration = field.default, _duration(field)
    if duration:
        return json.dumps(duration.text(value))
    return json.dumps(list(value) if isinstance(value, tuple) else value, default=str)


if __name__ == "__main__":
    print(reference(), end="")
