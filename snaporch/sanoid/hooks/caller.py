"""Finds the sanoid that called the hook, among the ancestors of this process (proc(5))."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

DEFAULT_CONFIG_DIR = Path("/etc/sanoid")
DEFAULT_CACHE_DIR = Path("/var/cache/sanoid")
_MOST_ANCESTORS = 64


@dataclass(frozen=True, slots=True)
class Caller:
    """The sanoid that called the hook, or its defaults if there is none."""

    pid: int
    """0 if the hook was not called by sanoid."""
    config_dir: Path
    program: Path | None = None
    """Its perl script."""
    cache_dir: Path = DEFAULT_CACHE_DIR


def find_sanoid(proc: Path = Path("/proc"), pid: int | None = None) -> Caller:
    """The nearest sanoid among the ancestors of a process.

    Args:
        pid: of that process; this one by default.
    """
    current = _parent(proc, os.getpid() if pid is None else pid)
    for _ in range(_MOST_ANCESTORS):
        if current <= 1:
            break
        words = _command(proc, current)
        arguments = _sanoid_in(words)
        if arguments:
            script, *options = arguments
            config_dir = _given(options, "configdir", 2) or str(DEFAULT_CONFIG_DIR)
            cache_dir = _given(options, "cache-dir", len("cache-d")) or str(DEFAULT_CACHE_DIR)
            paths = (_absolute(proc, current, Path(x)) for x in (config_dir, script, cache_dir))
            return Caller(current, *paths)
        current = _parent(proc, current)
    return Caller(0, DEFAULT_CONFIG_DIR)


def _parent(proc: Path, pid: int) -> int:
    """Field 4 of ``stat``. Field 2, the name, may contain parentheses and blanks."""
    try:
        text = (proc / str(pid) / "stat").read_text("utf-8", "replace")
        return int(text.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _command(proc: Path, pid: int) -> list[str]:
    try:
        raw = (proc / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return raw.decode("utf-8", "surrogateescape").rstrip("\0").split("\0")


def _sanoid_in(words: list[str]) -> list[str]:
    """sanoid's script and its arguments, without perl; empty if it is another program."""
    rest = words
    if os.path.basename(words[0] if words else "").startswith("perl"):
        rest = words[1:]
        while rest and rest[0].startswith("-"):
            rest = rest[1:]
    if rest and os.path.basename(rest[0]) in ("sanoid", "sanoid.pl"):
        return rest
    return []


def _given(options: list[str], option: str, least: int) -> str:
    """The value of an option as Getopt::Long reads it: one dash or two, with "=" or a blank.

    The name may be abbreviated to ``least`` letters: "c" alone could be ``--cron``.
    """
    for index, word in enumerate(options):
        name, equals, value = word.partition("=")
        bare = name.lstrip("-")
        if not name.startswith("-") or len(bare) < least or not option.startswith(bare.lower()):
            continue
        if not equals:
            value = options[index + 1] if index + 1 < len(options) else ""
        if value:
            return value
    return ""


def _absolute(proc: Path, pid: int, path: Path) -> Path:
    if path.is_absolute():
        return path
    try:
        return Path(os.readlink(proc / str(pid) / "cwd")) / path
    except OSError:
        return path
