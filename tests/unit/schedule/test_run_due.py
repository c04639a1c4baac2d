from datetime import timedelta

from fakes.hypervisor import Agent
from fakes.schedule import NOW

from snaporch.model import DomainState
from snaporch.schedule.concurrency import ConcurrencyLimiter, SnapshotJob
from snaporch.schedule.failed_attempts import FailedAttempt, read_failed
from snaporch.schedule.forecast import make_forecasts
from snaporch.schedule.run_due import changed_by, due_snapshots, remember, snapshot_job, take_all
from snaporch.schedule.subprocesses import SnapshotJobResult, Subprocesses

WEB = SnapshotJob("u", "web", "hourly", frozenset({"tank"}), 0)


class Taker(Subprocesses):
    """Returns the given status for each domain, or 0."""

    def __init__(self, context, **statuses):
        super().__init__(ConcurrencyLimiter(context.config.schedule), lambda _: [], lambda _: [])
        self.statuses = statuses
        self.context = context
        self.taken = []

    def _take(self, job):
        self.taken.append(job.domain)
        status = self.statuses.get(job.domain, 0)
        return SnapshotJobResult(job, status, f"status {status}")


def test_the_capture_that_waited_longest_comes_first(scheduled):
    world = scheduled.world
    for name in ("mail", "new"):
        world.add_guest(name)
    scheduled.hours_ago(3, guest="web")
    scheduled.hours_ago(9, guest="mail")
    found = due_snapshots(scheduled.context, make_forecasts(scheduled.context, NOW), NOW)
    assert [(each.domain, each.policy) for each in found] == [
        ("mail", "hourly"),
        ("web", "hourly"),
        ("new", "hourly"),
    ]


def test_a_capture_has_its_pools_and_ram(scheduled):
    world = scheduled.world
    domain = world.add_guest("two", {"vda": "tank/two", "vdb": "flash/two"})
    world.guest("two").ram = b"x" * (3 << 20)
    job = snapshot_job(scheduled.context, domain, "hourly")
    assert (job.pools, job.ram_mib) == ({"tank", "flash"}, 3)


def test_only_ram_snapshots_of_running_guests_burden_ram(scheduled):
    world = scheduled.world
    scheduled.configure(
        policy={"crash": {"level": "crash"}, "auto": {}}, domain={"quiet": {"level": "quiesced"}}
    )
    big = b"x" * (3 << 20)
    quiet = world.add_guest("quiet", agent=Agent.ANSWERS)
    off = world.add_guest("off", state=DomainState.OFF)
    for name in ("web", "quiet"):
        world.guest(name).ram = big
    web = scheduled.context.hypervisor.domain("web")
    burden = [
        snapshot_job(scheduled.context, domain, policy).ram_mib
        for domain, policy in ((web, "auto"), (web, "crash"), (quiet, "auto"), (off, "auto"))
    ]
    assert burden == [3, 0, 0, 0]


def test_a_failure_stops_no_other_and_is_remembered(scheduled):
    scheduled.world.add_guest("mail")
    context = scheduled.context
    wanted = due_snapshots(context, make_forecasts(context, NOW), NOW)
    taker = Taker(context, mail=8)
    reported = []
    outcomes = take_all(context, taker, wanted, reported.append)
    assert reported == outcomes
    assert sorted(taker.taken) == ["mail", "web"]
    assert {outcome.job.domain: outcome.status for outcome in outcomes} == {"mail": 8, "web": 0}
    remember(context, outcomes)
    mail = context.hypervisor.domain("mail").uuid
    assert set(read_failed(context.config.paths.schedule)) == {f"{mail}/hourly"}


def test_nothing_due_writes_nothing(scheduled):
    remember(
        scheduled.context, take_all(scheduled.context, Taker(scheduled.context), [], [].append)
    )
    assert not scheduled.context.config.paths.schedule.exists()


def test_after_a_signal_no_capture_begins(scheduled):
    scheduled.context.interrupt.signum = 15
    taker = Taker(scheduled.context)
    taker.limiter.close()
    (outcome,) = take_all(scheduled.context, taker, [WEB], [].append)
    assert (outcome.status, taker.taken) == (143, [])


def test_failures_that_are_remembered_after_an_attempt():
    before = {WEB.key: FailedAttempt(NOW - timedelta(hours=1), "old")}
    assert changed_by(before, [SnapshotJobResult(WEB, 0, "done")], NOW) == {}
    assert changed_by({}, [SnapshotJobResult(WEB, 6, "busy")], NOW) == {
        WEB.key: FailedAttempt(NOW, "busy")
    }
    assert changed_by(before, [SnapshotJobResult(WEB, 143, "stopped")], NOW) == before
