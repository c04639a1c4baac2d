import re
from dataclasses import replace
from datetime import UTC, timedelta

import pytest
from fakes.status_example import DOMAIN, NEXT, NOW, RUN, WELL, with_domain, with_policy

from snaporch.config import StatusOptions as Limits
from snaporch.output.status import nagios, print_status
from snaporch.schedule.failed_attempts import FailedAttempt
from snaporch.status.model import SchedulerState
from snaporch.status.problems import find_problems
from snaporch.verify.copy_decision import Source
from snaporch.verify.copy_results import CopyResult

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def shown(capsys, monkeypatch):
    """Return the printed status, for a terminal of 80 columns or a pipe."""

    def show(status, *, terminal=True):
        for name in ("FORCE_COLOR", "NO_COLOR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("COLUMNS", "80")
        if terminal:
            monkeypatch.setenv("FORCE_COLOR", "1")
            monkeypatch.setenv("TERM", "xterm-256color")
        print_status(status, find_problems(status, Limits()), UTC)
        return ANSI.sub("", capsys.readouterr().out).splitlines()

    return show


def test_a_status_without_problems(shown):
    assert shown(WELL) == [
        "policies  daemon (pid 123) since 2026-06-09 10:30 UTC, 1d 2h; last check 2m ago",
        "store     6.0 GiB in 24 bundles, 1.0 MiB in the trash; 900.0 GiB free",
        "",
        "DOMAIN  POLICY  LAST  NEXT   RAM  CRASH",
        "web     hourly  10m   13:00  10m  3d",
    ]


def test_verified_copies_have_a_line_with_their_ages(shown):
    good = CopyResult("nas", "web", "u", "r", "a", NOW, passed=True, source=Source.HERE)
    bad = replace(good, snapshot="b", at=NOW - timedelta(days=3), passed=False, reason="why")
    lines = shown(replace(WELL, copies=(good, bad)))
    assert lines[2] == "replica   nas: 1 of 2 verified copies passed; verified 0s to 3d ago"


def test_a_guest_that_is_off_shows_its_last_unchanged_check(shown):
    """It may have run since that check."""
    looked = with_policy(unchanged=NOW - timedelta(minutes=4))
    assert "web     hourly  10m, unchanged 4m ago  13:00" in shown(looked)[-1]


def test_a_journal_that_cannot_be_read_has_a_line(shown):
    since = NOW - timedelta(seconds=4)
    damaged = replace(RUN, domain="?", kind="", phase="cannot be read (x)", since=since)
    lines = shown(replace(WELL, runs=(damaged,)))
    assert "run       ?: its journal cannot be read (x), last written 4s ago" in lines


def test_problems_fit_80_columns(shown):
    lines = shown(replace(with_policy(missed=2), runs=(replace(RUN, locked=False),)))
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "run web: snapshot interrupted, frozen, window open for 0s" in text
    assert "critical web: a snapshot was interrupted" in text
    assert "[missed]" in text
    assert re.search(r"web +hourly +10m +missed", "\n".join(lines))


def test_a_piped_problem_is_one_line(shown):
    failed = replace(NEXT, failed=FailedAttempt(NOW, "x" * 300))
    lines = shown(with_policy(next=failed), terminal=False)
    assert lines[-1] == f"warning  web: hourly: {'x' * 300}  [failed]"


@pytest.mark.parametrize(
    ("coming", "word"),
    [
        (None, "-"),
        (replace(NEXT, at=NOW), "due"),
        (replace(NEXT, at=NOW + timedelta(days=1)), "06-11 12:30"),
        (replace(NEXT, failed=FailedAttempt(NOW, "no")), "failed"),
    ],
)
def test_the_next_column(shown, coming, word):
    row = next(line for line in shown(with_policy(next=coming)) if line.startswith("web"))
    assert row.split("  ")[4].strip() == word or f" {word} " in row


def test_guests_without_policies_and_scheduler(shown):
    status = replace(WELL, scheduler=SchedulerState(None), domains=(replace(DOMAIN, policies=()),))
    lines = shown(status)
    assert lines[0] == "policies  neither the daemon nor a timer"
    assert re.fullmatch(r"web +- +- +- +10m +3d", lines[-1])
    timer = replace(WELL, scheduler=SchedulerState(None, {"snaporch-run-due.timer": "active"}))
    assert shown(timer)[0] == "policies  snaporch-run-due.timer active"


def test_names_are_text(shown):
    status = replace(WELL, domains=(replace(DOMAIN, name="[red]a[/]\x1b[1m:x:"),))
    assert "[red]a[/]\\x1b[1m:x:" in "\n".join(shown(status))


@pytest.mark.parametrize(
    ("status", "start", "code"),
    [
        (WELL, "SNAPORCH OK - 1 guest | guests=1 missed=0 failed=0 interrupted=0 oldest=600s ", 0),
        (with_policy(missed=1), "SNAPORCH WARNING - web: hourly: the snapshot of ", 1),
        (
            replace(with_policy(missed=1), runs=(replace(RUN, locked=False),)),
            (
                "SNAPORCH CRITICAL - web: a snapshot was interrupted while frozen; run: snaporch "
                "recover u (and 1 more) | guests=1 missed=1 failed=0 interrupted=1 "
            ),
            2,
        ),
    ],
)
def test_the_line_for_nagios(status, start, code):
    line, answered = nagios(status, find_problems(status, Limits()), Limits())
    assert line.startswith(start)
    assert line.endswith("store_used=10%;85;95")
    assert (answered, line.count("|"), line.count("\n")) == (code, 1, 0)


def test_a_bar_in_a_name_begins_no_performance_data():
    status = with_policy(missed=1)
    status = replace(status, domains=(replace(status.domains[0], name="a|b=1"),))
    line, _ = nagios(status, find_problems(status, Limits()), Limits())
    assert "a/b=1" in line
    assert line.count("|") == 1


@pytest.mark.parametrize(
    ("created", "unchanged", "oldest"),
    [(600, None, 600), (600, 60, 60), (600, -60, 600), (-600, None, 0)],
)
def test_the_oldest_counts_from_its_last_check_unless_that_is_in_the_future(
    created, unchanged, oldest
):
    looked = None if unchanged is None else NOW - timedelta(seconds=unchanged)
    last = replace(DOMAIN.last, created=NOW - timedelta(seconds=created), unchanged=looked)
    line, _ = nagios(with_domain(last=last), [], Limits())
    assert f" oldest={oldest}s " in line
