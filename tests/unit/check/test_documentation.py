"""docs/check.md has a paragraph on each finding, and on no other."""

import re
from pathlib import Path

from snaporch.faults import FAULTS

TOP = Path(__file__).parents[3]


def test_every_finding_has_its_paragraph():
    rules = "".join(path.read_text() for path in (TOP / "snaporch/check/rules").glob("*.py"))
    used = set(re.findall(r'"([a-z]+(?:-[a-z]+)+|uncovered|busy|downgrade|stranger)"', rules))
    used |= {"pre-missing", "post-missing"} | {fault.code for fault in FAULTS}
    page = (TOP / "docs/check.md").read_text()
    headings = re.findall(r"^### (.+)$", page, re.MULTILINE)
    assert sorted(code for line in headings for code in line.split(", ")) == sorted(used)
