"""The daemon with real guests: it takes what is due, obeys signals, and its end harms no guest."""

import os
import signal
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import (
    JOURNAL,
    PATIENCE_SECONDS,
    assert_clean,
    must,
    open_gate,
    snaporch,
    stalled_compressor,
    wait_for,
    wait_for_ram_phase,
    zfs_snapshots,
)

POLICY = '[schedule]\nrefresh = "2s"\n[policy.{name}]\nevery = "1w"\ndomains = ["served"]\n'


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("served", disks=[Disk("file", "tank/served")])
    yield made
    made.remove()


@pytest.fixture
def listener(tmp_path):
    """What systemd would hear."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.settimeout(PATIENCE_SECONDS)
        bound.bind(str(tmp_path / "notify"))
        yield bound


def hear(listener, word):
    while word not in (text := listener.recv(4096).decode()):
        pass
    return text


@contextmanager
def serving(tmp_path, **env):
    """A daemon, killed at the end if it still runs."""
    environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), **env}
    log = tmp_path / "daemon.log"
    with log.open("a") as stream:
        process = subprocess.Popen(
            ["snaporch", "daemon"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        print(log.read_text())


def taken(policy):
    return zfs_snapshots(f"_{policy}")


def test_due_ones_are_taken_and_a_reload_brings_others(guest, listener, tmp_path):
    config = tmp_path / "snaporch.toml"
    config.write_text(POLICY.format(name="first"))
    with serving(tmp_path, SNAPORCH_CONFIG=str(config)) as daemon:
        hear(listener, "READY=1")
        wait_for(lambda: taken("first"), "the first policy's snapshot", PATIENCE_SECONDS)
        assert hear(listener, "STATUS=1 scheduled")
        config.write_text(POLICY.format(name="second"))
        daemon.send_signal(signal.SIGHUP)
        wait_for(lambda: taken("second"), "the second policy's snapshot", PATIENCE_SECONDS)
        hear(listener, "STATUS=1 scheduled, next served (second)")
        busy = snaporch("run-due")
        assert busy.status == 6
        assert "held by daemon" in busy.err
        daemon.send_signal(signal.SIGTERM)
        hear(listener, "STOPPING=1")
        assert daemon.wait(PATIENCE_SECONDS) == 0
    assert (len(taken("first")), len(taken("second"))) == (1, 1)
    records = snaporch("list", "served", "--json").json
    assert {record["state"] for record in records} == {"complete"}
    assert_clean(guest)


def test_sigterm_in_the_middle_of_a_capture_lets_it_undo_or_finish_itself(
    guest, listener, tmp_path
):
    """Which of both depends on whether its RAM has fit into the pipe by then."""
    mark = guest.mark()
    with stalled_compressor(tmp_path, spared=True) as env:
        config = Path(env["SNAPORCH_CONFIG"])
        config.write_text(config.read_text() + POLICY.format(name="third"))
        with serving(tmp_path, **env) as daemon:
            wait_for_ram_phase()
            daemon.send_signal(signal.SIGTERM)
            hear(listener, "STOPPING=1")
            open_gate(tmp_path)
            assert daemon.wait(PATIENCE_SECONDS) == 0
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert_clean(guest)


def test_a_daemon_that_is_killed_takes_no_capture_with_it(guest, listener, tmp_path):
    mark = guest.mark()
    with stalled_compressor(tmp_path, spared=True) as env:
        config = Path(env["SNAPORCH_CONFIG"])
        config.write_text(config.read_text() + POLICY.format(name="fourth"))
        with serving(tmp_path, **env) as daemon:
            wait_for_ram_phase()
            daemon.kill()
            daemon.wait()
            assert must("pgrep", "-f", "snapshot .* --policy fourth"), "the run ended, too"
            assert any(JOURNAL.iterdir())
            open_gate(tmp_path)
        wait_for(lambda: not any(JOURNAL.iterdir()), "a settled run", PATIENCE_SECONDS)
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert_clean(guest)
