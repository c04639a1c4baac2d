"""Known faults of the programs below snaporch, version by version.

One table (:data:`FAULTS`), and one question to it (:func:`known_faults`). ``snaporch check``
reports what it answers, a plan asks :func:`risks_overlays`, and docs/hosts.md prints the table.
Versions are upstream's: a distribution may have taken a fix into an older one. None stands here
that was not seen in its source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from snaporch.model import Disk

Release = tuple[int, int, int]

_RELEASE = re.compile(r"(?:[A-Za-z]+-)?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?![\d.])")
"""With what distributions and git put behind it: ``2.3.2-2``, ``10.0.11+ds``, ``zfs-2.4.2``."""


class Component(StrEnum):
    """A program of the host."""

    QEMU = "QEMU"
    OPENZFS = "OpenZFS"
    LIBVIRT = "libvirt"


class Need(StrEnum):
    """What a host must have for a fault to matter there."""

    DISCARD = "a guest's disk with discard or detect_zeroes"
    VOLUME = "a guest's disk on a ZFS volume"
    CLONING = "zfs_bclone_enabled is 1"
    SNAPDIR = "a file system with guests' disks"
    APPARMOR = "AppArmor is on"
    SPARSE = 'snapshot_image_format is "sparse" in /etc/libvirt/qemu.conf'


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that some versions have."""

    code: str
    """As ``snaporch check`` calls it."""
    component: Component
    since: Release | None
    """The first version with it; ``None`` for all that have no fix."""
    fixed: tuple[Release, ...]
    """The first version without it in each series that was mended, oldest first; empty when no
    version is known to be."""
    need: Need
    harmful: bool
    """Whether a guest's data can be wrong or lost by it, whatever snaporch does."""
    what: str
    meanwhile: str
    """What snaporch does about it."""
    mend: str
    sources: tuple[str, ...]

    def affects(self, release: Release) -> bool:
        """Whether a version has it.

        A series without a fix of its own has it up to the newest fix: 10.2.1 when 10.0.11 and
        11.0.2 are fixed.
        """
        if self.since is not None and release < self.since:
            return False
        if not self.fixed or release >= self.fixed[-1]:
            return not self.fixed
        return not any(fix[:2] == release[:2] and release >= fix for fix in self.fixed)


QCOW2_DISCARD = Fault(
    code="qcow2-discard",
    component=Component.QEMU,
    since=None,
    fixed=((10, 0, 11), (11, 0, 2)),
    need=Need.DISCARD,
    harmful=True,
    what="a discard while another write to the same cluster of a qcow2 image is under way, or a "
    "write of zeros with detect_zeroes='unmap', corrupts the image",
    meanwhile='its overlays are qcow2: `ram_strategy = "auto"` takes `manual` for guests with such '
    "disks, also with several pools and for sanoid",
    mend="upgrade QEMU, then restart the guests; or set discard='ignore' and detect_zeroes='off'",
    sources=(
        "changes of QEMU 10.0.11 and of 11.0.2",
        "'qcow2: Fix corruption on discard during write with COW'",
        "'qcow2: Fix data loss on zero write with detect-zeroes=unmap'",
    ),
)

FAULTS: tuple[Fault, ...] = (
    QCOW2_DISCARD,
    Fault(
        code="volume-flush",
        component=Component.OPENZFS,
        since=(2, 2, 7),
        fixed=((2, 2, 8), (2, 3, 2)),
        need=Need.VOLUME,
        harmful=True,
        what="flushes of guests on volumes are ignored: a power loss takes writes that the guest "
        "was told are stored",
        meanwhile="syncs each volume before its snapshot, so that snapshots hold what was written",
        mend="upgrade OpenZFS, or set sync=always on the volumes",
        sources=("https://github.com/openzfs/zfs/pull/17131",),
    ),
    Fault(
        code="clone-read",
        component=Component.OPENZFS,
        since=(2, 2, 0),
        fixed=((2, 3, 7), (2, 4, 2)),
        need=Need.CLONING,
        harmful=True,
        what="a read after a block clone over what was truncated a moment before gives zeros",
        meanwhile="makes its copies in new files",
        mend="upgrade OpenZFS, or set the module's parameter zfs_bclone_enabled to 0",
        sources=(
            "https://github.com/openzfs/zfs/commit/dceca0d4a36343c9e80a218feb16018ddbc31c0b",
            "https://github.com/openzfs/zfs/commit/e7524594a9",
        ),
    ),
    Fault(
        code="automount-deadlock",
        component=Component.OPENZFS,
        since=None,
        fixed=((2, 4, 2),),
        need=Need.SNAPDIR,
        harmful=False,
        what="a look into .zfs/snapshot while the same file system is rolled back or received into "
        "can hang, and all who list mounts with it",
        meanwhile="reads snapshots through mounts of its own, never there",
        mend="upgrade OpenZFS; until then keep indexers and backups out of .zfs/snapshot",
        sources=(
            "https://github.com/openzfs/zfs/issues/18073",
            "https://github.com/openzfs/zfs/pull/18415",
        ),
    ),
    Fault(
        code="apparmor-commit",
        component=Component.LIBVIRT,
        since=None,
        fixed=((12, 1, 0),),
        need=Need.APPARMOR,
        harmful=False,
        what="the profile of a guest that was started on an overlay denies writing what lies "
        "below: a commit fails with 'Permission denied'",
        meanwhile="`auto` takes `manual`, which commits nothing, where all disks are in one pool; "
        "a commit that is denied leaves the guest running on its overlay, and is told",
        mend="upgrade libvirt; a guest whose commit was denied: shut it off, `snaporch recover`",
        sources=(
            "https://gitlab.com/libvirt/libvirt/-/issues/806",
            "libvirt 12.1.0, NEWS: 'AppArmor: Ask for no deny rule for readonly disk elements'",
        ),
    ),
    Fault(
        code="sparse-images",
        component=Component.LIBVIRT,
        since=(11, 2, 0),
        fixed=(),
        need=Need.SPARSE,
        harmful=False,
        what="the RAM of external snapshots is labelled wrongly, and cannot be restored",
        meanwhile="writes the right label itself; `virsh snapshot-create` does not",
        mend="remove the line, and restart libvirtd",
        sources=(
            "libvirt 11.2.0, NEWS: 'Add sparse as a new save image format'",
            "seen with 11.3.0; no fix in NEWS up to 12.8.0",
        ),
    ),
)


def parse_release(text: str) -> Release | None:
    """The upstream version in ``text``; ``None`` when there is none at its start."""
    found = _RELEASE.match(text.strip())
    if found is None:
        return None
    major, minor, patch = found.groups(default="0")
    return int(major), int(minor), int(patch)


def known_faults(component: Component, version: str) -> Iterator[Fault]:
    """What is known of a version; nothing of one that cannot be read."""
    release = parse_release(version)
    if release is not None:
        yield from (f for f in FAULTS if f.component is component and f.affects(release))


def risks_overlays(emulator: str, disks: Iterable[Disk]) -> bool:
    """Whether a guest's writes could be corrupted in an overlay; an unknown emulator's could."""
    release = parse_release(emulator)
    faulty = release is None or QCOW2_DISCARD.affects(release)
    return faulty and any(disk.discards for disk in disks)
