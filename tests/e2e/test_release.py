"""Other programs act on a guest that a run holds: it is released, and their work is left alone."""

import json
import os
import re
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
from acts import Backup
from faults.machine import restart_libvirtd
from faults.process import Run, snaporch_here
from guests.disks import Disk
from guests.guest import Guest
from support import (
    JOURNAL,
    assert_clean,
    config,
    must,
    one_line_error,
    snaporch,
    snapshot,
    wait_for,
    zfs_snapshots,
)
from support import run as command

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def probe():
    disks = [Disk("file", "tank/held"), Disk("zvol", "flash/held")]
    made = Guest.create("held", disks=disks)
    yield made
    made.remove()


@pytest.fixture(scope="module")
def linux():
    made = Guest.create("talks", kind="linux", disks=[Disk("file", "tank/talks")])
    made.wait_agent()
    yield made
    made.remove()


def fs_status(guest):
    """Whether the file systems are frozen, by the guest's agent."""
    question = '{"execute":"guest-fsfreeze-status"}'
    return json.loads(must("virsh", "qemu-agent-command", guest.name, question))["return"]


def killed(guest, level, point="after:freeze"):
    """A run of a guest that was killed, with its guardian."""
    run = Run("snapshot", guest.name, "--level", level, point=point, guarded=False)
    try:
        run.wait_stopped()
    finally:
        run.kill()
        run.close()


# -- a job of another program --------------------------------------------------------------------


@contextmanager
def backup(guest):
    """A pull-mode backup, as backup tools make it: a job that lasts as long as they like."""
    job = Backup()
    job.do(guest)
    try:
        yield
    finally:
        job.undo(guest)  # if it is there yet


def test_a_paused_guest_goes_on_beside_a_job_of_another_program(probe):
    probe.wait_count()
    mark = probe.mark()
    killed(probe, "paused")
    assert probe.state() == "paused"
    with backup(probe):
        outcome = snaporch_here("recover")
        assert outcome.status == 0, outcome
        assert probe.state() == "running"
    probe.wait_count()
    probe.assert_undisturbed(mark)
    assert_clean(probe)


def test_a_frozen_guest_is_thawed_beside_a_job_of_another_program(linux):
    killed(linux, "quiesced")
    assert fs_status(linux) == "frozen"
    with backup(linux):
        outcome = snaporch_here("recover")
        assert outcome.status == 0, outcome
        assert fs_status(linux) == "thawed"
    linux.wait_count()
    assert_clean(linux)


def test_a_memory_snapshot_of_another_program_is_not_aborted(probe, tmp_path):
    """Its image goes through a pipe without a reader: it lasts until the test reads the pipe."""
    killed(probe, "paused", "past:release")
    probe.wait_count()
    pipe = tmp_path / "theirs"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    disks = "".join(f"<disk name='{target}' snapshot='no'/>" for target in probe.sources())
    xml = tmp_path / "snapshot.xml"
    memory = f"<memory snapshot='external' file='{pipe}'/>"
    xml.write_text(f"<domainsnapshot><name>t</name>{memory}<disks>{disks}</disks></domainsnapshot>")
    words = ["snapshot-create", probe.name, str(xml), "--no-metadata", "--live"]
    theirs = subprocess.Popen(["virsh", *words], stderr=subprocess.PIPE)
    try:
        wait_for(lambda: os.stat(pipe) and _readable(reader), "their image")
        outcome = snaporch_here("recover")
        assert outcome.status == 0, outcome
        assert theirs.poll() is None
    finally:
        os.set_blocking(reader, True)
        while theirs.poll() is None:
            os.read(reader, 1 << 20)
        os.close(reader)
    assert theirs.returncode == 0, theirs.stderr.read()
    theirs.stderr.close()
    assert_clean(probe)


def _readable(descriptor):
    try:
        return bool(os.read(descriptor, 1))
    except BlockingIOError:
        return False


# -- a freeze by another program -----------------------------------------------------------------


@contextmanager
def frozen_by_others(guest):
    must("virsh", "domfsfreeze", guest.name)
    try:
        yield
        assert fs_status(guest) == "frozen"
    finally:
        must("virsh", "domfsthaw", guest.name)


def test_a_freeze_by_another_program_is_left_to_it(linux):
    before = zfs_snapshots()
    with frozen_by_others(linux):
        outcome = snaporch("snapshot", linux.name, "--level", "quiesced")
        one_line_error(outcome, 5, linux.name, "frozen already", "not by snaporch")
    assert zfs_snapshots() == before
    assert_clean(linux)


def test_a_lower_level_leaves_it_to_them_too(linux, tmp_path):
    text = '[defaults]\non_unavailable = "paused"\n'
    with frozen_by_others(linux), config(tmp_path, text) as environment:
        options = ["--level", "quiesced", "--json"]
        outcome = snaporch("snapshot", linux.name, *options, env=environment)
        assert outcome.status == 0, outcome
        assert outcome.json["level"] == "paused"
    assert_clean(linux)


# -- an image that another program has locked ----------------------------------------------------


@contextmanager
def locked(image):
    """A process has an image open, as a script that reads it, or ``qemu-img`` without ``-U``."""
    words = ["qemu-io", "-f", "raw", str(image)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as locker:
        locker.stdin.write(b"read 0 512\n")
        locker.stdin.flush()
        while b"read 512/512" not in locker.stdout.readline():
            assert locker.poll() is None, "it could not have it"
        yield


def test_a_guest_goes_on_when_its_image_is_unlocked(probe, tmp_path):
    """QEMU gives its images' locks up when it has saved RAM; another process may lock one."""
    probe.wait_count()
    mark = probe.mark()
    path = tmp_path / "snaporch.toml"
    path.write_text('[defaults]\nram_strategy = "manual"\n')
    words = ["--config", str(path), "snapshot", probe.name, "--json"]
    run = Run(*words, point="after:freeze")
    try:
        run.wait_stopped()
        with locked(next(image.path for image in probe.images if image.path.is_file())):
            run.go_on()
            wait_for(lambda: "trying again" in run.outcome().err, "a try in vain")
            assert probe.state() == "paused"
        outcome = run.wait()
    finally:
        run.kill()
        run.close()
    assert outcome.status == 0, outcome
    assert outcome.json["level"] == "ram"
    probe.wait_count()
    probe.assert_undisturbed(mark)
    assert_clean(probe)


# -- a freeze that comes late --------------------------------------------------------------------


@contextmanager
def slow_disk(guest):
    """A disk on which a write takes longer than any program waits."""
    must("virsh", "blkdeviotune", guest.name, "vda", "--live", "--write-bytes-sec", "1")
    try:
        yield
    finally:
        must("virsh", "blkdeviotune", guest.name, "vda", "--live", "--write-bytes-sec", "0")


def test_a_freeze_that_comes_late_is_thawed_when_it_comes(linux, tmp_path):
    """The run has ended, its guardian was killed, libvirtd was restarted; the timer is there."""
    path = tmp_path / "snaporch.toml"
    path.write_text('[defaults]\nagent_timeout = "3s"\n')
    options = ["--config", str(path)]
    with slow_disk(linux):
        run = Run(*options, "snapshot", linux.name, "--level", "quiesced")
        outcome = run.wait()
        run.close()
        assert outcome.status == 9, outcome
        (guardian,) = guardians()
        os.kill(guardian, signal.SIGKILL)
        wait_for(lambda: not guardians(), "the guardian's end")
        restart_libvirtd()
        assert list(JOURNAL.glob("*.jsonl"))
        outcome = snaporch_here("status")
        assert outcome.status == 10, outcome
        assert "may still be paused or frozen" in outcome.out
        snaporch_here(*options, "run-due")
        assert guardians()
    wait_for(lambda: not list(JOURNAL.glob("*.jsonl")), "the thaw", 120)
    assert fs_status(linux) == "thawed"
    linux.wait_count()
    assert_clean(linux)


def guardians():
    """Processes that watch over a run."""
    return [
        int(word) for word in command("pgrep", "-f", "snaporch[.]recovery[.]guardian").out.split()
    ]


# -- the agent's time limit ----------------------------------------------------------------------


def test_the_time_that_others_give_the_agent_stays(linux):
    must("virsh", "guest-agent-timeout", linux.name, "--timeout", "77")
    assert snapshot(linux, "--level", "quiesced")["level"] == "quiesced"
    text = Path(f"/run/libvirt/qemu/{linux.name}.xml").read_text()
    assert re.findall(r"<agentTimeout>(.*)</agentTimeout>", text) == ["77"]
    must("virsh", "guest-agent-timeout", linux.name, "--timeout", "-2")


# -- without a journal ---------------------------------------------------------------------------


def test_a_guest_on_an_overlay_without_a_journal_is_returned_as_the_page_says(probe, tmp_path):
    probe.wait_count()
    with config(tmp_path, '[defaults]\nram_strategy = "overlay"\n') as env:
        run = Run("snapshot", probe.name, point="before:release", guarded=False, env=env)
        try:
            run.wait_stopped()
        finally:
            run.kill()
            run.close()
    (journal,) = JOURNAL.glob("*.jsonl")
    moved = journal.rename(JOURNAL.parent / journal.name)
    try:
        overlays = probe.sources()
        section = '"On an overlay of no known run"'
        found = snaporch("recover")
        assert (found.status, section in found.err) == (9, True), found.err
        for overlay in overlays.values():
            assert overlay in found.err
        assert f"{section}  [on-overlay]" in snaporch("status").out
        one_line_error(snaporch("snapshot", probe.name), 5, "an overlay of no known run", section)
        for target in overlays:
            must("virsh", "blockcommit", probe.name, target, "--shallow", "--active", "--wait")
        for target in overlays:
            must("virsh", "blockjob", probe.name, target, "--pivot")
        for inactive in (False, True):
            assert not set(probe.sources(inactive=inactive).values()) & set(overlays.values())
        for overlay in overlays.values():
            os.unlink(overlay)
        done = snaporch("recover")
        assert (done.status, "removed the empty directory" in done.out) == (0, True), done.err
        assert not re.search("on-overlay|unknown-overlay", snaporch("status").out)
    finally:
        moved.rename(journal)
    assert snaporch("recover").status == 0
    probe.wait_count()
    assert_clean(probe)
