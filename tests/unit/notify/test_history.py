from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from snaporch.notify.history import read_history, remembered, should_notify, write_history
from snaporch.notify.notification import Notification

AT = datetime(2026, 6, 10, 12, 30, tzinfo=UTC)
DAY = timedelta(days=1)
FAILURE = Notification("failure", "host", AT, "web", "u", "hourly", 5, "", "no such luck")
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
def test_which_events_are_sent_again(event, news):
    assert should_notify(event, KNOWN, DAY) is news


def test_without_an_interval_every_event_is_sent():
    assert should_notify(FAILURE, KNOWN, timedelta(0))


def test_a_problem_that_was_over_is_sent_again():
    over = remembered(replace(FAILURE, kind="success"), KNOWN)
    assert over == {}
    assert should_notify(FAILURE, over, DAY)


def test_the_history_is_kept_in_a_private_file(tmp_path):
    write_history(tmp_path / "s", KNOWN)
    assert read_history(tmp_path / "s") == KNOWN
    assert (tmp_path / "s" / "notified.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": ["x", "y", "z"]}'])
def test_an_unreadable_history_is_empty(tmp_path, text):
    (tmp_path / "notified.json").write_text(text)
    assert read_history(tmp_path) == {}
