"""Applies the rules to the facts. Reads nothing from the host.

The public functions of the modules in :mod:`snaporch.check.rules` are the rules. The name of a
rule, with hyphens, is the code of its findings.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType

from snaporch.check.facts import HostFacts
from snaporch.check.findings import Finding, Severity
from snaporch.check.rules import disks, guests, host, sanoid, sanoid_sections, sources, storage
from snaporch.check.sections_of_guests import covered_sections

HOST_RULES = (sanoid, host, storage, sources, disks)
"""Modules whose rules take :class:`HostFacts`."""
SECTION_RULES = sanoid_sections
"""Its rules also take one section of ``sanoid.conf``."""
GUEST_RULES = guests
"""Its rules also take one guest."""


def apply_rules(facts: HostFacts) -> list[Finding]:
    """All findings, worst first, each once."""
    found = [finding for module in HOST_RULES for finding in _apply(module, facts)]
    if facts.sanoid.config is not None:
        for section in covered_sections(facts.sanoid.config, facts.guests):
            found += _apply(SECTION_RULES, facts, section)
    for guest in facts.guests:
        found += _apply(GUEST_RULES, facts, guest)
    order = list(Severity)
    return sorted(dict.fromkeys(found), key=lambda finding: order.index(finding.severity))


def rules_in(module: ModuleType) -> dict[str, Callable[..., Iterator[Finding]]]:
    """The rules that a module defines, by their codes, in the order of the file."""
    return {
        name.replace("_", "-"): value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
    }


def _apply(module: ModuleType, *arguments: object) -> Iterator[Finding]:
    for code, rule in rules_in(module).items():
        for finding in rule(*arguments):
            yield finding if finding.code else replace(finding, code=code)
