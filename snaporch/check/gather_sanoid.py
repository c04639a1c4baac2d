"""Gathers the facts about sanoid that the rules judge. Only reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from snaporch import __version__
from snaporch.check.facts import HookProgram, SanoidFacts
from snaporch.check.host_files import HostFiles
from snaporch.command_log import LoggedCommand
from snaporch.sanoid.config.hook_command import SETTINGS, parse_hook
from snaporch.sanoid.config.resolve import SanoidConfig, SanoidConfigError, load_sanoid

_VERSION_SECONDS = 60


def own_command(search_path: str) -> str:
    """The absolute path of this ``snaporch``, for a hook setting."""
    called = Path(sys.argv[0])
    if called.name == "snaporch" and called.is_file():
        return str(called.absolute())
    return shutil.which("snaporch", path=search_path) or "snaporch"


def gather_sanoid(config_dir: Path, datasets: Iterable[str], files: HostFiles) -> SanoidFacts:
    """The facts about sanoid, its configuration and the programs that are its hooks.

    Args:
        config_dir: sanoid's configuration directory.
        datasets: the names of all datasets.
        files: the host's files that are read.
    """
    if shutil.which("sanoid", path=files.path) is None:
        return SanoidFacts(installed=False, scheduled=None, directory=config_dir, config=None)
    scheduled = _scheduled(files)
    if not (config_dir / "sanoid.conf").exists():
        return SanoidFacts(True, scheduled, config_dir, None, unused=True)
    try:
        config = load_sanoid(config_dir, datasets, files.sanoid_defaults)
    except SanoidConfigError as error:
        return SanoidFacts(
            True, scheduled, config_dir, None, refusal=f"{error.thing}: {error.reason}"
        )
    return SanoidFacts(True, scheduled, config_dir, config, programs=_programs(config, files.path))


def _scheduled(files: HostFiles) -> bool | None:
    """Debian's cron job does nothing under systemd. Other crontabs are not read."""
    if files.systemd.is_dir():
        command = ["systemctl", "--quiet", "is-active", "sanoid.timer"]
        with LoggedCommand(*command):
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return True if files.cron_job.exists() else None


def _programs(config: SanoidConfig, search_path: str) -> dict[str, HookProgram]:
    texts = {s.settings.get(key, "") for s in config.sections.values() for key in SETTINGS}
    named = {parse_hook(text).program for text in texts if text.strip()}
    return {name: _program(name, search_path) for name in named if name}


def _program(name: str, search_path: str) -> HookProgram:
    path = name if "/" in name else shutil.which(name, path=search_path)
    if path is None or not os.path.isfile(path):
        return HookProgram(exists=False, executable=False)
    if not os.access(path, os.X_OK):
        return HookProgram(exists=True, executable=False)
    return HookProgram(exists=True, executable=True, version=_version(path, search_path))


def _version(path: str, search_path: str) -> str:
    """The version that a ``snaporch`` prints, or the one installed beside a hook's file.

    Other programs are not started; their version is empty.
    """
    name = os.path.basename(path)
    if name.startswith("sanoid-"):  # PREFIX/share/snaporch/hooks, PREFIX/bin
        path = os.path.join(os.path.dirname(os.path.realpath(path)), "../../../bin/snaporch")
    if os.path.basename(path) != "snaporch" or not os.path.isfile(path):
        return ""
    own = own_command(search_path)
    if os.path.exists(own) and os.path.samefile(path, own):
        return __version__
    try:
        with LoggedCommand(path, "--version"):
            done = subprocess.run(
                [path, "--version"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=_VERSION_SECONDS,
            )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    words = done.stdout.decode("utf-8", "replace").split()
    return words[1] if words[:1] == ["snaporch"] and len(words) > 1 else "unknown"
