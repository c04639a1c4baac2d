"""What of a guest must not be on a replica in clear, and why: its disks are encrypted on this host.

It is asked, and a bundle is refused, by :mod:`snaporch.replication.replicate`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from snaporch.bundle.manifest import Manifest, Role
from snaporch.context import Context
from snaporch.model import LeftOutCode
from snaporch.zfs.resolver import NotOnZfsError

_COUNTED = (LeftOutCode.EXCLUDED, LeftOutCode.READ_ONLY, LeftOutCode.NOT_ROLLED_BACK)
"""Disks that are left out for these reasons may be on ZFS; RAM has what was read of them."""

_SECRET = {Role.RAM: "RAM", Role.TPM: "TPM state", Role.NVRAM: "UEFI variables"}
"""Parts of a bundle that can have keys of the guest, or what it read of its disks."""


def secrets_in(manifest: Manifest) -> list[str]:
    """The parts of a bundle that are as secret as encrypted disks, for a message."""
    return secret_parts({part.role for part in manifest.parts})


def secret_parts(roles: Collection[Role]) -> list[str]:
    """Those of these parts that are as secret as encrypted disks, for a message."""
    return [text for role, text in _SECRET.items() if role in roles]


def encrypted_disks(
    context: Context, datasets: Iterable[str], manifests: Iterable[Manifest | None]
) -> list[str]:
    """What is encrypted of a guest, one text each, such as ``tank/web is encrypted``.

    A dataset that does not exist any more counts, too, unless a manifest has it as not encrypted.
    So does a disk that is left out of the snapshots and cannot be found now. Removable disks do not
    count.

    Args:
        context: the pools and the resolver of this host.
        datasets: those of the guest's disks, the present ones and those of its older snapshots.
        manifests: of its bundles.

    Raises:
        PoolError: ZFS cannot be asked.
    """
    known = [each for each in manifests if each is not None]
    encrypted = context.pool.encrypted()
    present = {each.name for each in context.pool.datasets()}
    listed = [e for m in known if m.surroundings is not None for e in m.surroundings.datasets]
    clear = {each.dataset for each in listed} - {e.dataset for e in listed if e.encryption_root}
    found = {
        f"{each} is encrypted" if each in present else f"{each} is gone, and may be encrypted"
        for each in datasets
        if each in encrypted or each not in present | clear
    }
    return sorted(found | set(_left_out(context, known, encrypted)))


def _left_out(
    context: Context, manifests: Iterable[Manifest], encrypted: frozenset[str]
) -> Iterator[str]:
    paths = {
        disk.source: disk.target
        for manifest in manifests
        for disk in manifest.disks
        if disk.left_out in _COUNTED and disk.source is not None and disk.source.startswith("/")
    }
    for path, target in paths.items():
        try:
            dataset = context.resolver.resolve(path).name
        except NotOnZfsError:
            continue
        except OSError:
            yield f"{target} ({path}) cannot be read, and may be encrypted"
            continue
        if dataset in encrypted:
            yield f"{dataset} is encrypted"
