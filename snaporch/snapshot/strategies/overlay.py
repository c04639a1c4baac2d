"""``overlay``: RAM saved live, every disk switched to an overlay, later committed back.

The guest pauses only for the switch; the bases stand still for as long as the overlays are there,
so the window may be long and the pools many.
"""

from __future__ import annotations

from pathlib import Path

from snaporch.catalog.torn import commits_in, noted_commit
from snaporch.disks import overlay_files
from snaporch.hypervisor import Patience
from snaporch.journal import Note, noting
from snaporch.model import DomainState, Level
from snaporch.recovery.overlay_use import remove_unused
from snaporch.snapshot.strategies.ram import RamStrategy


class Overlay(RamStrategy):
    """See the module."""

    def make_overlays(self) -> None:
        """Empty overlays over the bases, made before so that the freeze need not wait for them."""
        facts, owner = self.work.plan.facts, self.work.domain.emulator_owner
        overlay_files.make_directory(Path(facts.overlay_dir))
        for disk in facts.overlays:
            size = self.work.hypervisor.disk_capacity(facts.uuid, disk.target)
            overlay_files.make_overlay(disk, size, owner)

    def remove_overlays(self) -> None:
        """Remove overlays that were never used."""
        facts = self.work.plan.facts
        overlay_files.remove(Path(facts.overlay_dir), facts.overlays)

    def reached(self) -> Level:
        """Nothing writes to a base below an overlay, unless somebody commits it."""
        uuid = self.work.plan.facts.uuid
        live, _ = self.work.hypervisor.sources(uuid)
        on = {disk.target: disk.overlay for disk in self.work.plan.facts.overlays}
        if live is None or any(live.get(target) != path for target, path in on.items()):
            return self._committed()
        if self.work.hypervisor.busy_disks(uuid) & on.keys():
            return self._committed()
        return Level.RAM

    def _committed(self) -> Level:
        """Somebody has begun to commit; if it was noted when, the snapshots tell by themselves."""
        level = self.disturbed(Level.RAM)
        return level if commits_in(self.work.journal.path) else Level.TORN

    def release(self) -> None:
        """Commit, pivot, and remove the overlays when they hold nothing any more."""
        facts = self.work.plan.facts
        self.work.say(f"paused {self.pause.milliseconds:.0f} ms; committing overlays")
        patience = Patience(running=self.work.plan.settings.commit_patience)
        told = noting(self.work.journal.note)
        with noted_commit(self.work.context.pool, facts.datasets, self.work.journal.path):
            self.work.hypervisor.commit(facts.uuid, facts.overlays, told, patience)
        self.work.journal.note(Note.COMMITTED)
        self._wake_from_full_disk()
        remove_unused(self.work.context, facts)

    def _wake_from_full_disk(self) -> None:
        """QEMU pauses a guest whose overlay cannot grow; on its base it can go on."""
        uuid, was = self.work.domain.uuid, self.work.domain.state
        if was is DomainState.RUNNING and self.work.hypervisor.paused_by(uuid) == "ioerror":
            self.work.hypervisor.resume(uuid)
            self.work.warn("its overlay was full, which paused it; it goes on")
