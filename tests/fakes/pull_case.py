"""A host with guests, a machine that pulls it, and the protocol between them."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from datetime import UTC, datetime

from fakes.pool import FakePool
from fakes.pulled import FakeCopies, FakeSend, FakeSource
from snaporch.bundle.manifest import (
    MANIFEST_NAME,
    Manifest,
    Part,
    Role,
    SnapshotEntry,
    VersionsEntry,
    manifest_bytes,
)
from snaporch.bundle.store import BundleStore
from snaporch.config import Config, Source
from snaporch.interrupt import Interrupt
from snaporch.model import Level
from snaporch.pull.local_copies import LocalCopies
from snaporch.pull.open_sender import find_unmarked_runs
from snaporch.pull.pull_guest import GuestPull
from snaporch.pull.send_permissions import make_offers
from snaporch.pull.sender import Sender
from snaporch.pull.source import PullSource
from snaporch.replication.received_bundles import ReceivedBundles

ROOT = "backup/vm1"
UUID = "4b1d2f0e-0000-4000-8000-00000000000{}"
DATASETS = {1: ["flash/web", "tank/web"], 2: ["tank/db"]}
NAMES = {1: "web", 2: "db"}


class Notes:
    """A progress that keeps notes."""

    def __init__(self):
        self.notes, self.amounts = [], []

    def step(self, subject, text):
        """Ignored."""

    def note(self, subject, text):
        self.notes.append(f"{subject}: {text}")

    def amount(self, subject, done, total):
        self.amounts.append((subject, done, total))


class PullCase:
    """A source with the guests ``web`` (two pools) and ``db``, and what a machine has of it."""

    def __init__(self, place, name="vm1", root=ROOT):
        self.name = name
        self.pool = FakePool(*DATASETS[1], *DATASETS[2])
        self.send = FakeSend(self.pool)
        self.store = BundleStore(place / "store")
        self.allowed, self.unfinished = None, set()
        self.host = FakeSource(self._sender)
        self.bundles = place / "bundles"
        self.bundles.mkdir()
        self.settings = Source(host="root@vm1", dataset=root, bundles=self.bundles, every="1h")
        self.zfs = FakeCopies(root)
        self.progress = Notes()
        self.config = Config(source={name: self.settings}, paths={"schedule": place / "schedule"})

    def _sender(self, output):
        snapshots = self.pool.snapshots()
        unmarked = find_unmarked_runs(self.store, snapshots)
        offers = make_offers(snapshots, self.allowed, self.unfinished, (), unmarked)
        return Sender(
            "nas", offers, self.pool, self.store, self.send, lambda _: nullcontext(), output
        )

    def open(self):
        """What ``open_pull`` opens, with the fakes."""
        source = PullSource(self.name, self.settings, Interrupt(), self.progress, self.host)
        copies = LocalCopies(self.name, self.settings.dataset, self.zfs)
        received = ReceivedBundles(self.bundles, self.settings.dataset)
        guests = GuestPull(self.name, source, copies, received, self.bundles, self.progress)
        return source, copies, guests

    def pull(self, number=1):
        """Pull one guest."""
        source, copies, guests = self.open()
        copies.prepare()
        uuid = UUID.format(number)
        return guests.pull(source.guest(uuid, source.guests()[uuid]))

    def take(self, run, number=1, *, parts=(("ram.save", b"ram"),), level="ram"):
        """A snapshot of a guest with its bundle; ``parts`` None for none."""
        uuid = UUID.format(number)
        marks = {"run": run, "uuid": uuid, "domain": NAMES[number], "level": level}
        if parts is not None:
            marks["bundle"] = f"{uuid}/{run}"
        for pool in dict.fromkeys(each.partition("/")[0] for each in DATASETS[number]):
            names = [f"{each}@{run}" for each in DATASETS[number] if each.startswith(f"{pool}/")]
            self.pool.snapshot(names, {f"snaporch:{key}": value for key, value in marks.items()})
        if parts is not None:
            self.bundle(run, number, parts)

    def bundle(self, run, number, parts, **changes):
        """Write the bundle of a run."""
        at = datetime.now(UTC).replace(microsecond=0)
        uuid = UUID.format(number)
        own = [e for e in self.pool.snapshots() if e.properties.get("run") == run]
        manifest = Manifest(
            run=run,
            domain=NAMES[number],
            uuid=uuid,
            snapshot=run,
            level=Level.RAM,
            was_running=True,
            started=at,
            created=at,
            finished=at,
            snapshots=tuple(
                SnapshotEntry(dataset=e.dataset, name=e.name, guid=e.guid, createtxg=e.createtxg)
                for e in own
            ),
            disks=(),
            parts=tuple(
                Part(
                    name=name,
                    role=Role.RAM,
                    bytes=len(data),
                    sha256=hashlib.sha256(data).hexdigest(),
                )
                for name, data in parts
            ),
            versions=VersionsEntry(snaporch="1", libvirt="1", emulator="", machine="pc"),
        ).model_copy(update=changes)
        directory = self.store.root / uuid / run
        directory.mkdir(parents=True)
        for name, data in parts:
            (directory / name).write_bytes(data)
        (directory / MANIFEST_NAME).write_bytes(manifest_bytes(manifest))

    def here(self):
        """The full names of the copies' snapshots."""
        return sorted(each.full_name for each in self.zfs.found)

    def bundles_here(self):
        """The bundles that are complete by their names."""
        return sorted(p.name for p in self.bundles.glob("*/*") if not p.name.startswith("."))
