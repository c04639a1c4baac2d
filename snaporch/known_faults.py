"""Known faults of the programs below snaporch, version by version.

:data:`FAULTS` is the table, :func:`known_faults` searches it. ``snaporch check`` reports the faults
of the host, a plan asks :func:`risks_overlays`, and docs/reference/hosts.md has the table. The
versions are upstream's: a distribution may have the fix in an older version. Each fault in the
table was confirmed in the program's source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from snaporch.model import Disk

Release = tuple[int, int, int]

_RELEASE = re.compile(r"(?:[A-Za-z]+-)?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?![\d.])")
"""A version with a distribution's prefix or suffix: ``2.3.2-2``, ``10.0.11+ds``, ``zfs-2.4.2``."""


class Component(StrEnum):
    """A program that can have known faults."""

    QEMU = "QEMU"
    OPENZFS = "OpenZFS"
    LIBVIRT = "libvirt"


class FaultCondition(StrEnum):
    """The condition under which a fault matters on a host."""

    DISCARD = "a guest's disk with discard or detect_zeroes"
    VOLUME = "a guest's disk on a ZFS volume"
    CLONING = "zfs_bclone_enabled is 1"
    SNAPDIR = "a file system with guests' disks"
    APPARMOR = "AppArmor is on, and snapshots of a guest use overlays"
    SPARSE = 'snapshot_image_format is "sparse" in /etc/libvirt/qemu.conf'
    PIPES_ONLY = "QEMU is 11.0 or newer"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of some versions of a program."""

    code: str
    """The code of the finding that ``snaporch check`` reports."""
    component: Component
    since: Release | None
    """The first version with the fault; ``None`` if all versions before the fix have it."""
    fixed: tuple[Release, ...]
    """The first version without the fault in each fixed series, oldest first; empty if there is no
    known fix."""
    need: FaultCondition
    harmful: bool
    """Whether the fault can corrupt or lose a guest's data, also without snaporch."""
    what: str
    meanwhile: str
    """How snaporch avoids the fault."""
    fix: str
    sources: tuple[str, ...]
    setting: str = ""
    """The setting of a domain in ``snaporch.toml`` that avoids the fault."""

    def affects(self, release: Release) -> bool:
        """Return whether a version has the fault.

        A series without a fix of its own has the fault if it is older than the newest fix: if
        10.0.11 and 11.0.2 have the fix, 10.2.1 has the fault.
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
    need=FaultCondition.DISCARD,
    harmful=True,
    what="a discard during another write to the same cluster of a qcow2 image, or a "
    "write of zeros with detect_zeroes='unmap', corrupts the image",
    meanwhile='its overlays are qcow2: `ram_strategy = "auto"` takes `manual` for guests with such '
    "disks, also in sanoid's hooks",
    fix="upgrade QEMU, then restart the guests; or set discard='ignore' and detect_zeroes='off'",
    sources=(
        "changes of QEMU 10.0.11 and of 11.0.2",
        "'qcow2: Fix corruption on discard during write with COW'",
        "'qcow2: Fix data loss on zero write with detect-zeroes=unmap'",
    ),
)

SAVED_GUESTS = Fault(
    code="saved-guests",
    component=Component.LIBVIRT,
    since=None,
    fixed=((12, 1, 0),),
    need=FaultCondition.PIPES_ONLY,
    harmful=True,
    what="RAM that libvirt saved uncompressed does not resume: libvirt opens the file for QEMU, "
    "which loads RAM from pipes only",
    meanwhile="restores through a pipe; `virsh start` and libvirt-guests do not",
    fix="set BYPASS_CACHE=1 in /etc/default/libvirt-guests, and resume a saved guest by "
    "`virsh start --bypass-cache`; or upgrade libvirt",
    sources=(
        "QEMU 11.0, removed features: 'migrate command with file-based fd: URI'",
        "libvirt 12.1.0, NEWS: 'Fix failures when restoring save/managed-save images'",
        "seen with libvirt 11.3.0 and QEMU 11.1.0",
    ),
)
_PIPES_ONLY_SINCE: Release = (11, 0, 0)

FAULTS: tuple[Fault, ...] = (
    QCOW2_DISCARD,
    SAVED_GUESTS,
    Fault(
        code="volume-flush",
        component=Component.OPENZFS,
        since=(2, 2, 7),
        fixed=((2, 2, 8), (2, 3, 2)),
        need=FaultCondition.VOLUME,
        harmful=True,
        what="flushes of guests on volumes are ignored: a power loss loses writes that were "
        "confirmed to the guest",
        meanwhile="syncs each volume before its snapshot, so that snapshots have all writes",
        fix="upgrade OpenZFS, or set sync=always on the volumes",
        sources=("https://github.com/openzfs/zfs/pull/17131",),
    ),
    Fault(
        code="clone-read",
        component=Component.OPENZFS,
        since=(2, 2, 0),
        fixed=((2, 3, 7), (2, 4, 2)),
        need=FaultCondition.CLONING,
        harmful=True,
        what="a read after a block clone over a range that was just truncated returns zeros",
        meanwhile="makes its copies in new files",
        fix="upgrade OpenZFS, or set the module's parameter zfs_bclone_enabled to 0",
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
        need=FaultCondition.SNAPDIR,
        harmful=False,
        what="an access to .zfs/snapshot while the same file system is rolled back or received "
        "into can hang, and with it all processes that list mounts",
        meanwhile="reads snapshots through mounts of its own, never through .zfs/snapshot",
        fix="upgrade OpenZFS; until then keep indexers and backups out of .zfs/snapshot",
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
        need=FaultCondition.APPARMOR,
        harmful=False,
        what="the profile of a guest that was started on an overlay denies writing to the "
        "base: a commit fails with 'Permission denied'",
        meanwhile="`auto` takes `manual`, which commits nothing, except in sanoid's hooks; "
        "a commit that is denied leaves the guest running on its overlay, and is reported",
        fix="upgrade libvirt, or avoid overlays in snaporch.toml; a guest whose commit was denied: "
        "shut it off, `snaporch recover`",
        sources=(
            "https://gitlab.com/libvirt/libvirt/-/issues/806",
            "libvirt 12.1.0, NEWS: 'AppArmor: Ask for no deny rule for readonly disk elements'",
        ),
        setting='ram_strategy = "manual"',
    ),
    Fault(
        code="sparse-images",
        component=Component.LIBVIRT,
        since=(11, 2, 0),
        fixed=(),
        need=FaultCondition.SPARSE,
        harmful=False,
        what="the RAM of external snapshots is labelled wrongly, and cannot be restored",
        meanwhile="writes the right label itself; `virsh snapshot-create` does not",
        fix="remove the line, and restart libvirtd",
        sources=(
            "libvirt 11.2.0, NEWS: 'Add sparse as a new save image format'",
            "seen with 11.3.0; no fix in NEWS up to 12.8.0",
        ),
    ),
)


def parse_release(text: str) -> Release | None:
    """Return the upstream version at the start of ``text``; ``None`` if there is none."""
    found = _RELEASE.match(text.strip())
    if found is None:
        return None
    major, minor, patch = found.groups(default="0")
    return int(major), int(minor), int(patch)


def known_faults(component: Component, version: str) -> Iterator[Fault]:
    """Yield the faults of a version; none if the version cannot be parsed."""
    release = parse_release(version)
    if release is not None:
        yield from (f for f in FAULTS if f.component is component and f.affects(release))


def loads_from_pipes_only(emulator: str) -> bool:
    """Return whether this version of QEMU refuses to load RAM from a file that libvirt opened."""
    release = parse_release(emulator)
    return release is not None and release >= _PIPES_ONLY_SINCE


def needs_pipe(releases: Mapping[Component, str]) -> bool:
    """Return whether libvirt has to be asked to give QEMU a saved image through a pipe."""
    faults = known_faults(Component.LIBVIRT, releases[Component.LIBVIRT])
    return loads_from_pipes_only(releases[Component.QEMU]) and SAVED_GUESTS in faults


def risks_overlays(emulator: str, disks: Iterable[Disk]) -> bool:
    """Return whether an overlay could corrupt a guest's writes.

    Args:
        emulator: QEMU's version; one that cannot be parsed counts as faulty.
        disks: the guest's disks; only those that discard are at risk.
    """
    release = parse_release(emulator)
    faulty = release is None or QCOW2_DISCARD.affects(release)
    return faulty and any(disk.discards for disk in disks)
