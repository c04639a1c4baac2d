import os
import signal
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fakes.schedule import Scheduled

from snaporch.errors import ExitCode
from snaporch.interrupt import Interrupt
from snaporch.locks import SCHEDULE, domain_lock, held_by

CHILD = """
import sys, uuid
names = {str(uuid.uuid5(uuid.NAMESPACE_DNS, name)): name for name in ("web", "mail", "bad")}
name = names[sys.argv[sys.argv.index("snapshot") + 1]]
if name == "bad":
    print("snaporch: bad: no such luck", file=sys.stderr)
    sys.exit(5)
print(f"{name}@s  ram  complete")
"""


PARTIAL = ".20260601T100000Z-0123abcd.partial"


@pytest.fixture
def policies(host):
    """A policy for all guests; the child that takes snapshots only prints its result."""
    host.add_guest()
    with host.config_file.open("a") as stream:
        stream.write('policies = ["hourly"]\n')
        stream.write(f'[policy.hourly]\nevery = "1h"\nkeep = {"{ last = 1 }"}\n')
    text = host.config_file.read_text()
    place = host.root / "schedule"
    host.config_file.write_text(text.replace("[paths]", f'[paths]\nschedule = "{place}"'))
    host.context.program = (sys.executable, "-c", CHILD)
    return host


def test_due_snapshots_are_taken_and_printed(policies, snaporch):
    answer = snaporch("run-due")
    assert (answer.code, answer.out, answer.err) == (0, "web@s  ram  complete\n", "")


def test_a_failure_is_a_line_and_the_exit_code_and_stops_no_other(policies, snaporch):
    policies.add_guest("bad")
    answer = snaporch("run-due")
    assert answer.code == ExitCode.REFUSED
    assert answer.out == "web@s  ram  complete\n"
    assert answer.err == "snaporch: bad: hourly: no such luck\n"


def test_an_unknown_policy_stops_no_other_snapshot(policies, snaporch):
    policies.add_guest("mail", {"vda": "tank/mail"})
    policies.pool.set_properties(["tank/mail"], {"snaporch:policy": "dayly"})
    answer = snaporch("run-due")
    assert (answer.code, answer.out) == (ExitCode.CONFIG, "web@s  ram  complete\n")
    assert "mail: snaporch:policy of tank/mail names the policy 'dayly'" in answer.err


def test_a_failed_snapshot_is_not_retried_at_once(policies, snaporch):
    policies.add_guest("bad")
    snaporch("run-due")
    answer = snaporch("run-due", "--json")
    assert [run["domain"] for run in answer.json["runs"]] == ["web"]  # its child took nothing


def test_retention_runs_unless_switched_off(policies, snaporch):
    scheduled = Scheduled(policies)
    now = datetime.now(UTC)
    old, _ = (scheduled.taken(now - timedelta(hours=h)) for h in (5, 3))
    assert "deleted" not in snaporch("run-due", "--no-retention").out
    answer = snaporch("run-due")
    assert f"web@{old.snapshot}  deleted: not in last=1" in answer.out.splitlines()
    assert f"tank/web@{old.snapshot}" not in policies.pool.names()


def test_run_due_prints_what_the_daily_prune_did_and_could_not_judge(policies, snaporch):
    """The timer's unit runs it with --quiet."""
    store, run = policies.paths.bundles, "20260601T100000Z-0123abcd"
    uuid = policies.guest().uuid
    partial, foreign = store / uuid / f".{run}.partial", store / uuid / run
    for directory in (partial, foreign):
        directory.mkdir(parents=True)
    answer = snaporch("run-due", "--quiet")
    reason = "deleted  0 B  its run ended without finishing it"
    assert f"{uuid}/{partial.name}  {reason}" in answer.out.splitlines()
    assert str(foreign) in answer.err
    assert "check it, then move or delete it yourself" in answer.err
    assert answer.code == ExitCode.ATTENTION
    (policies.root / "schedule" / "pruned").unlink()
    partial.mkdir()
    answer = snaporch("run-due", "--quiet", "--json")
    (item,) = answer.json["pruned"]
    assert (item["kind"], item["action"]) == ("partial", "delete")
    assert [str(foreign) in line for line in answer.json["failures"]] == [True]


def test_the_daily_prune_does_not_block_another_run_due(policies, snaporch):
    seen = []

    def listing():
        seen.append(held_by(policies.paths.runtime, SCHEDULE))
        os.kill(os.getpid(), signal.SIGTERM)

    partial = Path(Scheduled(policies).taken(datetime.now(UTC)).bundle).parent / PARTIAL
    partial.mkdir()
    policies.hooks.at["pool.snapshot_listing"] = listing
    assert snaporch("run-due").code == 128 + signal.SIGTERM
    assert set(seen) == {None}
    seen.clear()
    assert partial.exists()
    assert snaporch("run-due", "--no-retention").code == 0
    assert seen == []


def test_run_due_as_json(policies, snaporch):
    document = snaporch("run-due", "--json").json
    assert set(document) == {
        *("runs", "deleted", "pruned", "failures", "busy", "mounted", "replicated", "verified")
    }
    (run,) = document["runs"]
    assert (run["domain"], run["policy"], run["status"]) == ("web", "hourly", 0)


def test_due_verifications_run_last(policies, snaporch):
    text = policies.config_file.read_text()
    policies.config_file.write_text(f'{text}verify = "weekly"\n')
    record = Scheduled(policies).taken(datetime.now(UTC))
    assert "verify due now" in snaporch("plan").out
    (foreseen,) = snaporch("plan", "--json").json["verifications"]
    assert (foreseen["snapshot"], foreseen["due"]) == (record.snapshot, True)
    assert "passed" not in snaporch("run-due", "--no-verify").out
    answer = snaporch("run-due", "--quiet")
    assert f"web@{record.snapshot}  passed, a clone resumed from RAM" in answer.out
    assert snaporch("run-due", "--json").json["verified"] == []
    assert "verify next" in snaporch("plan").out


@pytest.mark.parametrize("words", [("verify", "--due"), ("run-due",)])
def test_a_failed_verification_is_printed_and_sets_the_exit_code(
    policies, snaporch, notified, words
):
    text = policies.config_file.read_text()
    policies.config_file.write_text(f'{text}verify = "weekly"\n')
    record = Scheduled(policies).taken(datetime.now(UTC))
    (policies.paths.bundles / record.uuid / record.run / "ram.save").write_bytes(b"")
    answer = snaporch(*words)
    assert answer.code == ExitCode.FAILED
    (line,) = notified()
    assert line.startswith(f"web@{record.snapshot}: verification failed: ")
    assert f"snaporch: {line}" in answer.err.splitlines()
    assert (snaporch(*words).code, len(notified())) == (0, 1)


def test_one_run_due_at_a_time(policies, snaporch):
    with domain_lock(
        policies.paths.runtime, "schedule", "schedule", "daemon", wait=0, interrupt=Interrupt()
    ):
        answer = snaporch("run-due")
    assert answer.code == ExitCode.BUSY
    assert "schedule: held by daemon" in answer.err
    assert "or use --wait" not in answer.err, "which run-due does not have"
    assert "--wait" not in snaporch("run-due", "--help").out


def test_nothing_is_due(policies, snaporch):
    Scheduled(policies).taken(datetime.now(UTC))
    answer = snaporch("run-due")
    assert (answer.code, answer.out) == (0, "")
    assert "nothing is due" in answer.err


def configure(policies, text):
    with policies.config_file.open("a") as stream:
        stream.write(text)


@pytest.mark.parametrize("words", [(), ("--no-retention",)])
def test_metrics_are_written_after_run_due(policies, snaporch, tmp_path, monkeypatch, words):
    target = tmp_path / "snaporch.prom"
    configure(policies, f'[metrics]\ntextfile = "{target}"\n')
    policies.add_guest("bad")
    snaporch("run-due", *words)
    text = target.read_text()
    assert 'snaporch_policy_last_run_failed{domain="bad",policy="hourly"} 1.0' in text


def test_metrics_that_cannot_be_written_are_a_note(policies, snaporch, tmp_path):
    configure(policies, f'[metrics]\ntextfile = "{tmp_path}/no/x.prom"\n')
    answer = snaporch("run-due")
    assert (answer.code, answer.out) == (0, "web@s  ram  complete\n")
    assert "metrics  note: " in answer.err


def test_a_failure_is_notified(policies, snaporch, tmp_path):
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\necho $SNAPORCH_TITLE: $SNAPORCH_TEXT >> {tmp_path}/sent\n")
    script.chmod(0o755)
    configure(policies, f'[notify]\non = ["failure", "success"]\ncommand = "{script}"\n')
    policies.add_guest("bad")
    answer = snaporch("run-due")
    assert answer.code == ExitCode.REFUSED
    sent = sorted(line.split(": ", 1)[1] for line in (tmp_path / "sent").read_text().splitlines())
    assert sent == [
        "failure: bad (hourly): no such luck",
        "success: web (hourly): web@s ram complete",
    ]


def test_an_undelivered_notification_is_a_note(policies, snaporch):
    configure(policies, '[notify]\non = ["success"]\ncommand = "/nonexistent"\n')
    answer = snaporch("run-due")
    assert answer.code == 0
    assert "web  note: notify.command: /nonexistent: cannot be started" in answer.err


def test_retention_deletes_snapshots_on_a_full_disk(policies, snaporch):
    """The failure is also remembered, because the runtime directory is in memory."""
    scheduled = Scheduled(policies)
    now = datetime.now(UTC)
    old, _ = (scheduled.taken(now - timedelta(hours=h)) for h in (5, 3))
    policies.add_guest("bad")
    (policies.root / "schedule").write_text("no directory")
    answer = snaporch("run-due")
    assert f"web@{old.snapshot}  deleted: not in last=1" in answer.out.splitlines()
    assert f"{policies.root}/schedule" in answer.err
    answer = snaporch("run-due", "--json")
    assert [run["domain"] for run in answer.json["runs"]] == ["web"]  # its child took nothing
