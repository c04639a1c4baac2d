"""The data of ``snaporch status``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from snaporch.config.transfer_window import ALWAYS, Windows
from snaporch.fence import Fence
from snaporch.locks import DAEMON, LockHolder
from snaporch.model import Level, SnapshotRecord, iso, parse_iso
from snaporch.pull.record import PullRecord
from snaporch.schedule.failed_attempts import FailedAttempt
from snaporch.schedule.forecast import NextSnapshot
from snaporch.schedule.replication_due import PendingReplication
from snaporch.systemd.unit_state import CARRIERS
from snaporch.verify.copy_results import CopyResult
from snaporch.verify.restore_results import RestoreResult
from snaporch.zfs import BlockingMount

_PRUNE_LATE = timedelta(days=2)
"""For a prune that should begin each day."""


class ProblemGrade(StrEnum):
    """How severe a problem is."""

    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that needs attention."""

    code: str
    """The kind of problem; ``docs/how-to/status.md`` lists them."""
    grade: ProblemGrade
    subject: str
    text: str

    def as_json(self) -> dict[str, str]:
        """The documented JSON object (``docs/reference/json.md``)."""
        return {
            "code": self.code,
            "grade": self.grade.value,
            "subject": self.subject,
            "text": self.text,
        }


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """The state of a policy on a domain."""

    policy: str
    last: datetime | None
    """When the newest snapshot of the policy was taken."""
    next: NextSnapshot | None
    """``None`` for a policy without times."""
    missed: int
    """How many times passed without a snapshot; 2 means two or more."""
    unchanged: datetime | None = None
    """When the guest was last found shut off and unchanged since that snapshot."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """The state of a replica of a domain."""

    replica: str
    last: datetime | None
    """When the newest snapshot that the replica has was taken."""
    next: PendingReplication | None
    """``None`` if the replica lacks no snapshot, or no policy replicates to it."""
    failed: FailedAttempt | None = None
    """The last attempt, if it failed."""


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """The state of a source that this machine pulls."""

    source: str
    every: timedelta | None
    """How often it is pulled; ``None`` by hand only."""
    whole: PullRecord | None
    """Its last pull; ``None`` if it was never pulled."""
    guests: Mapping[str, PullRecord] = field(default_factory=dict)
    """The last pull of each guest, by UUID."""
    newest_within: timedelta | None = None
    """How old the newest snapshot of a guest may be."""
    window: Windows = ALWAYS
    """When a pull may start by itself."""

    def waits_since(self, now: datetime) -> datetime | None:
        """Since when a pull is due, and waits for its window; ``None`` if none does."""
        if self.every is None or self.window.is_open(now):
            return None
        tried = self.whole.tried if self.whole else None
        due = tried + self.every if tried else now
        return due if due <= now else None


@dataclass(frozen=True, slots=True)
class DomainStatus:
    """The state of a domain."""

    name: str
    uuid: str
    policies: tuple[PolicyStatus, ...]
    unknown_policies: tuple[str, ...]
    """Names of assigned policies that are not in the configuration."""
    newest: Mapping[Level, datetime]
    """When the newest snapshot of each level was taken."""
    counts: Mapping[Level, int]
    """How many snapshots of each level there are."""
    last: SnapshotRecord | None
    """The newest snapshot, of whatever policy and level."""
    verified: tuple[SnapshotRecord, ...]
    """The snapshots that were verified, the last one first."""
    replicas: tuple[ReplicaStatus, ...] = ()
    unknown_overlays: tuple[str, ...] = ()
    """Overlays that it uses though no known run created them."""
    lost_policy: str = ""
    """The policy that took its newest snapshot, if the domain now has no policy."""
    replicated_by: LockHolder | None = None
    """The replication of it that runs now; retention waits for its end."""
    assigned_by: str = ""
    """The place that assigns its policies, also those that do not exist; empty if none does."""
    has_verify_command: bool = False
    """Its settings have a ``verify_command``."""


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run with a journal: it is running, or was interrupted."""

    domain: str
    uuid: str
    kind: str
    """``snapshot`` or ``restore``; empty if the journal is not readable."""
    phase: str
    in_window: bool
    """The guest is frozen, or writes to overlays."""
    since: datetime
    """When the journal was last written."""
    locked: bool
    """A process holds its lock: it is running or being recovered."""
    path: str
    guest_may_be_frozen: bool = False
    """The guest may still be paused or frozen."""
    guarded: bool = False
    """A guardian runs that releases such a guest."""
    step: str = ""
    """What to do about a journal that is not readable."""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """The usage of the bundle store."""

    path: str
    bundles: int
    bundle_bytes: int
    trash_bytes: int
    other_bytes: int
    """Safety copies of restores, unfinished bundles, and files of RAM."""
    free_bytes: int
    """Free space of its file system."""
    size_bytes: int
    """Size of its file system, without what is reserved for root."""

    @property
    def used_percent(self) -> float:
        """The used share of the file system in percent."""
        used = self.size_bytes - self.free_bytes
        return 100.0 * used / self.size_bytes if self.size_bytes else 0.0


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Whether and how policies are carried out."""

    holder: LockHolder | None
    """The daemon or ``run-due`` that holds the lock now."""
    units: Mapping[str, str] = field(default_factory=dict)
    """``ActiveState`` by systemd unit; empty without systemd."""
    refresh: timedelta = timedelta(minutes=5)
    """How often the daemon checks guests and policies."""
    pruned: datetime | None = None
    """When the last daily prune began; ``None`` if there was none."""

    @property
    def checked(self) -> datetime | None:
        """When the daemon last checked guests and policies, or began to work; else ``None``."""
        if self.holder is None or self.holder.doing != DAEMON:
            return None
        return parse_iso(self.holder.checked or self.holder.since)

    @property
    def prune_late_since(self) -> datetime | None:
        """When the last daily prune began, if the daemon should have begun another long ago."""
        holder, checked = self.holder, self.checked
        if holder is None or checked is None or self.pruned is None:
            return None
        began = max(self.pruned, parse_iso(holder.since))  # a new daemon begins with a prune
        return self.pruned if began + _PRUNE_LATE < checked else None

    @property
    def is_active(self) -> bool:
        """Whether the daemon, a ``run-due`` or the timer is active."""
        return self.holder is not None or any(self.units.get(u) == "active" for u in CARRIERS)


@dataclass(frozen=True, slots=True)
class Status:
    """The state of everything at one moment."""

    at: datetime
    scheduler: SchedulerState
    domains: tuple[DomainStatus, ...]
    runs: tuple[OpenRun, ...]
    overlays_without_journal: tuple[str, ...]
    """Directories of overlays without a readable journal of their run, but those in quarantine."""
    store: StoreUsage
    quarantined: tuple[str, ...] = ()
    """Directories of overlays in quarantine."""
    store_missing: bool = False
    """Whether the store is missing though snapshots have bundles."""
    unused_policies: tuple[str, ...] = ()
    """Policies with times that no domain has."""
    unknown_domains: tuple[tuple[str, str], ...] = ()
    """Pairs of a configuration section and a domain in it that does not exist."""
    mounted_snapshots: tuple[BlockingMount, ...] = ()
    """Mounted snapshots of these domains, which cannot be destroyed, and where they are mounted."""
    barred_guests: tuple[tuple[str, str], ...] = ()
    """Pairs of a guest that must not start until an undo is finished, and the explanation."""
    fenced_guests: tuple[tuple[str, str], ...] = ()
    """Pairs of a guest that does not start here because of its fence, and the explanation."""
    fences: tuple[tuple[str, Fence], ...] = ()
    """Pairs of such a guest, and its fence."""
    open_fences: tuple[tuple[str, str], ...] = ()
    """Pairs of a guest that runs or would start in spite of its fence, and the explanation."""
    unfinished_failovers: tuple[tuple[str, str], ...] = ()
    """Pairs of a guest that has ended here and is not on its replica yet, and the explanation."""
    sources: tuple[SourceStatus, ...] = ()
    exceeded_limits: tuple[tuple[str, str], ...] = ()
    """Pairs of such a directory, and how its overlays exceed a limit."""
    copies: tuple[CopyResult, ...] = ()
    """The last results of verifying copies on replicas, also of domains that this host lost."""
    test_restores: tuple[RestoreResult, ...] = ()
    """The last results of test restores of copies in pools of this machine."""
    unreadable_copies: tuple[tuple[str, str], ...] = ()
    """Pairs of a file of such results that cannot be read, and the explanation."""

    unfinished_rebuilds: tuple[str, ...] = ()
    """Datasets of guests whose rebuild is not complete."""

    def as_json(self) -> dict[str, object]:
        """The documented JSON object (``docs/reference/json.md``), without the problems."""
        holder = self.scheduler.holder
        store = self.store
        return {
            "at": iso(self.at),
            "scheduler": {
                "doing": holder.doing if holder else None,
                "pid": holder.pid if holder else None,
                "since": holder.since if holder else None,
                "checked": holder.checked or None if holder else None,
                "units": dict(self.scheduler.units),
            },
            "domains": [_domain_json(each, self.at) for each in self.domains],
            "sources": [_source_json(each, self.at) for each in self.sources],
            "runs": [
                {
                    "domain": run.domain,
                    "uuid": run.uuid,
                    "kind": run.kind,
                    "phase": run.phase,
                    "window_open": run.in_window,
                    "since": iso(run.since),
                    "under_way": run.locked,
                    "guest_held": run.guest_may_be_frozen,
                    "journal": run.path,
                }
                for run in self.runs
            ],
            "unknown_overlays": list(self.overlays_without_journal),
            "quarantined": list(self.quarantined),
            "barred": [name for name, _ in self.barred_guests],
            "fenced": [name for name, _ in self.fenced_guests],
            "fences": [
                {
                    "domain": name,
                    "uuid": fence.uuid,
                    "since": iso(fence.made) if fence.made else None,
                    "snapshot": fence.snapshot or None,
                    "replica": fence.replica or None,
                    "delivered": bool(fence.delivered),
                }
                for name, fence in self.fences
            ],
            "mounted": [
                {"snapshot": each.name, "by": each.program} for each in self.mounted_snapshots
            ],
            "copies": [each.as_json() for each in self.copies],
            "test_restores": [each.as_json() for each in self.test_restores],
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


def _source_json(source: SourceStatus, now: datetime) -> dict[str, object]:
    since = source.waits_since(now)
    return {
        "source": source.source,
        "pulled": _moment(source.whole.pulled if source.whole else None),
        "failed": (source.whole.failed or None) if source.whole else None,
        "waiting_since": _moment(since),
        "window_opens": _moment(source.window.opens(now) if since else None),
        "guests": [
            {
                "domain": each.domain,
                "uuid": uuid,
                "pulled": _moment(each.pulled),
                "newest": _moment(each.newest),
                "failed": each.failed or None,
                "skipped": each.skipped,
                "waiting": each.waiting,
                "waiting_since": _moment(each.waiting_since),
            }
            for uuid, each in source.guests.items()
        ],
    }


def _moment(at: datetime | None) -> str | None:
    return iso(at) if at else None


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
                "window_opens": _moment(
                    each.next.at if each.next and each.next.waits_for_window(now) else None
                ),
                "failed": each.failed.reason if each.failed else None,
            }
            for each in domain.replicas
        ],
    }
