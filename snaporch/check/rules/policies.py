"""What is looked at in policies: whether they can do as they say, and names that are nobody's."""

from __future__ import annotations

from collections.abc import Iterator

from snaporch.check.facts import GuestFacts, HostFacts
from snaporch.check.findings import Finding, Severity, listed


def policy_findings(facts: HostFacts, guest: GuestFacts) -> Iterator[Finding]:
    """All about the policies of one guest."""
    for policy, reason, step in guest.unmet:
        yield Finding(
            "policy-level",
            Severity.ERROR,
            guest.name,
            f"policy {policy}: {reason}",
            "its snapshots fail, or are of a lower level than the policy asks for",
            step or f"mend the reason, or ask for another level in [policy.{policy}]",
        )
    by_sanoid = facts.sanoid.config is not None or facts.sanoid.refusal
    if by_sanoid or guest.policies or guest.opted_out or not guest.datasets:
        return
    yield Finding(
        "uncovered",
        Severity.WARNING if facts.policies else Severity.HINT,
        guest.name,
        "it has no policy, and sanoid takes no snapshots here",
        "there is no way back for it but to snapshots that somebody takes by hand",
        "give it a policy: docs/schedule.md; or none knowingly: in snaporch.toml write",
        (f'[domain."{guest.name}"]', "policies = []"),
    )


def name_findings(facts: HostFacts) -> Iterator[Finding]:
    """Names in the configuration that are nobody's."""
    for where, names in facts.nobodys.items():
        patterns = all(set("*?[") & set(name) for name in names)
        yield Finding(
            "unknown-name",
            Severity.HINT if patterns else Severity.WARNING,
            where,
            f"no guest has {listed([repr(name) for name in names])}",
            "the setting does nothing: is it misspelt, or was the guest renamed?",
            "correct it in snaporch.toml",
        )
