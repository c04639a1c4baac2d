import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fakes.world import Heard

from snaporch.config import Config
from snaporch.errors import SnaporchError
from snaporch.notify.channels import NotifyError
from snaporch.notify.history import read_history
from snaporch.notify.notifier import Notifier, close_seconds
from snaporch.schedule.concurrency import SnapshotJob
from snaporch.schedule.subprocesses import SnapshotJobResult

PATIENCE = 60
WEB = SnapshotJob("u", "web", "hourly", frozenset({"tank"}), 0)
FAILED = SnapshotJobResult(WEB, 5, "no such luck")
TAKEN = SnapshotJobResult(WEB, 0, "web@s  ram  complete")


@pytest.fixture
def heard():
    return Heard()


@pytest.fixture
def notifier(heard, way):
    return Notifier(heard, way.open)


@pytest.fixture
def config(tmp_path):
    """Returns a configuration with these settings in ``[notify]``."""

    def make(**notify):
        return Config.model_validate(
            {"notify": notify, "paths": {"schedule": str(tmp_path / "schedule")}}
        )

    return make


@pytest.fixture
def way():
    """The only channel: a list of what was sent by it; it raises ``error`` if that is set."""

    class Recorder(list):
        error = None

        def __call__(self, event):
            if self.error is not None:
                raise self.error
            self.append((event.kind, event.domain, event.text))

        def open(self, _notify):
            return {"way": self}

    return Recorder()


def test_configured_events_are_sent(notifier, config, way, heard):
    notifier.ended(config(on=["failure"]), FAILED)
    notifier.ended(config(on=["failure"]), TAKEN)
    notifier.failed(config(on=["failure"]), SnaporchError("tank/web@s", "is busy"))
    notifier.close(PATIENCE)
    assert way == [
        ("failure", "web", "no such luck"),
        ("failure", "tank/web@s", "tank/web@s: is busy"),
    ]
    assert heard.notes == []


def test_the_same_problem_is_sent_once_until_it_is_over(config, way, heard):
    wanted = config()
    for outcome in (FAILED, FAILED, TAKEN, FAILED):
        one = Notifier(heard, way.open)  # each like a separate process
        one.ended(wanted, outcome)
        one.close(PATIENCE)
    assert len(way) == 2


def test_undelivered_notifications_are_sent_again(config, way, heard):
    way.error = NotifyError("mail.example.org", "answered 451 later")
    for _ in range(2):
        one = Notifier(heard, way.open)
        one.ended(config(), FAILED)
        one.close(PATIENCE)
        way.error = None
    assert way == [("failure", "web", "no such luck")]
    assert heard.notes == ["way: mail.example.org: answered 451 later"]


def test_what_one_of_two_channels_has_sent_is_not_sent_again(config, way, heard):
    def fail(_event):
        raise NotifyError("mail.example.org", "answered 451 later")

    for _ in range(2):
        one = Notifier(heard, lambda _: {"broken": fail, "way": way})
        one.ended(config(), FAILED)
        one.close(PATIENCE)
    assert len(way) == 1
    assert len(heard.notes) == 1


def test_a_bug_in_a_library_is_a_note_without_its_message(notifier, config, way, heard):
    way.error = ValueError("https://user:secret@example.org")
    notifier.ended(config(), FAILED)
    notifier.close(PATIENCE)
    assert heard.notes == ["way: ValueError while sending"]


def test_a_channel_that_hangs_delays_no_other_work(config, heard):
    release, sent = threading.Event(), []
    ways = {"deaf": lambda _: release.wait(PATIENCE), "way": lambda e: sent.append(e.kind)}
    notifier = Notifier(heard, lambda _: ways, extra_seconds=-0.9)
    try:
        notifier.ended(config(timeout="1s"), FAILED)
        notifier.close(PATIENCE)
        assert sent == ["failure"]
        assert heard.notes == ["deaf: did not end within 1 s"]
    finally:
        release.set()


def test_close_waits_no_longer_than_its_time_limit(config, heard):
    release = threading.Event()
    notifier = Notifier(heard, lambda _: {"deaf": lambda _: release.wait(PATIENCE)})
    try:
        notifier.ended(config(timeout="600s"), FAILED)
        notifier.close(0.01)
        assert heard.notes == ["not all notifications were sent within 0 s"]
    finally:
        release.set()


def test_a_history_that_cannot_be_written_is_a_note(notifier, config, way, heard, tmp_path):
    (tmp_path / "schedule").write_text("no directory")
    notifier.ended(config(), FAILED)
    notifier.close(PATIENCE)
    assert len(way) == 1
    (note,) = heard.notes
    assert str(tmp_path) in note


def test_without_channels_no_thread_is_started(config, heard):
    notifier = Notifier(heard)
    notifier.ended(config(), FAILED)
    assert notifier._thread is None
    notifier.close(PATIENCE)
    assert heard.notes == []


def test_success_alone_writes_no_history(notifier, config, way, tmp_path):
    notifier.ended(config(on=["success"]), TAKEN)
    notifier.close(PATIENCE)
    assert way == [("success", "web", "web@s  ram  complete")]
    assert not (tmp_path / "schedule").exists()
    assert read_history(Path(tmp_path / "schedule")) == {}


def test_the_time_limit_is_long_enough_for_all_channels(config):
    both = config(command="/bin/true", apprise="/etc/apprise", timeout="10s")
    assert close_seconds(both) == 24


def test_a_problem_of_no_run_is_over_after_a_forecast_without_it(notifier, config, way):
    wanted, error = config(), SnaporchError("tank/web@s", "is busy")
    # The failure is sent the first time, and again after a forecast without it.
    for forecasts in (0, 1, 1, 2, 0):  # before each failure
        for _ in range(forecasts):
            notifier.forecasts_made(wanted)
        notifier.failed(wanted, error)
    notifier.close(PATIENCE)
    assert len(way) == 2


def test_problems_of_other_processes_are_not_resolved_by_a_forecast(config, way, heard):
    wanted = config()
    for _ in range(2):
        other, own = Notifier(heard, way.open), Notifier(heard, way.open)
        other.failed(wanted, SnaporchError("nas: web", "is away"))
        other.close(PATIENCE)
        own.forecasts_made(wanted)
        own.close(PATIENCE)
    assert len(way) == 1


def test_a_problem_that_was_over_in_between_is_sent_again(config, way, heard):
    error = SnaporchError("vm1: web", "is not whole")
    before, later = (datetime.now(UTC) + sign * timedelta(hours=1) for sign in (-1, 1))
    for succeeded in (None, None, before, later):
        one = Notifier(heard, way.open)
        one.failed(config(), error, succeeded)
        one.close(PATIENCE)
    assert len(way) == 2
