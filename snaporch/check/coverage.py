"""Which of sanoid's sections takes the snapshots of which guests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from snaporch.check.facts import GuestFacts
from snaporch.check.findings import listed
from snaporch.sanoid.config.resolve import SanoidConfig, Section, hook_settings


@dataclass
class Covering:
    """A section of the file, with what it or its recursion covers of the guests."""

    section: Section
    """As sanoid has resolved it for one of the datasets."""
    settings: Mapping[str, str] | None
    """Where sanoid looks for the hooks; ``None`` when it looks nowhere."""
    guests: list[GuestFacts] = field(default_factory=list)
    datasets: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The section to write in."""
        return self.section.origin

    def setting(self, key: str) -> str:
        """What sanoid will use."""
        return (self.settings or {}).get(key, "")

    @property
    def of_guests(self) -> str:
        """Whose datasets it covers, for a message."""
        return listed([guest.name for guest in self.guests])


def coverings(config: SanoidConfig, guests: Sequence[GuestFacts]) -> list[Covering]:
    """The sections that matter to the guests, each section of the file once."""
    found: dict[tuple[str, bool], Covering] = {}
    for guest in guests:
        for dataset in guest.datasets:
            section = config.covering(dataset)
            if section is None:
                continue
            settings = hook_settings(config, section)
            covering = found.setdefault(
                (section.origin, settings is None), Covering(section, settings)
            )
            covering.datasets.add(dataset)
            if guest not in covering.guests:
                covering.guests.append(guest)
    return list(found.values())
