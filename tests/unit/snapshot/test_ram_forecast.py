"""How saving RAM ends, by the numbers."""

from math import inf

import pytest

from snaporch.snapshot.ram_forecast import RamForecast, RamOutcome, RamSaveFacts, forecast_save

STEPS = ((2.5, 50), (3.0, 25), (3.5, 10))


def forecast(changed, **more):
    facts = {"ram": 1000, "changed": changed, "speed": 100, "steps": STEPS} | more
    return forecast_save(RamSaveFacts(**facts))


@pytest.mark.parametrize(
    ("changed", "seconds"),
    [(0, 10.0), (50, 20.0), (59, 1000 / 41)],
)
def test_a_guest_that_changes_little_fits(changed, seconds):
    assert forecast(changed) == RamForecast(RamOutcome.FITS, pytest.approx(seconds))


def test_a_guest_is_slowed_down_step_by_step():
    """At 80 % 500 MiB are left after 25 s; half the CPU time saves 60 a second of them."""
    assert forecast(80) == RamForecast(RamOutcome.SLOWED, pytest.approx(5 + 200 / 80), 25)


def test_a_guest_that_changes_all_of_its_ram_at_once():
    """Until a step makes it slower than the saving, all of its RAM is left."""
    slowed = forecast(390)
    assert slowed.outcome is RamOutcome.SLOWED
    assert slowed.percent == 10
    # 25 s: all is left; at 25 % it gains 2.5 MiB a second for 5 s, then 61 until it is done.
    assert slowed.seconds == pytest.approx(10 + (1000 - 12.5) / 61)


@pytest.mark.parametrize(
    ("more", "outcome", "seconds"),
    [
        ({}, RamOutcome.ENDLESS, 0),
        ({"time_budget": 60}, RamOutcome.SUSPENDED, 10),
        ({"time_budget": 60, "aborts": True}, RamOutcome.ABORTED, 0),
        ({"budget": 4000}, RamOutcome.SUSPENDED, 10),
        ({"budget": 500}, RamOutcome.SUSPENDED, 10),
    ],
)
def test_a_guest_that_cannot_be_slowed_down_enough(more, outcome, seconds):
    found = forecast(2000, **more)
    assert (found.outcome, found.seconds) == (outcome, pytest.approx(seconds))


def test_a_budget_that_ends_before_the_first_step():
    assert forecast(0, time_budget=4) == RamForecast(RamOutcome.SUSPENDED, pytest.approx(6))
    assert forecast(90, time_budget=20).percent == 100


@pytest.mark.parametrize("budget", [{"time_budget": 26}, {"budget": 2600}])
def test_a_budget_that_ends_after_the_first_step(budget):
    """It is slowed down when 500 MiB are left, and saves 60 of them in the second that is left."""
    assert forecast(80, **budget) == RamForecast(RamOutcome.SUSPENDED, pytest.approx(4.4), 50)


def test_a_guest_that_cannot_be_slowed_down_at_all():
    assert forecast(90, steps=()) == RamForecast(RamOutcome.FITS, pytest.approx(100))
    assert forecast(110, steps=()).outcome is RamOutcome.ENDLESS


def test_a_rate_is_lifted_after_two_passes():
    """200 s at 10 a second, all of it left; then 50 a second more are saved than change."""
    fits = forecast(50, rate=10, steps=())
    assert fits == RamForecast(RamOutcome.FITS, pytest.approx(200 + 20))
    assert forecast(0, rate=1000) == forecast(0)
    assert forecast(0, rate=inf) == forecast(0)
