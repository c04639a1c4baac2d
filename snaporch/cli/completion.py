"""The names with which a shell completes a command line: domains, snapshots, policies, replicas.

typer completes commands, options and choices. This module adds the names that exist on the host.
It reads without locks, gives up after :data:`SECONDS`, and reports nothing: a shell that waits for
a name must get its prompt back.
"""

from __future__ import annotations

import os
import re
import threading
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snaporch.default_paths import CONFIG, LIBVIRT_URI

if TYPE_CHECKING:
    from snaporch.zfs import Pool

SECONDS = 2.0
"""How long a completion may take."""
_PLAIN = re.compile(r"[\w.@:+-]+")
"""Other names are not offered: shells evaluate them, or split them into words."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One name, with the attributes of click's ``CompletionItem``."""

    value: str
    help: str | None = None
    type: str = "plain"


def _domains(config: Mapping[str, Any]) -> Iterable[str]:
    from snaporch.hypervisor.domain_names import domain_names

    return domain_names(config.get("libvirt_uri", LIBVIRT_URI))


def _snapshots(config: Mapping[str, Any]) -> Iterable[str]:
    from snaporch.zfs.open_pool import open_pool

    del config
    return snapshot_names(open_pool(read_only=True))


def snapshot_names(pool: Pool) -> set[str]:
    """``DOMAIN@SNAPSHOT`` for each snapshot that a run of snaporch marked."""
    marked = [each for each in pool.snapshots() if "domain" in each.properties]
    return {f"{each.properties['domain']}@{each.name}" for each in marked}


def _section(name: str, config: Mapping[str, Any]) -> Iterable[str]:
    return list(config.get(name, {}))


_BY_METAVAR: Mapping[str, Callable[[Mapping[str, Any]], Iterable[str]]] = {
    "DOMAIN": _domains,
    "DOMAIN@SNAPSHOT": _snapshots,
}
_BY_OPTION: Mapping[str, Callable[[Mapping[str, Any]], Iterable[str]]] = {
    "--group": partial(_section, "group"),
    "--policy": partial(_section, "policy"),
    "--to": partial(_section, "replica"),
    "--from": partial(_section, "replica"),
}


def add_completion(parameter: Any) -> None:
    """Complete a parameter of a command with existing names, if its metavar or option has some."""
    metavar = re.sub(r"[^A-Z@]", "", parameter.metavar or "")
    options = [_BY_OPTION[each] for each in parameter.opts if each in _BY_OPTION]
    sources = options or [_BY_METAVAR[metavar]] if options or metavar in _BY_METAVAR else []
    if sources:
        parameter.shell_complete = partial(_complete, sources[0])


def _complete(
    source: Callable[[Mapping[str, Any]], Iterable[str]], context: Any, incomplete: str
) -> list[Completion]:
    if context.params.get("delete") and source is _snapshots:  # clone --delete CLONE
        source = _domains
    names = names_in_time(lambda: source(_read_config(context)), SECONDS)
    return [Completion(name) for name in names if name.startswith(incomplete)]


def names_in_time(source: Callable[[], Iterable[str]], seconds: float) -> list[str]:
    """The plain names of ``source``, sorted; none if it fails or takes longer than ``seconds``."""
    found: list[str] = []

    def read() -> None:
        with suppress(Exception):
            found.extend(sorted(name for name in source() if _PLAIN.fullmatch(name)))

    # libvirt and ZFS may hang in the kernel: the process exits without this thread
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(seconds)
    return list(found)


def _read_config(context: Any) -> dict[str, Any]:
    """The configuration as it is written; a mistake elsewhere in it hides no name."""
    named = [each.params.get("config") for each in (context, context.parent) if each]
    path = next((each for each in named if each), None) or os.environ.get("SNAPORCH_CONFIG")
    try:
        return tomllib.loads(Path(path or CONFIG).read_text("utf-8"))
    except FileNotFoundError:
        return {}
