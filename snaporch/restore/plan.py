"""What a restore would do, and every reason not to. All reads."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from snaporch.bundle.manifest import Manifest, Part, Role
from snaporch.catalog.holds import UNDO_HOLD
from snaporch.catalog.records import check_store, missing_of
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.hypervisor import domain_xml
from snaporch.model import BundleState, Domain, Level, PoolSnapshot, SnapshotRecord
from snaporch.restore.journal import HOLD, KeptDataset
from snaporch.restore.other_files import excluded, found_in, named
from snaporch.restore.preflight import (
    check_beneath,
    check_datasets,
    check_holders,
    check_machine,
    check_memory,
    check_partitions,
    check_places,
    unfit_files,
)
from snaporch.restore.safety_catalog import bookmarks_since
from snaporch.restore.select import find_inside, find_outside, split_name
from snaporch.restore.start_lock import as_defined
from snaporch.snapshot.locate_disks import datasets_of, locate_disks
from snaporch.zfs.resolver import NotOnZfsError, resolve

_HOST_PLACES = (Path("/"), Path("/var/lib/libvirt"))
_DESPITE = "use --despite-other-disks if its content is the same"
_DISKS_ONLY = "use --disks-only"
_PASSWORD = re.compile(r"""(passwd=['"])[^'"]*""")
_MOST_LINES = 20
"""Of a definition that has changed."""
SAFETY_PREFIX = "snaporch-safety_"
__all__ = ["RestorePlan", "is_safety", "make_restore_plan", "split_name"]


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
    running: bool
    """Whether the guest runs when it has been resumed: as it did when it was captured."""
    also_roll_back: bool = False
    """Whether files that are not the guest's may be rolled back with it."""
    damaged: frozenset[str] = frozenset()
    """Parts of the bundle that differ from the manifest, and are not put back."""
    unfit: Mapping[str, RefusedError] = field(default_factory=dict)
    """Parts of the bundle that have no place on this host, and are not put back; and why."""
    apart: bool = False
    """Whether disks and what lies beneath them may be of another time."""
    keep_definition: bool = False
    """Whether the domain stays defined as it is."""
    undoes: str = ""
    """The safety copy that is put back, if it is an undo."""
    kept: tuple[KeptDataset, ...] = ()
    """What the copy has of the datasets that it is received on."""

    @property
    def thing(self) -> str:
        """``DOMAIN@SNAPSHOT``."""
        return self.record.full_name

    @property
    def pages(self) -> Part | None:
        """The RAM to resume from, if an image has to be made of it first."""
        part = self.manifest.part(Role.RAM) if self.manifest and self.ram else None
        return part if part is not None and part.pages is not None else None

    @property
    def parts(self) -> list[Part]:
        """The parts of the bundle that can be put back."""
        if self.manifest is None or self.record.bundle is None:
            return []
        return [
            part
            for part in self.manifest.parts
            if part.name not in self.damaged and part.name not in self.unfit
            if not (self.keep_definition and part.role is Role.INACTIVE_XML)
        ]

    def text(self, role: Role) -> str | None:
        """A part of the bundle that is XML, if it can be read."""
        for part in self.parts:
            if part.role is role and self.record.bundle is not None:
                with suppress(OSError, UnicodeDecodeError):
                    return (Path(self.record.bundle) / part.name).read_text("utf-8")
        return None

    def others(self, context: Context) -> dict[str, list[str]]:
        """Of each dataset the files that are not in the snapshot and would be rolled back with it.

        These are others' files, and images of the guest that were left out.

        Raises:
            RefusedError: it cannot be told of one.
        """
        texts = [self.text(role) for role in (Role.INACTIVE_XML, Role.LIVE_XML)]
        disks = self.manifest.disks if self.manifest else ()
        beneath = [file.path for disk in disks for file in disk.beneath or ()]
        then = [*(disk.source for disk in disks), *beneath]
        now: list[str | None] = []
        if self.domain is not None:
            texts += [self.domain.inactive_xml, self.domain.live_xml]
            now = [disk.source for disk in self.domain.disks]  # of a storage pool's volumes too
        xmls = [xml for xml in map(_readable, texts) if xml is not None]
        paths = [path for path in (*then, *now) if path is not None]
        apart = [disk.source for disk in disks if disk.is_apart and disk.source]
        if self.manifest is None and self.domain is not None:
            apart = excluded(context, self.domain)
        return found_in(context, self.snapshots, xmls, paths, apart)

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
                f"the disk {disk.target} stays as it is, which is of another time: "
                f"{disk.left_out_reason}"
                for disk in self.manifest.disks
                if disk.is_apart and self.ram
            ]
        lines += [f"its {name} stays as it is: {why.reason}" for name, why in self.unfit.items()]
        lines += [f"its {part.name} as it is now" for part in self.parts if part.source is not None]
        lines += self._changes_of_definition()
        for snapshot in self.snapshots:
            written = context.pool.written_since(snapshot.full_name)
            lines.append(
                f"what was written to {snapshot.dataset} since the snapshot ({written >> 10} KiB)"
            )
        if self.also_roll_back:  # else there are none; and none of it stops the restore
            with suppress(RefusedError):
                others = self.others(context).items()
                lines += [f"in {name}: {named(files)}" for name, files in others]
        lines += [f"{name}, which is newer" for name in self.newer if not is_safety(name)]
        for snapshot in self.snapshots:
            _, lost = bookmarks_since(context.pool, snapshot.full_name)
            lines += [f"{name} for good: its snapshot is gone" for name in lost]
        return lines

    def _changes_of_definition(self) -> list[str]:
        """What becomes of the definition: metadata, in which a policy may be, included."""
        now = self.domain.inactive_xml if self.domain else None
        then = self.text(Role.INACTIVE_XML)
        if now is None or then is None or now == then:
            return []
        before, after = (_PASSWORD.sub(r"\1***", text).splitlines() for text in (now, then))
        changes = difflib.unified_diff(before, after, n=0, lineterm="")
        lines = [line for line in list(changes)[2:] if not line.startswith("@@")]
        more = (
            [f"    and {len(lines) - _MOST_LINES} lines more"] if len(lines) > _MOST_LINES else []
        )
        told = [f"    {line[0]} {line[1:].strip()}" for line in lines[:_MOST_LINES]]
        return ["its definition as it is now (virsh dumpxml --inactive):", *told, *more]


def check_others_writes(context: Context, plan: RestorePlan) -> None:
    """Refuse to roll back what others have written since the snapshot, unless it may be.

    Raises:
        RefusedError: it names some of the files; or it cannot be told.
    """
    if plan.also_roll_back:
        return
    for dataset, others in plan.others(context).items():
        raise RefusedError(
            plan.thing,
            f"{dataset} would be rolled back with {named(others)}",
            "move them to a dataset of their own, or use --also-roll-back",
        )


def make_restore_plan(
    context: Context,
    domain_name: str,
    snapshot: str,
    *,
    cold: bool = False,
    paused: bool = False,
    disks_only: bool = False,
    discard_newer: bool = False,
    bundle: Path | None = None,
    apart: bool = False,
    also_roll_back: bool = False,
    keep_definition: bool = False,
) -> RestorePlan:
    """Look everything over.

    Args:
        cold: boot from the disks, do not resume from RAM.
        paused: resume from RAM, and leave the guest paused.
        disks_only: roll back, and leave the guest off.
        discard_newer: snapshots newer than this one may be destroyed.
        bundle: the bundle's directory, if it is not in the store.
        also_roll_back: files that are not the guest's may be rolled back with it.
        apart: RAM may be resumed over disks that are of another time, and disks be put back over
            files that are not what they were.
        keep_definition: the domain stays defined as it is, where no RAM is resumed.

    Raises:
        NotFoundError: no such snapshot of such a domain.
        RefusedError: it cannot be done safely, and why.
    """
    if bundle is None:
        check_store(context.store, context.pool)
    found = find_outside if bundle else find_inside
    record, manifest, members = found(context, domain_name, snapshot, bundle)
    if record.level is Level.TORN:
        raise RefusedError(
            record.full_name,
            "was taken while overlays were committed: its disks are of no instant",
            f"choose another: snaporch list {record.domain}",
        )
    domain = as_defined(context, context.hypervisor.find(record.uuid))
    resumes = not cold and not disks_only
    _check_whole(record, manifest, members, domain, cold=not resumes)
    check_definition(context, record, manifest, domain)
    _check_bootable(record, manifest, domain, cold=cold)
    ram = manifest.part(Role.RAM) if manifest and resumes and record.level is Level.RAM else None
    if paused and ram is None:
        raise RefusedError(record.full_name, "has no RAM to resume from", "use --cold")
    plan = RestorePlan(
        record=record,
        manifest=manifest,
        domain=domain,
        snapshots=members,
        newer=tuple(newer_than(context, members)),
        ram=Path(record.bundle) / ram.name if ram and record.bundle else None,
        boot=cold or (resumes and record.level not in (Level.RAM, Level.OFF)),
        running=manifest is not None and manifest.was_running and not paused,
        also_roll_back=also_roll_back,
        apart=apart,
        keep_definition=keep_definition,
    )
    if keep_definition:
        _check_definition_may_stay(plan)
    return check_plan(
        context, plan, bundle=bundle, disks_only=disks_only, discard_newer=discard_newer
    )


def check_plan(
    context: Context,
    plan: RestorePlan,
    *,
    bundle: Path | None = None,
    disks_only: bool,
    discard_newer: bool,
) -> RestorePlan:
    """See that datasets, disks and files are such that the plan can be carried out on this host.

    Returns: the plan, knowing which files have no place here.

    Raises:
        RefusedError: it cannot be done safely, and why.
    """
    _check_alone(context, plan.record)
    _check_own_places(context, plan.record, bundle)
    if plan.manifest is not None:
        check_places(plan.thing, plan.manifest)
        if not plan.also_roll_back:
            check_partitions(plan.thing, plan.manifest)
        check_files_beneath(plan, plan.manifest)
    check_holders(context, plan.thing, [member.dataset for member in plan.snapshots])
    _check_newer(context, plan, discard=discard_newer)
    if plan.ram is not None and plan.manifest is not None and not plan.apart:
        _check_one_instant(plan, plan.manifest)
    plan = _checked_fitness(context, plan, disks_only=disks_only)
    check_others_writes(context, plan)
    return plan


def check_files_beneath(plan: RestorePlan, manifest: Manifest) -> None:
    """What lies beneath the disks is what it was; an undo must know only for its RAM.

    Raises:
        RefusedError: it is not.
    """
    if not plan.apart:
        step = _DISKS_ONLY if plan.undoes else _DESPITE
        needs_all = plan.ram is not None or not plan.undoes
        check_beneath(plan.thing, manifest, step, unknown_too=needs_all)


def _check_one_instant(plan: RestorePlan, manifest: Manifest) -> None:
    """A guest that finds a disk changed behind its back corrupts the file systems on it."""
    if others := [disk for disk in manifest.disks if disk.is_apart]:
        names = ", ".join(f"{disk.target} ({disk.left_out_reason})" for disk in others)
        step = "boot it with --cold, or use --despite-other-disks if nothing was"
        raise RefusedError(
            plan.thing,
            f"its RAM would be resumed over {names}, which is not in the snapshot and may have "
            "been written to since",
            _DISKS_ONLY if plan.undoes else step,
        )


def _checked_fitness(context: Context, plan: RestorePlan, *, disks_only: bool) -> RestorePlan:
    """The host can run the guest, and its files have their places; or the disks do without."""
    inactive, live = (_readable(plan.text(role)) for role in (Role.INACTIVE_XML, Role.LIVE_XML))
    current = plan.domain.inactive_xml or plan.domain.live_xml if plan.domain else None
    xmls = [xml for xml in (inactive, live, current) if xml is not None]
    unfit = unfit_files(context, plan.thing, plan.record.uuid, plan.parts, xmls)
    if not disks_only:
        for error in unfit.values():
            raise error
    plan = replace(plan, unfit=unfit)
    xml = live or inactive if plan.ram else inactive or current
    if xml is None or not (plan.ram or plan.boot):
        return plan
    cpu = plan.manifest.versions.cpu if plan.manifest and plan.ram else ""
    check_machine(context, plan.thing, xml, plan.domain, resumes=plan.ram is not None, cpu=cpu)
    if plan.manifest is not None:
        check_datasets(context, plan.thing, plan.manifest)
    check_memory(context, plan.thing, xml, plan.manifest if plan.ram else None, plan.domain)
    return plan


def _readable(xml: str | None) -> str | None:
    """The XML, unless it is damaged; its checksum is looked at later."""
    try:
        return xml if xml is not None and domain_xml.parse(xml) is not None else None
    except RefusedError:
        return None


def _check_whole(
    record: SnapshotRecord,
    manifest: Manifest | None,
    members: tuple[PoolSnapshot, ...],
    domain: Domain | None,
    *,
    cold: bool,
) -> None:
    thing = record.full_name
    if manifest is not None:
        if gone := missing_of(manifest, members):
            names = ", ".join(f"{dataset}@{record.snapshot}" for dataset in gone)
            raise RefusedError(thing, f"its snapshots are not all there: {names} is gone")
    elif domain is not None:
        planned, _ = locate_disks(domain)
        bare = {disk.dataset.name for disk in planned} - {member.dataset for member in members}
        if bare:
            raise RefusedError(thing, f"has no snapshot of {', '.join(sorted(bare))}")
        left = {member.dataset for member in members} - {disk.dataset.name for disk in planned}
        if left:
            reason = f"is of {', '.join(sorted(left))}, where the guest has no disk any more"
            raise RefusedError(thing, reason, "define it as it was")
    if cold:
        return
    marked = any(member.properties.get("level") == Level.RAM for member in members)
    wanted = marked or record.level is Level.RAM
    if wanted and record.state is not BundleState.COMPLETE:
        raise RefusedError(
            thing,
            f"its RAM cannot be restored: the bundle is {record.state}",
            "boot it with --cold"
            if record.state is not BundleState.DAMAGED
            else f"look again with `snaporch verify --checksums {shlex.quote(thing)}`, or boot it "
            "with --cold",
        )


def check_definition(
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
            f"shut it off, and run: virsh domrename {shlex.join([domain.name, record.domain])}",
        )
    for other in context.hypervisor.domains():
        if other.name == record.domain and other.uuid != record.uuid:
            raise RefusedError(
                record.domain,
                f"another domain has this name (UUID {other.uuid})",
                "rename it first",
            )


def _check_definition_may_stay(plan: RestorePlan) -> None:
    if plan.ram is not None:
        reason = "its RAM can be resumed only with the definition that it was saved with"
        raise RefusedError(plan.thing, reason, "use --cold or --disks-only as well")
    if plan.domain is None or plan.domain.inactive_xml is None:
        raise RefusedError(plan.thing, "there is no definition to keep", "leave --keep-definition")

    root = domain_xml.parse(plan.domain.inactive_xml)
    state = domain_xml.tpm_state(root)
    for part in plan.parts:
        if part.source is None or part.source == domain_xml.nvram(root):
            continue
        if state is None or not Path(part.source).is_relative_to(state.path):
            raise RefusedError(
                plan.thing,
                f"the definition that stays does not have {part.name} in {part.source}",
                "leave --keep-definition",
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


def _check_own_places(context: Context, record: SnapshotRecord, bundle: Path | None) -> None:
    """A rollback must not take back the bundle it restores from, nor the host itself."""
    paths = context.config.paths
    own = (bundle or paths.bundles, paths.bundles, paths.journal, paths.overlays)
    for place in (*own, *_HOST_PLACES):
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


def newer_than(context: Context, members: Sequence[PoolSnapshot]) -> list[str]:
    """Snapshots and bookmarks that are newer than these."""
    return [name for member in members for name in context.pool.newer(member.full_name)]


def _check_newer(context: Context, plan: RestorePlan, *, discard: bool) -> None:
    precious = [name for name in plan.newer if not is_safety(name)]
    if precious and not discard:
        raise RefusedError(
            plan.thing,
            f"newer snapshots would be destroyed: {', '.join(precious)}",
            "use --discard-newer if they may go",
        )
    check_destroyable(context, plan.thing, plan.record.uuid, plan.newer)


def check_destroyable(context: Context, thing: str, uuid: str, newer: Sequence[str]) -> None:
    """Refuse where ZFS would not destroy what is newer, which a rollback has to.

    Raises:
        RefusedError: a snapshot has clones, is held, or is mounted by another guest.
    """
    snapshots = [name for name in newer if "@" in name]
    cloned = context.pool.clones(snapshots) if snapshots else {}
    if cloned:
        names = ", ".join(f"{name} (clone {', '.join(of)})" for name, of in cloned.items())
        raise RefusedError(
            thing, f"newer snapshots have clones: {names}", "destroy the clones first"
        )
    held = [name for name in snapshots if set(context.pool.holds(name)) - {HOLD, UNDO_HOLD}]
    if held:
        raise RefusedError(
            thing, f"newer snapshots are held: {', '.join(held)}", "zfs release them"
        )
    for mount in context.pool.foreign_mounts(snapshots) if snapshots else ():
        if mount.uuid != uuid:  # the guest itself is stopped first
            raise RefusedError(
                thing,
                f"the newer snapshot {mount.name} is mounted by {mount.holder}",
                "shut it off or end it, then restore again",
            )
