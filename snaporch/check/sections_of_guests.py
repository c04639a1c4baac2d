"""Which sections of ``sanoid.conf`` take the snapshots of which guests.

How ``sanoid.conf`` is read is in :mod:`snaporch.sanoid.config.resolve`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from snaporch.check.facts import GuestFacts, HookProgram, HostFacts
from snaporch.check.findings import Severity, listed
from snaporch.sanoid.config.hook_command import SETTINGS, HookCommand, parse_hook
from snaporch.sanoid.config.resolve import SanoidConfig, Section, hook_settings


@dataclass
class CoveredSection:
    """A section of the file, and the guests that it or its recursion covers."""

    section: Section
    """As sanoid resolves it for one of the datasets."""
    settings: Mapping[str, str] | None
    """The settings in which sanoid looks for hooks; ``None`` if sanoid looks for none."""
    guests: list[GuestFacts] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The section of the file to edit."""
        return self.section.origin

    @property
    def subject(self) -> str:
        """The name in brackets, as in the file."""
        return f"[{self.name}]"

    def setting(self, key: str) -> str:
        """The value that sanoid uses; empty if there is none."""
        return (self.settings or {}).get(key, "")

    def severity(self, grave: Severity) -> Severity:
        """``grave``, or a hint if no guest depends on snaporch's hooks here.

        That is so if the section calls no snaporch, and each guest has a policy that takes its
        snapshots, or none on purpose.
        """
        commands = [parse_hook(self.setting(key)) for key in SETTINGS]
        called = any(command.phase for command in commands)
        provided = all(guest.policies or guest.opted_out for guest in self.guests)
        return Severity.HINT if provided and not called else grave

    @property
    def guest_names(self) -> str:
        """The names of the covered guests, for a message."""
        return listed([guest.name for guest in self.guests])

    def hooks(self, facts: HostFacts) -> Iterator[tuple[str, HookCommand, HookProgram | None]]:
        """Each hook setting that has a value: its key, its command and the program on disk."""
        for key in SETTINGS:
            if self.setting(key).strip():
                command = parse_hook(self.setting(key))
                yield key, command, facts.sanoid.programs.get(command.program)


def covered_sections(config: SanoidConfig, guests: Sequence[GuestFacts]) -> list[CoveredSection]:
    """The sections that cover any of the guests, each section of the file once."""
    found: dict[tuple[str, bool], CoveredSection] = {}
    for guest in guests:
        for section in filter(None, map(config.covering, guest.datasets)):
            settings = hook_settings(config, section)
            covered = found.setdefault(
                (section.origin, settings is None), CoveredSection(section, settings)
            )
            if guest not in covered.guests:
                covered.guests.append(guest)
    return list(found.values())
