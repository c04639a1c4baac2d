"""What libvirt's AppArmor driver lets an emulator do."""

from __future__ import annotations

import os
from pathlib import Path

_PROFILES = Path("/etc/apparmor.d/libvirt")


def is_confined(uuid: str, profiles: Path = _PROFILES) -> bool:
    """Whether libvirt has a profile for a guest that runs."""
    return (profiles / f"libvirt-{uuid}.files").exists()


def denies_writing(uuid: str, path: str, profiles: Path = _PROFILES) -> bool:
    """Whether a guest's profile has an express ``deny`` for writing to an image.

    libvirt's virt-aa-helper writes one for all that lies below a disk when the guest is started,
    and when an image is taken from it: with a disk that is detached, or at the end of a backup, a
    copy or a commit. It stays until the guest is off, and wins over what libvirt adds for a commit;
    nothing is logged.
    """
    try:
        lines = (profiles / f"libvirt-{uuid}.files").read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    wanted = {f'deny "{name}" w,' for name in (path, os.path.realpath(path))}
    return any(line.strip() in wanted for line in lines)
