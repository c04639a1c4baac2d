"""Reads the definitions in a bundle on a replica: bounded in size, of the guest, and checked.

What is defined on this host besides the guest: :mod:`snaporch.rebuild.surroundings`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Sequence

from snaporch.bundle.age import Identity
from snaporch.bundle.manifest import Part, Role
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.hypervisor import domain_xml
from snaporch.hypervisor.clone_allowlist import is_own
from snaporch.hypervisor.volume_paths import with_volume_paths
from snaporch.model import DatasetKind
from snaporch.rebuild.decrypt_bundles import decrypt_definition, missing_identity
from snaporch.rebuild.plan import RebuildPlan
from snaporch.rebuild.replica_source import Source
from snaporch.rebuild.surroundings import Surroundings
from snaporch.replication.interface import ReplicaError
from snaporch.restore.definition_checks import check_identity
from snaporch.restore.foreign_definition import check_foreign_definitions

_MAX_XML = 1 << 20
_PARTITION = re.compile(r"-part[0-9]+\Z")
"""The end of a link to a partition of a volume, as udev names it."""
BY_HAND = "bring it back by hand: see docs/how-to/replication.md, 'By hand'"


def definitions(source: Source, plan: RebuildPlan, identity: Identity | None = None) -> list[str]:
    """The definitions in the bundle, the running guest's first.

    Args:
        source: the replica.
        plan: what comes back.
        identity: decrypts them.

    Raises:
        RefusedError: one is too long to be one, or of another guest, or there is no identity for
            encrypted ones.
        ReplicaError: one is not what the manifest says, or cannot be decrypted.
    """
    manifest = plan.sent or plan.manifest
    if plan.sent and identity is None:
        raise missing_identity(plan.thing, plan.sent, source.name)
    found = [manifest.part(role) for role in (Role.LIVE_XML, Role.INACTIVE_XML)]
    return [_definition(source, plan, part, identity) for part in found if part]


def _definition(source: Source, plan: RebuildPlan, part: Part, identity: Identity | None) -> str:
    if part.bytes > _MAX_XML:
        raise RefusedError(plan.thing, f"its {part.role} has {part.bytes >> 10} KiB", BY_HAND)
    data = source.text(plan.reference, part).encode("utf-8", "surrogateescape")
    if hashlib.sha256(data).hexdigest() != part.sha256:
        reason = f"its {part.role} is damaged on replica {source.name}"
        raise ReplicaError(plan.thing, reason, "name an older snapshot: DOMAIN@SNAPSHOT")
    if identity is not None:
        data = decrypt_definition(plan.thing, part, data, identity)
    text = data.decode("utf-8", "surrogateescape")
    check_identity(plan.thing, f"its {part.role}", text, plan.manifest)
    return text


def check_definitions(
    context: Context,
    plan: RebuildPlan,
    surroundings: Surroundings,
    xmls: Sequence[str],
    accepted: Collection[str],
) -> None:
    """Refuse what the restore would refuse of the definitions when all data is here.

    Raises:
        RefusedError: see :func:`~snaporch.restore.foreign_definition.check_foreign_definitions`.
    """
    file_systems = {each.mountpoint for each in plan.incoming if each.mountpoint}
    volumes = {
        str(context.resolver.volume_link(each.dataset))
        for each in plan.incoming
        if each.kind is DatasetKind.VOLUME
    }

    def pools() -> list[str]:
        here = context.hypervisor.defined_storage_pools()
        return [*(each.xml for each in here), *(made.xml for made, _ in surroundings.pools)]

    def has(path: str) -> bool:
        return any(
            will_have(each, file_systems, volumes) for each in (path, os.path.realpath(path))
        )

    paths = [with_volume_paths(each, pools) for each in xmls]
    check_foreign_definitions(plan.thing, paths, accepted, has)


def will_have(path: str, file_systems: Collection[str], volumes: Collection[str]) -> bool:
    """Whether a path will be in a guest's file systems, or one of its volumes or their partitions.

    Args:
        path: absolute.
        file_systems: their mount points.
        volumes: the links to their devices.
    """
    return is_own(path, file_systems) or _PARTITION.sub("", path) in volumes


def other_host_values(*xmls: str) -> list[str]:
    """What definitions take of this host besides paths, for the question to the admin.

    These are the values in sources and security labels, devices of the host included, and arguments
    of QEMU: a program in one of them would run with QEMU's rights.
    """
    values = set().union(*(domain_xml.host_values(domain_xml.parse(xml)) for xml in xmls))
    return sorted(
        {
            f"<{tag.rpartition('}')[2]}> {f'{key}={value}' if key else value}"
            for tag, key, value in values
            if tag and key != "index" and not value.startswith("/")
        }
    )


def host_paths(*xmls: str) -> list[str]:
    """The paths of this host in definitions, for the question to the admin."""
    return sorted({path for xml in xmls for path in domain_xml.host_paths(domain_xml.parse(xml))})
