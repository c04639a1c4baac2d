"""The permissions that libvirt's AppArmor driver gives an emulator."""

from __future__ import annotations

import os
from pathlib import Path

PROFILES = Path("/etc/apparmor.d/libvirt")


def is_confined(uuid: str, profiles: Path = PROFILES) -> bool:
    """Whether libvirt has an AppArmor profile for a running guest."""
    return (profiles / f"libvirt-{uuid}.files").exists()


def denies_writing(uuid: str, path: str, profiles: Path = PROFILES) -> bool:
    """Whether a guest's profile explicitly denies writing to an image.

    libvirt's virt-aa-helper writes such a ``deny`` for every image below a disk when the guest
    starts. It also writes one when an image is removed from the guest: when a disk is detached, or
    at the end of a backup, a copy or a commit. The ``deny`` stays until the guest is off, and
    overrides what libvirt adds for a commit. The kernel logs nothing.
    """
    try:
        lines = (profiles / f"libvirt-{uuid}.files").read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    rules = {f'deny "{name}" w,' for name in (path, os.path.realpath(path))}
    return any(line.strip() in rules for line in lines)
