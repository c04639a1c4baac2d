"""A host that was taken over must not change what its copies are called."""

import pytest

from snaporch.model import PoolSnapshot
from snaporch.replication.mark_rules import decide_marks

RAM = {"run": "r", "uuid": "u", "level": "ram", "bundle": "u/r", "copy": "nas"}


def copies(*marks):
    return [PoolSnapshot("b/a", f"s{n}", n, n, None, given) for n, given in enumerate(marks)]


def test_the_first_marks_are_set():
    assert decide_marks(copies({}, {}), {"s0": RAM, "s1": RAM}) == ({"s0": RAM, "s1": RAM}, [])


def test_a_marked_copy_is_always_called_a_copy():
    (new,) = decide_marks(copies({}), {"s0": {"run": "r"}}).new.values()
    assert new == {"run": "r", "copy": "append-only"}


def test_without_anything_wanted_nothing_is_set():
    assert decide_marks(copies({}, {}), {"s0": {}, "gone": RAM}) == ({}, [])


@pytest.mark.parametrize("key", ["run", "uuid", "level", "bundle", "copy"])
def test_a_mark_that_has_a_value_keeps_it(key):
    assert decide_marks(copies(RAM), {"s0": {**RAM, key: "other"}}) == ({}, [])


@pytest.mark.parametrize(
    "key", ["run", "verified", "retention", "group", "domain", "ram", "ram-pools", "bundle"]
)
def test_a_mark_that_is_missing_after_the_first_ones_stays_missing(key):
    has = {each: value for each, value in RAM.items() if each != key}
    assert decide_marks(copies(has), {"s0": {**RAM, key: "new"}}) == ({}, [])


@pytest.mark.parametrize("key", ["torn", "note", "ended"])
def test_that_a_copy_is_torn_or_the_last_one_and_a_note_may_be_added_once(key):
    assert decide_marks(copies(RAM), {"s0": {**RAM, key: "x"}}).new == {"s0": {key: "x"}}
    assert decide_marks(copies({**RAM, key: "x"}), {"s0": {**RAM, key: "y"}}).new == {}


def test_a_torn_copy_keeps_its_level():
    wanted = {"s0": {**RAM, "level": "torn", "torn": "yes"}}
    assert decide_marks(copies(RAM), wanted) == ({"s0": {"torn": "yes"}}, [])


def test_a_copy_that_is_older_than_a_marked_one_gets_no_first_marks():
    wanted = {"s0": RAM, "s2": RAM}
    assert decide_marks(copies({}, RAM, {}), wanted) == ({"s2": RAM}, ["s0"])
    assert decide_marks(copies(RAM, {}, RAM), {"s1": RAM}) == ({}, ["s1"])


def test_a_copy_of_another_program_can_turn_out_to_be_torn_after_a_newer_one_was_marked():
    wanted = {"s0": {"level": "torn", "torn": "yes", "copy": "nas"}}
    assert decide_marks(copies({}, RAM), wanted) == ({"s0": {"torn": "yes"}}, [])
