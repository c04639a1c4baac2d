"""Which strategy, by level, blockers, pools and state."""

import itertools

import pytest

from snaporch.config import DomainSettings
from snaporch.errors import ExitCode, RefusedError
from snaporch.hypervisor import Blocker
from snaporch.model import Domain, DomainState, Level, Strategy
from snaporch.snapshot.choose_strategy import StrategyChoice, choose_strategy, is_lower, lower_level

RAM = frozenset({Strategy.OVERLAY, Strategy.MANUAL})
LEVELS = ["auto", "ram", "quiesced", "paused", "crash", "off"]
ACTIVE = [state for state in DomainState if state is not DomainState.OFF]


def domain(state=DomainState.RUNNING):
    return Domain(
        name="web",
        uuid="u",
        state=state,
        disks=(),
        live_xml=None if state is DomainState.OFF else "<domain/>",
        inactive_xml="<domain/>",
        nvram=None,
        tpm_state=None,
        machine="pc",
        managed_save=False,
        emulator_owner=None,
        boot="",
    )


def test_no_guest_stays_paused_for_another_program():
    settings = DomainSettings(ram_strategy="auto")
    assert choose_strategy(domain(), settings, ()).strategy is Strategy.MANUAL
    awaited = choose_strategy(domain(), settings, (), at_once=False)
    assert awaited.strategy is Strategy.OVERLAY
    wished = DomainSettings(ram_strategy="manual")
    assert choose_strategy(domain(), wished, (), at_once=False).strategy is Strategy.MANUAL


def blocked(*strategies, reason="because", step="do this"):
    return Blocker(frozenset(strategies), reason, step)


def choose(level="auto", *blockers, at_once=True, state=DomainState.RUNNING, once=None, **settings):
    chosen = DomainSettings(level=level, **({"ram_strategy": "auto"} | settings))
    return choose_strategy(domain(state), chosen, blockers, once, at_once=at_once)


# -- without blockers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "at_once", "strategy"),
    [
        ("auto", True, Strategy.MANUAL),
        ("auto", False, Strategy.OVERLAY),
        ("ram", True, Strategy.MANUAL),
        ("ram", False, Strategy.OVERLAY),
        ("quiesced", True, Strategy.QUIESCED),
        ("paused", False, Strategy.PAUSED),
        ("crash", True, Strategy.CRASH),
    ],
)
def test_a_running_guest_without_blockers(level, at_once, strategy):
    assert choose(level, at_once=at_once) == StrategyChoice(strategy)


@pytest.mark.parametrize("wished", ["overlay", "manual"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_configured_ram_strategy_is_taken(wished, at_once):
    assert choose(ram_strategy=wished, at_once=at_once).strategy == wished


@pytest.mark.parametrize("wished", ["auto", "overlay", "manual"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_paused_guest_gets_manual(wished, at_once):
    made = choose(ram_strategy=wished, at_once=at_once, state=DomainState.PAUSED)
    assert made == StrategyChoice(Strategy.MANUAL)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("gone", "other"),
    [(Strategy.OVERLAY, Strategy.MANUAL), (Strategy.MANUAL, Strategy.OVERLAY)],
)
def test_if_one_ram_strategy_is_blocked_the_other_is_no_downgrade(at_once, gone, other):
    assert choose("ram", blocked(gone), at_once=at_once) == StrategyChoice(other)


@pytest.mark.parametrize("wished", ["overlay", "manual"])
def test_a_configured_ram_strategy_is_not_replaced(wished):
    with pytest.raises(RefusedError, match="because"):
        choose("ram", blocked(Strategy(wished)), ram_strategy=wished)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("once", [None, "ram", "crash"])
def test_a_guest_that_is_off_gets_off_at_every_level(level, once):
    everything = blocked(*Strategy)
    made = choose(level, everything, state=DomainState.OFF, once=once)
    assert made == StrategyChoice(Strategy.OFF)


@pytest.mark.parametrize("state", ACTIVE)
def test_level_off_refuses_a_running_guest(state):
    with pytest.raises(RefusedError, match="only while it is off"):
        choose("off", state=state)


@pytest.mark.parametrize("configured", LEVELS)
@pytest.mark.parametrize("once", ["auto", "ram", "quiesced", "paused", "crash"])
def test_a_requested_level_overrides_the_configured_one(configured, once):
    assert choose(configured, once=once) == choose(once)


# -- with blockers ------------------------------------------------------------------------------


def test_a_refusal_names_every_reason_and_the_first_step():
    first = blocked(*RAM, reason="a hostdev", step="detach it")
    second = blocked(Strategy.OVERLAY, reason="a checkpoint", step="delete it")
    other = blocked(Strategy.QUIESCED, reason="no agent", step="install one")
    with pytest.raises(RefusedError) as caught:
        choose("ram", first, second, other)
    assert str(caught.value) == (
        "web: no ram snapshot is possible: a hostdev; a checkpoint; detach it"
    )
    assert caught.value.exit_code == ExitCode.REFUSED


@pytest.mark.parametrize("lower", ["quiesced", "paused", "crash"])
def test_a_lower_level_that_is_allowed_is_taken_and_explained(lower):
    made = choose("ram", blocked(*RAM, reason="a hostdev"), on_unavailable=lower)
    assert made.strategy == lower
    assert made.downgrade == f"no ram snapshot (a hostdev): taking {lower} instead"


def test_a_lower_level_that_is_blocked_too_is_refused_for_the_first_reason():
    reasons = [blocked(*RAM, reason="a hostdev"), blocked(Strategy.QUIESCED, reason="no agent")]
    with pytest.raises(RefusedError, match="no ram snapshot is possible: a hostdev"):
        choose("ram", *reasons, on_unavailable="quiesced")


@pytest.mark.parametrize(
    ("level", "other"),
    [("paused", "quiesced"), ("crash", "paused"), ("crash", "quiesced"), ("paused", "paused")],
)
def test_a_higher_level_is_never_taken_instead(level, other):
    with pytest.raises(RefusedError, match="because"):
        choose(level, blocked(Strategy(level)), on_unavailable=other)


def test_every_combination_is_a_possible_strategy_or_a_refusal():
    subsets = [
        frozenset(chosen)
        for size in range(len(Strategy) + 1)
        for chosen in itertools.combinations(Strategy, size)
    ]
    lowers = ["fail", "quiesced", "paused", "crash"]
    for level, lower, away, at_once, state, wished in itertools.product(
        LEVELS, lowers, subsets, [True, False], ACTIVE, ["auto", "overlay", "manual"]
    ):
        settings = DomainSettings.model_construct(
            level=level, on_unavailable=lower, ram_strategy=wished
        )
        blockers = [Blocker(away, "because", "")]
        asked = Level.RAM if level == "auto" else Level(level)
        try:
            made = choose_strategy(domain(state), settings, blockers, at_once=at_once)
        except RefusedError:
            assert level == "off" or away
            continue
        assert made.strategy not in away
        assert made.strategy is not Strategy.OFF
        if made.downgrade:
            assert made.strategy.level == lower
            assert is_lower(made.strategy.level, asked)
        else:
            assert made.strategy.level is asked


def test_levels_have_an_order():
    assert is_lower(Level.CRASH, Level.RAM)
    assert is_lower(Level.PAUSED, Level.QUIESCED)
    assert not is_lower(Level.RAM, Level.RAM)
    assert not is_lower(Level.QUIESCED, Level.PAUSED)


@pytest.mark.parametrize(
    ("on_unavailable", "level", "found"),
    [
        ("crash", Level.QUIESCED, Level.CRASH),
        ("fail", Level.QUIESCED, None),
        ("quiesced", Level.QUIESCED, None),
    ],
)
def test_a_guest_that_cannot_be_frozen_goes_lower_or_fails(on_unavailable, level, found):
    assert lower_level(DomainSettings(on_unavailable=on_unavailable), level) is found
