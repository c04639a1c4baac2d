"""The results of test restores, as they are on copies in pools of this machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from snaporch.catalog.records import VERIFIED_HERE
from snaporch.config import Config
from snaporch.model import PoolSnapshot, VerificationResult


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

    def as_json(self) -> dict[str, object]:
        """The documented JSON object (``docs/reference/json.md``)."""
        named = {"replica": self.replica, "domain": self.domain, "uuid": self.uuid}
        return named | {"snapshot": self.snapshot, **self.result.as_json()}


def restore_results(config: Config, snapshots: Iterable[PoolSnapshot]) -> list[RestoreResult]:
    """The results of test restores that are on copies in pools of this machine.

    Args:
        config: has the places of copies.
        snapshots: all ZFS snapshots of this machine.

    Returns:
        One for each run, by guest, the newest result last. Of results of a run that differ, since
        writing them was interrupted, the oldest counts.
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
        if known is None or result.at < known.result.at:
            found[name, uuid, run] = RestoreResult(name, domain, uuid, each.name, result)
    return sorted(found.values(), key=lambda each: (each.replica, each.domain, each.result.at))
