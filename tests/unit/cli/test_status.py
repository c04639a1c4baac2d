import json
from datetime import UTC, datetime, timedelta

import pytest
from fakes.schedule import Scheduled

from snaporch.errors import ExitCode
from snaporch.schedule.failed_attempts import FailedAttempt, write_failed


@pytest.fixture
def policies(host):
    """A policy for all guests, with a snapshot that is half an hour old."""
    web = host.add_guest()
    text = host.config_file.read_text()
    place = host.root / "schedule"
    text = text.replace("[paths]", f'[paths]\nschedule = "{place}"')
    text += 'policies = ["daily"]\n[status]\nstore_warning = 100\nstore_critical = 100\n'
    host.config_file.write_text(text + '[policy.daily]\nevery = "1d"\n')
    scheduled = Scheduled(host)
    scheduled.configure(policy={"daily": {"every": "1d"}})
    scheduled.taken(datetime.now(UTC), "daily")
    host.place, host.web = place, web
    return host


def fail(policies):
    later = datetime.now(UTC) + timedelta(seconds=-1)
    key = f"{policies.web.uuid}/daily"
    for name in policies.pool.names():
        policies.pool.age(name, later - timedelta(minutes=30))
    write_failed(policies.place, {key: FailedAttempt(later, "no such luck")})


def test_all_is_well(policies, snaporch):
    answer = snaporch("status")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("policies  neither the daemon nor a timer\n")
    assert "daily" in answer.out


def test_status_changes_nothing(policies, snaporch):
    before = {path: path.lstat().st_mtime_ns for path in policies.root.rglob("*")}
    log = list(policies.hooks.log)
    assert snaporch("status").code == snaporch("status", "--json").code == 0
    assert {path: path.lstat().st_mtime_ns for path in policies.root.rglob("*")} == before
    assert policies.hooks.log == log


def test_a_problem_is_exit_code_10(policies, snaporch):
    fail(policies)
    answer = snaporch("status")
    assert answer.code == ExitCode.WARNINGS
    assert "warning  web: daily: no such luck  [failed]" in answer.out


def test_json(policies, snaporch):
    fail(policies)
    answer = snaporch("status", "web", "--json")
    assert answer.code == ExitCode.WARNINGS
    assert set(answer.json) == {
        "at", "scheduler", "domains", "runs", "unknown_overlays", "quarantined", "barred",
        "fenced", "fences",
        "mounted", "store", "problems", "copies", "sources", "test_restores",
    }  # fmt: skip
    (web,) = answer.json["domains"]
    (daily,) = web["policies"]
    assert (web["counts"], daily["failed"], daily["missed"]) == ({"ram": 1}, "no such luck", 0)
    (problem,) = answer.json["problems"]
    assert (problem["code"], problem["grade"], problem["subject"]) == ("failed", "warning", "web")


def test_only_the_domains_that_are_named(policies, snaporch):
    policies.add_guest("mail")
    fail(policies)
    answer = snaporch("status", "mail")
    assert "[scheduler-inactive]" in answer.out  # it has no snapshot yet
    assert "web" not in answer.out
    names = [each["domain"] for each in snaporch("status", "web", "mail", "--json").json["domains"]]
    assert names == ["mail", "web"]
    answer = snaporch("status", "wbe")
    assert (answer.code, answer.out) == (ExitCode.NOT_FOUND, "")


def test_nagios(policies, snaporch):
    answer = snaporch("status", "--nagios")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("SNAPORCH OK - 1 guest | guests=1 ")
    fail(policies)
    answer = snaporch("status", "--nagios")
    assert (answer.code, len(answer.out.splitlines())) == (1, 1)
    assert answer.out.startswith("SNAPORCH WARNING - web: daily: no such luck | ")


def test_nagios_when_the_status_is_unknown(policies, snaporch):
    answer = snaporch("--config", "/nonexistent.toml", "status", "--nagios")
    assert (answer.code, answer.err) == (3, "")
    assert answer.out.startswith("SNAPORCH UNKNOWN - /nonexistent.toml: no such file")


def test_prometheus(policies, snaporch, tmp_path):
    fail(policies)
    answer = snaporch("status", "--prometheus", "-")
    assert answer.code == 0
    assert 'snaporch_policy_last_run_failed{domain="web",policy="daily"} 1.0' in answer.out
    target = tmp_path / "snaporch.prom"
    assert snaporch("status", "--prometheus", str(target)).out == ""
    assert 'snaporch_snapshots{domain="web",level="ram"} 1.0' in target.read_text()
    answer = snaporch("status", "--prometheus", str(tmp_path / "no" / "x.prom"))
    assert answer.code == ExitCode.UNAVAILABLE


@pytest.mark.parametrize(
    "words", [("--nagios", "--json"), ("--json", "--prometheus", "-"),
              ("--nagios", "--prometheus", "-")]
)  # fmt: skip
def test_one_format_at_a_time(policies, snaporch, words):
    answer = snaporch("status", *words)
    assert (answer.code, answer.out) == (ExitCode.USAGE, "")


def test_json_is_one_document(policies, snaporch):
    assert json.loads(snaporch("status", "--json").out)["scheduler"]["doing"] is None
