from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from snaporch.notify.event import Event
from snaporch.notify.history import read_history, remembered, should_notify, write_history

AT = datetime(2026, 6, 10, 12, 30, tzinfo=UTC)
DAY = timedelta(days=1)
FAILURE = Event("failure", "host", AT, "web", "u", "hourly", 5, "", "no such luck")
KNOWN = remembered(FAILURE, {})


@pytest.mark.parametrize(
    ("event", "news"),
    [
        (FAILURE, False),
        (replace(FAILURE, at=AT + DAY - timedelta(seconds=1)), False),
        (replace(FAILURE, at=AT + DAY), True),
        (replace(FAILURE, at=AT - timedelta(hours=1)), True),  # the clock went back
        (replace(FAILURE, text="another reason"), True),
        (replace(FAILURE, kind="attention"), True),
        (replace(FAILURE, policy="nightly"), True),
        (replace(FAILURE, uuid="v"), True),
        (replace(FAILURE, kind="success"), True),
        (replace(FAILURE, kind="downgrade"), True),
    ],
)
def test_what_is_news(event, news):
    assert should_notify(event, KNOWN, DAY) is news


def test_without_a_time_everything_is_news():
    assert should_notify(FAILURE, KNOWN, timedelta(0))


def test_a_trouble_that_was_over_is_news_again():
    over = remembered(replace(FAILURE, kind="success"), KNOWN)
    assert over == {}
    assert should_notify(FAILURE, over, DAY)


def test_it_is_kept_in_a_file(tmp_path):
    write_history(tmp_path / "s", KNOWN)
    assert read_history(tmp_path / "s") == KNOWN
    assert (tmp_path / "s" / "told.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": ["x", "y", "z"]}'])
def test_a_file_that_cannot_be_understood_knows_nothing(tmp_path, text):
    (tmp_path / "told.json").write_text(text)
    assert read_history(tmp_path) == {}
