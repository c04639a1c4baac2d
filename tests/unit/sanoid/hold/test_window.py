import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from snaporch.sanoid.hold.window import (
    HoldRequest,
    HoldWindow,
    WindowPhase,
    longest_window,
    window_end,
)

A, B = frozenset({"tank/a"}), frozenset({"tank/b"})


def join(target="tank/a", sanoid=1, datasets=None, promised=A | B, names=("hourly",)):
    wanted = frozenset({target}) if datasets is None else datasets
    return HoldRequest(sanoid, target, wanted, promised, names)


@pytest.fixture
def window():
    made = HoldWindow()
    assert made.join(join())
    made.set_open()
    return made


def test_a_guest_is_held_for_the_deadline_until_all_are_frozen_and_again_from_then_on():
    assert window_end(100, None, hook_deadline=30, max_frozen=90) == 130
    assert window_end(100, 120, hook_deadline=30, max_frozen=90) == 150
    assert window_end(100, 130, hook_deadline=30, max_frozen=90) == 100 + longest_window(30)


def test_a_guest_is_never_held_for_longer_than_it_may_be_frozen():
    assert window_end(100, None, hook_deadline=30, max_frozen=20) == 120
    assert window_end(100, 125, hook_deadline=30, max_frozen=40) == 140


def test_it_waits_for_the_post(window):
    window.leave((1, "tank/a"))
    alone = HoldWindow()
    alone.join(join(promised=A))
    alone.set_open()
    assert not alone.over
    assert alone.leave((1, "tank/a"))
    assert alone.over


def test_it_waits_for_the_datasets_that_are_promised(window):
    window.leave((1, "tank/a"))
    assert window.awaited == B
    assert not window.over
    assert window.join(join("tank/b", names=("x",)))
    assert not window.over
    window.leave((1, "tank/b"))
    assert window.over
    assert window.expected == {"tank/a": {"hourly"}, "tank/b": {"x"}}


def test_a_sanoid_that_has_exited_is_not_waited_for(window):
    window.ended(1)
    assert window.over


def test_an_unknown_sanoid_promises_nothing():
    window = HoldWindow()
    window.join(join(sanoid=0))
    window.set_open()
    window.leave((0, "tank/a"))
    assert window.over


def test_each_of_two_sanoids_is_waited_for(window):
    window.join(join(sanoid=2, promised=A))
    window.ended(1)
    assert not window.over
    assert window.leave((2, "tank/a"))
    assert window.over


def test_one_sanoid_keeps_the_promise_of_another(window):
    window.join(join("tank/b", sanoid=2, promised=A | B))
    window.leave((1, "tank/a"))
    window.leave((2, "tank/b"))
    assert window.over


def test_a_recursive_snapshot_covers_all_datasets_at_once():
    window = HoldWindow()
    window.join(join("tank", datasets=A | B))
    window.set_open()
    window.leave((1, "tank"))
    assert window.over
    assert set(window.expected) == A | B


def test_a_post_without_its_pre_is_not_known(window):
    assert not window.leave((1, "tank/b"))
    assert not window.leave((2, "tank/a"))
    assert not window.over


def test_all_calls_have_withdrawn(window):
    window.join(join(sanoid=2))
    assert window.withdraw((1, "tank/a"))
    assert not window.all_withdrawn
    assert window.withdraw((2, "tank/a"))
    assert window.all_withdrawn
    assert not window.withdraw((2, "tank/a"))


def test_it_is_abandoned_when_every_sanoid_has_exited(window):
    """Withdrawn calls do not count."""
    window.join(join(sanoid=2))
    window.join(join(sanoid=3))
    window.ended(1)
    assert not window.abandoned
    window.withdraw((2, "tank/a"))
    assert not window.abandoned
    window.ended(3)
    assert window.abandoned


def test_it_is_not_over_while_the_guest_is_frozen_again(window):
    window.ended(1)
    assert window.over
    window.set_opening()
    assert window.phase is WindowPhase.OPENING
    assert not window.over
    window.set_open()
    assert window.over


def test_a_closed_window_does_not_open_again(window):
    window.close()
    window.set_opening()
    assert not window.join(join("tank/b"))


def test_a_closed_window_cannot_be_joined(window):
    window.close()
    assert not window.join(join("tank/b"))


class Story:
    """The events of a window; its state is derived from all of them each time."""

    def __init__(self):
        self.events = []

    def add(self, what, key, promised=frozenset()):
        self.events.append((what, key, promised))

    def _after(self, place, what, key):
        return any((w, k) == (what, key) for w, k, _ in self.events[place + 1 :])

    def _joins(self):
        """The joins that were not withdrawn."""
        return [
            (place, key, promised)
            for place, (what, key, promised) in enumerate(self.events)
            if what == "join" and not self._after(place, "withdraw", key)
        ]

    def _has_ended(self, sanoid):
        """A sanoid process may join until it has exited."""
        last = max(
            place
            for place, (what, key, _) in enumerate(self.events)
            if what == "join" and key[0] == sanoid
        )
        return self._after(last, "end", sanoid)

    @property
    def all_withdrawn(self):
        return not self._joins()

    @property
    def inside(self):
        """The calls that joined and have not left since."""
        return {
            key
            for place, key, _ in self._joins()
            if not self._after(place, "leave", key) and not self._after(place, "end", key[0])
        }

    @property
    def awaited(self):
        joins = self._joins()
        promised = {
            dataset
            for _, key, datasets in joins
            if key[0] != 0 and not self._has_ended(key[0])
            for dataset in datasets
        }
        return promised - {key[1] for _, key, _ in joins}


class Anything(RuleBasedStateMachine):
    """In any order of events, a window waits for the calls that it should, and for no others."""

    def __init__(self):
        super().__init__()
        self.window = HoldWindow()
        self.story = Story()

    sanoids = st.integers(0, 1)  # few, so that they come again
    keys = st.tuples(sanoids, st.sampled_from(["tank/a", "tank/b"]))

    @rule(key=keys, promised=st.sets(st.sampled_from(["tank/a", "tank/b"])))
    def enter(self, key, promised):
        closed = self.window.phase is WindowPhase.CLOSED
        joined = self.window.join(join(key[1], key[0], promised=frozenset(promised)))
        assert joined is not closed
        if joined:
            self.story.add("join", key, frozenset(promised))

    @rule()
    def opened(self):
        if self.window.phase is WindowPhase.OPENING:
            self.window.set_open()

    @rule(key=keys)
    def leave(self, key):
        self.window.leave(key)
        self.story.add("leave", key)

    @rule(key=keys)
    def withdraw(self, key):
        self.window.withdraw(key)
        self.story.add("withdraw", key)

    @rule(sanoid=sanoids)
    def end(self, sanoid):
        self.window.ended(sanoid)
        self.story.add("end", sanoid)

    @rule()
    def close(self):
        self.window.close()

    @invariant()
    def it_is_over_when_no_call_is_inside_or_awaited(self):
        assert self.window.awaited == self.story.awaited
        assert self.window.all_withdrawn is self.story.all_withdrawn
        waits = self.story.inside or self.story.awaited
        assert self.window.over is (self.window.phase is WindowPhase.OPEN and not waits)


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=200, stateful_step_count=25)
