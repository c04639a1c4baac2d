"""Another program snapshots a guest's dataset all the time: torn snapshots are recorded as torn.

Some runs each day, a thousand by `make test-all`.
"""

import os
import shutil
import time

import pytest
from faults.process import snaporch_here
from guests.disks import Disk
from guests.guest import Guest
from other_program import assert_none_is_called_otherwise, judge, slow_commits, snapshot_loop
from support import assert_clean, config, must, one_line_error, run, snaporch

DATASET = "tank/torn"
ROUNDS = 1000 if os.environ.get("LONG") else 3
HELD_FOR = (0, 4, 8)
"""Snapshots for which a commit is held up, by turns: not at all is how it is on a host."""
REPORT_EACH = 5


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("torn", kind="load", disks=[Disk("file", DATASET)])
    yield made
    made.remove()


@pytest.mark.timeout(60 * ROUNDS + 120)
def test_what_a_commit_tears_is_called_torn_and_nothing_else_is_bad(guest, tmp_path, capsys):
    guest.wait_count(beyond=guest.wait_count() + 40)  # all slots have been written
    mark, judged, held, began = guest.mark(), [], 0, time.monotonic()

    def report():
        torn = [each for each in judged if each.torn]
        seen = sum(not each.whole for each in torn)
        with capsys.disabled():
            print(
                f"\n{number + 1} runs in {time.monotonic() - began:.0f} s: "
                f"{len(judged)} snapshots, {held} in commits that were held up, "
                f"{len(torn)} called torn, {seen} seen to be",
                flush=True,
            )
        return seen

    for number in range(ROUNDS):
        rounds = HELD_FOR[number % len(HELD_FOR)]
        with (
            config(tmp_path, '[defaults]\nram_strategy = "overlay"\n') as environment,
            snapshot_loop(guest) as loop,
            slow_commits(lambda loop=loop, rounds=rounds: loop.wait(rounds)),
        ):
            taken = snaporch_here(
                "snapshot", guest.name, "--name", f"s{number}", "--json", env=environment
            )
        assert taken.status == 0, taken
        found = judge(guest)
        assert_none_is_called_otherwise(found)
        assert [each.torn for each in found if each.name.endswith(f"@s{number}")] == [False]
        assert_clean(guest)
        must("zfs", "destroy", f"{DATASET}@%")
        shutil.rmtree(taken.json["bundle"])
        judged += found
        held += rounds
        if (number + 1) % REPORT_EACH == 0:
            report()
    seen = report()
    guest.assert_undisturbed(mark)
    assert seen >= held / 2  # the judge finds torn ones; one may be under way as a commit begins


def test_a_snapshot_of_ours_that_is_torn_is_of_no_use(guest, tmp_path):
    """As sanoid's are, if its guest was released before sanoid took them."""
    with config(tmp_path, '[defaults]\nram_strategy = "overlay"\n') as environment:
        taken = snaporch("snapshot", guest.name, "--name", "ours", env=environment)
    assert taken.status == 0, taken
    must("zfs", "set", "snaporch:level=torn", f"{DATASET}@ours")
    mark = guest.mark()
    for words in (["restore", "torn@ours", "--yes"], ["clone", "torn@ours", "again"]):
        one_line_error(snaporch(*words), 5, "taken while overlays were committed")
    outcome = run("snaporch", "verify", "torn@ours")
    assert outcome.status != 0
    assert "torn" in must("snaporch", "list", guest.name)
    guest.wait_count()
    guest.assert_undisturbed(mark)
