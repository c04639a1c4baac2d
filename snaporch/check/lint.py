"""The lint: facts in, findings out. Reads nothing, asks nobody."""

from __future__ import annotations

from snaporch.check.coverage import coverings
from snaporch.check.facts import HostFacts
from snaporch.check.findings import Finding, Severity
from snaporch.check.rules.calls import call_findings
from snaporch.check.rules.guests import guest_findings
from snaporch.check.rules.host import host_findings
from snaporch.check.rules.policies import name_findings, policy_findings
from snaporch.check.rules.sections import section_findings


def lint(facts: HostFacts) -> list[Finding]:
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
