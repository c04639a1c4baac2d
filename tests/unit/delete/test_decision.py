from dataclasses import replace

import pytest

from snaporch.catalog.keep import KEEP_HOLD
from snaporch.catalog.safety_copy_holds import UNDO_HOLD
from snaporch.delete.decision import SnapshotFacts, refusal
from snaporch.fence import Fence
from snaporch.restore.journal import HOLD as RESTORE_HOLD

FREE = SnapshotFacts(
    domain="web",
    snapshot="s1",
    holds={},
    clones={},
    mounts=[],
    kept=False,
    shared_with=[],
    copies=[],
    unfinished=False,
    moving=None,
    last=[],
)
MOVING = Fence("u", "web", "2026-01-01T00:00:00+00:00", "r", "s1", "nas")


def held(*tags):
    return {"holds": {"tank/web@s1": [*tags]}}


def line(also_newest=False, **facts):
    error = refusal(replace(FREE, **facts), also_newest=also_newest)
    return error.line() if error else ""


def test_a_snapshot_that_nothing_needs_may_be_deleted():
    assert line() == ""


@pytest.mark.parametrize(
    ("facts", "reason", "step"),
    [
        ({"kept": True}, "is kept", "snaporch unkeep web@s1"),
        (held(KEEP_HOLD), "is kept", "snaporch unkeep web@s1"),
        (held(UNDO_HOLD), "is needed to undo a restore", "after prune.safety_keep"),
        (held(RESTORE_HOLD), "was interrupted", "snaporch recover web"),
        ({"moving": MOVING}, "its failover to nas at @s1", "run: snaporch failover u --to nas"),
        ({"unfinished": True}, "was interrupted", "snaporch recover web"),
        (held("mine"), "tank/web@s1 is held (mine)", "zfs release mine tank/web@s1"),
        (
            {"clones": {"tank/c": ["zfs", "destroy", "tank/c"]}},
            "has clones: tank/c",
            "zfs destroy tank/c",
        ),
        ({"mounts": ["the guest db"]}, "is mounted: the guest db", "unmount it"),
        ({"shared_with": ["db@s1"]}, "is also db@s1", "add db@s1"),
        ({"copies": ["a@s", "b@s"]}, "it has no readable manifest", "zfs destroy"),
        ({"last": ["the newest good snapshot"]}, "is the newest good snapshot of web", "--also"),
    ],
)
def test_what_is_needed_is_refused_with_the_next_step(facts, reason, step):
    text = line(**facts)
    assert text.startswith("web@s1: ")
    assert reason in text
    assert step in text.partition("; ")[2]


def test_only_the_last_good_ones_can_be_deleted_by_an_option():
    assert line(last=["the newest good snapshot"], also_newest=True) == ""
    assert line(kept=True, also_newest=True)
    assert line(moving=MOVING, also_newest=True)
    assert line(**held("mine"), also_newest=True)


def test_the_command_that_deletes_a_clone_is_finished():
    delete = ["snaporch", "clone", "--delete", "my test"]
    other = ["zfs", "destroy", "tank/other"]
    clones = {"tank/c": delete, "flash/c": delete, "tank/other": other}
    assert line(clones=clones) == (
        "web@s1: has clones: tank/c, flash/c, tank/other; "
        "delete them first: snaporch clone --delete 'my test'; zfs destroy tank/other"
    )


def test_an_undo_is_given_up_on_all_the_datasets_that_are_held_for_it():
    text = line(holds={"tank/a b@s1": [UNDO_HOLD], "flash/web@s1": ["mine", UNDO_HOLD]})
    command = f"zfs release {UNDO_HOLD} 'tank/a b@s1' flash/web@s1"
    assert text.endswith(f"give that undo up: {command}")
    assert "snaporch undo" not in text, "its own safety copy would need the snapshot, too"


def test_names_in_commands_are_quoted():
    assert "snaporch unkeep 'my web@s1'" in line(domain="my web", kept=True)
