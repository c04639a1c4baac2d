"""Every observable state: the action, and the actions that are never taken."""

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


def in_use(observation):
    """Whether an emulator has the overlay open."""
    return observation.power in EMULATOR and observation.live is ImageRef.OVERLAY


def may_be_stale(observation):
    """Whether an emulator was started on an overlay that the one before was about to leave."""
    return (
        in_use(observation)
        and observation.power is EmulatorState.RESTARTED
        and observation.pivoting
    )


def seen(*actions):
    return [observation for observation in ALL if decide(observation) in actions]


def test_every_state_has_one_action():
    assert len(ALL) == 1024
    assert all(isinstance(decide(observation), Action) for observation in ALL)


def test_every_action_has_a_state():
    assert {decide(observation) for observation in ALL} == set(Action)


def test_an_overlay_that_may_have_the_only_copy_of_a_write_is_never_removed():
    """Only the same emulator on its base proves a pivot; an overlay in use is not read."""
    for observation in seen(Action.REMOVE):
        if observation.file is OverlayState.WRITTEN:
            assert (observation.power, observation.live) == (EmulatorState.ACTIVE, ImageRef.BASE)


def test_an_overlay_is_committed_by_the_emulator_exactly_if_that_has_it_open():
    assert seen(Action.COMMIT) == [
        observation for observation in ALL if in_use(observation) and not may_be_stale(observation)
    ]


def test_the_admin_is_asked_only_for_an_overlay_that_is_named_and_missing_or_may_be_stale():
    for observation in seen(Action.ATTENTION, Action.UNDECIDED):
        if may_be_stale(observation):
            continue
        assert observation.power is EmulatorState.OFF
        assert observation.inactive is ImageRef.OVERLAY
        assert observation.file is OverlayState.MISSING or (
            observation.file is OverlayState.WRITTEN and observation.pivoting
        )


def test_an_overlay_that_may_be_older_than_its_base_is_never_committed_into_it():
    """The guest may have written to the base after the pivot: only when both are the same."""
    for observation in seen(Action.COMMIT_OFFLINE):
        assert observation.file is OverlayState.COMMITTED or not observation.pivoting


def test_the_last_writes_of_a_transient_guest_are_committed_into_its_base():
    for observation in ALL:
        if (
            observation.power is EmulatorState.NO_DOMAIN
            and observation.unused
            and not observation.pivoting
        ):
            held = observation.file in (OverlayState.WRITTEN, OverlayState.COMMITTED)
            assert decide(observation) is (Action.COMMIT_OFFLINE if held else Action.REMOVE)


def test_a_guest_that_was_started_on_such_an_overlay_changes_nothing():
    """The guest was started without waiting for a decision; the admin still has to make it."""
    for observation in ALL:
        if may_be_stale(observation):
            assert decide(observation) is Action.UNDECIDED


@pytest.mark.parametrize("take", UserDecision)
def test_the_admin_decides_undecided_states_and_no_others(take):
    for observation in ALL:
        alone, decided = decide(observation), decide(observation, take)
        if alone is not Action.UNDECIDED:
            assert decided is alone
        elif take is UserDecision.OVERLAY:
            off = observation.power is EmulatorState.OFF
            assert decided is (Action.COMMIT_OFFLINE if off else Action.COMMIT)
        else:  # a guest on the overlay cannot be on the base as well
            assert decided is (
                Action.QUARANTINE if observation.power is EmulatorState.OFF else Action.UNDECIDED
            )


def test_no_overlay_of_a_running_emulator_is_committed_offline():
    for observation in seen(Action.COMMIT_OFFLINE):
        if observation.power is EmulatorState.NO_DOMAIN:
            assert observation.unused
        else:
            assert observation.power is EmulatorState.OFF
            assert observation.inactive is ImageRef.OVERLAY
        assert observation.file in (OverlayState.WRITTEN, OverlayState.COMMITTED)


def test_the_last_writes_of_a_missing_guest_are_committed_if_no_process_used_the_base_since():
    for observation in ALL:
        if (
            observation.power is EmulatorState.NO_DOMAIN
            and observation.file is OverlayState.WRITTEN
        ):
            last = observation.unused and not observation.pivoting
            assert decide(observation) is (Action.COMMIT_OFFLINE if last else Action.QUARANTINE)


def test_an_overlay_that_a_guest_that_is_off_names_is_committed_or_empty():
    for observation in ALL:
        if observation.power is EmulatorState.OFF and observation.inactive is ImageRef.OVERLAY:
            wanted = {
                OverlayState.MISSING: Action.ATTENTION,
                OverlayState.EMPTY: Action.REMOVE,
                OverlayState.WRITTEN: Action.UNDECIDED
                if observation.pivoting
                else Action.COMMIT_OFFLINE,
            }
            assert decide(observation) is wanted.get(observation.file, Action.COMMIT_OFFLINE)


def test_only_an_unused_overlay_is_quarantined():
    for observation in seen(Action.QUARANTINE):
        assert observation.file is OverlayState.WRITTEN
        assert not in_use(observation)
        assert not (
            observation.power is EmulatorState.OFF and observation.inactive is ImageRef.OVERLAY
        )


def test_a_missing_overlay_is_neither_moved_nor_read():
    assert not [
        observation
        for observation in seen(Action.QUARANTINE, Action.COMMIT_OFFLINE)
        if observation.file is OverlayState.MISSING
    ]


def test_a_restart_does_not_prove_a_pivot():
    """The guest may have written to the overlay before, and to the base since."""
    for observation in ALL:
        if (
            observation.power is EmulatorState.RESTARTED
            and observation.file is OverlayState.WRITTEN
            and not in_use(observation)
        ):
            assert decide(observation) is Action.QUARANTINE


@pytest.mark.parametrize("power", [EmulatorState.OFF, EmulatorState.NO_DOMAIN])
def test_without_an_emulator_the_live_definition_does_not_matter(power):
    for observation in ALL:
        if observation.power is power:
            assert decide(observation) is decide(replace(observation, live=ImageRef.NOWHERE))


def after(observation):
    """The state that is observed after the action."""
    done = decide(observation)
    inactive = ImageRef.BASE if observation.inactive is ImageRef.OVERLAY else observation.inactive
    live = ImageRef.BASE if done is Action.COMMIT else observation.live
    power = (
        EmulatorState.OFF if may_be_stale(observation) else observation.power
    )  # it was shut off to decide
    return replace(
        observation, power=power, live=live, inactive=inactive, file=OverlayState.MISSING
    )


def test_after_an_action_no_other_action_is_needed():
    for observation in ALL:
        if decide(observation) is not Action.ATTENTION:
            assert decide(after(observation)) is Action.REMOVE


def test_a_second_recovery_after_only_the_definition_was_fixed_loses_nothing():
    """Recovery may be killed between its steps."""
    for observation in ALL:
        if observation.file is OverlayState.WRITTEN and decide(observation) in (
            Action.QUARANTINE,
            Action.COMMIT,
        ):
            again = decide(replace(observation, inactive=ImageRef.BASE))
            assert again in (Action.QUARANTINE, Action.COMMIT)


def test_a_less_known_state_never_leads_to_a_removal():
    """Whether it was committed matters only while the overlay is not in use."""
    for observation in ALL:
        if observation.file is OverlayState.COMMITTED:
            doubtful = decide(replace(observation, file=OverlayState.WRITTEN))
            if decide(observation) is Action.REMOVE and doubtful is Action.REMOVE:
                assert (observation.power, observation.live) == (
                    EmulatorState.ACTIVE,
                    ImageRef.BASE,
                )
