"""The results of ``snaporch check``.

They are printed by :mod:`snaporch.output.findings`. What is an error and what a warning is decided
by each rule, in :mod:`snaporch.check.rules`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial

from snaporch.errors import ExitCode


class Severity(StrEnum):
    """How bad a finding is, worst first."""

    ERROR = "error"
    """Snapshots fail, or their level is lower than recorded."""
    WARNING = "warning"
    """Snapshots work, but something will be missing or cost more than expected."""
    HINT = "hint"
    """Good to know."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem; each code has a paragraph in ``docs/how-to/check.md``."""

    severity: Severity
    subject: str
    what: str
    why: str
    fix: str
    """What to do, and where."""
    lines: tuple[str, ...] = ()
    """Lines to write there, or commands to run."""
    code: str = ""
    """The name of the rule, with hyphens; set by :mod:`snaporch.check.apply_rules`."""

    def as_json(self) -> dict[str, object]:
        """The JSON object that ``docs/reference/json.md`` describes."""
        more = {"severity": self.severity.value, "lines": list(self.lines)}
        return {"code": self.code} | asdict(self) | more


error = partial(Finding, Severity.ERROR)
warning = partial(Finding, Severity.WARNING)
hint = partial(Finding, Severity.HINT)


def worst(findings: Iterable[Finding]) -> Severity | None:
    """The worst severity among the findings."""
    found = {finding.severity for finding in findings}
    return next((severity for severity in Severity if severity in found), None)


def exit_code(findings: Iterable[Finding]) -> ExitCode:
    """The exit code of ``snaporch check``: hints do not count."""
    codes = {Severity.ERROR: ExitCode.ATTENTION, Severity.WARNING: ExitCode.WARNINGS}
    severity = worst(findings)
    return codes.get(severity, ExitCode.OK) if severity else ExitCode.OK


def count(findings: Iterable[Finding]) -> str:
    """The number of findings of each severity, as text: ``2 errors, 1 hint``."""
    severities = [finding.severity for finding in findings]
    amounts = [(severities.count(severity), severity.value) for severity in Severity]
    texts = [f"{many} {kind}{'' if many == 1 else 's'}" for many, kind in amounts if many]
    return ", ".join(texts) or "nothing to fix"


def listed(names: Sequence[str], most: int = 4) -> str:
    """The names as text: ``a, b and c``. Of more than ``most``, the rest is a number."""
    unique = list(dict.fromkeys(names))
    if len(unique) > most:
        unique = [*unique[: most - 1], f"{len(unique) - most + 1} more"]
    return " and ".join(filter(None, [", ".join(unique[:-1]), unique[-1]])) if unique else ""
