"""Parses a hook setting of ``sanoid.conf``: one string that perl passes to a shell."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import PurePath

SETTINGS = {
    "pre_snapshot_script": "pre",
    "post_snapshot_script": "post",
    "pre_pruning_script": "pre-prune",
    "pruning_script": "prune",
}
"""The phase that belongs to each setting."""
_PHASES = tuple(SETTINGS.values())

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""systemd's default for services (systemd.exec(5)): where sanoid finds a hook without a slash."""

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_WRAPPERS = ("env", "exec")


@dataclass(frozen=True, slots=True)
class HookCommand:
    """The parts of a hook setting."""

    program: str
    """As it is written; empty if a shell could not parse the text."""
    phase: str
    """The phase for which snaporch is called; empty for another program."""


def parse_hook(text: str) -> HookCommand:
    """The program that a setting calls, and the phase for which it calls snaporch."""
    try:
        words = shlex.split(text)
    except ValueError:
        return HookCommand("", "")
    while words and (_ASSIGNMENT.match(words[0]) or words[0] in _WRAPPERS):
        words.pop(0)
    if not words:
        return HookCommand("", "")
    program, *arguments = words
    name = PurePath(program).name
    if name.startswith("sanoid-") and name.removeprefix("sanoid-") in _PHASES:
        return HookCommand(program, name.removeprefix("sanoid-"))
    is_snaporch = name == "snaporch" or arguments[:2] == ["-m", "snaporch"]
    return HookCommand(program, _phase(arguments) if is_snaporch else "")


def _phase(arguments: list[str]) -> str:
    """The phase after ``hook sanoid``; options may precede it."""
    try:
        after = arguments[arguments.index("sanoid", arguments.index("hook")) + 1 :]
    except ValueError:
        return ""
    return next((word for word in after if word in _PHASES), "")
