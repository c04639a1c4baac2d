"""RAM in pages of a larger guest: what it costs, and the result of a kill in the middle."""

import signal
import time
from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from paged import configured, dataset, listed, page_snapshots, ram, settle, uuid, zfs_number
from support import (
    JOURNAL,
    assert_clean,
    assert_restored,
    must,
    restore,
    run,
    snaporch,
    snapshot,
    started,
    wait_for,
)

__all__ = ["configured"]
TRIES = 8


@pytest.fixture(scope="module")
def big():
    made = Guest.create(
        "big",
        disks=[Disk("file", "tank/big")],
        kind="linux",
        command_line="dirty_mib=48 dirty_rate=20",
    )
    made.wait_count(beyond=20)
    yield made
    made.remove()


def recovered():
    """Wait until the guardian of a killed run has recovered it."""
    wait_for(lambda: not any(JOURNAL.iterdir()), "its guardian has recovered the run")


@pytest.mark.daily(1, "long")
def test_the_second_and_the_third_cost_a_small_part_of_the_first(big):
    """A Linux guest with 176 MiB that dirties a page now and then."""
    written, recorded = {}, {}
    for name in ("b1", "b2", "b3"):
        document = snapshot(big, "--name", name)
        assert ram(document)["compression"] == "pages", document
        written[name] = zfs_number(f"{dataset(big)}@{name}", "written")
        recorded[name] = ram(document)["pages"]["stored_bytes"]
        big.wait_count(beyond=big.snapshot_count(name) + 10)
    print("written to ZFS:", written)
    for name in ("b2", "b3"):
        assert written[name] < written["b1"] / 8
        assert recorded[name] == written[name]
    mark = big.mark()
    count = big.snapshot_count("b2")
    restore(big, "b2", "--discard-newer", "--no-safety")
    assert_restored(big, mark, count)


@pytest.mark.daily(1, "long")
def test_a_run_that_is_killed_while_it_writes_pages_does_no_harm(big):
    """The killed run is undone, its guest counts on, and the next run repairs the page file."""
    guest = big
    pages = Path("/tank/ram") / uuid(guest) / "pages"
    mark = guest.mark()
    for number in range(TRIES):
        name = f"killed{number}"
        pages.unlink(missing_ok=True)  # so that all of it has to be written
        with started("snapshot", guest.name, "--name", name, env={}) as process:
            while process.poll() is None and not (pages.exists() and pages.stat().st_blocks > 8):
                time.sleep(0.001)
            process.send_signal(signal.SIGKILL)
            process.wait()
        if process.returncode == -signal.SIGKILL and name not in page_snapshots(guest):
            break
        print(name, "was over too soon")
    else:
        pytest.fail("no run was killed in time")
    recovered()
    guest.wait_count()
    guest.assert_undisturbed(mark)
    left = [
        each for each in snaporch("list", guest.name, "--json").json if each["snapshot"] == name
    ]
    assert all(each["level"] == "crash" for each in left)
    after = snapshot(guest, "--name", f"after-{name}")
    assert ram(after)["compression"] == "pages"
    count = guest.snapshot_count(f"after-{name}")
    settle(guest)
    mark = guest.mark()
    restore(guest, f"after-{name}", "--discard-newer", "--no-safety")
    assert_restored(guest, mark, count)
    assert snaporch("prune").status == 0
    assert_clean(guest)


@pytest.mark.daily(1, "long")
def test_a_run_that_is_killed_while_it_reads_pages_back_leaves_no_complete_bundle(big):
    with started("snapshot", big.name, "--name", "unread", env={}) as process:
        taken = Path("/tank/ram") / uuid(big) / ".zfs/snapshot/unread"
        while process.poll() is None and not taken.exists():
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
    recovered()
    found = listed(big, "unread")
    assert process.returncode == -signal.SIGKILL
    assert (found["level"], found["state"]) != ("ram", "complete")
    assert "unread" not in page_snapshots(big)
    big.wait_count()
    assert ram(snapshot(big, "--name", "after-unread"))["compression"] == "pages"
    assert_clean(big)


@pytest.mark.daily(1, "long")
def test_a_page_pool_that_fills_up_while_ram_arrives_leaves_an_image(big):
    """The quota is set when the room was already checked."""
    place = dataset(big)
    pages = Path("/tank/ram") / uuid(big) / "pages"
    pages.unlink(missing_ok=True)
    mark = big.mark()
    with started("snapshot", big.name, "--name", "full", "--json", env={}) as process:
        while process.poll() is None and not pages.exists():
            time.sleep(0.001)
        # ZFS refuses a quota that what was written meanwhile exceeds
        while run("zfs", "set", f"quota={zfs_number(place, 'used') + (8 << 20)}", place).status:
            assert process.poll() is None, "all pages are written"
        process.wait()
    must("zfs", "set", "quota=none", place)
    found = listed(big, "full")
    print(process.returncode, found)
    assert process.returncode == 0
    assert (found["level"], found["state"]) == ("ram", "complete")
    assert ram(found)["name"] == "ram.save"
    big.assert_undisturbed(mark)
    count = big.snapshot_count("full")
    settle(big)
    mark = big.mark()
    restore(big, "full", "--discard-newer", "--no-safety")
    assert_restored(big, mark, count)
    assert ram(snapshot(big, "--name", "after-full"))["compression"] == "pages"
    assert_clean(big)
