from dataclasses import replace
from datetime import timedelta

import pytest
from fakes.status_example import NOW, RECORD, RUN, TAKEN, WELL, with_domain, with_policy
from prometheus_client.parser import text_string_to_metric_families

from snaporch import __version__
from snaporch.fence import Fence
from snaporch.model import VerificationResult, VerifyDepth
from snaporch.pull.record import PullRecord
from snaporch.schedule.failed_attempts import FailedAttempt
from snaporch.schedule.forecast import NextSnapshot
from snaporch.status.metrics import as_text, registry
from snaporch.status.model import Problem, ProblemGrade, SourceStatus
from snaporch.verify.copy_decision import Source
from snaporch.verify.copy_results import CopyResult

PROBLEM = Problem("missed", ProblemGrade.WARNING, "web", "text")


def samples(status, problems=()):
    """Value by name and labels, as Prometheus reads them."""
    text = as_text(status, problems).decode()
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_as_prometheus_reads_them():
    runs = (RUN, replace(RUN, locked=False))
    fences = (("db", Fence("u1", "db", "2026-01-01T00:00:00+00:00", replica="nas")),)
    found = samples(
        replace(WELL, runs=runs, barred_guests=(("db", "why"),), fences=fences), [PROBLEM]
    )
    assert found["snaporch_fence_timestamp_seconds", "db", "nas"] == 1767225600
    assert found["snaporch_info", __version__] == 1
    assert found["snaporch_status_timestamp_seconds",] == NOW.timestamp()
    assert found["snaporch_scheduler_active",] == 1
    assert found["snaporch_problems", "warning"] == 1
    assert found["snaporch_problems", "critical"] == 0
    assert (found["snaporch_runs_under_way",], found["snaporch_runs_interrupted",]) == (1, 1)
    assert found["snaporch_guests_barred",] == 1
    assert found["snaporch_windows_open",] == 2
    assert found["snaporch_newest_snapshot_timestamp_seconds", "ram", "web"] == TAKEN.timestamp()
    assert found["snaporch_snapshots", "ram", "web"] == 24
    assert found["snaporch_newest_snapshot_pause_seconds", "web"] == 0.25
    key = ("hourly", "web")
    assert found["snaporch_policy_newest_snapshot_timestamp_seconds", *key] == TAKEN.timestamp()
    assert found["snaporch_policy_next_run_timestamp_seconds", *key] == NOW.timestamp() + 1800
    assert found["snaporch_policy_missed_runs", *key] == 0
    assert found["snaporch_policy_last_run_failed", *key] == 0
    assert found["snaporch_store_bytes", "bundles"] == 24 << 28
    assert found["snaporch_store_free_bytes",] == 900 << 30


def test_unknown_values_are_left_out():
    found = samples(with_policy(last=None, next=None))
    assert ("snaporch_policy_newest_snapshot_timestamp_seconds", "hourly", "web") not in found
    assert ("snaporch_policy_next_run_timestamp_seconds", "hourly", "web") not in found


@pytest.mark.parametrize("snapshots", [True, False])
def test_a_snapshot_that_fails_is_late_however_often_it_is_tried(snapshots):
    """Its alert uses only this metric."""
    due, retry = NOW - timedelta(hours=3), NOW + timedelta(minutes=5)
    failed = FailedAttempt(NOW, "no")
    wanted, since = (due, None) if snapshots else (None, due)
    coming = NextSnapshot("hourly", retry, "a retry", wanted, failed, since)
    found = samples(with_policy(next=coming))
    name = "snaporch_policy_next_run_timestamp_seconds"
    assert found[name, "hourly", "web"] == due.timestamp()


def test_a_policy_whose_runs_are_killed_is_late_since_it_was_first_carried_out():
    """No snapshot and no failed attempt: the run had no time to record one."""
    due = NOW - timedelta(hours=3)
    coming = NextSnapshot("hourly", NOW, "no snapshot yet", first_run=due)
    found = samples(with_policy(next=coming))
    assert found["snaporch_policy_next_run_timestamp_seconds", "hourly", "web"] == due.timestamp()


def test_when_the_command_of_a_guest_last_passed():
    name = ("snaporch_verify_command_passed_timestamp_seconds", "web")
    assert name not in samples(WELL)
    assert samples(with_domain(has_verify_command=True))[name] == 0
    marks = [(0, False), (2, True), (1, True)]
    verified = tuple(
        replace(RECORD, verified=VerificationResult(at, passed, VerifyDepth.BOOTED, command=True))
        for at, passed in ((NOW - timedelta(hours=hours), passed) for hours, passed in marks)
    )
    found = samples(with_domain(verified=verified))
    assert found[name] == (NOW - timedelta(hours=1)).timestamp()
    late = replace(RECORD, verified=VerificationResult(NOW, True, VerifyDepth.BOOTED))
    assert samples(with_domain(verified=(late, *verified)))[name] == found[name]


def test_names_are_escaped():
    name = 'we"b\\ \n'
    assert samples(with_domain(name=name))["snaporch_snapshots", *sorted(["ram", name])] == 24


def test_there_are_no_metrics_before_the_first_forecast():
    assert list(registry(lambda: None).collect()) == []


def test_names_follow_the_conventions():
    lines = as_text(WELL, []).decode().splitlines()
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names)) > 15
    assert all(name.startswith("snaporch_") for name in names)
    assert not any(name.endswith(("_total", "_ms", "_mib")) for name in names)


def test_copies_are_counted_by_their_last_verification():
    good = CopyResult("nas", "web", "u", "r", "a", NOW, passed=True, source=Source.HERE)
    bad = replace(good, snapshot="b", at=NOW - timedelta(days=3), passed=False, reason="why")
    found = samples(replace(WELL, copies=(good, bad, replace(bad, snapshot="c"))))
    assert found["snaporch_copies_verified", "nas", "passed", "web"] == 1
    assert found["snaporch_copies_verified", "failed", "nas", "web"] == 2
    newest = found["snaporch_copies_newest_verification_timestamp_seconds", "nas", "web"]
    oldest = found["snaporch_copies_oldest_verification_timestamp_seconds", "nas", "web"]
    assert (newest, newest - oldest) == (NOW.timestamp(), 3 * 86_400)


def test_guests_of_a_source_with_the_same_name_have_series_of_their_own():
    web = PullRecord("web", pulled=NOW, newest=NOW, tried=NOW)
    source = SourceStatus("vm1", None, replace(web, domain=""), {"u1": web, "u2": web})
    text = as_text(replace(WELL, sources=(source,)), []).decode()
    series = [line.rpartition(" ")[0] for line in text.splitlines() if "snaporch_source_" in line]
    assert sum("skipped" in line for line in series) == 2 + 2  # with HELP and TYPE
    assert len({*series}) == len(series)
