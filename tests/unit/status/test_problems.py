import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from fakes.status_example import NEXT, NOW, RECORD, RUN, WELL, with_domain, with_policy

from snaporch.config import StatusOptions
from snaporch.locks import LockHolder
from snaporch.model import BundleState, Level, VerificationResult, VerifyDepth, VerifyStep, iso
from snaporch.pull.record import PullRecord
from snaporch.schedule.failed_attempts import FailedAttempt
from snaporch.schedule.replication_due import PendingReplication
from snaporch.status.model import ProblemGrade, ReplicaStatus, SchedulerState, SourceStatus
from snaporch.status.problems import find_problems, worst_grade
from snaporch.verify.copy_decision import Source
from snaporch.verify.copy_results import CopyResult
from snaporch.zfs import BlockingMount

FAILED = replace(NEXT, failed=FailedAttempt(NOW, "no such luck"))
DUE = replace(NEXT, at=NOW - timedelta(minutes=31))
JUST_DUE = replace(NEXT, at=NOW - timedelta(minutes=30))
FIRST = replace(NEXT, at=NOW, scheduled=None, first_run=NOW - timedelta(minutes=30))
LONG = replace(FIRST, first_run=NOW - timedelta(minutes=30, seconds=1))
INACTIVE = SchedulerState(None, {"snaporch.service": "inactive"})
STARTING = replace(WELL.scheduler.holder, checked="")
HALF = replace(RECORD, state=BundleState.MISSING)
BROKEN = replace(
    RECORD, verified=VerificationResult(NOW, passed=False, reached=VerifyDepth.CHECKED)
)
FINE = replace(RECORD, verified=VerificationResult(NOW, passed=True, reached=VerifyDepth.RESUMED))


MOUNT = BlockingMount("tank/web@s", "the guest db")
TRIED = FailedAttempt(NOW, "nas: away")


def with_replica(last=None, since=NOW, failed=None):
    waiting = PendingReplication("web", "u", "nas", NOW, "why", last, since, failed)
    return with_domain(replicas=(ReplicaStatus("nas", last, waiting, failed),))


def replicated_for(**ago):
    """A replication that began so long ago, and has not ended."""
    holder = LockHolder("replicate", 7, iso(NOW - timedelta(**ago)))
    return with_domain(replicated_by=holder)


def filled(percent):
    store = WELL.store
    return replace(WELL, store=replace(store, free_bytes=store.size_bytes * (100 - percent) // 100))


def late(**ago):
    """A daemon whose last check is so old."""
    holder = replace(WELL.scheduler.holder, checked=iso(NOW - timedelta(**ago)))
    return replace(WELL, scheduler=replace(WELL.scheduler, holder=holder))


def pruned(*, ago, daemon_for=timedelta(days=9)):
    """A daemon whose last prune began so long before its last check, which was now."""
    holder = replace(WELL.scheduler.holder, since=iso(NOW - daemon_for), checked=iso(NOW))
    return replace(WELL, scheduler=replace(WELL.scheduler, holder=holder, pruned=NOW - ago))


def codes(status, **limits):
    return [
        (each.code, each.grade.value) for each in find_problems(status, StatusOptions(**limits))
    ]


@pytest.mark.parametrize(
    "status",
    [
        WELL,
        replace(WELL, runs=(RUN,)),
        replace(WELL, scheduler=INACTIVE),  # nothing is due
        pruned(ago=timedelta(days=2)),
        pruned(ago=timedelta(days=9), daemon_for=timedelta(hours=1)),  # the host was off
        replace(WELL, scheduler=replace(INACTIVE, pruned=NOW - timedelta(days=9))),
        late(minutes=35),
        replace(WELL, scheduler=SchedulerState(replace(STARTING, doing="run-due"))),
        replace(
            with_policy(next=DUE),
            scheduler=SchedulerState(None, {"snaporch-run-due.timer": "active"}),
        ),
        replace(with_policy(next=JUST_DUE), scheduler=INACTIVE),
        with_policy(next=FIRST),
        replace(with_domain(last=HALF), runs=(RUN,)),  # it is being sealed
        with_domain(verified=(FINE,)),
        with_domain(replicas=(ReplicaStatus("nas", NOW, None),)),
        with_replica(),
        with_replica(since=NOW - timedelta(days=1)),
        replicated_for(days=1),
        with_domain(policies=(), last=None),
        filled(84),
    ],
)
def test_nothing_needs_attention(status):
    assert codes(status) == []


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (with_policy(missed=1), ("missed", "warning")),
        (with_policy(missed=2), ("missed", "critical")),
        (with_policy(next=FAILED), ("failed", "warning")),
        (with_policy(next=FAILED, last=None), ("failed", "critical")),
        (with_domain(unknown_policies=("dayly",)), ("unknown-policy", "warning")),
        (with_domain(unknown_policies=("dayly",), policies=()), ("unknown-policy", "critical")),
        (with_domain(unknown_overlays=("/o/vda",)), ("on-overlay", "critical")),
        (replace(WELL, store_missing=True), ("no-store", "critical")),
        (with_replica(failed=TRIED), ("replica-failed", "critical")),
        (
            with_domain(replicas=(ReplicaStatus("nas", NOW, None, TRIED),)),
            ("replica-failed", "warning"),
        ),
        (with_replica(last=NOW, failed=TRIED), ("replica-failed", "warning")),
        (with_replica(since=NOW - timedelta(days=1, seconds=1)), ("replica-late", "warning")),
        (replicated_for(days=1, seconds=1), ("replica-slow", "warning")),
        (with_domain(last=HALF), ("incomplete", "warning")),
        (with_domain(verified=(BROKEN,)), ("verify-failed", "critical")),
        (with_domain(verified=(BROKEN, FINE)), ("verify-failed", "critical")),
        (with_domain(verified=(FINE, BROKEN)), ("verify-failed", "warning")),
        (replace(WELL, runs=(replace(RUN, locked=False),)), ("interrupted", "critical")),
        (replace(WELL, runs=(replace(RUN, kind=""),)), ("unreadable-journal", "critical")),
        (replace(WELL, unfinished_rebuilds=("tank/web",)), ("rebuild", "warning")),
        (replace(WELL, barred_guests=(("web", "cannot be started"),)), ("barred", "critical")),
        (replace(WELL, fenced_guests=(("web", "is fenced"),)), ("fenced", "warning")),
        (replace(WELL, unfinished_failovers=(("web", "ended"),)), ("failover", "critical")),
        (replace(WELL, open_fences=(("web", "no hook"),)), ("fence-open", "critical")),
        (replace(WELL, overlays_without_journal=("/o/r",)), ("unknown-overlay", "warning")),
        (replace(WELL, quarantined=("/o/quarantine/r",)), ("quarantined", "warning")),
        (replace(WELL, exceeded_limits=(("/o/r", "is large"),)), ("overlay-limit", "critical")),
        (late(minutes=35, seconds=1), ("check-late", "warning")),
        (pruned(ago=timedelta(days=2, seconds=1)), ("prune-late", "warning")),
        (
            replace(WELL, scheduler=replace(WELL.scheduler, holder=STARTING)),
            ("check-late", "warning"),
        ),
        (replace(with_policy(next=DUE), scheduler=INACTIVE), ("scheduler-inactive", "warning")),
        (replace(with_policy(next=FIRST), scheduler=INACTIVE), ("scheduler-inactive", "warning")),
        (with_policy(next=LONG), ("never", "critical")),
        (with_policy(next=replace(FIRST, first_run=None)), ("never", "critical")),
        (with_domain(lost_policy="hourly"), ("no-policy", "critical")),
        (replace(WELL, unused_policies=("hourly",)), ("unused-policy", "warning")),
        (replace(WELL, unknown_domains=(("policy.p", "wbe"),)), ("no-such-domain", "warning")),
        (
            replace(
                WELL,
                scheduler=SchedulerState(
                    WELL.scheduler.holder, {"snaporch-run-due.service": "failed"}
                ),
            ),
            ("unit-failed", "warning"),
        ),
        (
            replace(WELL, scheduler=SchedulerState(None, {"snaporch.service": "failed"})),
            ("unit-failed", "critical"),
        ),
        (replace(WELL, mounted_snapshots=(MOUNT, MOUNT)), ("mounted", "warning")),
        (filled(85), ("store-full", "warning")),
        (filled(95), ("store-full", "critical")),
    ],
)
def test_each_problem(status, expected):
    assert codes(status) == [expected]


def test_limits_are_the_configured_ones():
    assert codes(filled(60), store_warning=50, store_critical=70) == [("store-full", "warning")]


def test_critical_problems_come_first():
    status = replace(with_policy(missed=1), runs=(replace(RUN, locked=False),))
    problems = find_problems(status, StatusOptions())
    assert [each.grade for each in problems] == [ProblemGrade.CRITICAL, ProblemGrade.WARNING]
    assert worst_grade(problems) is ProblemGrade.CRITICAL
    assert worst_grade(problems[1:]) is ProblemGrade.WARNING
    assert worst_grade([]) is None


def test_a_guest_that_a_run_may_still_hold_comes_with_what_to_do():
    held = replace(RUN, guest_may_be_frozen=True)
    assert find_problems(replace(WELL, runs=(held,)), StatusOptions()) == []  # it is just at it
    (problem,) = find_problems(replace(WELL, runs=(replace(held, locked=False),)), StatusOptions())
    assert (problem.code, problem.grade) == ("held", ProblemGrade.CRITICAL)
    assert problem.text == (
        "a snapshot was interrupted while frozen, and the guest may still be paused or frozen; "
        "run: snaporch recover u"
    )
    guarded = replace(held, locked=False, guarded=True)
    (problem,) = find_problems(replace(WELL, runs=(guarded,)), StatusOptions())
    assert problem.text.endswith("; its guardian keeps trying, or run: snaporch recover u")


def test_a_journal_that_cannot_be_read_comes_with_what_to_do():
    damaged = replace(RUN, kind="", phase="cannot be read", path="/j", step="see the page")
    (problem,) = find_problems(replace(WELL, runs=(damaged,)), StatusOptions())
    assert problem.text == "/j cannot be read; see the page"


def test_an_interrupted_run_is_not_reported_as_a_missing_bundle():
    bare = with_domain(last=replace(RECORD, state=BundleState.NONE, level=Level.CRASH))
    (problem,) = find_problems(bare, StatusOptions())
    assert problem.code == "incomplete"
    assert problem.text.endswith(
        "is only crash-consistent: its run was interrupted, or the guest was not frozen"
    )
    assert codes(replace(bare, runs=(replace(RUN, locked=False),))) == [("interrupted", "critical")]


def test_texts_of_interrupted_and_missed_snapshots():
    (problem,) = find_problems(replace(WELL, runs=(replace(RUN, locked=False),)), StatusOptions())
    assert problem.text == "a snapshot was interrupted while frozen; run: snaporch recover u"
    wanted = replace(NEXT, scheduled=NOW - timedelta(hours=2))
    (missed,) = find_problems(with_policy(missed=2, next=wanted), StatusOptions())
    assert missed.text.startswith("hourly: the snapshot of 2026-06-10 10:30 UTC was missed, and")


def test_snapshots_that_are_mounted_are_counted():
    (problem,) = find_problems(replace(WELL, mounted_snapshots=(MOUNT, MOUNT)), StatusOptions())
    assert (problem.subject, problem.text.split(",")[0]) == (
        "the guest db",
        "has 2 snapshots mounted",
    )


def test_every_code_is_documented():
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "status.md").read_text("utf-8")
    source = (Path(__file__).parents[3] / "snaporch/status/problems.py").read_text("utf-8")
    found = set(re.findall(r'Problem\(\s*"([a-z-]+)"', source))
    assert len(found) == 35
    for code in found:
        assert f"`{code}`" in page


def test_the_service_of_the_timer_does_not_count_as_active():
    assert not SchedulerState(None, {"snaporch-run-due.service": "active"}).is_active


def test_snapshots_that_failed_in_the_same_steps_share_a_line():
    def broken(name, *steps):
        result = replace(BROKEN.verified, failed_steps=steps)
        return replace(BROKEN, snapshot=name, verified=result)

    script, disks = VerifyStep.SCRIPT, VerifyStep.DISKS
    again = "snaporch verify --script PATH web@c web@a"
    failed = (broken("c", script), broken("b", disks), broken("a", script))
    found = find_problems(with_domain(verified=failed), StatusOptions())
    assert [(each.grade, each.text) for each in found] == [
        (
            ProblemGrade.CRITICAL,
            "the verification of @c, @a failed; to repeat it: " + again,
        ),
        (
            ProblemGrade.WARNING,
            "the verification of @b failed; to repeat it: snaporch verify --disks web@b",
        ),
    ]


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        (
            {"state": BundleState.DAMAGED},
            (
                "the stored data is damaged; put what is damaged or missing back from a replica: "
                "see docs/how-to/verify.md; or restore only its disks: "
                "snaporch restore --cold web@a; then to repeat it: snaporch verify web@a web@b"
            ),
        ),
        (
            {"state": BundleState.INCOMPLETE, "level": Level.TORN},
            "its disks are of two instants; to delete it: snaporch delete web@a web@b",
        ),
    ],
)
def test_where_a_repetition_does_not_help_the_step_that_helps_is_named(changes, step):
    result = replace(BROKEN.verified, failed_steps=(VerifyStep.CHECKSUMS,))
    bad = [replace(BROKEN, snapshot=name, verified=result, **changes) for name in "ab"]
    unlike = replace(BROKEN, snapshot="c", verified=result)
    first, second = find_problems(with_domain(verified=(*bad, unlike)), StatusOptions())
    assert first.text == f"the verification of @a, @b failed; {step}"
    assert second.text == "the verification of @c failed; to repeat it: snaporch verify web@c"


def copy(name, **changes):
    made = CopyResult("nas", "web", "u", f"r-{name}", name, NOW, passed=True, source=Source.HERE)
    return replace(made, **changes)


def test_copies_that_failed_their_verification_are_critical_until_they_pass():
    bad = copy("b", passed=False, reason="ram.save is damaged")
    (problem,) = find_problems(replace(WELL, copies=(copy("a"), bad)), StatusOptions())
    assert (problem.code, problem.grade, problem.subject) == (
        "copy-failed",
        ProblemGrade.CRITICAL,
        "web",
    )
    assert problem.text.startswith(
        "copies on replica nas (@b) failed their verification (ram.save is damaged); "
    )
    assert problem.text.endswith("to repeat it: snaporch verify --on nas web@b")
    assert codes(replace(WELL, copies=(copy("a"), copy("b")))) == []


def test_results_of_copies_that_cannot_be_read_are_critical():
    status = replace(WELL, unreadable_copies=(("/x.json", "cannot be read"),))
    assert codes(status) == [("copy-results", "critical")]


def test_many_copies_that_failed_are_counted():
    bad = tuple(copy(name, passed=False, reason="why") for name in "abcd")
    (problem,) = find_problems(replace(WELL, copies=bad), StatusOptions())
    assert problem.text.startswith("copies on replica nas (4) failed")
    assert problem.text.endswith("snaporch verify --on nas web")


def with_source(whole=None, every=timedelta(hours=1), within=None, **guests):
    return replace(WELL, sources=(SourceStatus("vm1", every, whole, guests, within),))


PULLED = PullRecord("", pulled=NOW, tried=NOW)
WEB = PullRecord("web", pulled=NOW, newest=NOW, tried=NOW)
LATE = NOW - timedelta(days=1, hours=1, seconds=1)


def pull_problems(status):
    return [(e.code, e.grade.value, e.subject) for e in find_problems(status, StatusOptions())]


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (with_source(PULLED, u=WEB), []),
        (with_source(), [("pull-late", "warning", "source.vm1")]),
        (
            with_source(replace(PULLED, failed="away")),
            [("pull-failed", "warning", "source.vm1")],
        ),
        (
            with_source(replace(PULLED, pulled=None, failed="away"), every=None),
            [("pull-failed", "critical", "source.vm1")],
        ),
        (
            with_source(replace(PULLED, failed="torn"), u=replace(WEB, failed="torn")),
            [("pull-failed", "warning", "vm1: web")],
        ),
        (
            with_source(replace(PULLED, failed="no wbe"), u=replace(WEB, failed="torn")),
            [("pull-failed", "warning", "source.vm1"), ("pull-failed", "warning", "vm1: web")],
        ),
        (with_source(replace(PULLED, pulled=LATE)), [("pull-late", "warning", "source.vm1")]),
        (with_source(PULLED, u=replace(WEB, pulled=LATE)), [("pull-late", "warning", "vm1: web")]),
        (with_source(replace(PULLED, pulled=LATE), every=None), []),
        (with_source(replace(PULLED, pulled=LATE + timedelta(seconds=1))), []),
        (
            with_source(PULLED, every=None, u=replace(WEB, waiting=1, waiting_since=LATE)),
            [("pull-late", "warning", "vm1: web")],
        ),
        (with_source(PULLED, u=replace(WEB, waiting=1, waiting_since=NOW)), []),
        (with_source(PULLED, within=timedelta(days=1), u=WEB), []),
        (
            with_source(PULLED, within=timedelta(days=1), u=replace(WEB, newest=LATE)),
            [("pull-late", "warning", "vm1: web")],
        ),
        (
            with_source(PULLED, within=timedelta(days=1), u=replace(WEB, newest=None)),
            [("pull-late", "warning", "vm1: web")],
        ),
    ],
)
def test_pulls_that_fail_or_are_late_are_reported(status, expected):
    assert pull_problems(status) == expected
