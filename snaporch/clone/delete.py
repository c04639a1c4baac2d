"""Delete a permanent clone, after checks that it is one and that nothing else uses it.

What belongs to a clone is found, and removed, by :mod:`snaporch.clone.find_clones`.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from snaporch import default_paths
from snaporch.clone.find_clones import CloneArtifacts, Purpose, directory_of, find_artifacts, remove
from snaporch.context import Context
from snaporch.errors import NotFoundError, RefusedError
from snaporch.hypervisor.clone_xml import clone_of
from snaporch.locks import domain_lock
from snaporch.model import Domain
from snaporch.snapshot.locate_disks import datasets_of


@dataclass(frozen=True, slots=True)
class DeletedClone:
    """A clone that was deleted."""

    name: str
    uuid: str
    done: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """The documented JSON object."""
        return {"name": self.name, "uuid": self.uuid, "removed": list(self.done)}


def delete_clone(context: Context, name: str) -> DeletedClone:
    """Delete the clone ``name``: its domain, its datasets, its UEFI variables.

    Raises:
        NotFoundError: there is no domain and no leftover clone with this name.
        RefusedError: snaporch did not make it, or something else depends on it.
    """
    uuid = _uuid_of(context, name)
    lock = domain_lock(
        default_paths.LOCKS, name, uuid, "clone --delete", wait=0, interrupt=context.interrupt
    )
    with lock:
        _check(context, name, uuid)
        done = remove(context, uuid)
        (default_paths.LOCKS / f"{uuid}.lock").unlink(missing_ok=True)
    return DeletedClone(name, uuid, tuple(done))


def _uuid_of(context: Context, name: str) -> str:
    """Find the clone by its domain, or by its datasets if another program undefined the domain."""
    for domain in context.hypervisor.domains():
        if name in (domain.name, domain.uuid):
            if not _is_marked(domain):
                raise RefusedError(name, "is not a clone that snaporch made", "nothing was changed")
            return domain.uuid
    for artifacts in find_artifacts(context):
        if name in (artifacts.name, artifacts.uuid):
            _check_renamed(context, name, artifacts)
            return artifacts.uuid
    raise NotFoundError(name, "no such clone", "see `virsh list --all`")


def _check_renamed(context: Context, name: str, artifacts: CloneArtifacts) -> None:
    """Refuse the old name of a clone that was renamed: the admin may use it as a guest now."""
    domain = context.hypervisor.find(artifacts.uuid)
    if domain is not None and name != artifacts.uuid:
        raise RefusedError(
            name,
            f"was renamed to {domain.name}",
            f"to delete it: {shlex.join(['snaporch', 'clone', '--delete', domain.name])}",
        )


def _is_marked(domain: Domain) -> bool:
    xml = domain.inactive_xml or domain.live_xml
    return xml is not None and clone_of(xml) is not None


def _check(context: Context, name: str, uuid: str) -> None:
    artifacts = next((found for found in find_artifacts(context) if found.uuid == uuid), None)
    if artifacts is None:
        if directory_of(context, uuid).exists():
            return
        domain = context.hypervisor.find(uuid)
        if domain is not None and datasets_of(context.resolver, domain):
            names = ", ".join(sorted(datasets_of(context.resolver, domain)))
            raise RefusedError(name, f"its disks on {names} carry no mark of a clone")
        return
    if artifacts.purpose is not Purpose.CLONE:
        raise RefusedError(
            name,
            f"is a temporary clone, made by {artifacts.purpose}",
            "snaporch recover removes it",
        )
    _check_datasets(context, name, artifacts)
    _check_others(context, name, artifacts)


def _check_datasets(context: Context, name: str, artifacts: CloneArtifacts) -> None:
    promoted = set(artifacts.datasets) - set(context.pool.origins(artifacts.datasets))
    if promoted:
        raise RefusedError(
            name,
            f"{', '.join(sorted(promoted))} is no longer a clone (promoted?)",
            "to keep it, use zfs inherit snaporch:clone on it, then try again",
        )
    for mount in context.pool.blocking_mounts(artifacts.datasets):
        if mount.uuid != artifacts.uuid:
            command = shlex.join(["snaporch", "clone", "--delete", name])
            step = f"shut it off or end it, then run again: {command}"
            raise RefusedError(name, f"{mount.name} is mounted by {mount.program}", step)
    snapshots = [snapshot.full_name for snapshot in context.pool.snapshots(artifacts.datasets)]
    if snapshots:
        raise RefusedError(
            name, f"it has snapshots: {', '.join(snapshots)}", "destroy them first with zfs destroy"
        )
    below = [
        dataset.name
        for dataset in context.pool.datasets()
        if dataset.name not in artifacts.datasets
        and any(dataset.name.startswith(f"{parent}/") for parent in artifacts.datasets)
    ]
    if below:
        raise RefusedError(name, f"there are datasets below it: {', '.join(below)}")


def _check_others(context: Context, name: str, artifacts: CloneArtifacts) -> None:
    for domain in context.hypervisor.domains():
        shared = datasets_of(context.resolver, domain) & set(artifacts.datasets)
        if domain.uuid != artifacts.uuid and shared:
            raise RefusedError(
                name, f"the domain {domain.name} has disks on {', '.join(sorted(shared))} too"
            )
