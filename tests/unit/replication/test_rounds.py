"""Random rounds with the fakes: exactly what is whole on the replica is called replicated.

Four seeds, or a hundred with LONG; SEED in the environment chooses the first one.
``tests/e2e/test_replicate_rounds.py`` does the same with a real replica.
"""

import os
import random
import re
import shutil
from datetime import date
from pathlib import Path

import pytest
from fakes.hooks import KilledError
from fakes.replica import FakeReplica

from snaporch.catalog.records import all_records
from snaporch.config import Config
from snaporch.errors import SnaporchError
from snaporch.private_files import sha256_of
from snaporch.replication.replicate import replicate
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot

FIRST = date.today().toordinal() if os.environ.get("LONG") else 0  # noqa: DTZ011 - any day will do
FIRST = int(os.environ.get("SEED") or FIRST)
SEEDS = range(FIRST, FIRST + (100 if os.environ.get("LONG") else 4))
ROUNDS = 6
ATTEMPTS = 6
DATASETS = ("flash/web", "tank/web")
MANIFEST = "manifest.json"
PLACES = (
    "replica.snapshots", "replica.send", "replica.received", "replica.send_from_bookmark",
    "replica.mark", "replica.set_policies", "replica.store", "replica.stored", "replica.damaged",
    "pool.set_properties", "pool.bookmark", "pool.destroy_bookmark",
)  # fmt: skip
"""Where a replication is killed, or fails."""


@pytest.mark.parametrize("seed", SEEDS)
def test_exactly_what_is_whole_there_is_called_replicated(world, seed):
    rounds = Rounds(world, seed)
    try:
        for _ in range(ROUNDS):
            rounds.disturb()
            rounds.settle()
    except BaseException:
        print(*rounds.log, sep="\n")
        raise


class Rounds:
    """A guest with disks in two pools, its replica, and what happens to them."""

    def __init__(self, world, seed):
        self.world, self.random = world, random.Random(seed)
        world.add_guest(disks=dict(zip(("vda", "vdb"), DATASETS, strict=True)))
        self.there = FakeReplica(world.pool, world.root / "there", world.pool.hooks)
        self.there.create()
        replicas = {"nas": {"host": "nas", "dataset": "backup/kvm", "bundles": "/backup/nas"}}
        document = world.context.config.model_dump() | {"replica": replicas}
        world.context.config = Config.model_validate(document)
        self.parts, self.files, self.bundles = {}, {}, {}  # by run, as they were taken
        self.once_whole = set()
        self.log, self.count = [], 0

    # -- what is there -----------------------------------------------------

    def records(self):
        found = all_records(self.world.context.store, self.world.pool.snapshots())
        return {record.run: record for record in found}

    def bundle(self, run):
        return self.world.context.store.path(self.bundles[run])

    def whole(self, runs):
        theirs = {(e.dataset, e.guid) for e in self.there.snapshots(DATASETS)}
        return {
            run
            for run in runs
            if self.parts[run] <= theirs
            and files_of(self.there.root / self.bundles[run]) == self.files[run]
        }

    def check(self, *, exact):
        records = self.records()
        here = {(each.dataset, each.guid) for each in self.world.pool.snapshots()}
        for run in [*records]:
            manifest = files_of(self.bundle(run)).get(MANIFEST)
            if not (self.parts[run] <= here or manifest == self.files[run][MANIFEST]):
                del records[run]  # nothing here shows what it consisted of
        whole = self.whole(records)
        called = {run for run, record in records.items() if record.replicated}
        self.once_whole |= whole
        assert self.names(called - self.once_whole) == [], "was never whole there"
        if exact:
            assert self.names(called - whole) == [], "is not whole there"
            left = {r for r in whole - called if files_of(self.bundle(r)) == self.files[r]}
            assert self.names(left) == [], "is whole there"

    def names(self, runs):
        return [record.snapshot for run, record in self.records().items() if run in runs]

    # -- what happens ------------------------------------------------------

    def disturb(self):
        self.log.append("round")
        self.take()
        events = [
            self.take, self.take_plain, self.destroy_here, self.roll_back_here, self.damage_here,
            self.destroy_there, self.roll_back_there, self.damage_there, self.interrupt,
            self.interrupt,
        ]  # fmt: skip
        for event in self.random.choices(events, k=self.random.randint(1, 5)):
            event()
            self.check(exact=False)

    def any_of(self, things):
        return self.random.choice(things) if things else None

    def take(self):
        self.count += 1
        domain = self.world.context.hypervisor.domain("web")
        record = take_snapshot(self.world.context, domain, SnapshotRequest(f"s{self.count}"))
        taken = self.world.pool.snapshots(DATASETS)
        self.parts[record.run] = {(e.dataset, e.guid) for e in taken if e.name == record.snapshot}
        self.bundles[record.run] = f"{record.uuid}/{record.run}"
        self.files[record.run] = files_of(Path(record.bundle))
        self.log.append(f"take {record.snapshot}: {record.run}")

    def take_plain(self):
        """As another program takes them."""
        self.count += 1
        for dataset in DATASETS:
            self.world.pool.snapshot([f"{dataset}@a{self.count}"], {})
        self.log.append(f"take a{self.count}")

    def destroy_here(self):
        names = self.world.pool.names()
        if chosen := self.any_of(names):
            all_of_it = self.random.random() < 0.5
            wanted = chosen.partition("@")[2]
            gone = [n for n in names if n == chosen or (all_of_it and n.endswith(f"@{wanted}"))]
            self.log.append(f"destroy here {gone}")
            self.destroy(gone)

    def destroy(self, names):
        for name in names:
            self.world.pool.destroy_snapshots([name])

    def roll_back_here(self):
        names = self.world.pool.names()
        both = {name.partition("@")[2] for name in names if name.startswith(DATASETS[0])}
        both &= {name.partition("@")[2] for name in names if name.startswith(DATASETS[1])}
        if name := self.any_of(sorted(both)):
            self.log.append(f"roll back here {name}")
            for dataset in DATASETS:
                self.roll_back(f"{dataset}@{name}")

    def roll_back(self, snapshot):
        for newer in self.world.pool.newer(snapshot):
            if "#" in newer:
                self.world.pool.destroy_bookmark(newer)
            else:
                self.destroy([newer])
        self.world.pool.rollback(snapshot)

    def damage_here(self):
        paths = [self.bundle(run) for run in self.bundles if run in self.records()]
        if path := self.any_of([each for each in paths if each.is_dir()]):
            self.damage(path, "here")

    def damage_there(self):
        paths = [self.there.root / each for each in self.bundles.values()]
        if path := self.any_of([each for each in paths if each.is_dir()]):
            self.damage(path, "there")

    def damage(self, path, where):
        name = self.any_of(sorted(each.name for each in path.iterdir()))
        how = self.any_of(["flip", "truncate", "remove", "remove all"]) if name else "remove all"
        self.log.append(f"{how} {where} {path.name}/{name}")
        if how == "remove all":
            shutil.rmtree(path)
        elif how == "remove":
            (path / name).unlink()
        else:
            content = bytearray((path / name).read_bytes() or b"more")
            place = self.random.randrange(len(content))
            content[place] ^= 1 << self.random.randrange(8)
            (path / name).write_bytes(content if how == "flip" else content[:place])

    def destroy_there(self):
        if name := self.any_of(self.there.names()):
            self.log.append(f"destroy there {name}")
            self.there.drop(name)

    def roll_back_there(self):
        dataset = self.any_of(DATASETS)
        names = [each.full_name for each in self.there.snapshots([dataset])]
        gone = names[self.random.randint(0, len(names)) :]
        self.log.append(f"roll back there {gone}")
        for name in gone:
            self.there.drop(name)

    def interrupt(self):
        """A replication that is killed, or fails once, at a random place."""
        place, left, kills = self.any_of(PLACES), self.random.randint(1, 6), self.any_of([0, 1])
        self.log.append(f"{'kill' if kills else 'fail'} at {place}, {left}")
        hooks = self.world.pool.hooks

        def reach():
            nonlocal left
            left -= 1
            if left == 0 and not kills:
                raise SnaporchError(place, "failed")
            if left == 0:
                hooks.kill()

        hooks.at[place] = reach
        try:
            self.replicate()
        except (SnaporchError, KilledError) as error:
            self.log.append(f"    {error!r}")
        hooks.revive()
        hooks.at.clear()

    def replicate(self, **more):
        if records := [*self.records().values()]:
            replicate(self.world.context, records, "nas", self.there, **more)

    # -- the end of a round ------------------------------------------------

    def settle(self):
        """Replicate undisturbed, and do what an admin does until nothing fails."""
        for _ in range(ATTEMPTS):
            try:
                self.replicate(recheck=True)
            except SnaporchError as error:
                self.log.append(f"    {error}")
                self.check(exact=True)
                self.repair(str(error))
            else:
                self.check(exact=True)
                return
        raise AssertionError("it fails again and again")

    def repair(self, message):
        if found := re.match("(.*): has diverged", message):
            self.log.append(f"move the copy of {found[1]} away")
            for each in self.there.snapshots([found[1]]):
                self.there.drop(each.full_name)
            return
        found = re.search(
            r"web@(s\d+): its (bundle|ZFS snapshot).*(not whole|damaged|not exist any more)",
            message,
        )
        assert found, message
        self.log.append(f"drop {found[1]}")
        self.destroy([each for each in self.world.pool.names() if each.endswith(f"@{found[1]}")])
        self.take()


def files_of(path):
    """The SHA-256 of each file of a bundle."""
    found = {each.name: sha256_of(each) for each in path.glob("*")}
    found.pop("copy.json", None)
    return found
