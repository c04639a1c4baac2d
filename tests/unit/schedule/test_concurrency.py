import threading

import pytest

from snaporch.config import Schedule
from snaporch.schedule.concurrency import ConcurrencyLimiter, LimiterClosedError, SnapshotJob


def job(name, *pools, ram=0, policy="p"):
    return SnapshotJob(name, name, policy, frozenset(pools or {"tank"}), ram)


class Crowd:
    """Captures that wait for the limiter, each in a thread; none ends by itself."""

    def __init__(self, **limits):
        self.limiter = ConcurrencyLimiter(Schedule(**limits))
        self.threads = {}
        self.leave = {}
        self.turned_away = []

    def come(self, each):
        self.leave[each.key] = threading.Event()
        arrived = threading.Event()
        thread = threading.Thread(target=self._pass, args=(each, arrived), daemon=True)
        self.threads[each.key] = thread
        thread.start()
        assert arrived.wait(30)

    def _pass(self, each, arrived):
        condition = self.limiter._changed
        wait_for = condition.wait_for

        def wait(predicate):
            arrived.set()  # this thread has the lock, so other threads see the limiter's decision
            return wait_for(predicate)

        condition.wait_for = wait
        try:
            with self.limiter.through(each):
                self.leave[each.key].wait(30)
        except LimiterClosedError:
            self.turned_away.append(each.key)

    def go(self, each):
        self.leave[each.key].set()
        self.threads[each.key].join(30)

    def inside(self):
        return sorted(each.domain for each in self.limiter.inside)

    def await_inside(self, *names):
        with self.limiter._changed:
            sure = self.limiter._changed.__class__.wait_for(
                self.limiter._changed,
                lambda: sorted(e.domain for e in self.limiter._inside) == [*names],
                30,
            )
        assert sure, self.inside()


def test_no_more_than_jobs_at_once():
    crowd = Crowd(jobs=2, jobs_per_pool=9)
    a, b, c = (job(name) for name in "abc")
    for each in (a, b, c):
        crowd.come(each)
    assert crowd.inside() == ["a", "b"]
    crowd.go(a)
    crowd.await_inside("b", "c")
    crowd.limiter.close()


def test_no_more_than_its_jobs_in_a_pool_while_others_go_on():
    crowd = Crowd(jobs=9, jobs_per_pool=1)
    for each in (job("a", "tank"), job("b", "tank", "flash"), job("c", "flash")):
        crowd.come(each)
    assert crowd.inside() == ["a", "c"]


def test_one_domain_is_never_taken_twice_at_once():
    crowd = Crowd(jobs=9, jobs_per_pool=9)
    crowd.come(job("a", policy="p"))
    crowd.come(job("a", policy="q"))
    assert crowd.inside() == ["a"]


def test_ram_in_flight_is_limited_and_a_plain_snapshot_is_not():
    crowd = Crowd(jobs=9, jobs_per_pool=9, ram_in_flight_mib=100)
    for each in (job("a", ram=60), job("b", ram=60), job("c"), job("d", ram=40)):
        crowd.come(each)
    assert crowd.inside() == ["a", "c", "d"]


def test_a_guest_with_more_ram_than_the_limit_is_taken_without_another_ram_snapshot():
    crowd = Crowd(jobs=9, jobs_per_pool=9, ram_in_flight_mib=100)
    crowd.come(job("big", ram=500))
    crowd.come(job("small", ram=1))
    assert crowd.inside() == ["big"]


def test_waiting_captures_are_refused_when_the_limiter_closes():
    crowd = Crowd(jobs=1)
    first, second = job("a"), job("b")
    crowd.come(first)
    crowd.come(second)
    crowd.limiter.close()
    crowd.threads[second.key].join(30)
    assert crowd.turned_away == [second.key]
    assert crowd.inside() == ["a"]


def test_a_closed_limiter_refuses_every_capture():
    limiter = ConcurrencyLimiter(Schedule())
    limiter.close()
    with pytest.raises(LimiterClosedError), limiter.through(job("a")):
        pass


def test_other_limits_count_at_once():
    crowd = Crowd(jobs=1, jobs_per_pool=9)
    crowd.come(job("a"))
    crowd.come(job("b"))
    crowd.limiter.limit(Schedule(jobs=2, jobs_per_pool=9))
    crowd.await_inside("a", "b")
