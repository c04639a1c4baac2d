"""A change of the clock changes no age of an item."""

import json

import pytest

from snaporch.prune.ages import ClockReading


@pytest.fixture
def trashed(shelf):
    """A bundle that has been in the trash for two of its three days."""
    shelf.take("s1")
    shelf.lose("s1")
    shelf.prune()
    shelf.age(2)
    shelf.prune()
    return shelf


def goes_after(shelf, days):
    """Whether the item is deleted after so many days, and not before."""
    shelf.age(days - 0.01)
    before = shelf.prune().freed
    shelf.age(0.02)
    return before == 0 and shelf.prune().freed > 0


@pytest.mark.parametrize("jump", [400, -400])
def test_a_clock_that_is_set_changes_nothing(trashed, jump):
    trashed.set_clock(jump)
    assert trashed.prune().freed == 0
    assert goes_after(trashed, 1)


@pytest.mark.parametrize("jump", [400, -400])
def test_a_clock_that_was_wrong_for_an_hour_changes_nothing(trashed, jump):
    trashed.set_clock(jump)
    for _ in range(4):
        trashed.age(1 / 24 / 4)
        assert trashed.prune().freed == 0
    trashed.set_clock(-jump)
    assert trashed.prune().freed == 0
    assert goes_after(trashed, 1 - 1 / 24)


@pytest.mark.parametrize("jump", [400, -400])
def test_a_bundle_that_was_trashed_by_a_wrong_clock_stays_as_long_as_others(shelf, jump):
    shelf.take("s1")
    shelf.lose("s1")
    shelf.set_clock(jump)
    shelf.prune()
    shelf.set_clock(-jump)
    assert goes_after(shelf, 3)


def test_a_clock_that_jumps_over_a_reboot_is_believed_for_a_day(shelf):
    shelf.take("s1")
    shelf.lose("s1")
    shelf.prune()
    shelf.reboot()
    shelf.set_clock(400)
    assert shelf.prune().freed == 0
    shelf.set_clock(-400)
    assert goes_after(shelf, 2 - 60 / 86_400)


def test_a_clock_set_back_over_a_reboot_keeps_no_item_for_ever(trashed):
    trashed.reboot()
    trashed.set_clock(-20_000)
    assert trashed.prune().freed == 0
    assert goes_after(trashed, 1 - 60 / 86_400)


def test_a_host_that_is_up_for_a_minute_a_day_empties_its_trash(trashed):
    trashed.reboot()
    trashed.set_clock(1)
    assert trashed.prune().freed > 0


def test_a_dry_run_writes_no_ages(trashed):
    before = (trashed.root / "ages.json").read_bytes()
    trashed.age(0.5)
    trashed.prune(dry_run=True)
    assert (trashed.root / "ages.json").read_bytes() == before


def test_a_prune_of_another_domain_keeps_the_ages(trashed):
    trashed.age(0.5)
    trashed.prune(domain="other")
    trashed.prune(only=[])
    assert goes_after(trashed, 0.5)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"read": {}, "seconds": {}}', '{"read": 1, "seconds": 1}']
)
def test_ages_that_cannot_be_read_begin_again(trashed, text):
    (trashed.root / "ages.json").write_text(text)
    trashed.age(400)
    assert trashed.prune().freed == 0
    assert goes_after(trashed, 3)


def test_ages_that_cannot_be_written_are_an_error_and_delete_nothing(trashed):
    (trashed.root / "ages.json").unlink()
    (trashed.root / "ages.json").mkdir()
    trashed.age(400)
    done = trashed.prune()
    assert done.freed == 0
    assert [failure.thing for failure in done.failures] == [str(trashed.root / ".ages.json")]


def test_the_ages_of_removed_items_are_forgotten(trashed):
    trashed.age(2)
    assert trashed.prune().freed > 0
    assert json.loads((trashed.root / "ages.json").read_bytes())["seconds"] == {}


def test_the_clocks_of_the_host_are_read():
    first, second = ClockReading.now(), ClockReading.now()
    assert first.boot == second.boot
    assert 0 <= second.since(first) < 60
