"""A guest with snapshots, ready to be restored."""

from pathlib import Path

import pytest

from snaporch import default_paths
from snaporch.errors import BusyError
from snaporch.interrupt import Interrupt
from snaporch.locks import readers_lock
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot


class Story:
    """A guest on two pools.

    Its datasets contained ``first`` at the snapshot ``s1``, and ``now`` now.
    """

    def __init__(self, world, **guest):
        self.world = world
        self.domain = world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"}, **guest)
        self.ram = world.guest().ram
        self.record = self.snapshot("s1")
        self.write(b"now")
        self.world.guest().ram = b"QEVM later"
        world.hooks.log.clear()

    @property
    def datasets(self):
        return ("flash/web", "tank/web")

    def snapshot(self, name):
        domain = self.world.hypervisor.domain("web")
        return take_snapshot(self.world.context, domain, SnapshotRequest(name))

    def write(self, content):
        """Write to the guest's images, as the guest would."""
        for disk, dataset in zip(self.domain.disks, ("tank/web", "flash/web"), strict=True):
            self.world.pool.write(dataset, content)
            Path(disk.source).write_bytes(content)

    def content(self):
        return {self.world.pool.read(dataset) for dataset in self.datasets}

    def safety(self):
        """The snapshots and directories of safety copies."""
        snapshots = [name for name in self.world.pool.names() if "@snaporch-safety_" in name]
        return snapshots, list(self.world.paths.bundles.glob("*/safety-*"))

    def refused_rollbacks(self, act):
        """At each such act a restore tries to roll the guest back, and is refused; the tries."""
        tried = []

        def roll_back():
            uuid, locks = self.domain.uuid, default_paths.LOCKS
            lock = readers_lock(locks, "web", uuid, alone=True, interrupt=Interrupt())
            with pytest.raises(BusyError, match="cloned, verified, copied or mounted"), lock:
                pass
            tried.append(uuid)

        self.world.hooks.at[act] = roll_back
        return tried
