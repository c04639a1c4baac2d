"""``overlay``: RAM is saved live and every disk switched to an overlay, which is committed later.

How long its commit may take is set by :mod:`snaporch.hypervisor.commit_timeouts`.

The guest is paused only for the switch. The base images do not change while the overlays exist, so
there is time for the ZFS snapshots of many pools.
"""

from __future__ import annotations

from pathlib import Path

from snaporch.catalog.torn import commits_in, recorded_commit
from snaporch.disks import overlay_files
from snaporch.hypervisor.commit_timeouts import CommitTimeouts
from snaporch.journal import Note, note_stages
from snaporch.model import DomainState, Level
from snaporch.recovery.overlay_removal import remove_unused
from snaporch.snapshot.strategies.ram import RamStrategy


class Overlay(RamStrategy):
    """Saves RAM live and freezes the base images below overlays."""

    def make_overlays(self) -> None:
        """Make empty overlays over the bases, so that the freeze need not wait for them."""
        facts, owner = self.work.plan.facts, self.work.domain.emulator_owner
        overlay_files.make_directory(Path(facts.overlay_dir))
        for disk in facts.overlays:
            size = self.work.hypervisor.disk_capacity(facts.uuid, disk.target)
            self.work.context.overlay_images.make_overlay(disk, size, owner)

    def remove_overlays(self) -> None:
        """Remove overlays that were never used."""
        facts = self.work.plan.facts
        overlay_files.remove(Path(facts.overlay_dir), facts.overlays)

    def reached(self) -> Level:
        """Return ``ram`` unless another process has begun to commit an overlay into its base."""
        uuid = self.work.plan.facts.uuid
        live, _ = self.work.hypervisor.sources(uuid)
        on = {disk.target: disk.overlay for disk in self.work.plan.facts.overlays}
        if live is None or any(live.get(target) != path for target, path in on.items()):
            return self._committed()
        if self.work.hypervisor.busy_disks(uuid) & on.keys():
            return self._committed()
        return Level.RAM

    def _committed(self) -> Level:
        """Return the level after another process's commit.

        If the journal has its times, torn snapshots are found by their transaction groups.
        """
        level = self.record_disturbance(Level.RAM)
        return level if commits_in(self.work.journal.path) else Level.TORN

    def release(self) -> None:
        """Commit the overlays, pivot to the bases, and remove the overlays that are unused."""
        facts = self.work.plan.facts
        self.work.report(f"paused {self.pause.milliseconds:.0f} ms; committing overlays")
        patience = CommitTimeouts(running=self.work.plan.settings.commit_patience)
        on_stage = note_stages(self.work.journal.note)
        with recorded_commit(self.work.context.pool, facts.datasets, self.work.journal.path):
            self.work.hypervisor.commit(facts.uuid, facts.overlays, on_stage, patience)
        self.work.journal.note(Note.COMMITTED)
        self._wake_from_full_disk()
        remove_unused(self.work.context, facts)

    def _wake_from_full_disk(self) -> None:
        """Resume a guest that QEMU has paused because its overlay could not grow."""
        uuid, was = self.work.domain.uuid, self.work.domain.state
        if was is DomainState.RUNNING and self.work.hypervisor.paused_by(uuid) == "ioerror":
            self.work.hypervisor.resume(uuid)
            self.work.warn("its overlay was full and QEMU had paused it; it runs again")
