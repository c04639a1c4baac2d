"""What `status` shows of a real host, and the notifications about how runs end."""

import email
import email.policy
import json
import signal
import sys
from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import (
    CONFIG,
    JOURNAL,
    PATIENCE_SECONDS,
    assert_clean,
    must,
    open_gate,
    snaporch,
    stalled_compressor,
    started,
    system_config,
    wait_for_ram_phase,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fakes.mail import MailSink

POLICIES = """
[policy.weekly]
every = "1w"
domains = ["stood"]
"""


@pytest.fixture(scope="module")
def guest():
    with system_config(POLICIES):
        disks = [Disk("file", "tank/stood")]
        made = Guest.create("stood", disks=disks, firmware="uefi")  # more RAM than pipes can hold
        yield made
        made.remove()


def codes(outcome):
    return [problem["code"] for problem in outcome.json["problems"]]


def test_a_first_snapshot_without_an_active_scheduler_is_a_problem(guest):
    outcome = snaporch("status", "--json")
    assert (outcome.status, codes(outcome)) == (10, ["never", "scheduler-inactive"])
    line = snaporch("status", "--nagios")
    assert line.status == 2
    assert line.out.startswith("SNAPORCH CRITICAL - stood: weekly: no snapshot that counts")


def test_a_run_under_way_is_seen_and_so_is_a_killed_one(guest, tmp_path):
    mark = guest.mark()
    with (
        stalled_compressor(tmp_path) as env,
        started("snapshot", "stood", env=env) as running,
    ):
        wait_for_ram_phase()
        (run,) = snaporch("status", "--json").json["runs"]
        assert (run["domain"], run["kind"], run["phase"]) == ("stood", "snapshot", "freezing")
        assert (run["under_way"], run["window_open"]) == (True, False)
        assert "run       stood: snapshot under way, freezing for" in snaporch("status").out
        must("pkill", "-KILL", "-f", "snaporch.recovery.guardian")  # the guardian
        running.send_signal(signal.SIGKILL)
        running.wait(PATIENCE_SECONDS)
        open_gate(tmp_path)
        outcome = snaporch("status", "--json")
        assert (outcome.status, codes(outcome)[0]) == (10, "held")
        line = snaporch("status", "--nagios")
        assert (line.status, line.out.split(" - ")[0]) == (2, "SNAPORCH CRITICAL")
        assert f"snaporch recover {run['uuid']}" in line.out
    assert snaporch("recover").status == 0
    assert not any(JOURNAL.iterdir())
    assert {"held", "interrupted"}.isdisjoint(codes(snaporch("status", "--json")))
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert_clean(guest)


def test_runs_are_reported_by_mail_and_script_and_figures_written(guest, tmp_path):
    must("ip", "link", "set", "lo", "up")
    sink, script, received = MailSink(), tmp_path / "script", tmp_path / "received"
    script.write_text(f"#!/bin/sh\ncat >> {received}\n")
    script.chmod(0o755)
    figures = tmp_path / "snaporch.prom"
    CONFIG.write_text(
        f"""{POLICIES}level = "quiesced"
[defaults]
on_unavailable = "crash"
[metrics]
textfile = "{figures}"
[notify]
on = ["downgrade"]
command = "{script}"
[notify.email]
to = ["admin@example.org"]
sender = "snaporch@example.org"
smtp = "{sink.place}"
"""
    )
    try:
        outcome = snaporch("run-due")
        assert outcome.status == 0, outcome.err
    finally:
        sink.close()
    event = json.loads(received.read_text())
    assert (event["event"], event["domain"], event["level"]) == ("downgrade", "stood", "crash")
    assert any("taking crash instead" in note for note in event["notes"])
    (mail,) = sink.mails
    assert mail.recipients == ["admin@example.org"]
    message = email.message_from_string(mail.text, policy=email.policy.default)
    assert message["Subject"].endswith(": downgrade: stood (weekly)")
    assert "taking crash instead" in message.get_content()
    assert 'snaporch_snapshots{domain="stood",level="crash"} 1.0' in figures.read_text()
    assert snaporch("status", "--prometheus", "-").out.count("# TYPE") > 15
    assert_clean(guest)


def test_then_all_is_well(guest):
    outcome = snaporch("status", "stood", "--json")
    assert (outcome.status, outcome.json["problems"]) == (0, [])
    (stood,) = outcome.json["domains"]
    assert list(stood["newest"]) == ["crash"]
    (weekly,) = stood["policies"]
    assert (weekly["missed"], weekly["failed"]) == (0, None)
    text = snaporch("status").out
    assert max(map(len, text.splitlines())) <= 80, text
    assert snaporch("status", "--nagios").status == 0
