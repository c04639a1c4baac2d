"""The units under a real systemd: hardened, and still able to do all of a run."""

from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from lab_ssh import sshd_here
from support import assert_clean, assert_confined, must, run, snaporch, wait_for, zfs_snapshots

CONFIG = Path("/etc/snaporch/snaporch.toml")
POLICY = '[schedule]\nrefresh = "5s"\n[policy.{name}]\nevery = "1w"\ndomains = ["united"]\n'


@pytest.fixture(scope="module")
def guest():
    CONFIG.parent.mkdir(exist_ok=True)
    disks = [Disk("file", "tank/united"), Disk("zvol", "flash/united")]
    made = Guest.create("united", disks=disks)
    assert snaporch("install").status == 0
    must("systemctl", "daemon-reload")
    yield made
    made.remove()
    must("snaporch", "uninstall")
    CONFIG.unlink()


def show(unit, name):
    return must("systemctl", "show", "-P", name, unit).strip()


def run_due(*, pulls_in):
    """Start the timer's unit; wait until the unit that it pulls in was started by this.

    A unit that still runs since the last time would not be started again: systemd joins both.
    """
    wait_for(lambda: show(pulls_in, "ActiveState") == "inactive", f"the end of {pulls_in}", 300)
    before = ("", show(pulls_in, "InvocationID"))
    outcome = run("systemctl", "start", "snaporch-run-due.service")
    assert outcome.status == 0, journal("snaporch-run-due")
    wait_for(lambda: show(pulls_in, "InvocationID") not in before, f"the start of {pulls_in}")


def journal(unit):
    return run("journalctl", "--no-pager", "-u", unit).out


def test_what_is_due_is_taken_by_the_timers_unit(guest):
    assert_confined(guest)
    CONFIG.write_text(POLICY.format(name="timed"))
    mark = guest.mark()
    outcome = run("systemctl", "start", "snaporch-run-due.service")
    assert outcome.status == 0, journal("snaporch-run-due")
    (record,) = snaporch("list", "united", "--json").json
    assert (record["policy"], record["level"], record["state"]) == ("timed", "ram", "complete")
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert_clean(guest)


def test_the_daemon_is_ready_reloads_and_stops(guest):
    unit = "snaporch.service"
    outcome = run("systemctl", "start", unit)
    assert outcome.status == 0, journal(unit)
    wait_for(lambda: "1 scheduled" in show(unit, "StatusText"), "the daemon's first look", 300)
    assert show(unit, "Slice") == "snaporch.slice"
    CONFIG.write_text(POLICY.format(name="other"))
    must("systemctl", "reload", unit)
    wait_for(lambda: zfs_snapshots("_other"), "the other policy's snapshot", 300)
    wait_for(lambda: "next united (other)" in show(unit, "StatusText"), "the daemon's status", 300)
    CONFIG.write_text("[policy.other\n")
    assert run("systemctl", "reload", unit).status != 0
    assert str(CONFIG) in journal(unit)
    assert show(unit, "ActiveState") == "active"
    assert "next united (other)" in show(unit, "StatusText")
    CONFIG.write_text(POLICY.format(name="other"))
    must("systemctl", "reload", unit)
    must("systemctl", "stop", unit)
    assert (show(unit, "Result"), show(unit, "ExecMainStatus")) == ("success", "0")
    assert "1 scheduled" not in show(unit, "StatusText")
    assert_clean(guest)


REPLICA = """replicate = ["offsite"]
[replica.offsite]
host = "{host}"
dataset = "flash/offsite"
bundles = "{bundles}"
"""


@pytest.mark.daily(1, "long")
def test_replications_are_in_the_slice_too_and_get_out_by_ssh(guest, tmp_path):
    (tmp_path / "there").mkdir()
    with sshd_here() as host:
        text = POLICY.format(name="other") + REPLICA.format(host=host, bundles=tmp_path / "there")
        CONFIG.write_text(text)
        unit = "snaporch-replicate.service"
        run_due(pulls_in=unit)
        assert run("systemctl", "start", unit).status == 0, journal(unit)  # joins what goes on
        assert (show(unit, "Result"), show(unit, "Slice")) == ("success", "snaporch.slice")
    (record,) = [e for e in snaporch("list", "--json").json if e["policy"] == "other"]
    assert record["replicated"] == ["offsite"], journal(unit)
    copy = tmp_path / "there" / record["uuid"] / record["run"]
    assert (copy / "manifest.json").exists()
    must("zfs", "destroy", "-r", "flash/offsite")
    assert_clean(guest)


@pytest.mark.daily(1, "long")
def test_verifications_are_in_the_slice_behind_everything(guest, tmp_path):
    CONFIG.write_text(POLICY.format(name="other") + 'verify = "weekly"\n')
    unit = "snaporch-verify.service"
    run_due(pulls_in=unit)
    assert run("systemctl", "start", unit).status == 0, journal(unit)  # joins what goes on
    assert (show(unit, "Result"), show(unit, "Slice")) == ("success", "snaporch.slice")
    (record,) = [e for e in snaporch("list", "--json").json if e["policy"] == "other"]
    assert record["verified"]["passed"]
    assert record["verified"]["reached"] == "resumed"
    script, seen = tmp_path / "script", tmp_path / "cgroup"
    script.write_text(f"#!/bin/sh\ncat /proc/self/cgroup > {seen}\n")
    script.chmod(0o755)
    by_hand = snaporch("verify", f"united@{record['snapshot']}", "--script", str(script))
    assert by_hand.status == 0, by_hand.err
    assert "/snaporch.slice/snaporch-verify-" in seen.read_text()
    assert_clean(guest)


def test_the_daemon_verifies(guest):
    unit = "snaporch.service"
    CONFIG.write_text(POLICY.format(name="other") + 'verify = "weekly"\n')
    must("zfs", "inherit", "snaporch:verified", *zfs_snapshots("_other"))
    must("systemctl", "start", unit)
    done = "verify: united@"
    wait_for(lambda: done in journal(unit), "the daemon's verification", 300)
    must("systemctl", "stop", unit)
    assert "passed, a clone resumed from RAM" in journal(unit)
    assert_clean(guest)


def test_recovery_at_boot_has_nothing_to_do_and_says_so(guest):
    assert run("systemctl", "start", "snaporch-recover.service").status == 0
    assert show("snaporch-recover.service", "Result") == "success"
    assert "nothing to recover" in journal("snaporch-recover")


def test_systemd_has_no_complaint_about_the_units(guest):
    units = sorted(Path("/etc/systemd/system").glob("snaporch*.*"))
    outcome = run("systemd-analyze", "verify", "--man=no", *map(str, units))
    assert (outcome.status, outcome.err) == (0, "")
