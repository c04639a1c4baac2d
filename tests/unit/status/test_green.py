"""After any events in any order the status is well only if the policy keeps its promise.

The test calculates the promise from its own actions: a whole snapshot that is no older than
the policy's hour and ``status.grace``; or none yet, if the policy was first carried out less than
``status.grace`` ago.
"""

import shutil
from datetime import timedelta

import pytest
from fakes.schedule import HOURLY, NOW, Scheduled
from fakes.world import World
from hypothesis import given, settings
from hypothesis import strategies as st

from snaporch.schedule.forecast import make_forecasts, record_carried_out
from snaporch.status.collect import collect_status
from snaporch.status.problems import find_problems

OLDEST, GRACE = timedelta(minutes=90), timedelta(minutes=30)
EVENTS = st.one_of(
    st.integers(1, 70).map(lambda minutes: ("pass", minutes)),
    st.integers(-2000, 2000).map(lambda minutes: ("clock jumps", minutes)),
    *[st.just((name, 0)) for name in ("take", "take", "take", "look", "look")],
    *[st.just((name, 0)) for name in ("fail", "damage", "rename", "store goes", "store comes")],
)


class Host:
    """A guest with a policy, and the snapshots that the test took of it."""

    def __init__(self, root, monkeypatch):
        world = World(root)
        world.install(monkeypatch)
        world.add_guest()
        self.scheduled = Scheduled(world)
        self.scheduled.configure(
            policy={"hourly": HOURLY | {"domains": ["we*"]}},
            status={"store_warning": 100, "store_critical": 100},
        )
        self.world, self.now = world, NOW
        self.whole, self.since, self.elsewhere = [], None, None

    def happen(self, event, minutes):
        self.now += timedelta(minutes=minutes)
        if event in ("take", "fail") and self.is_named("web"):
            self.take(fails=event == "fail")
        elif event == "damage" and self.whole and not self.elsewhere:
            shutil.rmtree(self.whole.pop()[1].bundle)
        elif event == "rename":
            old, new = ("web", "shop") if self.is_named("web") else ("shop", "web")
            guest = self.world.guest(old)
            guest.inactive = guest.inactive.replace(f"<name>{old}<", f"<name>{new}<")
            guest.live = guest.live.replace(f"<name>{old}<", f"<name>{new}<")
            guest.name = new
        elif event == "store goes" and not self.elsewhere and self.world.paths.bundles.exists():
            self.elsewhere = self.world.root / "elsewhere"
            self.world.paths.bundles.rename(self.elsewhere)
        elif event == "store comes" and self.elsewhere:
            self.elsewhere.rename(self.world.paths.bundles)
            self.elsewhere = None
        elif event == "look":
            context = self.scheduled.context
            record_carried_out(context, make_forecasts(context, self.now), self.now)
            named = self.is_named("web")
            self.since = min(self.since or self.now, self.now) if named else None

    def is_named(self, name):
        return any(guest.name == name for guest in self.world.hypervisor.guests.values())

    def take(self, *, fails):
        if self.elsewhere:  # no snapshot is taken while the store is away
            return
        record = self.scheduled.taken(self.now, level="crash")
        if fails:
            shutil.rmtree(record.bundle)
        else:
            self.whole.append((self.now, record))

    def is_well(self):
        context = self.scheduled.context
        status = collect_status(context, make_forecasts(context, self.now), self.now)
        return find_problems(status, context.config.status) == []

    def is_promised(self):
        if not self.is_named("web"):
            return False
        whole = [] if self.elsewhere else self.whole
        ages = [self.now - created for created, _ in whole]
        begun = self.since is not None and timedelta(0) <= self.now - self.since <= GRACE
        return begun or any(timedelta(0) <= age <= OLDEST for age in ages)


@settings(max_examples=120)
@given(events=st.lists(EVENTS, min_size=4, max_size=14))
def test_the_status_is_well_only_while_the_promise_is_kept(tmp_path_factory, events):
    with pytest.MonkeyPatch.context() as monkeypatch:
        host = Host(tmp_path_factory.mktemp("host"), monkeypatch)
        host.world.unit_states["snaporch.service"] = "active"
        for event in events:
            host.happen(*event)
            assert not host.is_well() or host.is_promised(), event


def test_the_status_is_well_while_the_promise_is_kept(tmp_path, monkeypatch):
    """Otherwise the test above would prove nothing."""
    host = Host(tmp_path, monkeypatch)
    host.happen("look", 0)
    host.happen("take", 0)
    for _ in range(5):
        assert host.is_well()
        host.happen("take", 60)
