"""What ``check`` asks a source, and whether its copies have a place here."""

import json

import pytest
from fakes.pull_case import NAMES, ROOT, UUID, PullCase

from snaporch import __version__
from snaporch.check.facts import SourceFacts
from snaporch.check.gather_sources import gather_sources
from snaporch.pull.send_request import Verb
from snaporch.remote_host import CommandError

NOW = 1_800_000_000.0


@pytest.fixture
def case(tmp_path, world):
    """A source whose key is restricted: it carries out nothing but requests."""
    (tmp_path / "case").mkdir()
    made = PullCase(tmp_path / "case")
    made.zfs.make_root(ROOT)
    made.world = world
    world.pool.create(ROOT)
    world.context.config = made.config
    request = made.host.script

    def script(text, *, what, limit=0.0, **more):
        if text == "true":
            raise CommandError("true", "is no request of snaporch")
        return request(text, what=what, limit=limit, **more)

    made.host.script = script
    answer(made, [{"uuid": UUID.format(n), "domain": name} for n, name in NAMES.items()])
    return made


def answer(case, guests, **more):
    said = {"guests": guests, "version": "1.0", "time": NOW + 400} | more
    case.host.answers[Verb.GUESTS] = json.dumps(said).encode()


def found(case):
    def opened(_context, _name):
        source, copies, _ = case.open()
        return source, copies

    return gather_sources(case.world.context, opened, lambda: NOW)["vm1"]


def test_a_source_that_answers(case):
    facts = found(case)
    assert (facts.unreachable, facts.no_place, facts.has_shell) == ("", "", False)
    assert (facts.version, facts.ahead_seconds, facts.unsent) == ("1.0", 400, ())
    assert facts.free_mib is not None


def test_a_source_of_an_earlier_version_says_only_its_guests(case):
    case.host.answers[Verb.GUESTS] = b'{"guests": []}'
    facts = found(case)
    assert (facts.version, facts.ahead_seconds, facts.sends_none) == ("", 0, True)


@pytest.mark.parametrize("version", [7, "1.0\n", "x" * 41, "\u001b[31m"])
def test_a_version_is_input(case, version):
    answer(case, [], version=version)
    assert found(case).version == ""


def test_a_time_that_is_none_is_an_answer_that_cannot_be_read(case):
    answer(case, [], time="noon")
    assert "its answer cannot be read" in found(case).unreachable


def test_a_key_that_runs_other_commands_is_seen(case):
    said = case.host.answers[Verb.GUESTS].decode()
    case.host.script = lambda text, **_: "" if text == "true" else said
    assert found(case).has_shell


def test_a_source_that_is_away_still_has_its_place_checked(case):
    case.host.is_away = True
    case.bundles.rmdir()
    facts = found(case)
    assert "cannot be reached" in facts.unreachable
    assert str(case.bundles) in facts.no_place


def test_a_guest_that_does_not_come_is_named(case):
    settings = case.settings.model_copy(update={"domains": ("web", "wbe")})
    case.world.context.config = case.config.model_copy(update={"source": {"vm1": settings}})
    assert found(case).unsent == ("wbe",)


def test_encrypted_copies_beside_bundles_in_clear_are_found(case):
    for name in (f"{ROOT}/tank:web", "tank/own"):
        case.world.pool.create(name, encrypted=True)
    case.world.pool.create(f"{ROOT}/tank:db")
    assert found(case).locked == (f"{ROOT}/tank:web",)
    case.host.is_away = True
    assert found(case).locked == (f"{ROOT}/tank:web",)
    case.zfs.encrypted.add(str(case.bundles))
    assert found(case).locked == ()


def test_copies_that_have_the_key_of_the_dataset_above_do_not_count(case):
    case.world.pool.create(ROOT, encrypted=True)
    case.world.pool.create(f"{ROOT}/tank:web", encrypted=True)
    assert found(case).locked == ()


def test_a_source_that_cannot_be_opened_is_a_finding(case):
    def fail(_context, _name):
        raise CommandError("zfs", "is not installed")

    (facts,) = gather_sources(case.world.context, fail).values()
    assert facts == SourceFacts(unreachable=facts.unreachable)
    assert "is not installed" in facts.unreachable


def test_a_source_says_its_version_and_its_clock(tmp_path):
    (tmp_path / "case").mkdir()
    source, _, _ = PullCase(tmp_path / "case").open()
    said = source.about()
    assert said.version == __version__
    assert said.time is not None
