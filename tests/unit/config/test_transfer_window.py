"""Times of day for transfers: by the clock on the wall, also when it changes."""

import random
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from snaporch.config import Config
from snaporch.config.load import ConfigError, load_config
from snaporch.config.transfer_window import ALWAYS, parse_windows, rate_at

BERLIN = ZoneInfo("Europe/Berlin")
NIGHT = parse_windows("22:00-06:00")


def local(text, *, fold=0):
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN, fold=fold).astimezone(UTC)


@pytest.mark.parametrize(
    ("text", "open_at", "closed_at"),
    [
        ("22:00-06:00", ["22:00", "23:59", "00:00", "05:59"], ["06:00", "21:59", "12:00"]),
        ("08:30-09:00", ["08:30", "08:59"], ["08:29", "09:00", "20:45"]),
        ("22:00-24:00", ["22:00", "23:59"], ["00:00", "21:59"]),
    ],
)
def test_it_is_open_from_its_beginning_until_its_end(text, open_at, closed_at):
    window = parse_windows(text)
    assert all(window.is_open(local(f"2026-06-10 {each}"), BERLIN) for each in open_at)
    assert not any(window.is_open(local(f"2026-06-10 {each}"), BERLIN) for each in closed_at)


def test_of_several_one_is_enough():
    window = parse_windows(["12:00-13:00", "22:00-06:00"])
    assert window.opens(local("2026-06-10 06:00"), BERLIN) == local("2026-06-10 12:00")
    assert window.opens(local("2026-06-10 13:00"), BERLIN) == local("2026-06-10 22:00")
    assert str(window) == "12:00-13:00, 22:00-06:00"


def test_without_a_window_it_is_always_open():
    now = local("2026-06-10 12:00")
    assert ALWAYS.is_open(now)
    assert ALWAYS.opens(now) == now
    assert ALWAYS.closes(now) is None
    assert ALWAYS.had_one(now, now)


def test_the_wall_clock_decides_when_it_is_set_forward():
    """In the night to 29 March 2026 the clock skips 02:00 to 03:00."""
    before = local("2026-03-28 21:00")
    opens = NIGHT.opens(before, BERLIN)
    closes = NIGHT.closes(opens, BERLIN)
    assert (opens, closes) == (local("2026-03-28 22:00"), local("2026-03-29 06:00"))
    assert closes - opens == timedelta(hours=7)
    skipped = parse_windows("02:10-02:50")
    assert skipped.opens(local("2026-03-28 12:00"), BERLIN) == local("2026-03-30 02:10")
    cut = parse_windows("02:30-04:00")
    assert cut.opens(local("2026-03-28 12:00"), BERLIN) == local("2026-03-29 03:00")


def test_the_wall_clock_decides_when_it_is_set_back():
    """In the night to 25 October 2026 the clock shows 02:00 to 03:00 twice."""
    opens = NIGHT.opens(local("2026-10-24 21:00"), BERLIN)
    assert NIGHT.closes(opens, BERLIN) - opens == timedelta(hours=9)
    twice = parse_windows("02:10-02:50")
    first, second = local("2026-10-25 02:10"), local("2026-10-25 02:10", fold=1)
    assert twice.opens(local("2026-10-24 12:00"), BERLIN) == first
    assert twice.opens(first + timedelta(minutes=40), BERLIN) == second


@pytest.mark.parametrize("seed", range(40))
def test_opens_and_closes_agree_with_is_open(seed):
    dice = random.Random(seed)
    begin, end = dice.sample(range(24 * 60), 2)
    window = parse_windows(f"{begin // 60:02}:{begin % 60:02}-{end // 60:02}:{end % 60:02}")
    now = local(dice.choice(["2026-03-28", "2026-10-24", "2026-06-10"]) + " 00:00")
    now += timedelta(minutes=dice.randint(0, 2 * 24 * 60), seconds=dice.randint(0, 59))
    opens = window.opens(now, BERLIN)
    assert window.is_open(opens, BERLIN)
    assert opens == now or not window.is_open(opens - timedelta(minutes=1), BERLIN)
    closes = window.closes(opens, BERLIN)
    assert not window.is_open(closes, BERLIN)
    assert window.is_open(closes - timedelta(minutes=1), BERLIN)
    assert not window.had_one(now, closes - timedelta(minutes=1), BERLIN) or opens == now


def test_a_whole_window_must_have_passed():
    taken = local("2026-06-10 23:00")  # in a window, which does not count
    assert not NIGHT.had_one(taken, local("2026-06-11 06:00"), BERLIN)
    assert not NIGHT.had_one(taken, local("2026-06-12 05:59"), BERLIN)
    assert NIGHT.had_one(taken, local("2026-06-12 06:00"), BERLIN)
    by_day = local("2026-06-10 07:00")
    assert not NIGHT.had_one(by_day, local("2026-06-10 23:00"), BERLIN)
    assert NIGHT.had_one(by_day, local("2026-06-11 06:00"), BERLIN)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ('"22-6"', "must be a time of day such as '22:00-06:00'"),
        ('"22:00-25:00"', "must be a time of day"),
        ('"22:00-22:00"', "has no length"),
        ('"00:00-24:00"', "has no length"),
        ('["00:00-12:00", "12:00-24:00"]', "has the whole day"),
        ("[]", "must be a time of day"),
        ("22", "must be a time of day"),
        ('["22:00-06:00", 7]', "must be a time of day"),
    ],
)
def test_another_form_is_refused_with_the_key(tmp_path, value, reason):
    path = tmp_path / "snaporch.toml"
    place = 'dataset = "backup/kvm"\nbundles = "/backup/snaporch"\n'
    path.write_text(f"[replica.nas]\n{place}window = {value}\n")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert "replica.nas.window" in str(error.value)
    assert reason in str(error.value)
    assert "\n" not in error.value.line()


def test_a_rate_outside_of_no_window_is_refused():
    place = {"dataset": "backup/kvm", "bundles": "/backup/snaporch", "rate_outside": 5}
    with pytest.raises(ValueError, match="rate_outside needs window"):
        Config.model_validate({"replica": {"nas": place}})
    with pytest.raises(ValueError, match="rate_outside needs window"):
        Config.model_validate({"source": {"vm1": {"host": "vm1", **place}}})


def test_the_rate_is_another_one_outside():
    place = {"dataset": "backup/kvm", "bundles": "/b", "window": ["22:00-06:00"]}
    replica = Config.model_validate({"replica": {"nas": place}}).replica["nas"]
    assert replica.start_window == NIGHT
    both = Config.model_validate({"replica": {"nas": {**place, "rate_outside": 5}}}).replica["nas"]
    assert both.start_window == ALWAYS
    for hour in range(24):
        moment = datetime(2026, 6, 10, hour).astimezone()
        assert rate_at(NIGHT, 100, 5, moment) == (100 if hour >= 22 or hour < 6 else 5)
        assert rate_at(NIGHT, 100, None, moment) == 100
