"""Rules about the sources that this machine pulls: what would make a pull fail or disappoint."""

from __future__ import annotations

from collections.abc import Iterator

from snaporch.check.facts import HostFacts
from snaporch.check.findings import Finding, error, hint, listed, warning

ROOM_MIB = 1024
"""Less room than this is reported."""
CLOCK_SECONDS = 300
_PAGE = "see docs/how-to/pull.md"


def source_unreachable(facts: HostFacts) -> Iterator[Finding]:
    """A source does not answer."""
    for name, source in facts.sources.items():
        if source.unreachable:
            yield warning(
                f"source {name}",
                source.unreachable,
                "nothing can be pulled from it",
                "see docs/how-to/pull.md, set up a source",
            )


def source_shell(facts: HostFacts) -> Iterator[Finding]:
    """The key of this machine is not restricted on the source."""
    for name, source in facts.sources.items():
        if source.has_shell:
            yield warning(
                f"source {name}",
                "the key of this machine may run any command there",
                "an attacker who takes over this machine takes over that host, too",
                'write restrict,command="snaporch send …" before the key in its authorized_keys: '
                "see docs/how-to/pull.md",
            )


def source_guests(facts: HostFacts) -> Iterator[Finding]:
    """The source does not send a guest that is to be pulled, or none at all."""
    for name, source in facts.sources.items():
        what = ""
        if source.unsent:
            what = f"it does not send {listed([repr(each) for each in source.unsent])}"
        elif source.sends_none:
            what = "it sends no guest"
        if what:
            yield warning(
                f"source {name}",
                what,
                "a pull fails for a name in domains that does not come",
                "correct domains in snaporch.toml, or --domain in authorized_keys there; a guest "
                "without snapshots is not sent",
            )


def source_place(facts: HostFacts) -> Iterator[Finding]:
    """The copies of a source have no place here."""
    for name, source in facts.sources.items():
        if source.no_place:
            yield error(f"source {name}", source.no_place, "nothing can be pulled from it", _PAGE)


def source_in_clear(facts: HostFacts) -> Iterator[Finding]:
    """Copies of a source are encrypted, and the RAM of their guests would be here in clear."""
    for name, source in facts.sources.items():
        if source.locked:
            yield error(
                f"source {name}",
                f"{listed(source.locked)} is encrypted, and the RAM of its guest would be here in "
                "clear",
                "its bundles are not pulled; those from before are here in clear",
                f"have the bundles of [source.{name}] on an encrypted dataset: "
                "see docs/how-to/pull.md, 'Encrypted guests'",
            )


def source_room(facts: HostFacts) -> Iterator[Finding]:
    """There is little room for the copies of a source."""
    for name, source in facts.sources.items():
        if source.free_mib is not None and source.free_mib < ROOM_MIB:
            yield warning(
                f"source {name}",
                f"{source.free_mib} MiB are free for its snapshots or bundles",
                "a pull stops when the room or the quota is used up",
                "raise the quota, or let old copies go: see keep in docs/how-to/pull.md",
            )


def source_clock(facts: HostFacts) -> Iterator[Finding]:
    """The clocks of a source and of this machine differ."""
    for name, source in facts.sources.items():
        if abs(source.ahead_seconds) > CLOCK_SECONDS:
            side = "ahead of" if source.ahead_seconds > 0 else "behind"
            yield warning(
                f"source {name}",
                f"its clock is {abs(source.ahead_seconds):.0f} s {side} the one here",
                "ages are wrong in status and in retention; a snapshot that was taken over a day "
                "in the future is refused",
                "set both clocks by NTP: see timedatectl",
            )


def source_version(facts: HostFacts) -> Iterator[Finding]:
    """The source has another version of snaporch."""
    for name, source in facts.sources.items():
        if source.version and source.version != facts.version:
            yield hint(
                f"source {name}",
                f"it has snaporch {source.version}, and this machine {facts.version}",
                "bundles of a later version may not be read by an earlier one",
                "upgrade the earlier one",
            )
