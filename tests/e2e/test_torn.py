"""Somebody else snapshots a guest's dataset all the time: what a commit tears is told apart.

Three runs each day, a thousand by `make test-all`.
"""

import os

import pytest
from guests.disks import Disk
from guests.guest import Guest
from stranger import assert_none_is_called_otherwise, judge, stranger
from support import assert_clean, config, must, one_line_error, run, snaporch

DATASET = "tank/torn"
LONG = bool(os.environ.get("LONG"))
ROUNDS = 1000 if LONG else 3


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("torn", kind="busy", disks=[Disk("file", DATASET)])
    yield made
    made.remove()


@pytest.mark.timeout(120 * ROUNDS + 300)
def test_what_a_commit_tears_is_called_torn_and_nothing_else_is_bad(guest, tmp_path, capsys):
    guest.wait_count(beyond=guest.wait_count() + 40)  # all slots have been written
    mark, judged = guest.mark(), []
    for number in range(ROUNDS):
        with (
            config(tmp_path, '[defaults]\nram_strategy = "overlay"\n') as environment,
            stranger(guest),
        ):
            taken = snaporch("snapshot", guest.name, "--name", f"s{number}", env=environment)
        assert taken.status == 0, taken
        found = judge(guest)
        assert_none_is_called_otherwise(found)
        assert [each.torn for each in found if each.name.endswith(f"@s{number}")] == [False]
        assert_clean(guest)
        must("zfs", "destroy", f"{DATASET}@%")
        judged += found
    guest.assert_undisturbed(mark)
    torn = [each for each in judged if each.torn]
    seen = [each for each in torn if not each.whole]
    with capsys.disabled():
        print(f"\n{ROUNDS} runs, {len(judged)} snapshots, {len(torn)} torn, {len(seen)} seen to be")
    assert torn
    assert seen or not LONG  # the judge can tell, but a few may be whole by luck


def test_a_snapshot_of_ours_that_is_torn_is_of_no_use(guest, tmp_path):
    """As sanoid's are, if its guest was let go before it came."""
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
