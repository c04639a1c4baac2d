"""Gathers the facts that the rules judge. Only reads.

They are judged by the modules of :mod:`snaporch.check.rules`.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from snaporch import __version__, default_paths
from snaporch.check.facts import (
    BundlePrivacy,
    GuestFacts,
    HostFacts,
    OpenRunFacts,
    OverlayFacts,
    PageStoreFacts,
    StoreFacts,
    StrayFence,
    UnreadableJournalFacts,
)
from snaporch.check.gather_disks import gather_disks, gather_records
from snaporch.check.gather_policies import takes_snapshots, unknown_names, with_policies
from snaporch.check.gather_sanoid import gather_sanoid, own_command
from snaporch.check.gather_sources import gather_sources
from snaporch.check.host_files import HostFiles
from snaporch.config import AnyReplica, Config, Paths, Replica, ResticReplica
from snaporch.context import Context
from snaporch.disks.overlay_files import QUARANTINE, is_empty
from snaporch.errors import SnaporchError
from snaporch.hypervisor import HypervisorError
from snaporch.hypervisor.start_hook_check import PLACE
from snaporch.journal import (
    OtherJournal,
    SnapshotJournal,
    UnreadableJournal,
    list_journals,
    read_journals,
)
from snaporch.known_faults import Component, FaultCondition, loads_from_pipes_only
from snaporch.locks import lock_holder
from snaporch.model import DatasetKind, Domain, LeftOutCode
from snaporch.remote_host import Host
from snaporch.replication.destination import (
    has_encrypted_bundles,
    has_encrypted_copies,
    unavailable_reason,
    weakness_of,
)
from snaporch.replication.transfer import limits_rate
from snaporch.restore.other_files import describe_other_files, guest_files
from snaporch.sanoid.config.frozen_datasets import frozen_datasets, unfrozen_section
from snaporch.sanoid.hold.snapshotter import estimate_freeze
from snaporch.schedule.carried_out_since import read_first_runs
from snaporch.snapshot.capture_selftest import capture_mode
from snaporch.snapshot.host_directories import dataset_under, existing_part, free_mib
from snaporch.snapshot.locate_disks import datasets_of, locate_disks
from snaporch.snapshot.plan import make_plan
from snaporch.systemd.configurations_in_units import unit_configurations
from snaporch.systemd.unit_state import CARRIERS
from snaporch.zfs.resolver import Resolver

_SPARSE = re.compile(r'^\s*snapshot_image_format\s*=\s*"sparse"', re.MULTILINE)


def choose_domains(context: Context, names: Sequence[str]) -> list[Domain]:
    """The domains with these names or UUIDs, each once; all domains if there are no names.

    Raises:
        NotFoundError: a name matches no domain.
    """
    if not names:
        return context.hypervisor.domains()
    found = [context.hypervisor.domain(name) for name in names]
    return list({domain.uuid: domain for domain in found}.values())


def gather(
    context: Context,
    domains: Sequence[Domain],
    files: HostFiles,
    config_dir: Path,
    config_file: Path,
) -> HostFacts:
    """The facts about the host and about these guests.

    Args:
        files: the host's files that are read.
        config_dir: sanoid's configuration directory.
        config_file: the configuration file that ``context`` has.

    Raises:
        SnaporchError: libvirt or ZFS failed, or a journal cannot be read.
    """
    kinds = {dataset.name: dataset.kind for dataset in context.pool.datasets()}
    names = set(kinds)
    sanoid = gather_sanoid(config_dir, names, files)
    context = replace(
        context,
        unfrozen_by=partial(unfrozen_section, sanoid.config),
        frozen_by_hooks=partial(frozen_datasets, sanoid.config),
    )
    guests = with_policies(context, domains, gather_guests(context, domains))
    encrypted = context.pool.encrypted()
    runs, unreadable = _runs(context)
    releases = _releases(context, files.zfs_module)
    replicas = _replicas(context)
    disks = gather_disks(context, domains, {guest.name for guest in guests if guest.busy})
    return HostFacts(
        version=__version__,
        command=own_command(files.path),
        sanoid=sanoid,
        guests=guests,
        store=_store(context, encrypted),
        pages=_pages(context, domains, names, encrypted),
        replicas=replicas,
        repositories=_repositories(context.config, replicas),
        bundle_privacy=_bundle_privacy(context, replicas),
        weak_replicas=_weak_replicas(context, replicas),
        unlimited=_unlimited(context.config, replicas),
        sources=gather_sources(context),
        overlays=_overlays(context, {run.run for run in runs}),
        datasets=frozenset(names),
        encrypted=encrypted,
        mountpoints=context.pool.mountpoints(),
        runs=runs,
        unreadable_journals=unreadable,
        start_hook_problem=context.hypervisor.start_hook_problem(),
        stray_fences=_stray_fences(context),
        late_fences=_late_fences(context),
        jobs=context.config.sanoid_hook_jobs,
        capture=capture_mode(context),
        volatile=_volatile(context.resolver, context.config.paths),
        releases=releases,
        needs=_needs(domains, guests, kinds, releases, files),
        domain_sections=frozenset(context.config.domain),
        policies=any(map(takes_snapshots, context.config.policy.values())),
        policies_wait=_policies_wait(context),
        other_configurations=_other_configurations(files.unit_directories, config_file),
        unknown_names=unknown_names(context.config, context.hypervisor.domains()),
        disks=disks,
        records=gather_records(context, disks),
    )


def _stray_fences(context: Context) -> tuple[StrayFence, ...]:
    names = {each.name: each.uuid for each in context.hypervisor.domains()}
    here = {*names.values()}
    return tuple(
        StrayFence(each.uuid, each.domain, names.get(each.domain, ""))
        for each in context.fences.all()
        if each.uuid not in here
    )


def _late_fences(context: Context) -> str:
    """The dataset that fences are in, if it can be missing when libvirt calls its hook."""
    if not context.config.replica and not context.fences.all():
        return ""
    return late_dataset(context.resolver, context.fences.directory)


def late_dataset(resolver: Resolver, fences: Path, hook: Path = PLACE) -> str:
    """The dataset of a directory, if it is in another pool than libvirt's hook; else empty."""
    found = [dataset_under(resolver, each) or "" for each in (fences, hook)]
    pools = [each.partition("/")[0] for each in found]
    return found[0] if pools[0] != pools[1] else ""


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


# -- snaporch's units ---------------------------------------------------------------------------


def _policies_wait(context: Context) -> bool:
    """Whether policies have never been carried out, and will not be by the units of this host."""
    units = context.unit_states()
    if not units or read_first_runs(context.config.paths.schedule):
        return False
    return not any(units.get(unit) == "active" for unit in CARRIERS)


def _other_configurations(
    directories: Sequence[Path], config_file: Path
) -> dict[Path, tuple[str, ...]]:
    named = unit_configurations(directories)
    return {file: _sorted(units) for file, units in named.items() if file != config_file}


# -- versions and known faults ------------------------------------------------------------------


def _releases(context: Context, zfs_module: Path) -> dict[Component, str]:
    try:
        found = dict(context.hypervisor.releases())
    except HypervisorError:
        found = dict.fromkeys(Component, "")
    return found | {Component.OPENZFS: _text(zfs_module / "version").strip()}


def _needs(
    domains: Sequence[Domain],
    guests: Sequence[GuestFacts],
    kinds: Mapping[str, DatasetKind],
    releases: Mapping[Component, str],
    files: HostFiles,
) -> dict[FaultCondition, tuple[str, ...]]:
    """The conditions of known faults that hold here, each with the guests concerned."""

    def guests_on(kind: DatasetKind) -> list[str]:
        return [g.name for g in guests if any(kinds.get(name) is kind for name in g.datasets)]

    confined = _text(files.apparmor).strip() == "Y"
    by_guest = {
        FaultCondition.DISCARD: [d.name for d in domains if any(disk.discards for disk in d.disks)],
        FaultCondition.VOLUME: guests_on(DatasetKind.VOLUME),
        FaultCondition.SNAPDIR: guests_on(DatasetKind.FILESYSTEM),
        FaultCondition.APPARMOR: [g.name for g in guests if confined and g.commits],
    }
    by_host = {
        FaultCondition.CLONING: _text(files.zfs_module / "parameters/zfs_bclone_enabled").strip()
        == "1",
        FaultCondition.SPARSE: bool(_SPARSE.search(_text(files.qemu_conf))),
        FaultCondition.PIPES_ONLY: loads_from_pipes_only(releases.get(Component.QEMU, "")),
    }
    found = {need: tuple(names) for need, names in by_guest.items() if names}
    return found | {need: () for need, holds in by_host.items() if holds}


# -- guests -------------------------------------------------------------------------------------


def gather_guests(context: Context, domains: Sequence[Domain]) -> tuple[GuestFacts, ...]:
    """The facts about domains: their datasets, and the plan of a snapshot."""
    journals = {
        journal.facts.uuid: journal for journal in read_journals(context.config.paths.journal)
    }
    found = [_guest(context, each, journals.get(each.uuid)) for each in domains]
    own = guest_files(context.resolver, context.hypervisor.domains())
    return tuple(
        replace(each, shared=tuple(describe_other_files(context.resolver, each.datasets, own)))
        for each in found
    )


def _guest(context: Context, domain: Domain, journal: SnapshotJournal | None) -> GuestFacts:
    """During a run the disks are overlays, so the datasets come from the run's journal."""
    settings = context.config.settings(domain.name, domain.uuid)
    busy = _busy(context, domain) or ("its last run was interrupted" if journal else "")
    if busy:
        datasets = journal.facts.datasets if journal else datasets_of(context.resolver, domain)
        return GuestFacts(domain.name, settings.level, _sorted(datasets), busy=busy)
    try:
        planned, left_out = locate_disks(context.resolver, domain, settings.exclude_disks)
    except SnaporchError as error:
        datasets = _sorted(datasets_of(context.resolver, domain))
        return GuestFacts(domain.name, settings.level, datasets, refusal=_refusal(error))
    datasets = _sorted({disk.dataset.name for disk in planned})
    off_zfs = tuple(
        out.describe()
        for out in left_out
        if out.matters and out.disk.target not in settings.exclude_disks
    )
    excluded = tuple(
        out.describe()
        for out in left_out
        if out.matters and out.disk.target in settings.exclude_disks
        if out.disk.source and dataset_under(context.resolver, Path(out.disk.source)) in datasets
    )
    read = (
        dataset_under(context.resolver, Path(out.disk.source))
        for out in left_out
        if out.code in (LeftOutCode.EXCLUDED, LeftOutCode.READ_ONLY) and out.disk.source
    )
    found = GuestFacts(
        domain.name,
        settings.level,
        datasets,
        off_zfs,
        on_unavailable=settings.on_unavailable,
        excluded=excluded,
        left_out=_sorted({each for each in read if each is not None}),
    )
    try:
        by_snaporch = make_plan(context, domain)
        for_sanoid = make_plan(context, domain, awaited=settings.hook_deadline)
        estimate = estimate_freeze(context, for_sanoid) if domain.active else None
    except SnaporchError as error:
        return replace(found, refusal=_refusal(error))
    confined = domain.active and context.hypervisor.is_confined(domain.uuid)
    return replace(
        found,
        downgrade=for_sanoid.downgrade,
        estimate=estimate,
        other_program=by_snaporch.other_program,
        overlays=bool(by_snaporch.facts.overlays),
        commits=bool(
            by_snaporch.facts.overlays
            or (for_sanoid.facts.overlays and context.frozen_by_hooks(datasets))
        ),
        confined_overlays=len(for_sanoid.facts.overlays) if confined else 0,
    )


def _busy(context: Context, domain: Domain) -> str:
    owner = lock_holder(default_paths.LOCKS, domain.uuid)
    if owner is not None:
        return owner
    job = context.hypervisor.busy_with(domain.uuid) if domain.active else None
    return f"libvirt has a job on it ({job})" if job else ""


def _refusal(error: SnaporchError) -> tuple[str, str]:
    return error.reason, error.step


def _sorted(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names))


def _volatile(resolver: Resolver, paths: Paths) -> dict[Path, str]:
    directories = (paths.overlays, paths.journal, paths.bundles)
    found = {each: resolver.volatile_file_system(existing_part(each)) for each in directories}
    return {directory: kind for directory, kind in found.items() if kind}


# -- snaporch's directories ---------------------------------------------------------------------


def _runs(
    context: Context,
) -> tuple[tuple[OpenRunFacts, ...], tuple[UnreadableJournalFacts, ...]]:
    """The runs that have a journal, and the journals that cannot be read."""
    runs, unreadable = [], []
    for journal in list_journals(context.config.paths.journal, sweep=False):
        if isinstance(journal, UnreadableJournal):
            error = journal.error
            unreadable.append(UnreadableJournalFacts(journal.path, error.reason, error.step))
            continue
        kind = journal.kind if isinstance(journal, OtherJournal) else "snapshot"
        alive = lock_holder(default_paths.LOCKS, journal.uuid) is not None
        runs.append(OpenRunFacts(journal.path.stem, journal.domain, alive, kind))
    return tuple(runs), tuple(unreadable)


def _store(context: Context, encrypted: Collection[str]) -> StoreFacts:
    path = context.config.paths.bundles
    existing = existing_part(path)
    dataset = dataset_under(context.resolver, path)
    is_encrypted = dataset in encrypted if dataset else _on_crypt(existing)
    return StoreFacts(
        path,
        exists=existing == path,
        writable=existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
        mode=stat.S_IMODE(existing.stat().st_mode),
        dataset=dataset,
        encrypted=is_encrypted,
        has_bundles=bool(context.store.references()),
    )


def _pages(
    context: Context, domains: Sequence[Domain], names: Collection[str], encrypted: Collection[str]
) -> PageStoreFacts | None:
    settings = {each.name: context.config.settings(each.name, each.uuid) for each in domains}
    guests = _sorted(name for name, its in settings.items() if its.ram_store == "pages")
    dataset = context.config.ram_pages.dataset
    if not guests:
        return None
    existing = dataset
    while "/" in existing and existing not in names:  # snaporch creates the rest
        existing = existing.rpartition("/")[0]
    return PageStoreFacts(dataset, guests, encrypted=existing in encrypted)


def _replicas(context: Context) -> dict[str, str]:
    config = context.config
    named = {name for policy in config.policy.values() for name in policy.replicate}
    return {
        name: unavailable_reason(config.replica[name], context.interrupt) for name in sorted(named)
    }


def _repositories(config: Config, names: Iterable[str]) -> frozenset[str]:
    """The replicas that are repositories of restic."""
    return frozenset(name for name in names if isinstance(config.replica[name], ResticReplica))


def _bundle_privacy(context: Context, reasons: Mapping[str, str]) -> dict[str, BundlePrivacy]:
    """How the bundles on the replicas that can be reached are protected from being read."""

    def privacy_of(replica: AnyReplica) -> BundlePrivacy:
        if isinstance(replica, ResticReplica):
            return BundlePrivacy.ALL
        if replica.encrypt_to:
            return BundlePrivacy.ENCRYPTED
        if replica.append_only:
            return BundlePrivacy.NOT_ASKED
        host = Host(replica.host, lambda: context.interrupt.check("check"))
        if not has_encrypted_bundles(replica, host):
            return BundlePrivacy.CLEAR
        copies = has_encrypted_copies(replica, host)
        return BundlePrivacy.ALL if copies else BundlePrivacy.ENCRYPTED_DATASET

    found = {}
    for name in (name for name, reason in reasons.items() if not reason):
        with suppress(SnaporchError):  # it does not answer any more
            found[name] = privacy_of(context.config.replica[name])
        context.interrupt.check("check")
    return found


def _unlimited(config: Config, names: Iterable[str]) -> list[str]:
    """The replicas with a rate that needs mbuffer, if it is missing."""
    found = {name: config.replica[name] for name in names}
    return [
        name
        for name, each in found.items()
        if isinstance(each, Replica) and (each.rate or each.rate_outside) and not limits_rate()
    ]


def _weak_replicas(context: Context, reasons: Mapping[str, str]) -> dict[str, str]:
    """Of the replicas that can be reached, those that are protected less than they could be."""
    replicas, interrupt = context.config.replica, context.interrupt
    reached = [name for name, reason in reasons.items() if not reason]
    found = {name: weakness_of(replicas[name], interrupt) for name in reached}
    return {name: reason for name, reason in found.items() if reason}


def _on_crypt(path: Path) -> bool:
    """Whether a file system lies on a dm-crypt device, directly or through other devices."""
    device = path.stat().st_dev
    return _crypt(Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"))


def _crypt(device: Path) -> bool:
    if _text(device / "dm" / "uuid").startswith("CRYPT-"):
        return True
    slaves = device / "slaves"
    return slaves.is_dir() and any(_crypt(slave) for slave in slaves.iterdir())


def _overlays(context: Context, runs: set[str]) -> OverlayFacts:
    paths = context.config.paths
    directory = paths.overlays
    found = sorted(directory.iterdir()) if directory.is_dir() else []
    quarantine = directory / QUARANTINE
    quarantined = sorted(quarantine.glob("*/*")) if quarantine.is_dir() else []
    return OverlayFacts(
        directory,
        free_mib=free_mib(existing_part(directory)),
        reserve_mib=paths.overlay_reserve_mib,
        dataset=dataset_under(context.resolver, directory),
        unknown=tuple(
            p.name for p in found if p.name not in runs and p.name != QUARANTINE and not is_empty(p)
        ),
        quarantined=tuple(str(path.relative_to(quarantine)) for path in quarantined),
    )
