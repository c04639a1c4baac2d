"""Every observable state: what is done, and what is never done."""

import itertools
from dataclasses import replace

import pytest

from snaporch.recovery.decision import (
    Action,
    EmulatorState,
    ImageRef,
    Observation,
    OverlayState,
    UserDecision,
    decide,
)

EMULATOR = (EmulatorState.ACTIVE, EmulatorState.RESTARTED)
ALL = [
    Observation(*values)
    for values in itertools.product(
        EmulatorState, ImageRef, ImageRef, OverlayState, *[(False, True)] * 2
    )
]


def in_use(sight):
    """Whether an emulator has the overlay open."""
    return sight.power in EMULATOR and sight.live is ImageRef.OVERLAY


def may_be_stale(sight):
    """Whether an emulator was started on an overlay that the one before was about to leave."""
    return in_use(sight) and sight.power is EmulatorState.RESTARTED and sight.pivoting


def seen(*actions):
    return [sight for sight in ALL if decide(sight) in actions]


def test_every_state_has_one_action():
    assert len(ALL) == 1024
    assert all(isinstance(decide(sight), Action) for sight in ALL)


def test_every_action_has_a_state():
    assert {decide(sight) for sight in ALL} == set(Action)


def test_a_write_that_may_be_nowhere_else_is_never_removed():
    """Only the same emulator on its base proves a pivot; an overlay in use is not looked at."""
    for sight in seen(Action.REMOVE):
        if sight.file is OverlayState.WRITTEN:
            assert (sight.power, sight.live) == (EmulatorState.ACTIVE, ImageRef.BASE)


def test_what_an_emulator_has_open_is_committed_by_it_and_nothing_else_is():
    assert seen(Action.COMMIT) == [
        sight for sight in ALL if in_use(sight) and not may_be_stale(sight)
    ]


def test_a_human_is_called_only_for_an_overlay_that_is_named_and_missing_or_may_be_stale():
    for sight in seen(Action.ATTENTION, Action.UNDECIDED):
        if may_be_stale(sight):
            continue
        assert sight.power is EmulatorState.OFF
        assert sight.inactive is ImageRef.OVERLAY
        assert sight.file is OverlayState.MISSING or (
            sight.file is OverlayState.WRITTEN and sight.pivoting
        )


def test_an_overlay_that_may_be_older_than_its_base_is_never_committed_into_it():
    """The guest may have written to the base after the pivot: only when both are the same."""
    for sight in seen(Action.COMMIT_OFFLINE):
        assert sight.file is OverlayState.COMMITTED or not sight.pivoting


def test_all_that_a_transient_guest_wrote_last_comes_into_its_base():
    for sight in ALL:
        if sight.power is EmulatorState.GONE and sight.unused and not sight.pivoting:
            held = sight.file in (OverlayState.WRITTEN, OverlayState.COMMITTED)
            assert decide(sight) is (Action.COMMIT_OFFLINE if held else Action.REMOVE)


def test_a_guest_that_was_started_on_such_an_overlay_changes_nothing():
    """Somebody did without waiting for a decision; it is still to be made."""
    for sight in ALL:
        if may_be_stale(sight):
            assert decide(sight) is Action.UNDECIDED


@pytest.mark.parametrize("take", UserDecision)
def test_a_human_decides_what_is_undecided_and_nothing_else(take):
    for sight in ALL:
        alone, told = decide(sight), decide(sight, take)
        if alone is not Action.UNDECIDED:
            assert told is alone
        elif take is UserDecision.OVERLAY:
            off = sight.power is EmulatorState.OFF
            assert told is (Action.COMMIT_OFFLINE if off else Action.COMMIT)
        else:  # who runs on the overlay cannot be on the base as well
            assert told is (
                Action.QUARANTINE if sight.power is EmulatorState.OFF else Action.UNDECIDED
            )


def test_nothing_is_committed_behind_an_emulators_back():
    for sight in seen(Action.COMMIT_OFFLINE):
        if sight.power is EmulatorState.GONE:
            assert sight.unused
        else:
            assert sight.power is EmulatorState.OFF
            assert sight.inactive is ImageRef.OVERLAY
        assert sight.file in (OverlayState.WRITTEN, OverlayState.COMMITTED)


def test_what_a_guest_that_is_gone_wrote_last_is_committed_if_nobody_can_have_come_after_it():
    for sight in ALL:
        if sight.power is EmulatorState.GONE and sight.file is OverlayState.WRITTEN:
            last = sight.unused and not sight.pivoting
            assert decide(sight) is (Action.COMMIT_OFFLINE if last else Action.QUARANTINE)


def test_what_the_definition_of_a_guest_that_is_off_names_is_committed_or_empty():
    for sight in ALL:
        if sight.power is EmulatorState.OFF and sight.inactive is ImageRef.OVERLAY:
            wanted = {
                OverlayState.MISSING: Action.ATTENTION,
                OverlayState.EMPTY: Action.REMOVE,
                OverlayState.WRITTEN: Action.UNDECIDED if sight.pivoting else Action.COMMIT_OFFLINE,
            }
            assert decide(sight) is wanted.get(sight.file, Action.COMMIT_OFFLINE)


def test_only_what_nobody_uses_is_set_aside():
    for sight in seen(Action.QUARANTINE):
        assert sight.file is OverlayState.WRITTEN
        assert not in_use(sight)
        assert not (sight.power is EmulatorState.OFF and sight.inactive is ImageRef.OVERLAY)


def test_an_overlay_that_is_not_there_is_neither_moved_nor_read():
    assert not [
        sight
        for sight in seen(Action.QUARANTINE, Action.COMMIT_OFFLINE)
        if sight.file is OverlayState.MISSING
    ]


def test_a_restart_proves_nothing():
    """The guest may have written to the overlay before, and to the base since."""
    for sight in ALL:
        if (
            sight.power is EmulatorState.RESTARTED
            and sight.file is OverlayState.WRITTEN
            and not in_use(sight)
        ):
            assert decide(sight) is Action.QUARANTINE


@pytest.mark.parametrize("power", [EmulatorState.OFF, EmulatorState.GONE])
def test_without_an_emulator_the_live_definition_does_not_matter(power):
    for sight in ALL:
        if sight.power is power:
            assert decide(sight) is decide(replace(sight, live=ImageRef.NOWHERE))


def after(sight):
    """What can be seen when the action has been done."""
    done = decide(sight)
    inactive = ImageRef.BASE if sight.inactive is ImageRef.OVERLAY else sight.inactive
    live = ImageRef.BASE if done is Action.COMMIT else sight.live
    power = EmulatorState.OFF if may_be_stale(sight) else sight.power  # it was shut off to decide
    return replace(sight, power=power, live=live, inactive=inactive, file=OverlayState.MISSING)


def test_doing_it_leaves_nothing_to_do():
    for sight in ALL:
        if decide(sight) is not Action.ATTENTION:
            assert decide(after(sight)) is Action.REMOVE


def test_a_second_look_after_only_the_definition_was_mended_loses_nothing():
    """Recovery may be killed between its steps."""
    for sight in ALL:
        if sight.file is OverlayState.WRITTEN and decide(sight) in (
            Action.QUARANTINE,
            Action.COMMIT,
        ):
            again = decide(replace(sight, inactive=ImageRef.BASE))
            assert again in (Action.QUARANTINE, Action.COMMIT)


def test_what_became_less_known_never_becomes_a_removal():
    """Whether it was committed decides only while the overlay is not in use."""
    for sight in ALL:
        if sight.file is OverlayState.COMMITTED:
            doubtful = decide(replace(sight, file=OverlayState.WRITTEN))
            if decide(sight) is Action.REMOVE and doubtful is Action.REMOVE:
                assert (sight.power, sight.live) == (EmulatorState.ACTIVE, ImageRef.BASE)
