from datetime import timedelta
from typing import Annotated

import pytest
from pydantic import BaseModel, ValidationError

from snaporch.config import Config
from snaporch.config.duration import Duration, Seconds, duration_text, parse_duration

LENGTHS = {
    "250ms": timedelta(milliseconds=250),
    "90s": timedelta(seconds=90),
    "15m": timedelta(minutes=15),
    "1h": timedelta(hours=1),
    "2d": timedelta(days=2),
    "1w": timedelta(weeks=1),
    "0s": timedelta(),
}


class Options(BaseModel):
    length: Annotated[timedelta | None, Duration("1s", "2m")] = None
    seconds: Annotated[int, Seconds("0s", "1h")] = 0


@pytest.mark.parametrize(("text", "length"), LENGTHS.items())
def test_durations(text, length):
    assert parse_duration(text) == length
    assert duration_text(length) == text


@pytest.mark.parametrize(
    "value",
    ["", "1", "h", "-1h", "1 h", "01h", "1.5h", "1y", "1S", "1h30m", "²s", 90, 1.5, True, None],
)
def test_what_is_not_a_duration(value):
    with pytest.raises(ValueError, match=r'must be a duration, .* "250ms", "90s", "5m"'):
        parse_duration(value)


@pytest.mark.parametrize("text", ["36501d", "999999999w"])
def test_no_duration_is_longer_than_a_hundred_years(text):
    assert parse_duration("36500d")
    with pytest.raises(ValueError, match='no more than "36500d"'):
        parse_duration(text)


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (timedelta(seconds=60), "1m"),
        (timedelta(seconds=61), "61s"),
        (timedelta(hours=36), "36h"),
        (timedelta(days=10), "10d"),
        (timedelta(seconds=1.5), "1500ms"),
    ],
)
def test_a_duration_is_written_in_the_largest_unit_it_is_a_multiple_of(length, text):
    assert duration_text(length) == text


@pytest.mark.parametrize("text", ["999ms", "121s"])
def test_the_limits_of_an_option(text):
    with pytest.raises(ValidationError, match='must be a duration from "1s" to "2m"'):
        Options(length=text)


def test_an_option_in_whole_seconds():
    assert Options(seconds="2m").seconds == 120
    with pytest.raises(ValidationError, match="in whole seconds"):
        Options(seconds="1500ms")


def test_options_are_written_as_they_are_read():
    options = Options(length="60s", seconds="90s")
    assert options.model_dump() == {"length": "1m", "seconds": "90s"}
    assert Options.model_validate(options.model_dump()) == options
    assert Options().model_dump()["length"] is None


def test_a_whole_configuration_is_written_as_it_is_read():
    config = Config.model_validate({"defaults": {"wait": "5s"}, "policy": {"p": {"every": "1h"}}})
    document = config.model_dump(exclude_unset=True)
    assert document == {"defaults": {"wait": "5s"}, "policy": {"p": {"every": "1h"}}}
    assert Config.model_validate(document) == config
