import queue
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fakes.hooks import failing

from snaporch.config import Config
from snaporch.context import Clock
from snaporch.errors import ConfigError, UnavailableError
from snaporch.hypervisor import HypervisorError
from snaporch.journal import Journal, Note
from snaporch.locks import DAEMON, SCHEDULE, domain_lock, held_by
from snaporch.model import VerificationResult, VerifyDepth, iso
from snaporch.schedule.concurrency import ConcurrencyLimiter, LimiterClosedError
from snaporch.schedule.daemon import Daemon, PolicyTrigger
from snaporch.schedule.failed_attempts import read_failed
from snaporch.schedule.recurrence import times
from snaporch.schedule.subprocesses import BulkJobResult, SnapshotJobResult, Subprocesses
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.request import SnapshotRequest

PATIENCE = 60


class Taker(Subprocesses):
    """Takes snapshots of the world in the scheduler's thread, and records them in ``taken``."""

    def __init__(self, scheduled):
        limiter = ConcurrencyLimiter(scheduled.context.config.schedule)
        super().__init__(limiter, lambda _: [], lambda _: [])
        self.scheduled = scheduled
        self.taken = queue.SimpleQueue()
        self.statuses = {}
        self.held = None
        self.bulk_jobs_done = queue.SimpleQueue()
        self.answer = 0, ("web@s  passed",), ()

    def _take(self, job):
        if self._stopped:
            raise LimiterClosedError
        if self.held is not None:
            self.taken.put(f"{job.domain} begins")
            assert self.held.wait(PATIENCE)
            return SnapshotJobResult(job, 143, "stopped by SIGTERM")
        status = self.statuses.get(job.domain, 0)
        if status == 0:
            self.scheduled.taken(datetime.now(UTC), job.policy, job.domain)
        self.taken.put(job.domain)
        return SnapshotJobResult(job, status, f"status {status}")

    def run_bulk_job(self, name):
        self.bulk_jobs_done.put((name, datetime.now(UTC)))
        return BulkJobResult(name, *self.answer)

    def stop(self):
        super().stop()
        if self.held is not None:
            self.held.set()


class Heard:
    """An observer of the daemon: what the daemon reports to it."""

    def __init__(self):
        self.looks, self.outcomes, self.errors = (queue.SimpleQueue() for _ in range(3))

    def forecasts_made(self, _context, forecasts, _now):
        self.looks.put([each.domain.name for each in forecasts])

    def ended(self, _config, outcome):
        self.outcomes.put((outcome.job.domain, outcome.status))

    def failed(self, _config, error):
        self.errors.put(error.line())


@pytest.fixture
def lines():
    """The lines to systemd."""
    return queue.SimpleQueue()


@pytest.fixture
def await_line(lines):
    """Waits for the next line to systemd that starts so; returns it."""

    def wait(start):
        while not (line := lines.get(timeout=PATIENCE)).startswith(start):
            pass
        return line

    return wait


@pytest.fixture
def serving(scheduled, lines):
    """Runs a daemon in a thread until the end of the block."""

    @contextmanager
    def run(load=None, **more):
        taker = Taker(scheduled)
        heard = Heard()
        load = load or (lambda: scheduled.context.config)

        def put(*new):
            for line in new:
                lines.put(line)

        made = Daemon(scheduled.context, taker, load, heard, put, **more)
        made.heard, made.ended = heard, queue.SimpleQueue()

        def serve():
            try:
                made.run()
            except ZeroDivisionError as error:  # as the caller of ``run`` would see it
                made.ended.put(error)

        thread = threading.Thread(target=serve, daemon=True)
        made.taker, made.thread = taker, thread
        try:
            yield made
        finally:
            if thread.ident is not None:
                made.stop()
                thread.join(PATIENCE)
                assert not thread.is_alive()

    return run


def test_a_due_snapshot_is_taken_at_once_and_only_once(scheduled, serving, await_line):
    with serving() as daemon:
        daemon.thread.start()
        await_line("READY=1")
        assert daemon.taker.taken.get(timeout=PATIENCE) == "web"
        assert "1 scheduled, next web (hourly)" in await_line("STATUS=1 scheduled")
    assert daemon.taker.taken.empty()
    assert len(scheduled.world.pool.names()) == 1


def test_a_snapshot_that_is_not_due_waits_for_its_time(scheduled, serving, await_line):
    scheduled.taken(datetime.now(UTC))
    with serving() as daemon:
        daemon.thread.start()
        await_line("STATUS=1 scheduled")
        (job,) = daemon._scheduler.get_jobs()
        when = times(
            scheduled.context.config, "hourly", scheduled.context.hypervisor.domain("web").uuid
        )
        assert job.next_run_time == when.after(datetime.now(UTC))
    assert daemon.taker.taken.empty()


def test_missed_times_are_made_up_for_once(scheduled, serving, await_line):
    scheduled.taken(datetime.now(UTC) - timedelta(hours=30))
    with serving() as daemon:
        daemon.thread.start()
        await_line("READY=1")
        daemon.taker.taken.get(timeout=PATIENCE)
        await_line("STATUS=1 scheduled")
    assert daemon.taker.taken.empty()


def test_guests_that_are_defined_and_undefined_are_noticed(scheduled, serving, await_line):
    scheduled.taken(datetime.now(UTC))
    with serving() as daemon:
        daemon.thread.start()
        await_line("STATUS=1 scheduled")
        mail = scheduled.world.add_guest("mail")
        daemon.reload()
        assert daemon.taker.taken.get(timeout=PATIENCE) == "mail"
        await_line("STATUS=2 scheduled")
        del scheduled.context.hypervisor.guests[mail.uuid]
        daemon.reload()
        await_line("STATUS=1 scheduled")


def test_an_event_of_libvirt_leads_to_a_forecast_at_once(scheduled, serving, await_line):
    """Not only at the next periodic forecast, which is five minutes away."""
    scheduled.taken(datetime.now(UTC))
    with serving() as daemon:
        daemon.thread.start()
        await_line("STATUS=1 scheduled")
        scheduled.world.add_guest("mail")
        for _ in range(9):
            scheduled.world.hypervisor.happen()
        assert daemon.taker.taken.get(timeout=PATIENCE) == "mail"
        await_line("STATUS=2 scheduled")
    looks = [daemon.heard.looks.get() for _ in range(daemon.heard.looks.qsize())]
    assert len(looks) in (2, 3)  # at the start, after the swarm, maybe after the snapshot


def test_a_libvirt_that_refuses_events_is_a_note(scheduled, serving, await_line):
    scheduled.world.hooks.at["hypervisor.on_change"] = failing(HypervisorError("libvirt", "no"))
    with serving() as daemon:
        daemon.thread.start()
        await_line("READY=1")
        assert daemon.taker.taken.get(timeout=PATIENCE) == "web"
    assert "libvirt: no" in scheduled.world.heard.notes


def test_a_failure_is_remembered_and_tried_again_later(scheduled, serving, await_line):
    with serving() as daemon:
        daemon.taker.statuses["web"] = 5
        daemon.thread.start()
        await_line("READY=1")
        daemon.taker.taken.get(timeout=PATIENCE)
        while not (failed := read_failed(scheduled.context.config.paths.schedule)):
            await_line("STATUS=")
        (failed,) = failed.values()
        assert failed.reason == "status 5"
        while daemon._scheduler.get_jobs()[0].next_run_time != failed.at + timedelta(minutes=10):
            await_line("STATUS=")
    assert daemon.taker.taken.empty()
    assert scheduled.world.heard.notes == ["hourly: status 5"]
    assert daemon.heard.outcomes.get(timeout=PATIENCE) == ("web", 5)
    assert daemon.heard.looks.get(timeout=PATIENCE) == ["web"]


def test_snapshots_that_no_rule_keeps_are_deleted(scheduled, serving, await_line):
    now = datetime.now(UTC)
    old = scheduled.taken(now - timedelta(hours=9))
    for hours in (7, 5, 0):
        scheduled.taken(now - timedelta(hours=hours))
    partial = Path(old.bundle).parent / ".20260601T100000Z-0123abcd.partial"
    partial.mkdir()
    (Path(old.bundle) / "unknown").touch()
    with serving() as daemon:
        daemon.thread.start()
        await_line("STATUS=1 scheduled")
        assert "holds unknown" in daemon.heard.errors.get(timeout=PATIENCE)
    assert f"tank/web@{old.snapshot}" not in scheduled.world.pool.names()
    text = f"deleted {partial.name}: its run ended without finishing it"
    assert text in scheduled.world.heard.steps
    assert f"deleted @{old.snapshot}: not in hourly=2" in scheduled.world.heard.steps


def test_a_long_prune_delays_no_forecast(scheduled, serving, await_line):
    begun, go_on = threading.Event(), threading.Event()
    record = scheduled.taken(datetime.now(UTC))
    partial = Path(record.bundle).parent / ".20260601T100000Z-0123abcd.partial"
    partial.mkdir()

    def listing():
        begun.set()
        assert go_on.wait(PATIENCE)

    scheduled.world.hooks.at["pool.snapshot_listing"] = listing
    with serving() as daemon:
        daemon.thread.start()
        assert begun.wait(PATIENCE)
        for _ in range(2):
            daemon.heard.looks.get(timeout=PATIENCE)
            daemon.reload()
        daemon.stop()
        await_line("STOPPING=1")
        go_on.set()
    assert partial.exists(), "a daemon that ends prunes nothing more"


@pytest.mark.parametrize(("limit", "reported"), [(timedelta(0), True), (timedelta(1), False)])
def test_a_prune_that_hangs_is_reported(scheduled, serving, limit, reported):
    begun, go_on = threading.Event(), threading.Event()
    scheduled.taken(datetime.now(UTC))
    scheduled.world.hooks.at["pool.snapshot_listing"] = lambda: (begun.set(), go_on.wait(PATIENCE))
    with serving(long_prune=limit) as daemon:
        daemon.thread.start()
        assert begun.wait(PATIENCE)
        for _ in range(3):
            daemon.heard.looks.get(timeout=PATIENCE)
            daemon.reload()
        if reported:
            error = daemon.heard.errors.get(timeout=PATIENCE)
            assert "prune: has been running since" in error
        go_on.set()
    assert daemon.heard.errors.empty() or reported


def test_a_prune_that_runs_is_in_the_status_line(scheduled, serving, await_line):
    begun, go_on = threading.Event(), threading.Event()
    at = datetime.now(UTC)
    scheduled.taken(at)
    scheduled.context.clock = Clock(now=lambda: at)
    scheduled.world.hooks.at["pool.snapshot_listing"] = lambda: (begun.set(), go_on.wait(PATIENCE))
    with serving() as daemon:
        daemon.thread.start()
        assert begun.wait(PATIENCE)
        daemon.reload()
        prune = f"; prune runs since {at:%H:%M} UTC"
        while not await_line("STATUS=1 scheduled").endswith(prune):
            pass  # the one of the first forecasts
        go_on.set()
        with daemon._pruning:
            pass
        daemon.reload()
        await_line("STATUS=1 scheduled")


def test_a_reload_brings_other_policies_and_limits(scheduled, serving, await_line):
    scheduled.taken(datetime.now(UTC))
    paths = scheduled.context.config.paths
    new = Config(
        paths=paths,
        schedule={"jobs": 7},
        policy={"daily": {"every": "1d", "domains": ["web"]}},
    )
    with serving(load=lambda: new) as daemon:
        daemon.thread.start()
        await_line("STATUS=1 scheduled")
        daemon.reload()
        await_line("RELOADING=1")
        assert await_line("MONOTONIC_USEC=")
        await_line("READY=1")
        assert daemon.taker.taken.get(timeout=PATIENCE) == "web"
        await_line("STATUS=1 scheduled, next web (daily)")
        assert daemon.taker.limiter._limits.jobs == 7


def test_a_configuration_that_is_wrong_changes_nothing(scheduled, serving, await_line):
    scheduled.taken(datetime.now(UTC))

    def load():
        raise ConfigError("snaporch.toml", "is not TOML")

    with serving(load=load) as daemon:
        daemon.thread.start()
        await_line("STATUS=1 scheduled")
        daemon.reload()
        await_line("STATUS=1 scheduled")
    (note,) = [n for n in scheduled.world.heard.notes if "TOML" in n]
    assert note == "snaporch.toml: is not TOML; keeping the old configuration"


def test_a_stop_in_the_middle_waits_for_the_snapshot_under_way(scheduled, serving, await_line):
    with serving() as daemon:
        daemon.taker.held = threading.Event()
        daemon.thread.start()
        assert daemon.taker.taken.get(timeout=PATIENCE) == "web begins"
        daemon.stop()
        await_line("STOPPING=1")
        daemon.thread.join(PATIENCE)
        assert not daemon.thread.is_alive()
    assert "hourly: stopped by SIGTERM" in scheduled.world.heard.notes
    assert read_failed(scheduled.context.config.paths.schedule) == {}


def test_a_stop_is_obeyed_while_libvirt_does_not_answer(scheduled, serving, await_line):
    """libvirt may not answer while it saves RAM, and answers again when that has been stopped."""
    scheduled.taken(datetime.now(UTC))
    looking, answer = threading.Event(), threading.Event()

    def hang():
        looking.set()
        assert answer.wait(PATIENCE)

    with serving() as daemon:
        daemon.taker.stop = answer.set
        daemon.thread.start()
        await_line("STATUS=1 scheduled")
        scheduled.world.hooks.at["pool.policy_view"] = hang
        daemon.reload()
        assert looking.wait(PATIENCE)
        daemon.stop()
        await_line("STOPPING=1")
        daemon.thread.join(PATIENCE)
        assert not daemon.thread.is_alive()


def test_the_daemon_continues_when_zfs_answers_again(scheduled, serving, await_line):
    scheduled.taken(datetime.now(UTC))
    hooks = scheduled.world.hooks
    hooks.at["pool.policy_view"] = failing(UnavailableError("zfs", "does not answer"))
    with serving() as daemon:
        daemon.thread.start()
        assert await_line("STATUS=") == "STATUS=zfs: does not answer"
        assert daemon.heard.errors.get(timeout=PATIENCE) == "zfs: does not answer"
        del hooks.at["pool.policy_view"]
        daemon.reload()
        await_line("STATUS=1 scheduled")


def wants_bulk_job(scheduled, bulk_job):
    options = {"verify": {"verify": "weekly"}, "replicate": {"replicate": ["offsite"]}}[bulk_job]
    scheduled.configure(
        policy={"hourly": {"every": "1h"} | options},
        defaults={"policies": ["hourly"]},
        replica={"offsite": {"host": "nas", "dataset": "backup/kvm", "bundles": "/backup"}},
    )
    return scheduled.taken(datetime.now(UTC))


def is_put_off(daemon, bulk_job, until):
    job = daemon._scheduler.get_job(bulk_job)
    return job is not None and job.next_run_time >= until


every_bulk_job = pytest.mark.parametrize("bulk_job", ["verify", "replicate"])


@every_bulk_job
def test_a_bulk_job_runs_once_and_then_at_its_next_time(scheduled, serving, await_line, bulk_job):
    wants_bulk_job(scheduled, bulk_job)
    with serving() as daemon:
        daemon.thread.start()
        done, begun = daemon.taker.bulk_jobs_done.get(timeout=PATIENCE)
        assert done == bulk_job
        await_line("STATUS=1 scheduled, next web (hourly)")
        daemon.reload()
        await_line("RELOADING=1")
        await_line("STATUS=1 scheduled, next web (hourly)")
        while not is_put_off(daemon, bulk_job, begun + timedelta(minutes=5)):
            await_line("STATUS=")
    assert daemon.taker.bulk_jobs_done.empty()
    assert f"{bulk_job}: web@s  passed" in scheduled.world.heard.steps


@every_bulk_job
def test_a_failed_bulk_job_is_reported_and_not_retried_at_once(
    scheduled, serving, await_line, bulk_job
):
    wants_bulk_job(scheduled, bulk_job)
    with serving() as daemon:
        daemon.taker.answer = 8, ("web@s  FAILED",), ("it failed: why",)
        daemon.thread.start()
        _, begun = daemon.taker.bulk_jobs_done.get(timeout=PATIENCE)
        await_line("STATUS=1 scheduled")
        daemon.reload()
        await_line("RELOADING=1")
        await_line("STATUS=1 scheduled")
        while not is_put_off(daemon, bulk_job, begun + timedelta(minutes=10)):
            await_line("STATUS=")
    assert daemon.taker.bulk_jobs_done.empty()
    assert "it failed: why" in scheduled.world.heard.notes


def test_a_reload_without_policies_removes_the_verification(scheduled, serving, await_line):
    record = wants_bulk_job(scheduled, "verify")
    names = [f"{dataset}@{record.snapshot}" for dataset in record.datasets]
    text = VerificationResult(datetime.now(UTC), passed=True, reached=VerifyDepth.RESUMED).as_text()
    scheduled.world.pool.set_properties(names, {"snaporch:verified": text})
    with serving(load=lambda: Config(paths=scheduled.context.config.paths)) as daemon:
        daemon.thread.start()
        await_line("STATUS=1 scheduled")
        assert daemon._scheduler.get_job("verify") is not None
        daemon.reload()
        await_line("STATUS=no policy")
        assert daemon._scheduler.get_job("verify") is None
    assert daemon.taker.bulk_jobs_done.empty()


def test_replicated_snapshots_need_no_bulk_job(scheduled, serving, await_line):
    record = wants_bulk_job(scheduled, "replicate")
    names = [f"{dataset}@{record.snapshot}" for dataset in record.datasets]
    scheduled.world.pool.set_properties(names, {"snaporch:replicated": "offsite,usb"})
    with serving() as daemon:
        daemon.thread.start()
        await_line("STATUS=1 scheduled")
        assert daemon._scheduler.get_job("replicate") is None
    assert daemon.taker.bulk_jobs_done.empty()


def test_the_watchdog_is_fed(scheduled, serving, await_line, monkeypatch):
    scheduled.taken(datetime.now(UTC))
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    with serving() as daemon:
        daemon.thread.start()
        for _ in range(5):
            await_line("WATCHDOG=1")


def test_a_trigger_makes_up_for_missed_times_with_one(scheduled):
    trigger = PolicyTrigger(times(scheduled.context.config, "hourly", "u"))
    start = datetime(2026, 6, 10, 12, tzinfo=UTC)
    now = start + timedelta(hours=5, minutes=1)
    assert trigger.get_next_fire_time(start, now) == start + timedelta(hours=6)
    assert trigger.get_next_fire_time(None, now) == start + timedelta(hours=6)


def bug():
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("place", ["pool.policy_view", "hypervisor.find"])
def test_an_unexpected_error_ends_the_daemon(scheduled, serving, await_line, place):
    """systemd starts it again; a daemon that runs and takes no snapshots would be worse."""
    scheduled.world.hooks.at[place] = bug
    with serving() as daemon:
        daemon.thread.start()
        assert isinstance(daemon.ended.get(timeout=PATIENCE), ZeroDivisionError)
        await_line("STOPPING=1")


def test_an_error_in_the_calculation_of_times_ends_the_daemon(
    scheduled, serving, await_line, monkeypatch
):
    """The error is raised in the scheduler's thread, and without it no time would come."""
    scheduled.taken(datetime.now(UTC) - timedelta(hours=2))
    monkeypatch.setattr(PolicyTrigger, "get_next_fire_time", lambda *_arguments: bug())
    with serving() as daemon:
        daemon.thread.start()
        assert isinstance(daemon.ended.get(timeout=PATIENCE), ZeroDivisionError)


def test_a_libvirt_that_does_not_answer_at_a_due_time_is_a_failure(scheduled, serving, await_line):
    away = failing(UnavailableError("libvirt", "does not answer"))
    scheduled.world.hooks.at["hypervisor.find"] = away
    with serving() as daemon:
        daemon.thread.start()
        assert daemon.heard.outcomes.get(timeout=PATIENCE) == ("web", 7)
        while not (failed := read_failed(scheduled.context.config.paths.schedule)):
            await_line("STATUS=")
    (failed,) = failed.values()
    assert failed.reason == "libvirt: does not answer"


def test_the_daemon_is_ready_before_the_first_forecast(scheduled, serving, await_line):
    """A forecast may take hours, because retention deletes snapshots."""
    answer = threading.Event()
    scheduled.world.hooks.at["pool.policy_view"] = lambda: answer.wait(PATIENCE)
    with serving() as daemon:
        daemon.thread.start()
        await_line("READY=1")
        assert daemon.heard.looks.empty()
        answer.set()


def heard(lines, seconds):
    """The next line; None if none comes in this time."""
    try:
        return lines.get(timeout=seconds)
    except queue.Empty:
        return None


def test_the_watchdog_is_not_fed_while_a_forecast_hangs(scheduled, serving, lines, monkeypatch):
    scheduled.taken(datetime.now(UTC))
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    answer = threading.Event()
    scheduled.world.hooks.at["pool.policy_view"] = lambda: answer.wait(PATIENCE)
    with serving() as daemon:
        daemon.thread.start()
        fed = 0
        while heard(lines, seconds=1):
            fed += 1
            assert fed < 200
        answer.set()
        while lines.get(timeout=PATIENCE) != "WATCHDOG=1":
            pass


def test_a_check_that_hangs_is_shown(scheduled, serving, await_line):
    scheduled.taken(datetime.now(UTC))
    runtime, interrupt = scheduled.context.config.paths.runtime, scheduled.context.interrupt
    answer, began = threading.Event(), datetime.now(UTC)

    def checked():
        return held_by(runtime, SCHEDULE).checked

    with (
        domain_lock(runtime, SCHEDULE, SCHEDULE, DAEMON, wait=0, interrupt=interrupt),
        serving() as daemon,
    ):
        daemon.thread.start()
        await_line("STATUS=1 scheduled")
        before = checked()
        assert before >= iso(began)
        hanging = threading.Event()
        scheduled.world.hooks.at["pool.policy_view"] = lambda: (
            hanging.set() or answer.wait(PATIENCE)
        )
        daemon.reload()
        assert hanging.wait(PATIENCE)
        daemon.reload()
        assert await_line("STATUS=").startswith("STATUS=checking guests and policies since ")
        assert checked() == before
        answer.set()
        await_line("STATUS=1 scheduled")


def test_a_full_disk_stops_neither_retention_nor_the_delay_before_a_retry(
    scheduled, serving, await_line
):
    now = datetime.now(UTC)
    old, *_ = [scheduled.taken(now - timedelta(hours=hours)) for hours in (9, 7, 5)]
    scheduled.context.config.paths.schedule.write_text("no directory")
    with serving() as daemon:
        daemon.taker.statuses["web"] = 5
        daemon.thread.start()
        daemon.taker.taken.get(timeout=PATIENCE)
        await_line("STATUS=1 scheduled")
        while daemon._scheduler.get_jobs()[0].next_run_time < now + timedelta(minutes=9):
            await_line("STATUS=")
        assert "schedule" in daemon.heard.errors.get(timeout=PATIENCE)
    assert f"tank/web@{old.snapshot}" not in scheduled.world.pool.names()
    assert daemon.taker.taken.empty()


def test_a_clock_that_is_put_forward_wakes_the_scheduler(
    scheduled, serving, await_line, monkeypatch
):
    scheduled.taken(datetime.now(UTC))
    ahead = timedelta(0)
    asked = queue.SimpleQueue()

    class Shifted(datetime):
        @classmethod
        def now(cls, zone=None):
            asked.put(threading.current_thread().name)
            return datetime.now(zone) + ahead

    monkeypatch.setattr("apscheduler.schedulers.base.datetime", Shifted)
    scheduled.context.clock = Clock(now=lambda: Shifted.now(UTC))
    with serving() as daemon:
        daemon.thread.start()
        await_line("STATUS=1 scheduled")
        while heard(asked, seconds=1):
            pass
        ahead = timedelta(hours=2)  # the scheduler sleeps until a time of the old clock
        daemon.reload()
        assert daemon.taker.taken.get(timeout=PATIENCE) == "web"


def test_a_guest_that_a_run_may_hold_gets_another_guardian(scheduled, serving, await_line):
    """Its guardian was killed while the daemon was running."""
    domain = scheduled.context.hypervisor.domain("web")
    facts = make_plan(scheduled.context, domain, SnapshotRequest(level="paused")).facts
    journal = Journal(scheduled.context.config.paths.journal, facts)
    journal.note(Note.SUSPENDED)
    journal.close(settled=False)
    with serving() as daemon:
        daemon.thread.start()
        assert daemon.heard.looks.get(timeout=PATIENCE) == ["web"]
    assert scheduled.world.guarded_again[0] == facts
