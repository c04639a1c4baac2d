"""Replications in windows: they start in them, stop at their end, and take turns."""

from datetime import UTC, datetime, timedelta

import pytest
from fakes.replica import FakeReplica
from fakes.schedule import Scheduled

from snaporch.config import ResticReplica
from snaporch.config.transfer_window import ALWAYS, parse_windows
from snaporch.errors import WindowClosedError
from snaporch.model import BundleState, Level
from snaporch.schedule.failed_attempts import STOPPED, FailedAttempt, read_failed, write_failed
from snaporch.schedule.forecast import make_forecasts, record_carried_out
from snaporch.schedule.replicate_domains import choose_targets, replicate_domains
from snaporch.schedule.replication_due import next_replication, start_window, waiting_since
from snaporch.schedule.run_replications import replicate_due

NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)


def window(begin, end):
    """A window by the clock on the wall, in hours from now."""
    texts = (f"{(NOW + hours * HOUR).astimezone():%H:%M}" for hours in (begin, end))
    return "-".join(texts)


class Site:
    """Guests with a snapshot each, and a replica with a window."""

    def __init__(self, world, times):
        self.world = world
        self.scheduled = Scheduled(world)
        self.opened = []
        self.replica = FakeReplica(world.pool, world.root / "there")
        self.configure(times)

    def configure(self, times, **more):
        place = {"host": "nas", "dataset": "backup", "bundles": "/backup/nas", "window": times}
        self.scheduled.configure(
            policy={"hourly": {"every": "1h", "replicate": ["nas"]}},
            defaults={"policies": ["hourly"]},
            replica={"nas": {**place, **more}},
        )

    def open(self, context, _name):
        self.opened.append(context)
        return self.replica

    def take(self, guest, hours=1):
        self.scheduled.taken(datetime.now(UTC) - hours * HOUR, guest=guest)

    def run(self, now=lambda: datetime.now(UTC)):
        """What is due is replicated; the guests in their order, and whether they were stopped."""
        done = replicate_due(self.scheduled.context, self.open, now)
        return [(each.pending.domain, isinstance(each.outcome, WindowClosedError)) for each in done]

    def waiting(self):
        (forecast,) = make_forecasts(self.scheduled.context, datetime.now(UTC), "web")
        return forecast.replications[0]

    @property
    def stopped(self):
        return read_failed(self.scheduled.context.config.paths.schedule, STOPPED)


@pytest.fixture
def site(world):
    for name in ("web", "db"):
        world.add_guest(name, {"vda": f"tank/{name}"})
    return Site(world, window(-1, 2))


def test_nothing_starts_outside_of_the_window_and_the_waiting_is_known(site):
    site.take("web", hours=5)
    site.configure(window(2, 4))
    assert site.run() == []
    found = site.waiting()
    assert found.waits_for_window(datetime.now(UTC))
    assert NOW + HOUR < found.at <= NOW + 2 * HOUR
    assert "waits for its window" in found.reason
    assert NOW - 6 * HOUR < found.since < NOW - 4 * HOUR
    site.configure(window(-1, 2))
    assert site.run() == [("web", False)]


@pytest.mark.parametrize("has_mbuffer", [True, False])
def test_with_a_rate_outside_it_starts_there_too_if_mbuffer_limits_it(
    site, has_mbuffer, tmp_path, monkeypatch
):
    if has_mbuffer:
        (tmp_path / "mbuffer").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    site.take("web")
    site.configure(window(2, 4), rate_outside=3)
    assert site.run() == ([("web", False)] if has_mbuffer else [])
    site.configure(window(-1, 2), rate_outside=3)
    assert site.run() == ([] if has_mbuffer else [("web", False)])
    notes = str(site.scheduled.context.progress.notes)
    assert ("apt install mbuffer" in notes) == (not has_mbuffer)


def test_restic_needs_no_mbuffer_for_a_rate_outside(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    replica = ResticReplica(
        engine="restic", repository="/x", password_file="/y", window="22:00-06:00", rate_outside=1
    )
    assert start_window(replica) == ALWAYS


def test_by_hand_there_is_no_window_and_that_is_said(site):
    site.take("web")
    site.configure(window(2, 4), rate=7)
    context = site.scheduled.context
    targets = choose_targets(context, ["web"], [])
    done = [
        outcome for _, _, outcome in replicate_domains(context, targets, site.open, recheck=False)
    ]
    assert [len(each.arrived) for each in done] == [1]
    assert site.opened[0].config.replica["nas"].rate_now() == 7
    assert any("by hand it has none" in str(note) for note in context.progress.notes)


def test_the_end_of_the_window_stops_it_and_the_next_time_others_come_first(site):
    for name, hours in (("web", 1), ("db", 2)):
        site.take(name, hours)
    later = NOW + 3 * HOUR  # the window has ended
    over = []
    site.replica.hooks.at["replica.create"] = lambda: over.append(1)
    done = replicate_due(site.scheduled.context, site.open, lambda: later if over else NOW)
    first = next(done)
    assert (first.pending.domain, type(first.outcome)) == ("db", WindowClosedError)
    done.close()
    assert [*site.stopped] == [first.pending.key]
    over.clear()
    site.replica.hooks.at.clear()
    assert site.run() == [("web", False), ("db", False)]
    assert site.stopped == {}


def test_late_means_that_a_whole_window_has_passed():
    night = parse_windows("22:00-06:00")

    def pending(since, now, times=night):
        record = Record(since.astimezone(UTC))
        return next_replication("nas", ["p"], [record], {}, HOUR, now.astimezone(UTC), times)

    by_day = datetime(2026, 6, 10, 7, tzinfo=UTC).replace(tzinfo=None).astimezone()
    for hours in (6, 12, 22):
        now = by_day + hours * HOUR
        assert not pending(by_day, now).is_late(4 * HOUR, now.astimezone(UTC))
    now = by_day + 23 * HOUR
    assert pending(by_day, now).is_late(4 * HOUR, now.astimezone(UTC))
    assert not pending(by_day, now).is_late(24 * HOUR, now.astimezone(UTC))


@pytest.mark.parametrize("times", ["22:00-06:00", "06:00-05:00", "00:00-23:59"])
@pytest.mark.parametrize(("kept", "late"), [(13, 6), (25, 24), (13, 24)])
def test_that_it_is_late_does_not_end_when_retention_deletes_what_waited(times, kept, late):
    """Each hour a snapshot is taken and the oldest is deleted, and nothing is replicated."""
    begin, waited, found = datetime(2026, 6, 8, tzinfo=UTC), {}, []
    for hour in range(24 * 5):
        now = begin + hour * HOUR
        records = [Record(now - age * HOUR) for age in range(min(kept, hour), -1, -1)]
        done = {"web/nas": FailedAttempt(begin, "")}
        pending = next_replication(
            "nas", ["p"], records, {}, HOUR, now, parse_windows(times), {}, done, waited
        )
        waited = waiting_since([pending])
        found.append(pending.is_late(late * HOUR, now))
    assert found[0] is False
    assert all(found[60:])
    assert found == sorted(found)


def test_what_waited_before_a_replication_was_complete_does_not_count(site):
    for hours in (5, 4):
        site.take("web", hours)
    context, now = site.scheduled.context, datetime.now(UTC)

    def tick():
        record_carried_out(context, make_forecasts(context, now), now)

    tick()
    first = site.waiting().since
    oldest = min(site.world.pool.snapshots(["tank/web"]), key=lambda each: each.createtxg)
    site.world.pool.destroy_snapshots([oldest.full_name])
    tick()
    assert site.waiting().since == first.replace(microsecond=0)
    assert site.run() == [("web", False)]
    site.take("web", 1)
    assert site.waiting().since > first
    tick()
    assert site.waiting().since > first


def test_the_order_starves_no_guest():
    """A guest that takes longer than all windows is stopped each night, and others still come."""
    stopped, served = {}, []
    for night in range(1, 9):
        now = datetime(2026, 6, night, 23, tzinfo=UTC)
        queue = []
        for name in ("huge", "large", "small"):
            record = Record(now - HOUR, name)
            queue.append(next_replication("nas", ["p"], [record], {}, HOUR, now, stopped=stopped))
        order = [each.domain for each in sorted(queue, key=lambda each: (each.turn, each.domain))]
        for name in order:  # a night has room for one that is not small
            served.append(name)
            if name != "small":
                stopped[f"{name}/nas"] = FailedAttempt(now, "its window has ended")
                break
    assert {served.count(name) >= 3 for name in ("huge", "large", "small")} == {True}


class Record:
    """The facts of a snapshot that its replication needs."""

    level, policy, replicated, dropped, run = Level.RAM, "p", (), (), "r"

    state = BundleState.COMPLETE

    def __init__(self, created, domain="web"):
        self.created, self.domain, self.uuid = created, domain, domain


def test_what_was_stopped_is_remembered(tmp_path):
    at = datetime(2026, 6, 10, tzinfo=UTC)
    write_failed(tmp_path, {"u/nas": FailedAttempt(at, "x")}, STOPPED)
    assert read_failed(tmp_path, STOPPED)["u/nas"].at == at
