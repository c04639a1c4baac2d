"""RAM in pages of a larger guest: what it costs, and the result of a kill in the middle."""

import signal
import time
from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from paged import configured, dataset, listed, page_snapshots, ram, settle, uuid, zfs_number
from support import assert_clean, assert_restored, restore, snaporch, snapshot, started

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
def test_a_run_that_is_killed_while_it_writes_pages_loses_nothing(big):
    """A killed run leaves its whole image; the next run repairs whatever was half written."""
    guest = big
    pages = Path("/tank/ram") / uuid(guest) / "pages"
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
    document = listed(guest, name)
    assert (document["state"], document["level"]) == ("complete", "ram")
    assert ram(document)["name"] == "ram.save"
    count = guest.snapshot_count(name)
    after = snapshot(guest, "--name", f"after-{name}")
    assert ram(after)["compression"] == "pages"
    second = guest.snapshot_count(f"after-{name}")
    for wanted, expected in ((f"after-{name}", second), (name, count)):
        settle(guest)
        mark = guest.mark()
        restore(guest, wanted, "--discard-newer", "--no-safety")
        assert_restored(guest, mark, expected)
    assert snaporch("prune").status == 0
    assert not (Path(document["bundle"]) / "ram.rest").exists()
    assert_clean(guest)
