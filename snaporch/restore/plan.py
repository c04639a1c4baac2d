"""What a restore would do, and every reason not to. All reads."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from snaporch.bundle.manifest import Manifest, Role
from snaporch.errors import NotFoundError, RefusedError, UsageError
from snaporch.model import BundleState, Domain, Level, PoolSnapshot, SnapshotRecord
from snaporch.pool.resolver import NotOnZfsError, resolve
from snaporch.run.context import Context
from snaporch.run.plan import check_snapshot_name, datasets_of, locate_disks
from snaporch.run.records import all_records, missing_of, one_of_each, own_members

_HOST_PLACES = (Path("/"), Path("/var/lib/libvirt"))
_HARMLESS = ("removable", "read-only")
SAFETY_PREFIX = "snaporch-safety_"


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """A restore that may be carried out."""

    record: SnapshotRecord
    manifest: Manifest | None
    domain: Domain | None
    """The domain as it is now; ``None`` when it is undefined."""
    snapshots: tuple[PoolSnapshot, ...]
    newer: tuple[str, ...]
    """Snapshots and bookmarks that have to go."""
    ram: Path | None
    """The image to resume from; ``None`` to boot or to stay off."""
    boot: bool
    cold: bool
    discard_newer: bool
    running: bool
    """Whether the guest ran when it was captured."""
    damaged: frozenset[str] = frozenset()
    """Parts of the bundle that differ from the manifest, and are not put back."""

    def losses(self, context: Context) -> list[str]:
        """What the user gives up, a line each."""
        lines = []
        if self.domain is not None and self.domain.active:
            lines.append(
                f"the state of the running guest {self.domain.name}, which will be stopped"
            )
        if self.domain is not None and self.domain.managed_save:
            lines.append("its managed save image: the RAM it had when libvirt saved it")
        if self.manifest is not None:
            lines += [
                f"the disk {disk.target} stays as it is, which is of another time: {disk.left_out}"
                for disk in self.manifest.disks
                if disk.left_out and self.ram and not disk.left_out.startswith(_HARMLESS)
            ]
        for snapshot in self.snapshots:
            written = context.pool.written_since(snapshot.full_name)
            lines.append(
                f"what was written to {snapshot.dataset} since the snapshot ({written >> 10} KiB)"
            )
        lines += [f"{name}, which is newer" for name in self.newer if not is_safety(name)]
        return lines


def split_name(text: str) -> tuple[str, str]:
    """``DOMAIN@SNAPSHOT`` in two; a domain's name may hold an ``@``, a snapshot's cannot.

    Raises:
        UsageError: it is not of that form.
    """
    domain, _, snapshot = text.rpartition("@")
    if not domain or not snapshot:
        raise UsageError(repr(text), "is not DOMAIN@SNAPSHOT", "see `snaporch list`")
    check_snapshot_name(snapshot)
    return domain, snapshot


def make_restore_plan(
    context: Context, domain_name: str, snapshot: str, *, cold: bool, discard_newer: bool
) -> RestorePlan:
    """Look everything over.

    Args:
        cold: boot from the disks, do not resume from RAM.
        discard_newer: snapshots newer than this one may be destroyed.

    Raises:
        NotFoundError: no such snapshot of such a domain.
        RefusedError: it cannot be done safely, and why.
    """
    everything = context.pool.snapshots()
    record = _find(context, everything, domain_name, snapshot)
    _, manifest = context.store.state(f"{record.uuid}/{record.run}")
    thing = f"{record.domain}@{record.snapshot}"
    of_run = [s for s in everything if s.properties.get("run") == record.run]
    own = own_members(context.store, of_run)
    members = tuple(one_of_each(manifest, own, record.snapshot, newest=True))
    domain = context.hypervisor.find(record.uuid)
    _check_whole(record, manifest, members, domain, cold=cold)
    _check_definition(context, record, manifest, domain)
    _check_bootable(record, manifest, domain, cold=cold)
    _check_alone(context, record)
    _check_own_places(context, record)
    newer = _newer(context, members)
    _check_newer(context, thing, newer, discard=discard_newer)
    wanted = record.level is Level.RAM and not cold
    ram = manifest.part(Role.RAM) if manifest and wanted else None
    return RestorePlan(
        record=record,
        manifest=manifest,
        domain=domain,
        snapshots=members,
        newer=tuple(newer),
        ram=Path(record.bundle) / ram.name if ram and record.bundle else None,
        boot=cold or record.level not in (Level.RAM, Level.OFF),
        cold=cold,
        discard_newer=discard_newer,
        running=manifest.was_running if manifest else False,
    )


def _find(
    context: Context, snapshots: list[PoolSnapshot], domain: str, snapshot: str
) -> SnapshotRecord:
    of_domain = [
        record
        for record in all_records(context.store, snapshots)
        if domain in (record.domain, record.uuid)
    ]
    found = [record for record in of_domain if record.snapshot == snapshot]
    if found:
        return found[-1]
    step = f"see `snaporch list {domain}`" if of_domain else "see `snaporch list`"
    raise NotFoundError(f"{domain}@{snapshot}", "snaporch has no such snapshot", step)


def _check_whole(
    record: SnapshotRecord,
    manifest: Manifest | None,
    members: tuple[PoolSnapshot, ...],
    domain: Domain | None,
    *,
    cold: bool,
) -> None:
    thing = f"{record.domain}@{record.snapshot}"
    if manifest is not None:
        if gone := missing_of(manifest, members):
            names = ", ".join(f"{dataset}@{record.snapshot}" for dataset in gone)
            raise RefusedError(thing, f"its snapshots are not all there: {names} is gone")
    elif domain is not None:
        planned, _ = locate_disks(domain)
        bare = {disk.dataset.name for disk in planned} - {member.dataset for member in members}
        if bare:
            raise RefusedError(thing, f"has no snapshot of {', '.join(sorted(bare))}")
    if cold:
        return
    wanted = any(member.properties.get("level") == Level.RAM for member in members)
    if wanted and record.state is not BundleState.COMPLETE:
        raise RefusedError(
            thing,
            f"its RAM cannot be restored: the bundle is {record.state}",
            "boot it with --cold",
        )


def _check_definition(
    context: Context, record: SnapshotRecord, manifest: Manifest | None, domain: Domain | None
) -> None:
    if domain is None and manifest is None:
        raise RefusedError(
            record.domain, "is undefined, and its bundle is gone", "define it by hand"
        )
    if domain is not None and domain.name != record.domain:
        raise RefusedError(
            record.domain,
            f"is called {domain.name} now",
            f"virsh domrename {domain.name} back first",
        )
    for other in context.hypervisor.domains():
        if other.name == record.domain and other.uuid != record.uuid:
            raise RefusedError(
                record.domain,
                f"another domain has this name (UUID {other.uuid})",
                "rename it first",
            )


def _check_alone(context: Context, record: SnapshotRecord) -> None:
    """A rollback takes along whatever else lives in the dataset."""
    for other in context.hypervisor.domains():
        if other.uuid == record.uuid:
            continue
        shared = datasets_of(other) & set(record.datasets)
        if shared:
            raise RefusedError(
                record.domain,
                f"the domain {other.name} has disks on {', '.join(sorted(shared))} too, which a "
                "rollback would take back with it",
                "give each guest a dataset of its own",
            )


def _check_own_places(context: Context, record: SnapshotRecord) -> None:
    """A rollback must not take back the bundle it restores from, nor the host itself."""
    paths = context.config.paths
    for place in (paths.bundles, paths.journal, paths.overlays, *_HOST_PLACES):
        with suppress(NotOnZfsError, OSError):
            dataset = resolve(str(place)).name
            if dataset in record.datasets:
                raise RefusedError(
                    record.domain,
                    f"{place} lies in {dataset}, and would be rolled back with the guest",
                    "keep guests in datasets of their own, apart from the host and its bundles",
                )


def _check_bootable(
    record: SnapshotRecord, manifest: Manifest | None, domain: Domain | None, *, cold: bool
) -> None:
    """A transient domain has no definition to boot from; its RAM image has one of its own."""
    resumes = record.level is Level.RAM and not cold
    has_definition = (manifest is not None and manifest.part(Role.INACTIVE_XML) is not None) or (
        domain is not None and domain.inactive_xml is not None
    )
    if not resumes and not has_definition:
        raise RefusedError(
            record.domain, "is transient: there is no definition to boot from", "define it first"
        )


def is_safety(name: str) -> bool:
    """Whether it is the safety snapshot of a restore, which a restore may always destroy."""
    return f"@{SAFETY_PREFIX}" in name


def _newer(context: Context, members: tuple[PoolSnapshot, ...]) -> list[str]:
    """What lies between."""
    return [name for member in members for name in context.pool.newer(member.full_name)]


def _check_newer(context: Context, thing: str, newer: list[str], *, discard: bool) -> None:
    precious = [name for name in newer if not is_safety(name)]
    if precious and not discard:
        raise RefusedError(
            thing,
            f"newer snapshots would be destroyed: {', '.join(precious)}",
            "use --discard-newer if they may go",
        )
    snapshots = [name for name in newer if "@" in name]
    cloned = context.pool.clones(snapshots) if snapshots else {}
    if cloned:
        names = ", ".join(f"{name} (clone {', '.join(of)})" for name, of in cloned.items())
        raise RefusedError(
            thing, f"newer snapshots have clones: {names}", "destroy the clones first"
        )
    held = [name for name in snapshots if context.pool.holds(name)]
    if held:
        raise RefusedError(
            thing, f"newer snapshots are held: {', '.join(held)}", "zfs release them"
        )
