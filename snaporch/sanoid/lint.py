"""The lint: facts in, findings out. Reads nothing, asks nobody."""

from __future__ import annotations

from snaporch.sanoid.covering import coverings
from snaporch.sanoid.facts import Facts
from snaporch.sanoid.findings import Finding, Severity
from snaporch.sanoid.rules_calls import call_findings
from snaporch.sanoid.rules_guests import guest_findings
from snaporch.sanoid.rules_host import host_findings
from snaporch.sanoid.rules_policies import name_findings, policy_findings
from snaporch.sanoid.rules_sections import section_findings


def lint(facts: Facts) -> list[Finding]:
    """Everything that could be better, worst first, each thing once."""
    found = [*host_findings(facts), *name_findings(facts)]
    if facts.sanoid.installed and facts.sanoid.config is not None:
        for covering in coverings(facts.sanoid.config, facts.guests):
            found += section_findings(facts, covering)
    found += call_findings(facts)
    for guest in facts.guests:
        found += [*guest_findings(facts, guest), *policy_findings(facts, guest)]
    order = list(Severity)
    return sorted(dict.fromkeys(found), key=lambda finding: order.index(finding.severity))
