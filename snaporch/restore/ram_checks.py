"""Whether a restore can resume RAM: the bundle is complete, and all disks are in the snapshot.

Backing files that changed, which ``--despite-other-disks`` allows as well:
:mod:`snaporch.restore.disk_checks`.

Whether the definition in the RAM image is the bundle's: :mod:`snaporch.restore.definition_checks`.
Whether this host has the machine and the memory: :mod:`snaporch.restore.host_requirements`.
"""

from __future__ import annotations

import shlex

from snaporch.bundle.manifest import Manifest
from snaporch.errors import RefusedError
from snaporch.model import BundleState, Level, PoolSnapshot, SnapshotRecord
from snaporch.restore.plan_model import RestorePlan
from snaporch.restore.source import PUT_BACK

_DISKS_ONLY = "use --disks-only"


def check_ram_whole(record: SnapshotRecord, members: tuple[PoolSnapshot, ...]) -> None:
    """Refuse to resume a snapshot with RAM whose bundle is not complete.

    Args:
        members: the ZFS snapshots that exist.

    Raises:
        RefusedError: the RAM cannot be restored.
    """
    thing = record.full_name
    marked = any(member.properties.get("level") == Level.RAM for member in members)
    needs_ram = marked or record.level is Level.RAM
    if needs_ram and record.state is not BundleState.COMPLETE:
        step = "boot it with --cold"
        if record.state is BundleState.DAMAGED:
            again = shlex.join(["snaporch", "verify", "--checksums", thing])
            step = f"{PUT_BACK}, then run `{again}`; or {step}"
        reason = f"its RAM cannot be restored: the bundle is {record.state}"
        raise RefusedError(thing, reason, step)


def check_one_instant(plan: RestorePlan, manifest: Manifest) -> None:
    """Refuse to resume RAM over a disk that is not in the snapshot.

    A resumed guest assumes that its disks have not changed. If one has, the guest corrupts the file
    systems on that disk.
    """
    if others := [disk for disk in manifest.disks if disk.is_apart]:
        names = ", ".join(f"{disk.target} ({disk.left_out_reason})" for disk in others)
        step = "boot it with --cold, or use --despite-other-disks if nothing was"
        raise RefusedError(
            plan.thing,
            f"its RAM would be resumed over {names}, which is not in the snapshot and may have "
            "been written to since",
            _DISKS_ONLY if plan.undoes else step,
        )
