"""How it stands, as plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from snaporch.locks import Holder
from snaporch.model import Level, SnapshotRecord, iso
from snaporch.schedule.forecast import NextSnapshot
from snaporch.schedule.replication_due import PendingReplication
from snaporch.systemd.unit_state import CARRIERS
from snaporch.zfs import ForeignMount


class ProblemGrade(StrEnum):
    """How bad something is."""

    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that needs attention."""

    code: str
    """Which kind of problem it is: a heading of ``docs/status.md``."""
    grade: ProblemGrade
    subject: str
    text: str

    def as_json(self) -> dict[str, str]:
        """The documented JSON object (``docs/json.md``)."""
        return {
            "code": self.code,
            "grade": self.grade.value,
            "subject": self.subject,
            "text": self.text,
        }


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """A policy on a domain."""

    policy: str
    last: datetime | None
    """When the newest snapshot of the policy was taken."""
    next: NextSnapshot | None
    """``None`` for a policy that takes nothing by itself."""
    missed: int
    """How many of its times have gone by without a snapshot; 2 means two or more."""
    unchanged: datetime | None = None
    """When the guest was last found off, and still what that snapshot holds."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica of a domain's snapshots."""

    replica: str
    last: datetime | None
    """When the newest snapshot was taken that is there."""
    next: PendingReplication | None
    """``None`` while it has everything."""


@dataclass(frozen=True, slots=True)
class DomainStatus:
    """A domain."""

    name: str
    uuid: str
    policies: tuple[PolicyStatus, ...]
    unknown: tuple[str, ...]
    """Policies that somebody names and the configuration does not have."""
    newest: Mapping[Level, datetime]
    """When the newest snapshot of each level was taken."""
    counts: Mapping[Level, int]
    """How many snapshots of each level there are."""
    last: SnapshotRecord | None
    """The newest snapshot of all."""
    verified: SnapshotRecord | None
    """The one that was verified last."""
    replicas: tuple[ReplicaStatus, ...] = ()
    stray: tuple[str, ...] = ()
    """Overlays it runs on though no run is known that put it there."""
    lost: str = ""
    """The policy that took its newest snapshot, if nobody gives it any now."""


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run whose journal is there: it goes on, or was cut short."""

    domain: str
    uuid: str
    kind: str
    """``snapshot`` or ``restore``; empty when its journal cannot be understood."""
    phase: str
    window: bool
    """The guest is frozen, or writes to overlays."""
    since: datetime
    """When its journal was written last."""
    held: bool
    """Somebody is at it."""
    path: str
    guest_held: bool = False
    """It may have left its guest paused or frozen."""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """The bundle store."""

    path: str
    bundles: int
    bundle_bytes: int
    trash_bytes: int
    other_bytes: int
    """Safety copies of restores, and unfinished bundles."""
    free_bytes: int
    """What its file system has left."""
    size_bytes: int
    """Of that file system, as far as it is snaporch's to use."""

    @property
    def used_percent(self) -> float:
        """How full the file system is."""
        used = self.size_bytes - self.free_bytes
        return 100.0 * used / self.size_bytes if self.size_bytes else 0.0


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Who carries policies out."""

    holder: Holder | None
    """The daemon or ``run-due``, while it works."""
    units: Mapping[str, str] = field(default_factory=dict)
    """State of the systemd units that do; empty where there is no systemd."""

    @property
    def there(self) -> bool:
        """Whether anybody is known to do it."""
        return self.holder is not None or any(self.units.get(u) == "active" for u in CARRIERS)


@dataclass(frozen=True, slots=True)
class Status:
    """All of it, of one moment."""

    at: datetime
    carrier: SchedulerState
    domains: tuple[DomainStatus, ...]
    runs: tuple[OpenRun, ...]
    overlays: tuple[str, ...]
    """Directories of overlays that belong to no run that is known."""
    store: StoreUsage
    store_gone: bool = False
    """Whether there is no store where there ought to be one."""
    unused: tuple[str, ...] = ()
    """Policies that have times, and no domain."""
    strangers: tuple[tuple[str, str], ...] = ()
    """Sections of the configuration, and domains they name that do not exist."""
    mounted: tuple[ForeignMount, ...] = ()
    """Snapshots of these domains that cannot be destroyed, and who has them mounted."""
    barred: tuple[tuple[str, str], ...] = ()
    """Guests that cannot be started until the undo of a restore is finished, and how it is."""

    def as_json(self) -> dict[str, object]:
        """The documented JSON object (``docs/json.md``), without the problems."""
        holder = self.carrier.holder
        store = self.store
        return {
            "at": iso(self.at),
            "carrier": {
                "doing": holder.doing if holder else None,
                "pid": holder.pid if holder else None,
                "since": holder.since if holder else None,
                "units": dict(self.carrier.units),
            },
            "domains": [_domain_json(each, self.at) for each in self.domains],
            "runs": [
                {
                    "domain": run.domain,
                    "uuid": run.uuid,
                    "kind": run.kind,
                    "phase": run.phase,
                    "window_open": run.window,
                    "since": iso(run.since),
                    "under_way": run.held,
                    "guest_held": run.guest_held,
                    "journal": run.path,
                }
                for run in self.runs
            ],
            "stray_overlays": list(self.overlays),
            "barred": [name for name, _ in self.barred],
            "mounted": [{"snapshot": each.name, "by": each.holder} for each in self.mounted],
            "store": {
                "path": store.path,
                "bundles": store.bundles,
                "bundle_bytes": store.bundle_bytes,
                "trash_bytes": store.trash_bytes,
                "other_bytes": store.other_bytes,
                "free_bytes": store.free_bytes,
                "size_bytes": store.size_bytes,
            },
        }


def _domain_json(domain: DomainStatus, now: datetime) -> dict[str, object]:
    return {
        "domain": domain.name,
        "uuid": domain.uuid,
        "newest": {level.value: iso(at) for level, at in domain.newest.items()},
        "counts": {level.value: count for level, count in domain.counts.items()},
        "policies": [
            {
                "policy": each.policy,
                "last": iso(each.last) if each.last else None,
                "next": iso(each.next.at) if each.next else None,
                "due": each.next.due(now) if each.next else False,
                "missed": each.missed,
                "unchanged": iso(each.unchanged) if each.unchanged else None,
                "failed": each.next.failed.reason if each.next and each.next.failed else None,
            }
            for each in domain.policies
        ],
        "replicas": [
            {
                "replica": each.replica,
                "last": iso(each.last) if each.last else None,
                "waiting_since": iso(each.next.since) if each.next else None,
                "failed": each.next.failed.reason if each.next and each.next.failed else None,
            }
            for each in domain.replicas
        ],
    }
