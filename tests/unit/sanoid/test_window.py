import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from snaporch.sanoid.window import Join, Phase, Window

A, B = frozenset({"tank/a"}), frozenset({"tank/b"})


def join(target="tank/a", sanoid=1, datasets=None, promised=A | B, names=("hourly",)):
    wanted = frozenset({target}) if datasets is None else datasets
    return Join(sanoid, target, wanted, promised, names)


@pytest.fixture
def window():
    made = Window()
    assert made.join(join())
    made.opened()
    return made


def test_it_waits_for_the_post(window):
    window.leave((1, "tank/a"))
    alone = Window()
    alone.join(join(promised=A))
    alone.opened()
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


def test_nobody_waits_for_a_sanoid_that_has_ended(window):
    window.ended(1)
    assert window.over


def test_a_sanoid_that_nobody_knows_promises_nothing():
    window = Window()
    window.join(join(sanoid=0))
    window.opened()
    window.leave((0, "tank/a"))
    assert window.over


def test_two_sanoids_are_waited_for_each(window):
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


def test_a_recursive_snapshot_takes_all_at_once():
    window = Window()
    window.join(join("tank", datasets=A | B))
    window.opened()
    window.leave((1, "tank"))
    assert window.over
    assert set(window.expected) == A | B


def test_a_post_without_its_pre_is_not_known(window):
    assert not window.leave((1, "tank/b"))
    assert not window.leave((2, "tank/a"))
    assert not window.over


def test_when_all_have_withdrawn_it_is_deserted(window):
    window.join(join(sanoid=2))
    assert window.withdraw((1, "tank/a"))
    assert not window.deserted
    assert window.withdraw((2, "tank/a"))
    assert window.deserted
    assert not window.withdraw((2, "tank/a"))


def test_it_can_be_too_late(window):
    window.close()
    assert not window.join(join("tank/b"))


class Anything(RuleBasedStateMachine):
    """Whatever comes in whatever order, a window that is over misses nobody."""

    def __init__(self):
        super().__init__()
        self.window = Window()
        self.inside = set()

    keys = st.tuples(st.integers(0, 2), st.sampled_from(["tank/a", "tank/b"]))

    @rule(key=keys, promised=st.sets(st.sampled_from(["tank/a", "tank/b"])))
    def enter(self, key, promised):
        if self.window.join(join(key[1], key[0], promised=frozenset(promised))):
            self.inside.add(key)

    @rule()
    def opened(self):
        if self.window.phase is Phase.OPENING:
            self.window.opened()

    @rule(key=keys)
    def leave(self, key):
        self.window.leave(key)
        self.inside.discard(key)

    @rule(key=keys)
    def withdraw(self, key):
        self.window.withdraw(key)
        self.inside.discard(key)

    @rule(sanoid=st.integers(0, 2))
    def end(self, sanoid):
        self.window.ended(sanoid)
        self.inside = {key for key in self.inside if key[0] != sanoid}

    @rule()
    def close(self):
        self.window.close()

    @invariant()
    def nobody_is_forgotten(self):
        if self.window.over:
            assert not self.inside
            assert not self.window.awaited
        if self.window.phase is Phase.OPEN and not self.inside and not self.window.awaited:
            assert self.window.over


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=60, stateful_step_count=20)
