"""A host for runs and restores: fakes for libvirt and ZFS, real files for everything else."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid as uuids
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fakes import images, streams
from fakes.domain_xml import DiskSpec, domain_xml
from fakes.hooks import Hook, Hooks
from fakes.hypervisor import Agent, FakeGuest, FakeHypervisor
from fakes.pool import FakePool
from fakes.resolver import FakeResolver
from snaporch.config import Config, Paths
from snaporch.context import Clock, Context
from snaporch.default_paths import HostPaths
from snaporch.disks.overlay_files import OverlayImages
from snaporch.fence import Fences
from snaporch.hypervisor import OverlayDisk
from snaporch.journal import OtherJournal, RunFacts, SnapshotJournal, read_journal
from snaporch.model import Domain, DomainState, Owner
from snaporch.restore import recovery
from snaporch.waiting_times import LibvirtTimes, LivenessTimes, RamTimes
from snaporch.zfs import PREFIX

_WRITTEN = b"the guest's last writes"


@dataclass
class Heard:
    """A listener that records what is reported."""

    steps: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    amounts: list[tuple[int, int]] = field(default_factory=list)
    at: dict[str, Hook] = field(default_factory=dict)
    """What to call at a step, by the beginning of its text."""

    def step(self, subject: str, text: str) -> None:
        """A step."""
        self.steps.append(text)
        for beginning, hook in list(self.at.items()):
            if text.startswith(beginning):
                hook()

    def note(self, subject: str, text: str) -> None:
        """A note."""
        self.notes.append(text)

    def amount(self, subject: str, done: int, total: int) -> None:
        """Bytes."""
        self.amounts.append((done, total))


class World:
    """A host whose datasets are the directories ``zfs/POOL/NAME`` of a temporary directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hooks = Hooks()
        self.pool = FakePool(hooks=self.hooks)
        self.hypervisor = FakeHypervisor(hooks=self.hooks)
        self.pool.mounted, self.pool.unmounted = self.mounted, self.unmounted
        self.pool.created, self.pool.snapshotted = self.created, self.snapshotted
        self.pool.snapshot_files = self.snapshot_files
        self.heard = Heard()
        host = HostPaths(proc=root / "proc", sys=root / "sys", dev=root / "dev")
        self.resolver = FakeResolver(host, zfs=root / "zfs", node=self.volume_node)
        host.proc.mkdir(parents=True)
        self.set_memory(1 << 40)
        self.guarded: list[RunFacts] = []
        self.guarded_again: list[RunFacts] = []
        self._guardians: list[int] = []
        self.lowered: list[str] = []
        self.unit_states: dict[str, str] = {}
        self.clock = Clock()
        self.fences = Fences(root / "fences")
        self.window_clock = time.monotonic
        self.libvirt_times = LibvirtTimes(resume=0)
        self.ram_times = RamTimes()
        self.liveness_times = LivenessTimes(cpu=0.05, agent=0.05, poll=0.001)
        self.paths = Paths(
            overlays=root / "overlays",
            overlay_reserve_mib=1,
            overlay_floor_mib=0,
            bundles=root / "bundles",
            journal=root / "journal",
            clones=root / "clones",
            runtime=root / "runtime",
        )
        self.context = self.with_defaults()

    def with_defaults(self, **defaults: object) -> Context:
        """The context with these settings for every domain.

        RAM is saved with overlays by default: that strategy has the most steps.
        """
        chosen = {"ram_strategy": "overlay"} | defaults
        pages = {"dataset": "tank/ram"}
        config = Config.model_validate(
            {"paths": self.paths.model_dump(), "defaults": chosen, "ram_pages": pages}
        )
        self.context = Context(
            config,
            self.hypervisor,
            self.pool,
            self.heard,
            resolver=self.resolver,
            fences=self.fences,
            clock=self.clock,
            libvirt_times=self.libvirt_times,
            ram_times=self.ram_times,
            liveness_times=self.liveness_times,
            finishers={"restore": self.finish},
            overlay_images=OverlayImages(
                self.make_overlay,
                self.holds_writes,
                self.holds_what_base_holds,
                self.commit_offline,
            ),
            start_detached=self.start_detached,
            lower_priority=self.lowered.append,
            unit_states=lambda: self.unit_states,
        )
        return self.context

    def with_pages(self, name: str = "web", **defaults: object) -> World:
        """Store RAM in pages below ``tank/ram``; the guest's RAM is a stream with pages."""
        self.with_defaults(ram_store="pages", **defaults)
        if "tank" not in {known.name for known in self.pool.datasets()}:
            self.pool.create("tank")
        self.guest(name).ram = streams.guest_stream()
        return self

    def finish(self, context: Context, journal: OtherJournal, dry_run: bool) -> list[str]:
        """Finish a restore, as the command line does."""
        return recovery.recover_restore(context, journal, dry_run=dry_run)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Install the fake TPM directory."""
        monkeypatch.setattr("snaporch.hypervisor.domain_xml.SWTPM_STATE", self.root / "swtpm")

    # -- snapshots ------------------------------------------------------------------------------

    def take_again(self, name: str, *datasets: str) -> None:
        """Another name for the ZFS snapshots of a run, as of sanoid's daily beside its hourly."""
        for each in self.pool.snapshots(list(datasets) or ["tank/web", "flash/web"]):
            marks = {PREFIX + key: value for key, value in each.properties.items()}
            self.pool.snapshot([f"{each.dataset}@{name}"], marks)

    # -- guests ---------------------------------------------------------------------------------

    def add_guest(
        self,
        name: str = "web",
        disks: Mapping[str, str] | None = None,
        *,
        state: DomainState = DomainState.RUNNING,
        more: tuple[DiskSpec, ...] = (),
        nvram: str | None = None,
        tpm: str | None = None,
        persistent: bool = True,
        agent: Agent = Agent.MISSING,
    ) -> Domain:
        """Add a guest with an image on each dataset: target → dataset."""
        specs = [
            DiskSpec(target, str(self.image(dataset, f"{name}-{target}.img")))
            for target, dataset in ({"vda": f"tank/{name}"} if disks is None else disks).items()
        ]
        uuid = str(uuids.uuid5(uuids.NAMESPACE_DNS, name))
        connected = None if agent is Agent.MISSING else "connected"
        xml = domain_xml(name, uuid, [*specs, *more], nvram=nvram, tpm=tpm, agent=connected)
        off = state is DomainState.OFF
        self.hypervisor.guests[uuid] = FakeGuest(
            name=name,
            uuid=uuid,
            inactive=xml if persistent else None,
            live=None if off else xml,
            state=state,
            paused_reason="user" if state is DomainState.PAUSED else None,
            ram=b"" if off else images.qemu_stream(20_000),
            agent=agent,
        )
        return self.hypervisor.domain(uuid)

    def guest(self, name: str = "web") -> FakeGuest:
        """The hypervisor's data of the guest."""
        return next(g for g in self.hypervisor.guests.values() if g.name == name)

    def image(self, dataset: str, name: str) -> Path:
        """An image file in a dataset; creates both as needed."""
        if dataset not in {known.name for known in self.pool.datasets()}:
            self.pool.create(dataset)
            self.pool.write(dataset, b"first")
        path = self.root / "zfs" / dataset / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return path

    def on_bases(self, name: str = "web") -> bool:
        """Whether neither live nor inactive XML names an overlay."""
        used = [path for xml in self.guest(name).sources() for path in (xml or {}).values()]
        return not any(path.startswith(str(self.paths.overlays)) for path in used)

    # -- the kernel -------------------------------------------------------------------------------

    def set_memory(self, size: int) -> None:
        """Have so many bytes of memory available."""
        text = f"MemTotal: {2 * size >> 10} kB\nMemAvailable: {size >> 10} kB\n"
        (self.resolver.host.proc / "meminfo").write_text(text)

    def start_process(self, number: int, dataset: str) -> Path:
        """Start a process that has a file of a dataset open; returns its directory in proc."""
        process = self.resolver.host.proc / str(number)
        for name in ("fd", "fdinfo"):
            (process / name).mkdir(parents=True, exist_ok=True)
        (process / "fd" / "3").touch()
        (process / "fdinfo" / "3").write_text("mnt_id:\t40\n")
        (process / "cmdline").write_bytes(b"less\0")
        (process / "mountinfo").write_text(f"40 1 0:50 / /x rw - zfs {dataset} rw\n")
        return process

    # -- leftovers -------------------------------------------------------------------------------

    def leftovers(self) -> list[str]:
        """Overlays, journals, pipes and unfinished bundles."""
        found = [*self.paths.overlays.rglob("*"), *self.paths.journal.rglob("*")]
        found += self.paths.runtime.glob("*.ram")
        found += self.paths.bundles.glob("*/.*")
        return sorted(str(path.relative_to(self.root)) for path in found)

    def is_as_it_was(self, name: str = "web", state: DomainState = DomainState.RUNNING) -> bool:
        """Whether a run left the guest unchanged, and nothing of its own behind."""
        guest = self.guest(name)
        still = guest.state is state and not guest.frozen and guest.job is None
        return still and self.on_bases(name) and self.leftovers() == []

    # -- fakes of functions ----------------------------------------------------------------------

    def mounted(self, name: str, origin: str, where: Path) -> None:
        """A clone has the files of its origin."""
        if where.is_relative_to(self.root):
            shutil.copytree(self.root / "zfs" / origin, where, symlinks=True)

    def created(self, name: str) -> None:
        """A new file system is mounted and empty."""
        (self.root / "zfs" / name).mkdir(parents=True)

    def snapshotted(self, name: str, snapshot: str) -> None:
        """Keep the page file of a page dataset for its snapshot."""
        pages = self.root / "zfs" / name / "pages"
        if pages.exists():
            target = self.snapshot_files(name, snapshot)
            target.mkdir(parents=True)
            shutil.copy(pages, target)

    def snapshot_files(self, name: str, snapshot: str) -> Path:
        """The directory with the files of a snapshot, if it has any."""
        return self.root / "zfs" / name / ".zfs" / "snapshot" / snapshot

    def unmounted(self, where: Path) -> None:
        """Remove the files of an unmounted clone."""
        if where.is_relative_to(self.root):
            shutil.rmtree(where)

    def volume_node(self, volume: str) -> Path:
        """The link to a file in place of the device of a clone."""
        link = self.resolver.volume_link(volume)
        node = self.resolver.host.dev / volume.replace("/", "-")
        link.parent.mkdir(parents=True, exist_ok=True)
        node.write_bytes(self.pool.read(volume))
        link.unlink(missing_ok=True)
        link.symlink_to(node)
        return link

    def make_overlay(self, disk: OverlayDisk, size: int, owner: Owner | None) -> None:
        """Create an empty overlay."""
        self.hooks.act("overlays.make", disk.target)
        Path(disk.overlay).touch()

    def write_overlay(self, path: str) -> None:
        """Write to an overlay, as the guest would."""
        Path(path).write_bytes(_WRITTEN)

    def holds_writes(self, disk: OverlayDisk, owner: Owner | None) -> bool:
        """Whether the overlay contains writes."""
        self.hooks.reach("overlays.read")
        return Path(disk.overlay).read_bytes() == _WRITTEN

    def holds_what_base_holds(self, disk: OverlayDisk, owner: Owner | None) -> bool:
        """Whether the overlay was committed."""
        self.hooks.reach("overlays.compare")
        return Path(disk.overlay).read_bytes() == Path(disk.base).read_bytes()

    def start_detached(self, unit: str, command: list[str]) -> None:
        """Record the run that a guardian watches, and lock its journal as the guardian would."""
        self.hooks.reach("guardian.start")
        process, path = command[4:6]
        descriptor = os.open(path, os.O_RDONLY)
        self._guardians.append(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        journal = read_journal(Path(path))
        assert isinstance(journal, SnapshotJournal)
        (self.guarded_again if process == "0" else self.guarded).append(journal.facts)

    def kill_guardians(self) -> None:
        """Kill all guardians, which unlocks their journals."""
        while self._guardians:
            os.close(self._guardians.pop())

    def commit_offline(self, disk: OverlayDisk, owner: Owner | None) -> None:
        """Do what ``qemu-img commit`` does."""
        self.hooks.act("overlays.commit_offline", disk.target)
        Path(disk.base).write_bytes(Path(disk.overlay).read_bytes())
        Path(disk.overlay).write_bytes(b"")
