"""A run that the kernel kills for want of memory: its unit, its guardian and the guest continue."""

import os
import re
from contextlib import suppress
from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import JOURNAL, STALLED, assert_clean, must, run, snaporch, wait_for

pytestmark = pytest.mark.timeout(400)
CONFIG = Path("/etc/snaporch/snaporch.toml")
UNITS = Path("/etc/systemd/system")
PROGRAMS = Path("/run/programs")
HOLD = Path("/run/hold-compressor")
STEP = 1 << 20
POLICY = """
[schedule]
refresh = "1h"
[defaults]
compression = "gzip"
ram_strategy = "overlay"
[policy.{name}]
every = "1w"
domains = ["starved"]
"""
PIGZ = f"""#!/bin/sh
case $(tr '\\0' ' ' < /proc/$PPID/cmdline) in
*" snapshot "*) echo "$PPID" > {STALLED}.new; mv {STALLED}.new {STALLED}; read -r _ < {HOLD} ;;
esac
exec /usr/bin/pigz "$@"
"""


def write(path, text, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


@pytest.fixture(scope="module")
def guest():
    """A UEFI guest: its firmware alone is more RAM than the pipes can hold."""
    must("ip", "link", "set", "lo", "up")
    CONFIG.parent.mkdir(exist_ok=True)
    write(PROGRAMS / "pigz", PIGZ, 0o755)
    path = f"{PROGRAMS}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"
    for unit in ("snaporch", "snaporch-run-due"):
        write(UNITS / f"{unit}.service.d" / "test.conf", f"[Service]\nEnvironment=PATH={path}\n")
    made = Guest.create("starved", disks=[Disk("file", "tank/starved")], firmware="uefi")
    assert snaporch("install").status == 0
    must("systemctl", "daemon-reload")
    yield made
    made.remove()


@pytest.fixture
def release():
    """Compressors of runs wait until this is called."""
    STALLED.unlink(missing_ok=True)
    os.mkfifo(HOLD)
    descriptor = os.open(HOLD, os.O_RDWR)

    def go_on():
        os.write(descriptor, b"go on\n" * 9)
        HOLD.unlink(missing_ok=True)

    yield go_on
    go_on()
    os.close(descriptor)


def show(unit, name):
    return must("systemctl", "show", "-P", name, unit).strip()


def log(unit):
    return run("journalctl", "--no-pager", "-u", unit).out


def starve(unit, process):
    """Take memory from a unit until the kernel kills that process of it, and no other."""
    group = Path("/sys/fs/cgroup", show(unit, "ControlGroup").lstrip("/"))
    for each in map(int, (group / "cgroup.procs").read_text().split()):
        # before the limit is lifted again the kernel may want more than the one
        score = "1000" if each == process else "-1000"
        with suppress(OSError):  # it has just ended
            Path(f"/proc/{each}/oom_score_adj").write_text(score)

    def killed():
        text = (group / "memory.events").read_text()
        return int(re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)[1])

    limit = int((group / "memory.current").read_text())
    with suppress(OSError):  # the unit is over
        while not killed() and limit > STEP:
            limit -= STEP
            (group / "memory.max").write_text(str(limit))
        (group / "memory.max").write_text("max")
    wait_for(lambda: not Path(f"/proc/{process}/exe").exists(), "the end of the run")
    assert "oom-kill" in must("dmesg")


@pytest.mark.daily(1)
@pytest.mark.parametrize("unit", ["snaporch.service", "snaporch-run-due.service"])
def test_no_other_process_ends_and_the_guest_is_released(guest, release, unit):
    CONFIG.write_text(POLICY.format(name=f"of-{unit.partition('.')[0]}"))
    mark = guest.mark()
    must("systemctl", "start", "--no-block", unit)
    wait_for(STALLED.exists, "RAM to flow", 300)
    process = int(STALLED.read_text())
    main = show(unit, "MainPID")
    assert process != int(main)
    (journal,) = JOURNAL.glob("*.jsonl")
    guardian = f"snaporch-guardian-{journal.stem}.service"
    assert show(guardian, "ActiveState") == "active"
    starve(unit, process)
    wait_for(lambda: not journal.exists(), "the guardian to settle the run", 200)
    release()
    guest.wait_count()
    guest.assert_undisturbed(mark)
    if unit == "snaporch.service":
        assert (show(unit, "ActiveState"), show(unit, "MainPID")) == ("active", main), log(unit)
        must("systemctl", "stop", unit)
        assert show(unit, "Result") == "success"
    else:  # the unit reports that its run failed; it was not killed
        wait_for(lambda: show(unit, "ActiveState") == "failed", "the end of the unit", 200)
        assert show(unit, "Result") == "exit-code", log(unit)
    assert_clean(guest)
