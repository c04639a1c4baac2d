"""The host's files and directories that ``check`` reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from snaporch.sanoid.config.hook_command import PATH
from snaporch.systemd.configurations_in_units import DIRECTORIES


@dataclass(frozen=True, slots=True)
class HostFiles:
    """Files and directories of the host; the defaults are Debian's."""

    qemu_conf: Path = Path("/etc/libvirt/qemu.conf")
    zfs_module: Path = Path("/sys/module/zfs")
    apparmor: Path = Path("/sys/module/apparmor/parameters/enabled")
    cron_job: Path = Path("/etc/cron.d/sanoid")
    """What starts sanoid where systemd is not init."""
    systemd: Path = Path("/run/systemd/system")
    """Exists where systemd is init: sd_booted(3)."""
    unit_directories: tuple[Path, ...] = DIRECTORIES
    path: str = PATH
    """Where programs are searched for, as in ``PATH``."""
    sanoid_defaults: Path | None = None
    """sanoid's defaults; searched for if ``None``."""
