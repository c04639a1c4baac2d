from dataclasses import replace

import pytest

from snaporch.model import Strategy
from snaporch.sanoid.hooks.freeze_order import (
    FreezeEstimate,
    FreezeProgress,
    find_conflict,
    next_to_freeze,
)

GIB = 1 << 30


def estimate(strategy="overlay", ram=GIB, seconds=10.0, patience=90.0):
    return FreezeEstimate(Strategy(strategy), ram, seconds, patience)


def order(jobs=1, **estimates):
    """Names in the order of freezing, wave by wave."""
    places = {name: FreezeProgress(each) for name, each in estimates.items()}
    waves = []
    while due := next_to_freeze(places.values(), jobs):
        waves.append({name for name, place in places.items() if any(place is d for d in due)})
        for place in due:
            place.ordered = place.frozen = True
    return waves


def test_an_estimate_survives_a_message():
    each = estimate("manual")
    assert FreezeEstimate.from_json(each.as_json()) == each


def test_guests_that_are_paused_come_last():
    waves = order(
        paused=estimate("paused"),
        quiesced=estimate("quiesced"),
        manual=estimate("manual"),
        overlay=estimate("overlay"),
        crash=estimate("crash"),
    )
    assert waves == [{"overlay"}, {"manual"}, {"quiesced"}, {"paused", "crash"}]


def test_guests_on_overlays_go_a_few_at_a_time_the_longest_first():
    waves = order(2, a=estimate(seconds=1), b=estimate(seconds=3), c=estimate(seconds=2))
    assert waves == [{"b", "c"}, {"a"}]


def test_a_guest_under_way_is_one_of_the_jobs():
    under_way, waiting = FreezeProgress(estimate(), ordered=True), FreezeProgress(estimate())
    assert next_to_freeze([under_way, waiting], 1) == []
    assert next_to_freeze([under_way, waiting], 2) == [waiting]
    under_way.frozen = True
    assert next_to_freeze([under_way, waiting], 1) == [waiting]


def test_a_smaller_paused_guest_starts_when_the_larger_has_as_little_left():
    large = FreezeProgress(estimate("manual", ram=4 * GIB, seconds=40))
    small = FreezeProgress(estimate("manual", ram=GIB))
    assert next_to_freeze([small, large], 1) == [large]
    large.ordered, large.left = True, 2 * GIB
    assert next_to_freeze([small, large], 1) == []
    large.left = GIB
    assert next_to_freeze([small, large], 1) == [small]


def test_equal_paused_guests_start_together_whatever_jobs_is():
    places = [FreezeProgress(estimate("manual")) for _ in range(3)]
    assert len(next_to_freeze(places, 1)) == 3


@pytest.mark.parametrize(
    ("count", "jobs", "fits"), [(1, 1, True), (10, 1, True), (11, 1, False), (36, 4, True)]
)
def test_all_ram_must_be_saved_before_the_first_guest_is_released(count, jobs, fits):
    """Each takes 10 s, and each is held for 90 s."""
    estimates = {f"g{number}": estimate() for number in range(count)}
    conflict = find_conflict(estimates, jobs)
    assert (conflict is None) is fits
    if conflict:
        assert "takes about 110 s" in conflict.reason
        assert 'hook_deadline = "110s"' in conflict.step


def test_the_guest_with_the_most_ram_is_in_conflict():
    estimates = {"a": estimate(seconds=50), "b": estimate(seconds=200), "c": estimate("paused")}
    conflict = find_conflict(estimates, 1)
    assert conflict is not None
    assert conflict.guest == "b"


def test_a_guest_that_can_take_overlays_gives_way():
    giver = replace(estimate("manual", seconds=100, patience=58), yields_to_other_program=True)
    guests = {"long": estimate("manual", seconds=200), "short": estimate("manual", seconds=90)}
    conflict = find_conflict(guests | {"giver": giver}, 1)
    assert conflict is not None
    assert conflict.guest == "giver"
    other = estimate(seconds=200, patience=100)
    conflict = find_conflict({"other": other, "giver": replace(giver, seconds=150)}, 4)
    assert conflict is not None
    assert (conflict.guest, conflict.reason[:7]) == ("giver", "other: ")
    assert find_conflict({"giver": giver}, 1) is None


def test_a_single_guest_always_fits():
    assert (
        find_conflict({"a": estimate(seconds=1e4), "b": estimate("paused", seconds=0)}, 1) is None
    )
    assert find_conflict({"a": estimate("manual", seconds=1e4, patience=1)}, 1) is None


def test_of_two_paused_guests_the_shorter_must_be_short():
    long, short = estimate("manual", seconds=500, patience=58), estimate("manual", seconds=50)
    assert find_conflict({"long": long, "short": short}, 4) is None
    conflict = find_conflict({"long": long, "short": estimate("manual", seconds=59)}, 4)
    assert conflict is not None
    assert conflict.guest == "short"
    assert "it may be paused for 59 s while the RAM of long is saved" in conflict.reason
    assert "58 s are allowed" in conflict.reason
