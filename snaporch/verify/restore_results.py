"""The results of test restores, as they are on copies in pools of this machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from snaporch.catalog.records import VERIFIED_HERE
from snaporch.config import Config
from snaporch.model import PoolSnapshot, VerificationResult


class RestoreOutcome(StrEnum):
    """What a test restore has shown."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RESTORED = "not-restored"
    """Nothing failed, and no clone could be run: only checksums and GUIDs are known."""


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """The last result of restoring a copy in a clone on this machine."""

    replica: str
    """The name in the configuration of the copies."""
    domain: str
    uuid: str
    snapshot: str
    result: VerificationResult

    @property
    def full_name(self) -> str:
        """``DOMAIN@SNAPSHOT``."""
        return f"{self.domain}@{self.snapshot}"

    @property
    def outcome(self) -> RestoreOutcome:
        """What the test restores of the copy have shown."""
        if not self.result.passed:
            return RestoreOutcome.FAILED
        restored = self.result.is_restored
        return RestoreOutcome.PASSED if restored else RestoreOutcome.NOT_RESTORED

    def as_json(self) -> dict[str, object]:
        """The documented JSON object (``docs/reference/json.md``)."""
        named = {"replica": self.replica, "domain": self.domain, "uuid": self.uuid}
        found = {"snapshot": self.snapshot, **self.result.as_json()}
        return named | found | {"passed": self.result.is_restored}


def result_of_run(results: Sequence[VerificationResult]) -> VerificationResult:
    """The result that counts, of those on the ZFS snapshots of one run.

    They differ if writing them was interrupted, or if datasets are shared. A failure counts before
    a copy that was not restored, this before a pass, and of two alike the oldest.

    Args:
        results: at least one.
    """
    return min(results, key=lambda each: (each.passed, each.is_restored, each.at))


def restore_results(config: Config, snapshots: Iterable[PoolSnapshot]) -> list[RestoreResult]:
    """The results of test restores that are on copies in pools of this machine.

    Args:
        config: has the places of copies.
        snapshots: all ZFS snapshots of this machine.

    Returns:
        One for each run, by guest, the newest result last; see :func:`result_of_run`.
    """
    names = {place.dataset: name for name, place in config.copies_here.items()}
    found: dict[tuple[str, str, str], RestoreResult] = {}
    for each in snapshots:
        name = names.get(each.dataset.rpartition("/")[0])
        result = VerificationResult.parse(each.properties.get(VERIFIED_HERE))
        if name is None or result is None:
            continue
        domain, uuid, run = (each.properties.get(key, "") for key in ("domain", "uuid", "run"))
        known = found.get((name, uuid, run))
        if known is None or result_of_run([known.result, result]) is result:
            found[name, uuid, run] = RestoreResult(name, domain, uuid, each.name, result)
    return sorted(found.values(), key=lambda each: (each.replica, each.domain, each.result.at))
