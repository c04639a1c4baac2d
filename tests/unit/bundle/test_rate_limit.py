import threading

import pytest

from snaporch.bundle.rate_limit import RateLimit

MIB = 1 << 20
PATIENCE = 60


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_bytes_come_at_the_rate(clock):
    throttle = RateLimit(10, clock=clock)
    for _ in range(50):
        clock.now += max(throttle.delay(MIB), 0)
    assert clock.now == pytest.approx(105, abs=0.1)


def test_a_rest_is_not_saved_up(clock):
    throttle = RateLimit(10, clock=clock)
    clock.now += 1000
    assert throttle.delay(10 * MIB) == pytest.approx(1, abs=0.1)


def test_no_rate_is_no_limit(clock):
    throttle = RateLimit(0, clock=clock)
    assert not throttle.limits
    assert throttle.delay(1 << 40) == 0
    throttle.spend(1 << 40)


def test_a_waiting_thread_continues_when_the_limit_is_lifted():
    throttle = RateLimit(1)
    waiting = threading.Thread(target=throttle.spend, args=(1 << 40,), daemon=True)
    waiting.start()
    throttle.lift()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    assert throttle.delay(1 << 40) == 0
