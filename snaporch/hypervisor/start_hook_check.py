"""libvirt's hook that prevents guests from being started on overlays: its place, and its check.

libvirt looks for hooks when it starts. From then on it calls them for each guest that it starts,
and after its own restart for each running guest. So a hook that was never called while guests run
is one that libvirt does not know. Without running guests libvirt knows a hook that is older than
the start of its daemon.
"""

from __future__ import annotations

import os
from pathlib import Path

from snaporch.data_files import shared_file
from snaporch.default_paths import HOST, HostPaths
from snaporch.hypervisor.interface import StartHookProblem

SOURCE = "hooks/libvirt-qemu"
PLACE = Path("/etc/libvirt/hooks/qemu.d/snaporch")
"""Read by libvirt 6.5 and later."""
CALLED = Path("/run/snaporch-hook")
"""The hook creates this file whenever it is called."""
PACKAGED = Path("/usr/lib/systemd/system/snaporch.slice")
"""A unit of the package, whose hook dpkg installs."""
_VENDORED = Path("/usr/lib/snaporch/site")
"""What only the package with its libraries inside has."""
_MISSING = "-o Dpkg::Options::=--force-confmiss"
"""dpkg installs a missing conffile again only with it."""


def find_hook_problem(
    *,
    may_have_called: bool,
    place: Path = PLACE,
    called: Path = CALLED,
    host: HostPaths = HOST,
    packaged: Path = PACKAGED,
) -> StartHookProblem | None:
    """Check the hook: its problem and the remedy, or ``None``.

    Args:
        may_have_called: guests run, so libvirt has called its hooks. The daemon runs, too.
        place: the hook.
        called: what it creates.
        host: where the host has what the check reads.
        packaged: exists if snaporch is a package.

    Raises:
        UnavailableError: snaporch's own copy of the hook is not installed.
    """
    try:
        text = place.read_text("utf-8", "replace")
    except OSError:
        return StartHookProblem(f"{place} does not exist", _install_command(packaged))
    _, _, body = shared_file(SOURCE).read_text("utf-8").partition("\n")
    if not text.endswith(body) or not os.access(place, os.X_OK):
        install = _install_command(packaged)
        step = f"rm {place} && {install}" if packaged.exists() else install
        return StartHookProblem(f"{place} is not the hook of this version of snaporch", step)
    daemon = "virtqemud" if (host.run / "virtqemud.pid").exists() else "libvirtd"
    if not _is_loaded(place, called, host.run / f"{daemon}.pid", may_have_called=may_have_called):
        restart = f"systemctl try-restart {daemon}"
        return StartHookProblem(f"libvirt has not loaded {place} yet", restart)
    return None


def _is_loaded(place: Path, called: Path, daemon: Path, *, may_have_called: bool) -> bool:
    """Whether libvirt's daemon knows the hook.

    Args:
        daemon: the file that the daemon writes when it starts; without it only ``called`` counts.
    """
    try:
        called_at = called.stat().st_mtime
    except OSError:
        if may_have_called:
            return False
        called_at = 0.0
    try:
        started = daemon.stat().st_mtime
        changed = max(place.stat().st_ctime, place.parent.stat().st_ctime)
    except OSError:
        return True
    return called_at >= started or changed < started


def _install_command(packaged: Path) -> str:
    """The command that installs the hook. `snaporch install` also writes units, as dpkg does."""
    if not packaged.exists():
        return "snaporch install"
    name = "snaporch-vendored" if _VENDORED.exists() else "snaporch"
    return f"apt-get install --reinstall {_MISSING} {name}"
