import re

import pytest

from snaporch.output.progress_bar import ProgressBar

ANSI = re.compile(r"\x1b\[[0-9;]*m")
MIB = 1 << 20


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def lines(clock, amounts, total, width=80, subject="web"):
    """The lines of a bar to which an amount is reported each second."""
    made = ProgressBar(subject, clock)
    for done in amounts:
        yield ANSI.sub("", made.line(done, total, width))
        clock.now += 1


def test_it_has_bytes_rate_and_time_left(clock):
    first, *_, last = lines(clock, range(0, 50 * MIB, 10 * MIB), 100 * MIB)
    assert first.endswith("0 B of 100.0 MiB")
    assert last.endswith("40.0 MiB of 100.0 MiB  10.0 MiB/s  0:00:06 left")
    assert last.startswith("web  ━")


@pytest.mark.parametrize("width", [10, 40, 60, 80, 200])
def test_it_is_never_wider_than_the_terminal(clock, width):
    for line in lines(clock, range(0, 50 * MIB, 10 * MIB), 100 * MIB, width, "a-domain" * 3):
        assert len(line) < width


def test_a_reader_that_reports_each_block_does_not_draw_each(clock):
    made = ProgressBar("web", clock)
    drawn = [bool(made.line(done, 1000, 80)) for done in range(1000)]
    assert drawn.count(True) == 1
    assert made.line(1000, 1000, 80), "the end is drawn in any case"


def test_more_than_was_expected_is_the_whole(clock):
    (line,) = lines(clock, [20], 10)
    assert line.endswith("20 B of 20 B")


def test_another_activity_has_a_bar_of_its_own(clock):
    made = ProgressBar("web", clock)
    made.line(50, 100, 80)
    assert made.continues("web", 60)
    assert not made.continues("db", 60)
    assert not made.continues("web", 10)
