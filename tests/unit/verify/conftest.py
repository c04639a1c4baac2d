"""A guest with copies on a replica."""

import shutil

import pytest
from fakes.rebuild_source import FakeSource
from fakes.replica import FakeReplica

from snaporch.catalog.records import all_records
from snaporch.config import Config
from snaporch.interrupt import Interrupt
from snaporch.replication.replicate import replicate
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.verify.copies import CopyHost, CopyVerifier, choose_copies
from snaporch.verify.copy_results import CopyResults


class Copied:
    """A guest with two disks and the snapshots s1 and s2, which are on a replica."""

    def __init__(self, world):
        self.world = world
        self.uuid = world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"}).uuid
        nas = {"host": "nas", "dataset": "backup/kvm", "bundles": "/backup/nas"}
        document = world.context.config.model_dump() | {"replica": {"nas": nas}}
        document["paths"]["schedule"] = world.root / "schedule"
        self.config = world.context.config = Config.model_validate(document)
        self.replica = FakeReplica(world.pool, world.root / "there", world.hooks)
        self.replica.create()
        self.source = FakeSource(world.pool, self.replica, world.hooks)
        self.interrupt = Interrupt()
        self.results = CopyResults(self.config.paths.schedule)
        self.taken = {}

    def take(self, name, level=None):
        domain = self.world.hypervisor.domain("web")
        self.taken[name] = take_snapshot(self.world.context, domain, SnapshotRequest(name, level))

    def records(self):
        return all_records(self.world.context.store, self.world.pool.snapshots())

    def replicate(self):
        replicate(self.world.context, self.records(), "nas", self.replica)

    def verifier(self, **limits):
        host = CopyHost(self.config, self.world.pool, self.world.heard, self.interrupt)
        return CopyVerifier(host, "nas", self.source, **limits)

    def verify(self, *names):
        """The outcomes, by the snapshot's name; or a list of errors."""
        verifier = self.verifier()
        copies = choose_copies(verifier.find(), "nas", names)
        return {each.copy.snapshot: each for each in verifier.verify(copies)}

    def faults(self, *names):
        """Why copies failed, by the snapshot's name; empty for those that passed."""
        return {name: each.result.reason for name, each in self.verify(*names).items()}

    def recorded(self):
        return {e.snapshot: e.passed for e in self.results.all(["nas"])[0]}

    def there(self, name, file="ram.save"):
        return self.replica.root / self.uuid / self.taken[name].run / file

    def here(self, name):
        return self.world.paths.bundles / self.uuid / self.taken[name].run

    def flip(self, name, file="ram.save"):
        data = bytearray(self.there(name, file).read_bytes())
        data[len(data) // 2] ^= 1
        self.there(name, file).write_bytes(data)

    def forget(self):
        """This host loses the guest's snapshots and bundles."""
        self.source.lose("tank/web", "flash/web")
        shutil.rmtree(self.world.paths.bundles)


@pytest.fixture
def copied(world):
    made = Copied(world)
    made.take("s1"), made.take("s2")
    made.replicate()
    return made
