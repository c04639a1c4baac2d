"""A store with bundles, and the snapshots they belong to."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from snaporch.config import Config
from snaporch.prune.ages import ClockReading
from snaporch.prune.prune import prune
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot

DAY = 86_400.0


class Shelf:
    """Guests of a world, their bundles, and the results of pruning."""

    def __init__(self, world):
        self.world = world
        self.pool = world.pool
        self.root = world.paths.bundles
        self.trash = self.root / ".trash"
        self.clocks = ClockReading("boot", 5 * DAY, 20_000 * DAY)

    def take(self, name, guest="web"):
        """A snapshot of the guest; its bundle's directory."""
        domain = self.world.hypervisor.domain(guest)
        return Path(take_snapshot(self.world.context, domain, SnapshotRequest(name)).bundle)

    def lose(self, name, *datasets):
        """Destroy the snapshot, on these datasets or on all."""
        for full in self.pool.names():
            dataset, _, bare = full.partition("@")
            if bare == name and (not datasets or dataset in datasets):
                self.pool.destroy_snapshots([full])

    def prune(self, *, trash_days=3, safety_days=7, **options):
        """Prune, with these times of grace."""
        config = Config.model_validate(
            {
                "paths": self.world.paths.model_dump(),
                "prune": {"trash_keep": f"{trash_days}d", "safety_keep": f"{safety_days}d"},
            }
        )
        return prune(config, self.pool, read_clocks=lambda: self.clocks, **options)

    def actions(self, **options):
        """What pruning does to each item, and why: title → (action, reason)."""
        return {v.found.title: (v.action.value, v.reason) for v in self.prune(**options).decisions}

    def trashed(self):
        """Names in the trash."""
        return sorted(os.listdir(self.trash)) if self.trash.is_dir() else []

    def age(self, days):
        """Let time pass."""
        self.set_clock(days)
        self.clocks = replace(self.clocks, uptime=self.clocks.uptime + days * DAY)

    def set_clock(self, days):
        """Put the clock forward (or back), while no time passes."""
        self.clocks = replace(self.clocks, clock=self.clocks.clock + days * DAY)

    def reboot(self):
        """Reboot the host, within a minute."""
        clock = self.clocks.clock + 60
        self.clocks = ClockReading(f"{self.clocks.boot}+", 60.0, clock)


@pytest.fixture
def shelf(world):
    """A guest with a disk on each of two pools."""
    world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    return Shelf(world)
