"""The guest's agent: quiesced snapshots, a dead agent, the clock after a restore."""

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import (
    assert_clean,
    assert_restored,
    config,
    one_line_error,
    restore,
    snaporch,
    snapshot,
    zfs_snapshots,
)


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("linux", kind="linux", disks=[Disk("zvol", "tank/linux", size_mib=64)])
    made.wait_agent()
    yield made
    made.remove()


def test_quiesced(guest):
    mark = guest.mark()
    taken = snapshot(guest, "--level", "quiesced")
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert_clean(guest)
    assert (taken["level"], taken["state"]) == ("quiesced", "complete")
    assert taken["pause_ms"] > 0


def test_only_the_mount_points_that_are_named(guest, tmp_path):
    text = '[defaults]\nquiesce_mountpoints = ["/nowhere"]\n'
    with config(tmp_path, text) as environment:
        outcome = snaporch("snapshot", guest.name, "--level", "quiesced", "--json", env=environment)
    assert outcome.status == 0, outcome.err
    assert outcome.json["level"] == "crash"  # nothing was frozen, so nothing is promised
    assert "recorded as crash-consistent" in outcome.err


def test_frozen_for_longer_than_the_budget_is_crash(guest, tmp_path):
    mark = guest.mark()
    text = '[defaults]\nquiesce_budget = "100ms"\n'
    slow = tmp_path / "slow.py"  # a pool that takes its time
    slow.write_text(
        "import time\nfrom snaporch.snapshot import run as snapshot\n"
        "real = snapshot._Run._snapshot_pools\n"
        "def slowly(self, reference):\n    real(self, reference)\n    time.sleep(0.2)\n"
        "snapshot._Run._snapshot_pools = slowly\n"
        "from snaporch.cli.main import run\nrun()\n"
    )
    from support import run

    with config(tmp_path, text) as environment:
        command = ["python3", "-P", str(slow), "snapshot", guest.name, "--level", "quiesced"]
        outcome = run(*command, "--json", env=environment)
    assert outcome.status == 0, outcome.err
    assert outcome.json["level"] == "crash"
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert_clean(guest)


def test_ram_of_a_linux_guest_and_its_clock(guest):
    taken = snapshot(guest)
    count = guest.snapshot_count(taken["snapshot"])
    guest.wait_count(beyond=count + 5)
    mark = guest.mark()
    restored = restore(guest, taken["snapshot"])
    assert_restored(guest, mark, count)
    assert restored["clock_set"]


def test_an_agent_that_never_answers():
    deaf = Guest.create(
        "deaf",
        kind="linux",
        command_line="agent=stopped",
        disks=[Disk("zvol", "tank/deaf", size_mib=64)],
    )
    mark = deaf.mark()
    before = zfs_snapshots()
    outcome = snaporch("snapshot", deaf.name, "--level", "quiesced")
    one_line_error(outcome, 5, "deaf", "does not answer")
    assert zfs_snapshots() == before
    deaf.wait_count()
    deaf.assert_undisturbed(mark)
    assert snapshot(deaf)["level"] == "ram"
    deaf.remove()
