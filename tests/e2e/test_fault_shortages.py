"""What runs out or goes wrong around a run: space, an agent, a snapshot's name, the clock."""

import time
from collections import deque
from contextlib import contextmanager
from pathlib import Path

import pytest
from faults.oracle import assert_no_loss, assert_well, look
from faults.process import Run, snaporch_here
from faults.stopping import AT_THE_END_OF_RAM
from guests.disks import Disk, zfs
from guests.guest import Guest
from support import (
    BUNDLES,
    JOURNAL,
    OVERLAYS,
    assert_clean,
    must,
    one_line_error,
    run,
    wait_for,
    zfs_snapshots,
)

from snaporch.bundle.store import MARKER


@pytest.fixture(scope="module")
def guest():
    disks = [Disk("file", "tank/short"), Disk("zvol", "flash/short", size_mib=64)]
    made = Guest.create("short", kind="busy", disks=disks)
    must("install", "-d", "-m", "700", str(BUNDLES))  # the first snapshots have theirs in another
    (BUNDLES / MARKER).touch()
    yield made
    made.remove()


TOO_SMALL_KIB = 2600
"""For two overlays of the guest, which writes 1 MiB of each disk over and over: with what qcow2
needs for itself they come to 2.7 MiB, filled or not."""


@pytest.fixture(autouse=True)
def well(guest):
    """Whatever is short, the guest must not notice."""
    mark = guest.mark()
    guest.wait_count()
    yield
    before = look(guest, mark)
    assert_well(guest, "running")
    assert_no_loss(guest, before)


@contextmanager
def small(directory, options):
    """Mount a file system over a directory; it hides the directory's files meanwhile."""
    directory.mkdir(parents=True, mode=0o711, exist_ok=True)
    must("mount", "-t", "tmpfs", "-o", "mode=711", "tmpfs", str(directory))
    if directory == BUNDLES:
        (BUNDLES / MARKER).touch()
    must("mount", "-o", f"remount,{options}", str(directory))
    try:
        yield
    finally:
        must("umount", "-l", str(directory))


@contextmanager
def small_disk(directory, image):
    """The same, one that a power loss does not empty: overlays are on no other."""
    directory.mkdir(parents=True, mode=0o711, exist_ok=True)
    with image.open("wb") as stream:
        stream.truncate(TOO_SMALL_KIB << 10)
    must("mkfs.ext2", "-q", "-F", "-b", "1024", "-N", "64", "-m", "0", str(image))
    must("mount", "-o", "loop", str(image), str(directory))
    directory.chmod(0o711)
    (directory / "lost+found").rmdir()
    try:
        yield
    finally:
        must("umount", "-l", str(directory))


@contextmanager
def under_way(tmp_path, guest, point, *options, settings="", paths=""):
    """A run that is stopped at a point."""
    path = tmp_path / "snaporch.toml"
    path.write_text(f"[paths]\n{paths}\n[defaults]\n{settings}\n")
    process = Run("--config", str(path), "snapshot", guest.name, *options, point=point)
    try:
        process.wait_stopped()
        yield process
    finally:
        process.kill()
        process.close()


def fill(directory):
    """Use up the space that is left."""
    outcome = run("dd", "if=/dev/zero", f"of={directory / 'filler'}", "bs=64k")
    assert "No space" in outcome.err


@pytest.mark.daily(2, "long")
def test_no_space_for_what_the_guest_writes_to_its_overlay(guest, tmp_path):
    """QEMU pauses a guest that it cannot write for; the run must bring it back."""
    with (
        small_disk(OVERLAYS, tmp_path / "disk"),
        under_way(
            tmp_path,
            guest,
            "before:release",
            settings='ram_strategy = "overlay"',
            paths="overlay_reserve_mib = 1\noverlay_floor_mib = 0",
        ) as process,
    ):
        fill(OVERLAYS)
        wait_for(lambda: guest.state() == "paused", "QEMU to pause the guest")
        process.go_on()
        outcome = process.wait()
        assert outcome.status == 0, outcome
        (OVERLAYS / "filler").unlink()
        assert_clean(guest)


@pytest.mark.daily(2, "long")
def test_no_space_for_overlays_and_killed(guest, tmp_path):
    with (
        small_disk(OVERLAYS, tmp_path / "disk"),
        under_way(
            tmp_path,
            guest,
            "before:release",
            settings='ram_strategy = "overlay"',
            paths="overlay_reserve_mib = 1\noverlay_floor_mib = 0",
        ) as process,
    ):
        fill(OVERLAYS)
        wait_for(lambda: guest.state() == "paused", "QEMU to pause the guest")
        process.kill()
        wait_for(lambda: guest.state() == "running", "the guardian")
        wait_for(lambda: "nothing to recover" in snaporch_here("recover").err, "its end")
        (OVERLAYS / "filler").unlink()
        assert_clean(guest)


@pytest.mark.daily(2, "long")
def test_no_space_in_the_pool_for_the_commit(guest, tmp_path):
    """The guest continues on its overlay, which holds what the dataset has no room for."""
    (dataset,) = [name for name in guest.datasets() if name.startswith("tank/")]
    settings = 'ram_strategy = "overlay"'
    with under_way(tmp_path, guest, "before:release", settings=settings) as process:
        guest.wait_count(beyond=guest.wait_count() + 20)
        must("zpool", "sync", "tank")  # what is still to be written is not in "used" yet
        used = int(zfs("get", "-Hpo", "value", "used", dataset))
        zfs("set", f"quota={used}", dataset)
        process.go_on()
        one_line_error(quiet(process.wait()), 9, "without reaching the base", "snaporch recover")
    assert any(path.startswith(str(OVERLAYS)) for path in guest.sources().values())
    assert guest.state() == "running"
    guest.wait_count(beyond=guest.wait_count() + 5)
    zfs("set", "quota=none", dataset)
    outcome = snaporch_here("recover", "--wait", "60s")
    assert outcome.status == 0, outcome
    assert_clean(guest)


@pytest.mark.daily(1)
@pytest.mark.parametrize("way", ["overlay", "manual"])
def test_no_space_in_the_bundle_store_for_ram(guest, tmp_path, way):
    """It may be noticed before the snapshots are taken or after: then they are crash-consistent."""
    settings = f'ram_strategy = "{way}"\ncompression = "none"'
    with (
        small(BUNDLES, "size=64m"),
        under_way(tmp_path, guest, "before:freeze", settings=settings) as process,
    ):
        fill(BUNDLES)
        process.go_on()
        one_line_error(quiet(process.wait()), 8, "No space")
        (BUNDLES / "filler").unlink()
        assert_clean(guest)


@pytest.mark.daily(1)
@pytest.mark.parametrize("way", ["overlay", "manual"])
def test_no_space_in_the_bundle_store_when_it_is_sealed(guest, tmp_path, way):
    settings = f'ram_strategy = "{way}"'
    with (
        small(BUNDLES, "size=64m"),
        under_way(tmp_path, guest, "before:seal", settings=settings) as process,
    ):
        fill(BUNDLES)
        process.go_on()
        one_line_error(quiet(process.wait()), 8, "crash-consistent")
        (BUNDLES / "filler").unlink()
        assert_clean(guest)


@pytest.mark.daily(2, "long")
def test_a_bundle_store_that_cannot_be_written(guest, tmp_path):
    before = zfs_snapshots()
    with small(BUNDLES, "ro"):
        outcome = snaporch_here("snapshot", guest.name)
        one_line_error(quiet(outcome), 7, str(BUNDLES))
        assert_clean(guest)
    assert zfs_snapshots() == before


@pytest.mark.daily(1)
@pytest.mark.parametrize("way", ["overlay", "manual", "paused"])
def test_one_pool_refuses_the_snapshot(guest, tmp_path, way):
    """The name is taken there meanwhile: what the other pool took goes, what was there stays."""
    name = f"taken-{way}"
    level = "paused" if way == "paused" else "ram"
    settings = "" if way == "paused" else f'ram_strategy = "{way}"'
    options = ("--name", name, "--level", level)
    point = "before:pool-snapshot"
    with under_way(tmp_path, guest, point, *options, settings=settings) as process:
        zfs("snapshot", f"tank/short@{name}")
        process.go_on()
        one_line_error(quiet(process.wait()), 8, name)
    assert zfs_snapshots(f"@{name}") == [f"tank/short@{name}"]
    assert_clean(guest)
    zfs("destroy", f"tank/short@{name}")


@pytest.mark.daily(1)
@pytest.mark.parametrize("way", ["overlay", "manual", "paused"])
@pytest.mark.parametrize("days", [-1, 1])
def test_the_clock_jumps(guest, tmp_path, way, days):
    level = "paused" if way == "paused" else "ram"
    settings = "" if way == "paused" else f'ram_strategy = "{way}"'
    with under_way(tmp_path, guest, "after:freeze", "--level", level, settings=settings) as process:
        now = time.time()
        since = time.monotonic()
        must("date", "-s", f"@{int(now + days * 86400)}")
        process.go_on()
        outcome = process.wait()
        must("date", "-s", f"@{int(now + time.monotonic() - since)}")
    assert outcome.status == 0, outcome
    assert f"done: {level} snapshot" in outcome.err


DEADLINE = 'ram_strategy = "{}"\nfreeze_deadline = "3s"'


@pytest.mark.daily(2, "long")
@pytest.mark.timeout(200)
def test_a_run_that_is_stopped_when_qemu_pauses_its_guest_for_the_end_of_ram(guest, tmp_path):
    settings = DEADLINE.format("manual")
    with under_way(tmp_path, guest, AT_THE_END_OF_RAM, settings=settings) as process:
        wait_for(lambda: guest.state() == "running", "the guardian")
        process.go_on()
        one_line_error(quiet(process.wait()), 8, "the guest is as it was", "crash-consistent")
    assert_clean(guest)


@pytest.mark.daily(1)
@pytest.mark.parametrize("way", ["manual", "overlay"])
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.timeout(200)
def test_no_space_for_what_the_guardian_has_to_say(guest, tmp_path, way, killed):
    settings = DEADLINE.format(way)
    with (
        small_disk(JOURNAL, tmp_path / "disk"),
        under_way(
            tmp_path, guest, "past:freeze", settings=settings, paths="overlay_max_mib = 1"
        ) as process,
    ):
        fill_with_names(JOURNAL)
        if killed:
            process.kill()
        wait_for(lambda: is_released(guest), "the guardian")
        if not killed:
            process.go_on()
            outcome = process.wait()
            assert outcome.status == 0, outcome
            assert "it did not stay as it was" in outcome.err
        wait_for(lambda: not list(JOURNAL.glob("*.jsonl")), "its end")
    assert_clean(guest)


def fill_with_names(directory):
    """No more file can be made there."""
    names = (directory / f"filler-{number}" for number in range(1000))
    with pytest.raises(OSError, match="No space"):
        deque(map(Path.touch, names), maxlen=0)


def is_released(guest):
    """Whether the guest runs on its base images."""
    on_overlays = any(path.startswith(str(OVERLAYS)) for path in guest.sources().values())
    return guest.state() == "running" and not on_overlays


@pytest.mark.daily(2, "long")
def test_an_agent_that_never_answers(tmp_path):
    silent = Guest.create(
        "silent",
        kind="linux",
        disks=[Disk("file", "tank/silent")],
        command_line="agent=stopped",
    )
    try:
        silent.wait_agent()
        mark = silent.mark()
        path = tmp_path / "snaporch.toml"
        path.write_text('[defaults]\nagent_timeout = "1s"\n')
        command = ("--config", str(path), "snapshot", silent.name, "--level", "quiesced")
        began = time.monotonic()
        one_line_error(quiet(snaporch_here(*command)), 5, "agent")
        assert time.monotonic() - began < 60
        assert_clean(silent)
        path.write_text('[defaults]\nagent_timeout = "1s"\non_unavailable = "paused"\n')
        outcome = snaporch_here(*command)
        assert outcome.status == 0, outcome
        assert "taking paused instead" in outcome.err
        silent.wait_count()
        silent.assert_undisturbed(mark)
        assert_clean(silent)
    finally:
        silent.remove()


def quiet(outcome):
    """Without the steps it reported."""
    lines = [line for line in outcome.err.splitlines() if line.startswith("snaporch:")]
    outcome.err = "\n".join(lines)
    return outcome
