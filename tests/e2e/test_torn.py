"""Somebody else snapshots a guest's dataset all the time: what a commit tears is told apart."""

import itertools
import os
import threading
from contextlib import contextmanager

import pytest
from guests.disks import Disk
from guests.guest import Guest
from guests.sector import DiskContentError
from support import assert_clean, config, must, one_line_error, run, snaporch

DATASET = "tank/torn"
ROUNDS = 1000 if os.environ.get("LONG") else 8


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("torn", kind="busy", disks=[Disk("file", DATASET)])
    yield made
    made.remove()


@contextmanager
def stranger():
    """Snapshots of the dataset, one after the other, as fast as they come."""
    over = threading.Event()

    def snapshot():
        for number in itertools.count():
            if over.is_set():
                return
            must("zfs", "snapshot", f"{DATASET}@stranger-{number}")

    thread = threading.Thread(target=snapshot)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def levels():
    """By name, of every snapshot of the dataset."""
    text = must("zfs", "list", "-Hpo", "name,snaporch:level", "-t", "snapshot", "-d", "1", DATASET)
    rows = (line.split("\t") for line in text.splitlines())
    return {name.partition("@")[2]: level for name, level in rows}


def is_of_one_instant(guest, name):
    try:
        guest.disk_counts(name)
        guest.assert_load_whole(name)
    except DiskContentError:
        return False
    return True


@pytest.mark.timeout(60 * ROUNDS + 300)
def test_what_a_commit_tears_is_called_torn_and_nothing_else_is_bad(guest, tmp_path):
    guest.wait_count(beyond=guest.wait_count() + 40)  # all slots have been written
    torn = 0
    for number in range(ROUNDS):
        with config(tmp_path, '[defaults]\nram_strategy = "overlay"\n') as environment, stranger():
            taken = snaporch("snapshot", guest.name, "--name", f"s{number}", env=environment)
        assert taken.status == 0, taken
        found = levels()
        assert found[f"s{number}"] == "ram"
        torn += sum(level == "torn" for level in found.values())
        good = [name for name, level in found.items() if level != "torn"]
        bad = [name for name in good if not is_of_one_instant(guest, name)]
        assert bad == []
        assert_clean(guest)
        must("zfs", "destroy", f"{DATASET}@%")
    assert torn


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
