"""From a host to the facts that a lint looks at. All reads."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from snaporch import __version__, default_paths
from snaporch.check.facts import (
    GuestFacts,
    HookProgram,
    HostFacts,
    OpenRunFacts,
    OverlayFacts,
    PageStoreFacts,
    SanoidFacts,
    StoreFacts,
)
from snaporch.check.policies import names_of_nobody, takes_snapshots, with_policies
from snaporch.command_log import LoggedCommand
from snaporch.config import Paths
from snaporch.context import Context
from snaporch.errors import SnaporchError
from snaporch.faults import Component, Need
from snaporch.hypervisor import HypervisorError
from snaporch.journal import SnapshotJournal, read_journals
from snaporch.locks import holder
from snaporch.model import DatasetKind, Domain
from snaporch.replication.target import why_not
from snaporch.restore.other_files import beside, files_of
from snaporch.sanoid.config.hook_command import PATH, SETTINGS, parse_hook
from snaporch.sanoid.config.resolve import CONFIG_DIR, SanoidConfig, SanoidConfigError, load_sanoid
from snaporch.sanoid.config.unhooked import held_datasets, unheld_section
from snaporch.sanoid.hold.snapshotter import prospect
from snaporch.snapshot.capture_selftest import capture_mode
from snaporch.snapshot.plan import (
    dataset_under,
    datasets_of,
    existing_part,
    free_mib,
    locate_disks,
    make_plan,
)
from snaporch.zfs.resolver import forgetful

_SPARSE = re.compile(r'^\s*snapshot_image_format\s*=\s*"sparse"', re.MULTILINE)
_VERSION_SECONDS = 60
_QUARANTINE = "quarantine"


@dataclass(frozen=True, slots=True)
class Places:
    """Where a host has what is looked at."""

    qemu_conf: Path = Path("/etc/libvirt/qemu.conf")
    zfs_module: Path = Path("/sys/module/zfs")
    apparmor: Path = Path("/sys/module/apparmor/parameters/enabled")
    cron_job: Path = Path("/etc/cron.d/sanoid")
    systemd: Path = Path("/run/systemd/system")
    path: str = PATH
    sanoid_defaults: Path | None = None


PLACES = Places()


def gather(context: Context, domains: Sequence[Domain], config_dir: Path = CONFIG_DIR) -> HostFacts:
    """Look at the host, and at these guests.

    Raises:
        SnaporchError: libvirt or ZFS failed, or a journal cannot be read.
    """
    kinds = {dataset.name: dataset.kind for dataset in context.pool.datasets()}
    names = set(kinds)
    sanoid = _sanoid(config_dir, names)
    context = replace(context, strangers=partial(_unheld, sanoid), held=partial(_held, sanoid))
    guests = with_policies(context, domains, gather_guests(context, domains))
    encrypted = context.pool.encrypted()
    runs = tuple(_run(journal) for journal in _journals(context))
    return HostFacts(
        version=__version__,
        command=own_command(),
        sanoid=sanoid,
        guests=guests,
        store=_store(context, encrypted),
        pages=_pages(context, domains, names, encrypted),
        replicas=_replicas(context),
        overlays=_overlays(context, {run.run for run in runs}),
        datasets=frozenset(names),
        encrypted=encrypted,
        runs=runs,
        unguarded=context.hypervisor.unguarded(),
        jobs=context.config.jobs,
        capture=capture_mode(context),
        forgetful=_forgetful(context.config.paths),
        releases=_releases(context),
        needs=_needs(domains, guests, kinds),
        policies=any(map(takes_snapshots, context.config.policy.values())),
        nobodys=names_of_nobody(context.config, context.hypervisor.domains()),
    )


def own_command() -> str:
    """The absolute path of the ``snaporch`` that runs, as a hook setting would call it."""
    called = Path(sys.argv[0])
    if called.name == "snaporch" and called.is_file():
        return str(called.absolute())
    return shutil.which("snaporch", path=PLACES.path) or "snaporch"


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


# -- what the host's programs are known for -----------------------------------------------------


def _releases(context: Context) -> dict[Component, str]:
    found = dict.fromkeys(Component, "")
    with suppress(HypervisorError):
        found |= context.hypervisor.releases()
    return found | {Component.OPENZFS: _text(PLACES.zfs_module / "version").strip()}


def _needs(
    domains: Sequence[Domain], guests: Sequence[GuestFacts], kinds: Mapping[str, DatasetKind]
) -> dict[Need, tuple[str, ...]]:
    """What of known faults can matter here, and to which guests."""
    discarding = [d.name for d in domains if any(disk.discards for disk in d.disks)]
    on = {
        kind: [g.name for g in guests if any(kinds.get(name) is kind for name in g.datasets)]
        for kind in DatasetKind
    }
    concerned = {
        Need.DISCARD: discarding,
        Need.VOLUME: on[DatasetKind.VOLUME],
        Need.SNAPDIR: on[DatasetKind.FILESYSTEM],
    }
    whole = {
        Need.CLONING: _text(PLACES.zfs_module / "parameters/zfs_bclone_enabled").strip() == "1",
        Need.APPARMOR: _text(PLACES.apparmor).strip() == "Y",
        Need.SPARSE: bool(_SPARSE.search(_text(PLACES.qemu_conf))),
    }
    found = {need: tuple(names) for need, names in concerned.items() if names}
    return found | {need: () for need, holds in whole.items() if holds}


# -- sanoid -------------------------------------------------------------------------------------


def _sanoid(config_dir: Path, datasets: Iterable[str]) -> SanoidFacts:
    if shutil.which("sanoid", path=PLACES.path) is None:
        return SanoidFacts(installed=False, scheduled=None, directory=config_dir, config=None)
    scheduled = _scheduled()
    if not (config_dir / "sanoid.conf").exists():
        return SanoidFacts(True, scheduled, config_dir, None, unused=True)
    try:
        config = load_sanoid(config_dir, datasets, PLACES.sanoid_defaults)
    except SanoidConfigError as error:
        return SanoidFacts(
            True, scheduled, config_dir, None, refusal=f"{error.thing}: {error.reason}"
        )
    return SanoidFacts(True, scheduled, config_dir, config, programs=_programs(config))


def _unheld(sanoid: SanoidFacts, datasets: Sequence[str]) -> str:
    return unheld_section(sanoid.config, datasets) if sanoid.config else ""


def _held(sanoid: SanoidFacts, datasets: Sequence[str]) -> frozenset[str]:
    return held_datasets(sanoid.config, datasets) if sanoid.config else frozenset()


def _scheduled() -> bool | None:
    """Debian's cron job does nothing where systemd runs; of other crontabs nothing is known."""
    if PLACES.systemd.is_dir():
        command = ["systemctl", "--quiet", "is-active", "sanoid.timer"]
        with LoggedCommand(*command):
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return True if PLACES.cron_job.exists() else None


def _programs(config: SanoidConfig) -> dict[str, HookProgram]:
    texts = {s.settings.get(key, "") for s in config.sections.values() for key in SETTINGS}
    named = {parse_hook(text).program for text in texts if text.strip()}
    return {name: _program(name) for name in named if name}


def _program(name: str) -> HookProgram:
    path = name if "/" in name else shutil.which(name, path=PLACES.path)
    if path is None or not os.path.isfile(path):
        return HookProgram(exists=False, executable=False)
    if not os.access(path, os.X_OK):
        return HookProgram(exists=True, executable=False)
    return HookProgram(exists=True, executable=True, version=_version(path))


def _version(path: str) -> str:
    """What a ``snaporch`` answers, or the one that is installed with a hook's file.

    Other programs are not called.
    """
    name = os.path.basename(path)
    if name.startswith("sanoid-"):  # PREFIX/share/snaporch/hooks, PREFIX/bin
        path = os.path.join(os.path.dirname(os.path.realpath(path)), "../../../bin/snaporch")
    if os.path.basename(path) != "snaporch" or not os.path.isfile(path):
        return ""
    own = own_command()
    if os.path.exists(own) and os.path.samefile(path, own):
        return __version__
    try:
        with LoggedCommand(path, "--version"):
            done = subprocess.run(
                [path, "--version"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=_VERSION_SECONDS,
            )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    words = done.stdout.decode("utf-8", "replace").split()
    return words[1] if words[:1] == ["snaporch"] and len(words) > 1 else "unknown"


# -- guests -------------------------------------------------------------------------------------


def gather_guests(context: Context, domains: Sequence[Domain]) -> tuple[GuestFacts, ...]:
    """Where the domains' disks are, and what a plan says of each."""
    under_way = {journal.facts.uuid: journal for journal in _journals(context)}
    found = [_guest(context, each, under_way.get(each.uuid)) for each in domains]
    own = files_of(context.hypervisor.domains())
    return tuple(replace(each, shared=tuple(beside(each.datasets, own))) for each in found)


def _guest(context: Context, domain: Domain, journal: SnapshotJournal | None) -> GuestFacts:
    """While a run is under way the disks are its overlays, and its journal knows the datasets."""
    settings = context.config.settings(domain.name, domain.uuid)
    busy = _busy(context, domain) or ("its last run was cut short" if journal else "")
    if busy:
        datasets = journal.facts.datasets if journal else datasets_of(domain)
        return GuestFacts(domain.name, settings.level, _sorted(datasets), busy=busy)
    try:
        planned, left_out = locate_disks(domain, settings.exclude_disks)
    except SnaporchError as error:
        datasets = _sorted(datasets_of(domain))
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
        if out.disk.source and dataset_under(Path(out.disk.source)) in datasets
    )
    found = GuestFacts(
        domain.name,
        settings.level,
        datasets,
        off_zfs,
        on_unavailable=settings.on_unavailable,
        excluded=excluded,
    )
    try:
        alone = make_plan(context, domain, None)
        plan = make_plan(context, domain, None, awaited=settings.hook_deadline)
        ahead = prospect(context, plan) if domain.active else None
    except SnaporchError as error:
        return replace(found, refusal=_refusal(error))
    return replace(
        found,
        downgrade=plan.downgrade,
        prospect=ahead,
        stranger=alone.stranger,
        overlays=bool(alone.facts.overlays),
    )


def _busy(context: Context, domain: Domain) -> str:
    held = holder(default_paths.LOCKS, domain.uuid)
    if held is not None:
        return held
    job = context.hypervisor.busy_with(domain.uuid) if domain.active else None
    return f"libvirt has a job on it ({job})" if job else ""


def _refusal(error: SnaporchError) -> tuple[str, str]:
    return error.reason, error.step


def _sorted(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names))


def _forgetful(paths: Paths) -> dict[Path, str]:
    places = (paths.overlays, paths.journal, paths.bundles)
    found = {place: forgetful(existing_part(place)) for place in places}
    return {place: kind for place, kind in found.items() if kind}


# -- snaporch's directories ---------------------------------------------------------------------


def _journals(context: Context) -> list[SnapshotJournal]:
    return read_journals(context.config.paths.journal)


def _run(journal: SnapshotJournal) -> OpenRunFacts:
    facts = journal.facts
    alive = holder(default_paths.LOCKS, facts.uuid) is not None
    return OpenRunFacts(facts.run, facts.domain, alive)


def _store(context: Context, secret: Collection[str]) -> StoreFacts:
    path = context.config.paths.bundles
    there = existing_part(path)
    dataset = dataset_under(path)
    encrypted = dataset in secret if dataset else _on_crypt(there)
    return StoreFacts(
        path,
        exists=there == path,
        writable=there.is_dir() and os.access(there, os.W_OK | os.X_OK),
        mode=stat.S_IMODE(there.stat().st_mode),
        dataset=dataset,
        encrypted=encrypted,
    )


def _pages(
    context: Context, domains: Sequence[Domain], names: Collection[str], secret: Collection[str]
) -> PageStoreFacts | None:
    settings = {each.name: context.config.settings(each.name, each.uuid) for each in domains}
    guests = _sorted(name for name, its in settings.items() if its.ram_store == "pages")
    dataset = context.config.pages.dataset
    if not guests:
        return None
    steps = dataset.split("/")
    above = ["/".join(steps[:count]) for count in range(len(steps), 0, -1)]
    there = next((each for each in above if each in names), None)  # snaporch makes what is missing
    return PageStoreFacts(dataset, guests, encrypted=there in secret)


def _replicas(context: Context) -> dict[str, str]:
    config = context.config
    named = {name for policy in config.policy.values() for name in policy.replicate}
    return {name: why_not(config.replica[name]) for name in sorted(named)}


def _on_crypt(path: Path) -> bool:
    """Whether a file system lies on a dm-crypt device, itself or what that is made of."""
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
    quarantine = directory / _QUARANTINE
    aside = sorted(quarantine.glob("*/*")) if quarantine.is_dir() else []
    return OverlayFacts(
        directory,
        free_mib=free_mib(existing_part(directory)),
        reserve_mib=paths.overlay_reserve_mib,
        dataset=dataset_under(directory),
        left=tuple(p.name for p in found if p.name not in runs and p.name != _QUARANTINE),
        set_aside=tuple(str(path.relative_to(quarantine)) for path in aside),
    )
