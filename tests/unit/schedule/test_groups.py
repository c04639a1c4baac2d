"""Policies on domains of a consistency group."""

from datetime import UTC, datetime, timedelta

import pytest
from fakes.schedule import HOURLY, NOW

from snaporch.config import Schedule
from snaporch.schedule.apply_retention import apply_retention
from snaporch.schedule.concurrency import ConcurrencyLimiter, SnapshotJob
from snaporch.schedule.forecast import make_forecasts
from snaporch.schedule.recurrence import times
from snaporch.schedule.run_due import changed_by, due_snapshots
from snaporch.schedule.subprocesses import SnapshotJobResult
from snaporch.snapshot.group import snapshot_group
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot

GROUP = {"pair": {"domains": ["web", "mail"]}}


@pytest.fixture
def pair(scheduled):
    scheduled.world.add_guest("mail", disks={"vda": "flash/mail"})
    scheduled.world.add_guest("other")
    policy = HOURLY | {"stagger": "30m"}
    scheduled.configure(policy={"hourly": policy}, defaults={"policies": ["hourly"]}, group=GROUP)
    return scheduled


def due(scheduled, now=NOW):
    return due_snapshots(scheduled.context, make_forecasts(scheduled.context, now), now)


def test_a_group_is_due_once_with_the_pools_and_ram_of_all_members(pair):
    captures = {job.label: job for job in due(pair)}
    assert set(captures) == {"group pair", "other"}
    group = captures["group pair"]
    assert group.pools == {"tank", "flash"}
    assert len(group.uuids) == len(group.keys) == 2
    alone = [g for g in pair.world.hypervisor.guests.values() if g.name in ("web", "mail")]
    assert group.ram_mib == sum(
        pair.context.hypervisor.ram_in_use(guest.uuid) >> 20 for guest in alone
    )


def test_domains_of_a_group_have_the_same_times(pair):
    snapshot_group(pair.context, "pair", SnapshotRequest(level="crash", policy="hourly"))
    now = datetime.now(UTC)
    next_snapshots = {
        each.domain.name: each.next_snapshots[0].at for each in make_forecasts(pair.context, now)
    }
    when = times(pair.context.config, "hourly", "pair")
    assert next_snapshots["web"] == next_snapshots["mail"]
    assert next_snapshots["web"] - when.after(now) in (timedelta(0), timedelta(hours=-1))


def test_a_failure_is_remembered_for_all_members(pair):
    (group,) = [job for job in due(pair) if job.group]
    failed = changed_by({}, [SnapshotJobResult(group, 5, "no")], NOW)
    assert set(failed) == group.keys
    assert changed_by(failed, [SnapshotJobResult(group, 0, "done")], NOW) == {}


def test_the_run_reports_a_missing_member(pair):
    pair.world.hypervisor.guests.pop(pair.context.hypervisor.domain("mail").uuid)
    (group,) = [job for job in due(pair) if job.group]
    assert group.others == ()


def test_a_group_counts_as_so_many_jobs_as_it_has_domains():
    limiter = ConcurrencyLimiter(Schedule(jobs=2, jobs_per_pool=9))
    pair = SnapshotJob("u", "web", "hourly", frozenset({"tank"}), 0, "pair", ("v",))
    other = SnapshotJob("w", "other", "hourly", frozenset({"tank"}), 0)
    member = SnapshotJob("v", "mail", "daily", frozenset({"flash"}), 0)
    with limiter.through(other):
        assert not limiter._room(pair)
    with limiter.through(pair):  # it may begin, although it alone reaches the limit
        assert not limiter._room(other)
        limiter.limit(Schedule(jobs=9, jobs_per_pool=9))
        assert limiter._room(other)
        assert not limiter._room(member)


def test_retention_keeps_snapshots_of_a_group_together(pair):
    """A snapshot of one member must not displace a snapshot of all members."""
    keep = {"hourly": {"every": "1h", "keep": {"last": 2}}}
    pair.configure(policy=keep, defaults={"policies": ["hourly"]}, group=GROUP)
    for _ in range(2):
        snapshot_group(pair.context, "pair", SnapshotRequest(level="crash", policy="hourly"))
    alone = pair.context.hypervisor.domain("web")
    take_snapshot(pair.context, alone, SnapshotRequest(level="crash", policy="hourly"))
    now = datetime.now(UTC) + timedelta(minutes=1)
    forecasts = make_forecasts(pair.context, now)
    assert [verdict for each in forecasts for verdict in each.to_delete] == []
    web = next(each for each in forecasts if each.domain.name == "web")
    assert web.retention[0].reason == "taken together with mail's, which is kept"
    (again,) = make_forecasts(pair.context, now, "web")
    assert again.retention == web.retention
    assert apply_retention(pair.context, forecasts, now).deleted == []


def test_a_group_snapshot_that_no_rule_keeps_is_deleted_for_all_members(pair):
    keep = {"hourly": {"every": "1h", "keep": {"last": 1}}}
    pair.configure(policy=keep, defaults={"policies": ["hourly"]}, group=GROUP)
    for _ in range(2):
        snapshot_group(pair.context, "pair", SnapshotRequest(level="crash", policy="hourly"))
    now = datetime.now(UTC) + timedelta(minutes=1)
    deleted = apply_retention(pair.context, make_forecasts(pair.context, now), now).deleted
    assert sorted(domain for domain, _ in deleted) == ["mail", "web"]
    assert len({verdict.taken.group_run for _, verdict in deleted}) == 1
