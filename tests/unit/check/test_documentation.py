"""docs/how-to/check.md has a paragraph on each finding, and on no other."""

import re
from pathlib import Path

from snaporch.check.apply_rules import GUEST_RULES, HOST_RULES, SECTION_RULES, rules_in
from snaporch.known_faults import FAULTS

TOP = Path(__file__).parents[3]


def test_every_finding_has_its_paragraph():
    modules = (*HOST_RULES, SECTION_RULES, GUEST_RULES)
    rules = {code for module in modules for code in rules_in(module)} - {"known-fault"}
    used = rules | {fault.code for fault in FAULTS}
    page = (TOP / "docs/how-to/check.md").read_text()
    headings = re.findall(r"^### (.+)$", page, re.MULTILINE)
    assert sorted(code for line in headings for code in line.split(", ")) == sorted(used)
