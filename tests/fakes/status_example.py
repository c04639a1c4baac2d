"""The status of a host without problems; tests change it."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from snaporch.locks import LockHolder
from snaporch.model import BundleState, Level, SnapshotRecord, iso
from snaporch.schedule.forecast import NextSnapshot
from snaporch.status.model import (
    DomainStatus,
    OpenRun,
    PolicyStatus,
    SchedulerState,
    Status,
    StoreUsage,
)

NOW = datetime(2026, 6, 10, 12, 30, tzinfo=UTC)
TAKEN = NOW - timedelta(minutes=10)
RECORD = SnapshotRecord(
    domain="web",
    uuid="u",
    snapshot="snaporch_20260610T122000Z_hourly",
    run="r",
    level=Level.RAM,
    datasets=("tank/web",),
    created=TAKEN,
    ram_bytes=1 << 30,
    stored_bytes=1 << 28,
    pause_ms=250.0,
    bundle="/b/u/r",
    state=BundleState.COMPLETE,
    policy="hourly",
)
NEXT = NextSnapshot(
    "hourly", NOW + timedelta(minutes=30), "every 1h", wanted=NOW + timedelta(minutes=30)
)
POLICY = PolicyStatus("hourly", TAKEN, NEXT, 0)
DOMAIN = DomainStatus(
    name="web",
    uuid="u",
    policies=(POLICY,),
    unknown=(),
    newest={Level.RAM: TAKEN, Level.CRASH: NOW - timedelta(days=3)},
    counts={Level.RAM: 24, Level.CRASH: 1},
    last=RECORD,
    verified=(),
)
RUN = OpenRun("web", "u", "snapshot", "frozen", True, NOW, True, "/j/r.jsonl")
WELL = Status(
    at=NOW,
    scheduler=SchedulerState(
        LockHolder("daemon", 123, "2026-06-09T10:30:00Z", iso(NOW - timedelta(minutes=2))),
        {"snaporch.service": "active"},
    ),
    domains=(DOMAIN,),
    runs=(),
    overlays=(),
    store=StoreUsage("/b", 24, 24 << 28, 1 << 20, 0, 900 << 30, 1000 << 30),
)


def with_domain(**changes):
    """The status with one change to its domain."""
    return replace(WELL, domains=(replace(DOMAIN, **changes),))


def with_policy(**changes):
    """The status with one change to the policy of its domain."""
    return with_domain(policies=(replace(POLICY, **changes),))
