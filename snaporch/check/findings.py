"""What a lint says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad it is, worst first."""

    ERROR = "error"
    """Snapshots fail, or are not what they claim to be."""
    WARNING = "warning"
    """Works, and will disappoint."""
    HINT = "hint"
    """Good to know."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that could be better; each code has a paragraph in ``docs/check.md``."""

    code: str
    severity: Severity
    subject: str
    what: str
    why: str
    mend: str
    """What to do, and where."""
    lines: tuple[str, ...] = ()
    """What to write there, or to run."""

    def as_json(self) -> dict[str, object]:
        """The documented JSON object (``docs/json.md``)."""
        return asdict(self) | {"severity": self.severity.value, "lines": list(self.lines)}


def worst(findings: Iterable[Finding]) -> Severity | None:
    """The worst severity there is."""
    found = {finding.severity for finding in findings}
    return next((severity for severity in Severity if severity in found), None)


def count(findings: Iterable[Finding]) -> str:
    """How many of each: ``2 errors, 1 hint``."""
    kinds = [finding.severity for finding in findings]
    amounts = [(kinds.count(severity), severity.value) for severity in Severity]
    told = [f"{many} {kind}{'' if many == 1 else 's'}" for many, kind in amounts if many]
    return ", ".join(told) or "nothing to mend"


def listed(names: Sequence[str], most: int = 4) -> str:
    """``a, b and c``; beyond ``most`` the rest is a number."""
    unique = list(dict.fromkeys(names))
    if len(unique) > most:
        unique = [*unique[: most - 1], f"{len(unique) - most + 1} more"]
    return " and ".join(filter(None, [", ".join(unique[:-1]), unique[-1]])) if unique else ""
