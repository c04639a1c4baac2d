"""sanoid's rounds that are killed, in each other's way, or too slow."""

import os
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from guests.sector import agreed_count
from sanoid_here import PATIENT, Sanoid, autosnaps, forget, records
from support import (
    BUNDLES,
    JOURNAL,
    RUNTIME,
    assert_clean,
    assert_restored,
    config,
    restore,
    stalled_compressor,
    wait_for,
    wait_for_ram_phase,
)

from snaporch.catalog.torn import commits_in

HOOK = "/usr/local/bin/snaporch hook sanoid pre"


@pytest.fixture(scope="module")
def guest():
    """A UEFI guest: its firmware alone is more RAM than the pipes between us can hold."""
    disks = [Disk("file", "tank/cut"), Disk("zvol", "flash/cut")]
    made = Guest.create("cut", disks=disks, firmware="uefi")
    yield made
    made.remove()


@pytest.fixture(autouse=True)
def undisturbed(guest):
    """Checks that the guest was, at the latest at the end of the test."""
    mark = [guest.mark()]

    def check():
        guest.wait_count()
        guest.assert_undisturbed(mark[0])
        mark[0] = None

    yield check
    if mark[0] is not None:
        check()
    guest.wait_count()
    assert_clean(guest)
    forget()


class Gate:
    """Where sanoid waits between the freeze and its snapshot."""

    def __init__(self, directory: Path) -> None:
        self._gate = directory / "gate"
        self._frozen = directory / "frozen"
        os.mkfifo(self._gate)

    @property
    def script(self) -> str:
        """The pre script: the real hook, and then the wait."""
        return f"{HOOK} && touch {self._frozen} && cat {self._gate}"

    def wait(self) -> None:
        """Until the guest is frozen and the hook has returned."""
        wait_for(self._frozen.exists, "the freeze")

    def open(self) -> None:
        """Let sanoid continue, to its next dataset if there is one."""
        self._frozen.unlink()
        with self._gate.open("w"):
            pass


@contextmanager
def at_the_gate(tmp_path, *, env=None, **template):
    """A sanoid that has the guest frozen and waits."""
    gate = Gate(tmp_path)
    sections = {"tank/cut": "no"}
    sanoid = Sanoid.configured("gate", sections, pre_snapshot_script=gate.script, **template)
    with sanoid.started(env) as process:
        gate.wait()
        yield gate, process


def holder():
    """The process that holds the guest."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"snaporch.sanoid.hold.process" in words:
                return int(entry.name)
    raise AssertionError("no process holds the guest")


def on_overlays(guest):
    return any("/overlays/" in source for source in guest.sources().values())


def is_committed(guest):
    """Whether the guest is back on its disks, so that new snapshots are of one instant again."""
    commits = [commit for path in JOURNAL.glob("*.jsonl") for commit in commits_in(path)]
    return not on_overlays(guest) and all(commit.until is not None for commit in commits)


def test_killed_with_its_process_group_while_the_guest_is_frozen(guest, tmp_path):
    with at_the_gate(tmp_path) as (_gate, process):
        assert on_overlays(guest)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        wait_for(lambda: not on_overlays(guest), "the guest to be released")
    assert records(guest) == []
    assert list(BUNDLES.glob("*/*")) == []


def test_killed_with_its_process_group_while_ram_is_saved(guest, tmp_path):
    sanoid = Sanoid.configured("ram", {"tank/cut": "no"})
    with stalled_compressor(tmp_path) as environment, sanoid.started(environment) as process:
        wait_for_ram_phase()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        wait_for(lambda: not list(RUNTIME.glob("*.ram")), "the end of the run")
    assert not on_overlays(guest)
    assert autosnaps(*guest.datasets()) == []


def test_the_holder_is_killed_while_the_guest_is_frozen(guest, tmp_path):
    """The guardian releases the guest; sanoid's snapshot after that is recorded as it is."""
    with at_the_gate(tmp_path) as (gate, process):
        os.kill(holder(), signal.SIGKILL)
        wait_for(lambda: is_committed(guest), "the guardian")
        gate.open()
        out, _ = process.communicate()
    assert "was not frozen for tank/cut@autosnap_" in out
    (record,) = records(guest)
    assert (record["level"], record["bundle"]) == ("crash", None)


def test_sanoid_takes_too_long(guest, tmp_path):
    with (
        config(tmp_path, '[defaults]\nhook_deadline = "3s"\n') as environment,
        at_the_gate(tmp_path, env=environment) as (gate, process),
    ):
        wait_for(lambda: is_committed(guest), "the deadline")
        gate.open()
        out, _ = process.communicate()
    assert "recorded as crash-consistent" in out
    (record,) = records(guest)
    assert record["level"] == "crash"


def test_two_sanoids_at_once(guest, tmp_path, undisturbed):
    """One takes hourly, the other daily snapshots; the second comes into the first's window."""
    sections = {"tank/cut": "no", "flash/cut": "no"}
    second = Sanoid.configured("second", sections, hourly="0", daily="5")
    gate = Gate(tmp_path)
    first = Sanoid.configured("first", sections, pre_snapshot_script=gate.script)
    with config(tmp_path, PATIENT) as env, first.started(env) as one:
        gate.wait()
        with second.started(env) as two:
            wait_for(lambda: len(autosnaps("tank/cut", "flash/cut")) > 0, "the second's snapshot")
            gate.open()
            gate.wait()
            gate.open()
            out, _ = two.communicate()
            assert "WARN" not in out, out
            out, _ = one.communicate()
            assert "WARN" not in out, out
    undisturbed()
    wait_for(lambda: not list(JOURNAL.glob("*.jsonl")), "the bundles to be sealed")
    found = records(guest)
    assert len(found) >= 2
    assert {(record["level"], record["state"]) for record in found} == {("ram", "complete")}
    runs = {run: [r for r in found if r["run"] == run] for run in {r["run"] for r in found}}
    assert any(of_both(taken) for taken in runs.values()), runs
    expected = {run: count_of_one_instant(guest, taken) for run, taken in runs.items()}
    newest = found[-1]
    mark = guest.mark()
    restore(guest, newest["snapshot"])
    assert_restored(guest, mark, expected[newest["run"]])


def of_both(taken):
    """Whether the snapshots of a run are of the one sanoid and of the other."""
    return {record["snapshot"].rpartition("_")[2] for record in taken} >= {"hourly", "daily"}


def count_of_one_instant(guest, taken):
    """What the snapshots of a run agree on.

    A disk holds the same in each, whatever its name; of two disks the second may be one behind.
    """
    names = {record["snapshot"] for record in taken}
    held = []
    for image in guest.images:
        there = {full.partition("@")[2] for full in autosnaps(image.dataset)}
        held.append({image.count(name) for name in names & there})
    assert all(len(counts) <= 1 for counts in held), held
    return agreed_count([count for counts in held for count in counts])
