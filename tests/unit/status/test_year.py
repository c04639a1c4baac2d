"""A year of a host: at every minute the status is green only while the promise is kept.

The test has its own clock, and the clock jumps. The host sleeps, is off, or imports its pools late.
The store fills up or is not mounted. The guest is renamed. The daemon, the timer or neither takes
the snapshots. The test calculates the promise from these events and the clock of a zone, and from
no output of snaporch. Promised is a whole snapshot since each policy's last time that is over by
more than ``status.grace``; or none yet, of a policy that was first carried out less than that ago.

``LONG=1`` runs a whole year, other runs a few days of it. The test looks at the minutes in which an
answer can change: first after an event or its repair, around the times of the policies, and when
their grace is over. Around changes of the clock it looks at every minute.
"""

import os
import random
import shutil
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from fakes.schedule import Scheduled
from fakes.world import World

from snaporch.errors import ExitCode, SnaporchError, UnavailableError
from snaporch.schedule import failed_attempts
from snaporch.schedule.apply_retention import apply_retention
from snaporch.schedule.failed_attempts import read_failed, write_failed
from snaporch.schedule.forecast import make_forecasts, record_carried_out
from snaporch.schedule.run_due import changed_by, due_snapshots
from snaporch.schedule.subprocesses import SnapshotJobResult
from snaporch.status.collect import collect_status
from snaporch.status.problems import find_problems

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
GRACE, REFRESH, TIMER = timedelta(minutes=30), 5, 5
ZONE = ZoneInfo("Europe/Berlin")
POLICIES = {
    "hourly": {"every": "1h", "keep": {"hourly": 3}, "domains": ["we*"], "level": "crash"},
    "night": {"cron": "15 2,14 * * *", "keep": {"daily": 2}, "domains": ["we*"], "level": "crash"},
}
LONG = bool(os.environ.get("LONG"))
OFTEN, RARELY = 80, 720
"""About how many minutes are between two events."""
SPRING, AUTUMN = datetime(2026, 3, 28, 22, tzinfo=UTC), datetime(2026, 10, 24, 22, tzinfo=UTC)
HOURS = 72 if LONG else 8
PERIODS = (
    (SPRING, HOURS * 60, OFTEN, 1),
    (AUTUMN, HOURS * 60, OFTEN, 2),
    (datetime(2026, 1, 1, tzinfo=UTC), (365 if LONG else 3) * 24 * 60, RARELY, 3),
)
AFTER_EVENT, AFTER_REPAIR = 45, 45
"""After an event or a repair, the test looks at each of so many minutes."""


def is_time_of(policy, moment):
    """Whether a zone's clock shows a time of the policy, or has just skipped one."""
    if policy == "hourly":
        return moment.minute == 0
    shown = moment.astimezone(ZONE).replace(tzinfo=None)
    before = shown - HOUR
    left_out = before.replace(tzinfo=ZONE).astimezone(UTC).astimezone(ZONE).replace(tzinfo=None)
    candidates = [shown] if left_out == before else [shown, before]
    return any(each.minute == 15 and each.hour in (2, 14) for each in candidates)


def matters(moment):
    """Whether a policy's time is now, can be made up for by now, or is over by the grace."""
    if moment.minute in (0, 1, 6, 30, 31):
        return True
    nightly = is_time_of("night", moment.replace(minute=15))
    return moment.minute in (15, 16, 21, 45, 46) and nightly


class Host:
    """One guest with two policies; the truth about it is in ``taken`` and ``since``."""

    def __init__(self, root, monkeypatch, now):
        self.world = World(root)
        self.world.install(monkeypatch)
        self.world.add_guest()
        self.scheduled = Scheduled(self.world)
        self.scheduled.configure(
            policy=POLICIES,
            schedule={"timezone": "Europe/Berlin"},
            prune={"trash_keep": "0s"},  # its ages are of the real clock
            status={"store_warning": 100, "store_critical": 100},
        )
        self.now, self.by, self.ticks, self.is_full = now, "daemon", 0, False
        self.jobs, self.look_at, self.run_at = {}, 0, 0
        self.wrong = timedelta(0)
        self.taken = {name: [] for name in POLICIES}
        self.since = dict.fromkeys(POLICIES)
        self.elsewhere = root / "elsewhere"
        self.world.context.unit_states = self.units
        monkeypatch.setattr(
            "snaporch.schedule.forecast.read_zone_again", lambda: None
        )  # named above
        write = failed_attempts._write
        monkeypatch.setattr(
            failed_attempts, "_write", lambda place, *what: self.write(write, place, *what)
        )

    def units(self):
        """The states of the units, as systemd returns them."""
        unit = "snaporch.service" if self.by == "daemon" else "snaporch-run-due.timer"
        return {unit: "active" if self.by else "inactive"}

    def write(self, real, place, *what):
        """Fails when the disk is full: the schedule's directory is on the disk of the store."""
        if self.is_full and place == self.scheduled.context.config.paths.schedule:
            raise UnavailableError(str(place), "No space left on device")
        real(place, *what)

    # -- events --------------------------------------------------------------------------------

    def clock(self, draw):
        """The clock is wrong until it is repaired."""
        self.now -= self.wrong
        self.wrong = timedelta(minutes=draw.choice([-1500, -90, -20, 45, 200]))
        self.now += self.wrong

    def suspend(self, draw):
        """The host sleeps."""
        self.now += timedelta(minutes=draw.randint(5, 600))

    def off(self, draw):
        """The host is off and boots again; its pools may be imported late."""
        self.suspend(draw)
        self.jobs, self.look_at = {}, self.ticks
        self.world.pool.exported |= {"tank"} if draw.random() < 1 / 2 else set()

    def full(self, _draw):
        """The disk with the store and the schedule's directory is full."""
        self.is_full = True

    def store(self, _draw):
        """The store is not mounted; its mount point is empty."""
        if not self.elsewhere.exists() and self.world.paths.bundles.exists():
            self.world.paths.bundles.rename(self.elsewhere)
            self.world.paths.bundles.mkdir()

    def damage(self, draw):
        """A bundle is lost."""
        whole = [each for taken in self.taken.values() for each in taken if self.is_whole(each)]
        if whole:
            shutil.rmtree(self.directory(draw.choice(whole)))

    def rename(self, _draw):
        """The policies' pattern stops matching the guest, or matches it again."""
        old, new = ("web", "shop") if self.name == "web" else ("shop", "web")
        guest = self.world.guest(old)
        for which in ("inactive", "live"):
            text = getattr(guest, which).replace(f"<name>{old}<", f"<name>{new}<")
            setattr(guest, which, text)
        guest.name = new

    def scheduler(self, draw):
        """The daemon, the timer or neither takes snapshots from now on."""
        self.by = draw.choice(["daemon", "timer", "daemon", "timer", ""])
        self.jobs, self.look_at = {}, self.ticks

    def repair(self, draw):
        """The admin repairs everything."""
        self.is_full, self.by = False, self.by or "daemon"
        self.now, self.wrong = self.now - self.wrong, timedelta(0)
        self.world.pool.exported.clear()
        if self.elsewhere.exists():
            shutil.rmtree(self.world.paths.bundles)
            self.elsewhere.rename(self.world.paths.bundles)
        if self.name != "web":
            self.rename(draw)

    @property
    def name(self):
        return next(iter(self.world.hypervisor.guests.values())).name

    # -- the daemon or the timer ---------------------------------------------------------------

    def pass_over(self, most):
        """Skip minutes without an event or a due time, at most so many; return their number."""
        passed = 0
        while passed < most and not matters(self.now + MINUTE):
            self.now += MINUTE
            self.ticks += 1
            passed += 1
        return passed

    def tick(self):
        """A minute with the host awake."""
        self.now += MINUTE
        self.ticks += 1
        if self.by == "timer" and self.ticks >= self.run_at:
            self.run_at = self.ticks + TIMER
            self.carry_out(lambda _policy: True)
        if self.by == "daemon":
            fired = {policy for policy, at in self.jobs.items() if at <= self.now}
            if fired:
                self.carry_out(fired.__contains__)
            if fired or self.ticks >= self.look_at:
                self.look_at = self.ticks + REFRESH
                self.look()

    def look(self):
        """The daemon's forecast, which schedules snapshots; it fails while pools are missing."""
        context = self.scheduled.context
        try:
            forecasts = make_forecasts(context, self.now)
            self.record_first_runs(forecasts)
            apply_retention(context, forecasts, self.now)
        except SnaporchError:
            return
        self.jobs = {
            each.policy: each.at for forecast in forecasts for each in forecast.next_snapshots
        }

    def carry_out(self, wanted):
        context = self.scheduled.context
        try:
            forecasts = make_forecasts(context, self.now)
            self.record_first_runs(forecasts)
        except SnaporchError:
            return
        for job in due_snapshots(context, forecasts, self.now):
            if wanted(job.policy):
                self.take(job)
        if self.by == "timer":
            apply_retention(context, make_forecasts(context, self.now), self.now)

    def record_first_runs(self, forecasts):
        record_carried_out(self.scheduled.context, forecasts, self.now)
        for policy in POLICIES:
            known = self.since[policy]
            self.since[policy] = min(known or self.now, self.now) if self.name == "web" else None

    def take(self, job):
        paths, text, status = self.scheduled.context.config.paths, "taken", ExitCode.OK
        try:
            if self.is_full:
                raise UnavailableError("store", "No space left on device")
            record = self.scheduled.taken(self.now, job.policy, level="crash")
            self.taken[job.policy].append((self.now, record))
        except SnaporchError as error:
            text, status = error.line(), error.exit_code
        known = read_failed(paths.schedule, spare=paths.runtime)
        changed = changed_by(known, [SnapshotJobResult(job, int(status), text)], self.now)
        try:
            write_failed(paths.schedule, changed, spare=paths.runtime)
        except UnavailableError:
            assert self.is_full

    # -- the truth, and the status --------------------------------------------------------------

    def directory(self, taken):
        """The bundle of a snapshot; it is elsewhere while the store is not mounted."""
        record = taken[1]
        return self.world.paths.bundles / record.uuid / record.run

    def is_whole(self, taken):
        there = {snapshot.full_name for snapshot in self.world.pool.snapshots()}
        return f"tank/web@{taken[1].snapshot}" in there and self.directory(taken).is_dir()

    def is_promised(self):
        return self.name == "web" and all(map(self.is_kept, POLICIES))

    def is_kept(self, policy):
        since = self.since[policy]
        if since is not None and timedelta(0) <= self.now - since <= GRACE:
            return True
        slot = (self.now - GRACE).replace(second=0, microsecond=0)
        if slot < self.now - GRACE:
            slot += MINUTE
        slot -= MINUTE  # a time exactly that long ago may still be made up for
        while not is_time_of(policy, slot):
            slot -= MINUTE
        own = self.taken[policy][-30:]
        return any(slot <= taken[0] <= self.now and self.is_whole(taken) for taken in own)

    def is_green(self):
        context = self.scheduled.context
        try:
            status = collect_status(context, make_forecasts(context, self.now), self.now)
        except SnaporchError:
            return False
        return find_problems(status, context.config.status) == []


EVENTS = (
    Host.clock,
    Host.suspend,
    Host.off,
    Host.full,
    Host.store,
    Host.damage,
    Host.rename,
    Host.scheduler,
)


@pytest.mark.timeout(0 if LONG else 600)
@pytest.mark.parametrize(("start", "minutes", "between", "seed"), PERIODS)
def test_the_status_is_green_only_while_the_promise_is_kept(
    tmp_path, monkeypatch, start, minutes, between, seed
):
    host, draw = Host(tmp_path, monkeypatch, start), random.Random(seed)
    minute = seen = green = 0
    events, happened, repaired, event_at = [], -AFTER_EVENT, -AFTER_REPAIR, draw.randrange(between)
    while minute < minutes:
        if minute >= event_at:
            event = draw.choice(EVENTS)
            events.append((host.now, event.__name__))
            event(host, draw)
            happened, repaired = minute, minute + draw.randint(5, 120)
            event_at = minute + 1 + draw.randrange(2 * between)
        if minute == repaired:
            events.append((host.now, "repair"))
            host.repair(draw)
        host.tick()
        minute, seen = minute + 1, seen + 1
        if host.is_green():
            green += 1
            assert host.is_promised(), (host.now, events[-8:])
        if (
            between == RARELY
            and minute > happened + AFTER_EVENT
            and not (repaired <= minute <= repaired + AFTER_REPAIR)
        ):
            following = [each for each in (event_at, repaired, minutes) if each > minute]
            minute += host.pass_over(min(following) - minute)
    print(f"{len(events)} events, {seen} of {minutes} minutes looked at, {green} of them green")
    assert green > seen / 10  # otherwise the test would prove nothing
