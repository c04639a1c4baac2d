"""Findings of ``snaporch check``, as text and for a monitoring plugin."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from snaporch.check.findings import Finding, Severity, count, worst
from snaporch.errors import one_line
from snaporch.output.terminal import print_result

_WIDEST = 100
_INDENT = "    "
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.HINT: "cyan"}
_NAGIOS = {
    None: ("OK", 0),
    Severity.HINT: ("OK", 0),
    Severity.WARNING: ("WARNING", 1),
    Severity.ERROR: ("CRITICAL", 2),
}
NAGIOS_UNKNOWN = 3


def print_findings(findings: Sequence[Finding], looked_at: str) -> None:
    """Print each finding as a paragraph, then their number.

    Args:
        looked_at: what was checked.
    """
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    width = min(console.width, _WIDEST)
    with console.capture() as captured:
        for finding in findings:
            console.print(_paragraph(finding, width))
    print_result(captured.get() + f"{looked_at}: {count(findings)}")


def _paragraph(finding: Finding, width: int) -> Text:
    """Format a finding; sentences are wrapped, lines to be copied are not."""
    text = Text()
    text.append(f"{finding.severity}", style=_STYLES[finding.severity])
    text.append(f"  {one_line(finding.subject)}  [{finding.code}]\n")
    for sentence in (finding.what, f"Why: {finding.why}", f"Fix: {finding.fix}"):
        for line in textwrap.wrap(
            one_line(sentence), width - len(_INDENT), break_long_words=False, break_on_hyphens=False
        ):
            text.append(f"{_INDENT}{line}\n")
    for line in finding.lines:
        text.append(f"{_INDENT * 2}{one_line(line)}\n", style="bold")
    return text


def nagios(findings: Sequence[Finding]) -> tuple[str, int]:
    """Return the line and the exit status of a monitoring plugin (Nagios Plugin API)."""
    word, status = _NAGIOS[worst(findings)]
    grave = [f for f in findings if f.severity is not Severity.HINT]
    text = count(findings)
    if grave:
        text += f" - {grave[0].subject}: {grave[0].what}"
    return nagios_line(word, text), status


def nagios_line(word: str, text: str) -> str:
    """Return one line without bars, which would begin performance data."""
    return one_line(f"SNAPORCH {word} - {text}").replace("|", "/")
