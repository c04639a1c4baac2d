from datetime import UTC, datetime

import pytest

from snaporch.config import Config
from snaporch.errors import AttentionError, SnaporchError
from snaporch.notify.notification import notification_of_error, notification_of_run
from snaporch.schedule.concurrency import SnapshotJob
from snaporch.schedule.subprocesses import SnapshotJobResult

AT = datetime(2026, 6, 10, 12, 30, tzinfo=UTC)
WEB = SnapshotJob("u", "web", "hourly", frozenset({"tank"}), 0)


def event(
    status=0, text="web@s  ram  complete", *, level="auto", own="auto", reached=("ram",), notes=()
):
    config = Config.model_validate(
        {"policy": {"hourly": {"every": "1h", "level": level}}, "defaults": {"level": own}}
    )
    documents = [{"domain": "web", "uuid": "u", "level": each} for each in reached if not status]
    return notification_of_run(
        config, SnapshotJobResult(WEB, status, text, notes, tuple(documents)), "host", AT
    )


@pytest.mark.parametrize(
    ("reached", "level", "own", "kind"),
    [
        ("ram", "auto", "auto", "success"),
        ("ram", "quiesced", "auto", "success"),
        ("crash", "auto", "auto", "downgrade"),
        ("quiesced", "ram", "crash", "downgrade"),
        ("crash", "auto", "crash", "success"),
        ("crash", "crash", "ram", "success"),
        ("off", "ram", "auto", "success"),  # a guest that is off cannot have more
    ],
)
def test_what_a_snapshot_means(reached, level, own, kind):
    found = event(reached=(reached,), level=level, own=own)
    assert (found.kind, found.level) == (kind, reached)


def test_the_worst_of_a_group_counts():
    found = event(reached=("ram", "crash", "off"))
    assert (found.kind, found.level) == ("downgrade", "crash")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(1, "failure"), (5, "failure"), (6, "failure"), (8, "failure"), (9, "attention")],
)
def test_what_an_exit_code_means(status, kind):
    assert event(status, "no such luck").kind == kind


def test_a_run_stopped_by_a_signal_is_no_event():
    assert event(143, "stopped by SIGTERM") is None


def test_what_other_errors_mean():
    assert notification_of_error(SnaporchError("tank/web@s", "busy"), "host", AT).kind == "failure"
    assert notification_of_error(AttentionError("web", "look"), "host", AT).kind == "attention"


def test_title_and_body_are_for_people():
    found = event(5, "no agent\nanswers", notes=("first\x1b[1m",))
    assert found.title == "snaporch on host: failure: web (hourly)"
    assert found.body.splitlines() == [
        "no agent answers",
        "first\\x1b[1m",
        "",
        "host    host",
        "domain  web",
        "policy  hourly",
        "time    2026-06-10T12:30:00Z",
        "code    5 (docs/reference/exit-codes.md)",
    ]


def test_as_json():
    assert event().as_json() == {
        "event": "success",
        "host": "host",
        "at": "2026-06-10T12:30:00Z",
        "domain": "web",
        "uuid": "u",
        "policy": "hourly",
        "status": 0,
        "level": "ram",
        "text": "web@s  ram  complete",
        "notes": [],
    }
