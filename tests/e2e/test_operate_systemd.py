"""The daemon under a real systemd: killed in a capture, after a downtime, and what it reports."""

import os
import re
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import (
    JOURNAL,
    PATIENCE_SECONDS,
    STALLED,
    assert_clean,
    must,
    run,
    snaporch,
    wait_for,
    zfs_snapshots,
)

CONFIG = Path("/etc/snaporch/snaporch.toml")
DROP_IN = Path("/etc/systemd/system/snaporch.service.d/test.conf")
PROGRAMS = Path("/run/programs")
HOLD = Path("/run/hold-compressor")
SPARE = Path("/run/spare-compressor")
"""One call goes through: a daemon that starts tries out how RAM can go."""
NOTIFICATIONS = Path("/run/notifications")
UNIT = "snaporch.service"
MOST_EXPOSURE = 5.5
"""The figure of docs/how-to/schedule.md."""
POLICIES = f"""
[schedule]
refresh = "1h"
[defaults]
compression = "gzip"
[metrics]
listen = "127.0.0.1:9751"
[notify]
on = ["success", "failure", "attention"]
command = "{PROGRAMS}/notify"
[policy.often]
cron = "{(datetime.now(UTC).minute + 30) % 60} * * * *"
domains = ["operated", "later"]
"""
PIGZ = f"""#!/bin/sh
if [ -e {SPARE} ]; then
    rm {SPARE}
elif [ -p {HOLD} ]; then
    : > {STALLED}
    read -r _ < {HOLD}
fi
exec /usr/bin/pigz "$@"
"""
NOTIFY = f"""#!/bin/sh
echo "$SNAPORCH_TITLE" >> {NOTIFICATIONS}
"""


def write(path, text, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


@pytest.fixture(scope="module")
def guest():
    """A UEFI guest: its firmware alone is more RAM than the pipes can hold."""
    must("ip", "link", "set", "lo", "up")
    write(CONFIG, POLICIES)
    write(PROGRAMS / "pigz", PIGZ, 0o755)
    write(PROGRAMS / "notify", NOTIFY, 0o755)
    path = f"{PROGRAMS}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"
    write(DROP_IN, f"[Service]\nEnvironment=PATH={path}\nRestartSec=1\n")
    made = Guest.create("operated", disks=[Disk("file", "tank/operated")], firmware="uefi")
    assert snaporch("install").status == 0
    must("systemctl", "daemon-reload")
    yield made
    made.remove()


def show(name):
    return must("systemctl", "show", "-P", name, UNIT).strip()


def log():
    return run("journalctl", "--no-pager", "-u", UNIT).out


def taken(guest="operated"):
    return [name for name in zfs_snapshots("_often") if name.startswith(f"tank/{guest}@")]


def records(guest="operated"):
    return snaporch("list", guest, "--json").json


def settled():
    """Wait until every run has ended or was recovered."""
    wait_for(lambda: not any(JOURNAL.iterdir()), "settled runs", PATIENCE_SECONDS)


def next_run(guest="operated"):
    (run,) = snaporch("plan", guest, "--json").json["runs"]
    return run


def test_a_daemon_that_is_killed_in_a_capture_is_started_again(guest):
    """The capture continues by itself."""
    mark = guest.mark()
    os.mkfifo(HOLD)
    SPARE.touch()
    outcome = run("systemctl", "start", UNIT)
    assert outcome.status == 0, log()
    wait_for(STALLED.exists, "RAM to flow", PATIENCE_SECONDS)
    (journal,) = JOURNAL.glob("*.jsonl")
    before = show("MainPID")
    must("systemctl", "kill", "--kill-whom=main", "--signal=KILL", UNIT)
    wait_for(lambda: show("NRestarts") == "1", "systemd to start it again", PATIENCE_SECONDS)
    wait_for(lambda: show("ActiveState") == "active", "the daemon", PATIENCE_SECONDS)
    assert show("MainPID") not in (before, "0")
    assert journal.exists()
    HOLD.write_text("go on\n")
    HOLD.unlink()
    wait_for(lambda: not journal.exists(), "a settled run", PATIENCE_SECONDS)
    wait_for(lambda: any(each["level"] == "ram" for each in records()), "a snapshot", 300)
    settled()
    (record,) = [each for each in records() if each["level"] == "ram"]
    assert (record["run"], record["state"], record["policy"]) == (journal.stem, "complete", "often")
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert_clean(guest)
    assert snaporch("status", "operated", "--nagios").status == 0


def test_within_its_sandbox_it_notifies_and_serves(guest):
    wait_for(
        lambda: (
            NOTIFICATIONS.exists() and ": success: operated (often)" in NOTIFICATIONS.read_text()
        ),
        "a notification",
        PATIENCE_SECONDS,
    )

    def scraped():
        with urllib.request.urlopen("http://127.0.0.1:9751/metrics", timeout=60) as answer:
            text = answer.read().decode()
        # the capture of a daemon that was killed may have gone on, beside that of the next one
        return (
            text
            if re.search(r'snaporch_snapshots{domain="operated",level="ram"} [1-9]', text)
            else None
        )

    text = wait_for(scraped, "figures after the snapshot", PATIENCE_SECONDS)
    assert "snaporch_scheduler_active 1.0" in text


def test_a_guest_that_is_defined_is_noticed_at_once(guest):
    """The next look would be an hour away."""
    later = Guest.create("later", disks=[Disk("file", "tank/later")], start=False)
    try:
        wait_for(lambda: taken("later"), "a snapshot of the new guest", 300)
        settled()
    finally:
        wait_for(lambda: "taking" not in show("StatusText"), "an idle daemon", PATIENCE_SECONDS)
        later.remove()


def test_a_downtime_is_made_up_for_by_one_snapshot(guest):
    must("systemctl", "stop", UNIT)
    many = len(taken())
    must("date", "--set", "+5 hours")
    assert next_run()["due"]
    status = snaporch("status", "operated", "--json")
    assert (status.status, status.json["domains"][0]["policies"][0]["missed"]) == (10, 2)
    assert snaporch("status", "--nagios").status == 2
    must("systemctl", "start", UNIT)
    wait_for(lambda: len(taken()) == many + 1, "the snapshot that makes up for it", 300)
    wait_for(lambda: not next_run()["due"], "the next time", PATIENCE_SECONDS)
    wait_for(lambda: "1 scheduled" in show("StatusText"), "the daemon's next", PATIENCE_SECONDS)
    settled()
    coming = datetime.fromisoformat(next_run()["at"])
    assert coming > datetime.now(UTC)
    assert len(taken()) == many + 1
    assert snaporch("status", "operated").status == 0
    must("systemctl", "stop", UNIT)
    assert_clean(guest)


@pytest.mark.parametrize("name", ["snaporch", "snaporch-run-due", "snaporch-recover"])
def test_no_unit_is_more_exposed_than_the_documents_say(guest, name):
    text = run("systemd-analyze", "security", "--no-pager", f"{name}.service").out
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", text)
    assert found, text
    page = (Path(__file__).resolve().parents[2] / "docs/how-to/schedule.md").read_text()
    assert f"at most {MOST_EXPOSURE}" in page
    assert float(found[1]) <= MOST_EXPOSURE, text
