"""``overlay``: RAM saved live, every disk switched to an overlay, later committed back.

The guest pauses only for the switch; the bases stand still for as long as the overlays are there,
so the window may be long and the pools many.
"""

from __future__ import annotations

from pathlib import Path

from snaporch.model import Level
from snaporch.run import overlays
from snaporch.run.journal import Note
from snaporch.run.settle import remove_unused
from snaporch.run.strategies.ram import RamStrategy


class Overlay(RamStrategy):
    """See the module."""

    def make_overlays(self) -> None:
        """Empty overlays over the bases, made before so that the freeze need not wait for them."""
        facts, owner = self.work.plan.facts, self.work.domain.emulator_owner
        overlays.make_directory(Path(facts.overlay_dir), owner)
        for disk in facts.overlays:
            size = self.work.hypervisor.disk_capacity(facts.uuid, disk.target)
            overlays.make_overlay(disk, size, owner)

    def remove_overlays(self) -> None:
        """Remove overlays that were never used."""
        facts = self.work.plan.facts
        overlays.remove(Path(facts.overlay_dir), facts.overlays)

    def reached(self) -> Level:
        """Nobody but us can write to a base below an overlay."""
        return Level.RAM

    def release(self) -> None:
        """Commit, pivot, and remove the overlays when they hold nothing any more."""
        facts = self.work.plan.facts
        self.work.say(f"paused {self.pause.milliseconds:.0f} ms; committing overlays")
        self.work.journal.note(Note.SUSPENDED)  # the commit may, to catch up with the guest
        patience = self.work.plan.settings.commit_patience
        self.work.hypervisor.commit(facts.uuid, facts.overlays, lambda: None, patience=patience)
        self.work.journal.note(Note.COMMITTED)
        remove_unused(self.work.context, facts)
