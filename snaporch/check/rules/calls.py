"""What is looked at in the guests of one call of the pre hook."""

from __future__ import annotations

from collections.abc import Iterator

from snaporch.check.facts import GuestFacts, HostFacts
from snaporch.check.findings import Finding, Severity
from snaporch.sanoid.hooks.freeze_order import find_misfit


def call_findings(facts: HostFacts) -> Iterator[Finding]:
    """Guests that cannot all be frozen before the first of them has to go on."""
    for path, guests in _calls(facts).items():
        prospects = {each.name: each.prospect for each in guests if each.prospect is not None}
        misfit = find_misfit(prospects, facts.jobs)
        if misfit is None:
            continue
        lower = next(each.on_unavailable for each in guests if each.name == misfit.guest)
        gives_way = prospects[misfit.guest].gives_way
        fails = lower == "fail" and not gives_way
        result = f"its snapshots are {lower} ones"
        if gives_way:
            result = "it is held on overlays, and somebody else's snapshots of it may be torn"
        yield Finding(
            "hook-deadline",
            Severity.ERROR if fails else Severity.WARNING,
            misfit.guest,
            f"it cannot be frozen together with the others on {path}: {misfit.reason}",
            "the pre hook fails, and freezes none of them" if fails else result,
            misfit.step,
        )


def _calls(facts: HostFacts) -> dict[str, list[GuestFacts]]:
    """Dataset that sanoid calls its hook for → guests on it or, with ``recursive = zfs``, below."""
    found: dict[str, list[GuestFacts]] = {}
    for guest in facts.guests:
        sections = map(facts.sanoid.config.covering, guest.datasets) if facts.sanoid.config else ()
        hooked = (each for each in sections if each and each.settings.get("pre_snapshot_script"))
        for path in {section.path for section in hooked}:
            found.setdefault(path, []).append(guest)
    return found
