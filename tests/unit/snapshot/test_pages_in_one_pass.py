"""RAM is split into pages while it arrives, or saved as a whole image."""

import os
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from fakes import streams
from fakes.hooks import KilledError, failing, failing_once, no_room_for_pages

from snaporch.bundle.manifest import Role, read_manifest
from snaporch.bundle.page_image import check_image
from snaporch.catalog.records import all_records
from snaporch.context import Clock
from snaporch.errors import InterruptedRunError, RunFailedError, SnaporchError
from snaporch.hypervisor import HypervisorError
from snaporch.journal import release_mark
from snaporch.model import BundleState, DomainState, Level
from snaporch.recovery.recover_runs import preview, recover
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.snapshot.store_pages import PageRoom, page_dataset
from snaporch.snapshot.strategies import ram as ram_strategy
from snaporch.snapshot.strategies.ram_limits import SealingWatch
from snaporch.zfs import PoolError

READING_BACK = "reading RAM back"
SEALING = "sealing the bundle"
SAVING, MOVING = "saving RAM", "writing what changed in RAM"
LARGE = 16_000
"""Pages of a guest whose stream is longer than what waits between libvirt and the page file."""
IMAGE_FILES = ["domain.live.xml", "domain.xml", "manifest.json", "ram.save"]


@pytest.fixture(params=["overlay", "manual"])
def paged(request, world):
    """A guest whose RAM is stored as pages below ``tank/ram``."""
    world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    return world.with_pages(ram_strategy=request.param)


def snapshot(world, name="s1", **more):
    domain = world.hypervisor.domain("web")
    return take_snapshot(world.context, domain, SnapshotRequest(name), **more)


def ram(record):
    return read_manifest(Path(record.bundle)).part(Role.RAM)


def dataset(world):
    return f"tank/ram/{world.hypervisor.domain('web').uuid}"


def root(world):
    return world.root / "zfs" / dataset(world)


def files(record):
    return sorted(os.listdir(record.bundle))


def can_be_restored(world, record):
    """The pages and the rest in the bundle are whole, and the record says so."""
    (listed,) = [
        each
        for each in all_records(world.context.store, world.pool.snapshots())
        if each.run == record.run
    ]
    assert (listed.level, listed.state) == (Level.RAM, BundleState.COMPLETE)
    part = ram(record)
    world.context.store.verify(f"{record.uuid}/{record.run}")
    pages = root(world) / ".zfs/snapshot" / part.pages.name / "pages"
    check_image(Path(record.bundle) / part.name, part.pages, pages, lambda _done: None)
    return True


def test_no_image_is_ever_written(paged):
    seen = []
    for step in (SEALING, READING_BACK):
        paged.heard.at[step] = lambda: seen.extend(paged.paths.bundles.rglob("ram.save"))
    record = snapshot(paged)
    assert seen == []
    assert files(record) == ["domain.live.xml", "domain.xml", "manifest.json", "ram.rest"]
    part = ram(record)
    assert (part.name, part.compression) == ("ram.rest", "pages")
    assert part.payload_bytes == len(paged.guest().ram)
    assert part.pace is not None
    assert can_be_restored(paged, record)
    assert paged.is_as_it_was()
    assert paged.heard.notes == []


def test_the_result_is_the_same_as_of_an_image_that_is_split_later(paged):
    at_once = snapshot(paged)
    paged.with_defaults(ram_store="pages", ram_capture="file")
    later = snapshot(paged, "s2")
    one, two = ram(at_once), ram(later)
    assert (one.pages.sha256, one.pages.bytes) == (two.pages.sha256, two.pages.bytes)
    rests = [(Path(each.bundle) / "ram.rest").read_bytes() for each in (at_once, later)]
    ends = [
        (rest[part.pages.split :], rest[rest.find(b"QEVM") : part.pages.split])
        for rest, part in zip(rests, (one, two), strict=True)
    ]
    assert ends[0] == ends[1]


def test_pages_say_nothing_of_the_speed_of_a_compressor(paged):
    record = snapshot(paged)
    assert paged.context.store.last_save_times(record.uuid) is None


def test_the_pages_are_read_back_before_the_bundle_is_sealed(paged):
    """Nothing may rely on pages that cannot be read."""
    sealed = []

    def differently(name, snapshot):
        paged.snapshotted(name, snapshot)
        for pages in (paged.root / "zfs" / name).glob(f".zfs/snapshot/{snapshot}/pages"):
            pages.write_bytes(pages.read_bytes().replace(b"\x07\x09", b"\x07\x08", 1))

    paged.pool.snapshotted = differently
    paged.heard.at[READING_BACK] = lambda: sealed.extend(paged.paths.bundles.glob("*/[!.]*"))
    with pytest.raises(RunFailedError, match=r"damaged.*only as crash-consistent, without its RAM"):
        snapshot(paged)
    assert sealed == []
    only_a_crash_snapshot_is_left(paged)


def only_a_crash_snapshot_is_left(world):
    (record,) = all_records(world.context.store, world.pool.snapshots())
    assert record.level is Level.CRASH
    assert record.state is not BundleState.COMPLETE
    assert world.pool.snapshots([dataset(world)]) == []
    assert world.is_as_it_was()


def test_a_page_snapshot_that_cannot_be_taken_costs_only_the_ram(paged):
    def refuse():
        paged.hooks.at["pool.snapshot"] = failing(PoolError("zfs snapshot", "out of space"))

    paged.heard.at[SEALING] = refuse
    with pytest.raises(RunFailedError, match=r"out of space.*crash-consistent"):
        snapshot(paged)
    only_a_crash_snapshot_is_left(paged)


def repeated_as_image(world, record, words):
    """The run was repeated with an image, which was split afterwards or stayed."""
    assert (record.level, record.state) == (Level.RAM, BundleState.COMPLETE)
    (note,) = [text for text in world.heard.notes if "repeating with an image" in text]
    assert words in note
    world.context.store.verify(f"{record.uuid}/{record.run}")
    assert world.is_as_it_was()


def test_an_unknown_stream_is_saved_as_an_image(paged):
    paged.guest().ram = streams.guest_stream(LARGE).replace(b"\x03ram", b"\x03rom")
    record = snapshot(paged)
    repeated_as_image(paged, record, "where memory should begin")
    assert files(record) == IMAGE_FILES


@pytest.mark.parametrize("capture", ["auto", "stream"])
def test_a_page_pool_that_fills_up_is_left_for_an_image(paged, monkeypatch, capture):
    paged.with_pages(ram_strategy="overlay", ram_capture=capture)
    paged.guest().ram = streams.guest_stream(LARGE)
    no_room_for_pages(monkeypatch)
    record = snapshot(paged)
    repeated_as_image(paged, record, "No space left on device")
    assert files(record) == IMAGE_FILES
    assert (root(paged) / "pages").stat().st_size == 0


@pytest.mark.parametrize("capture", ["auto", "file"])
def test_the_room_that_guests_need_is_left_while_pages_are_written(paged, monkeypatch, capture):
    """Other guests fill the pool after the run has looked at its room."""
    paged.with_pages(ram_strategy="overlay", ram_capture=capture)
    paged.hypervisor.reports_pauses = False  # else the second half waits in memory
    paged.guest().ram = streams.guest_stream(LARGE + LARGE // 2)
    real = shutil.disk_usage(paged.root)

    def left(path):
        begun = (Path(path) / "pages").exists()
        return real._replace(total=1 << 40, free=1 << (30 if begun else 39))

    monkeypatch.setattr(shutil, "disk_usage", left)
    record = snapshot(paged)
    assert files(record) == IMAGE_FILES
    assert any("kept for others" in text for text in paged.heard.notes)
    assert (root(paged) / "pages").stat().st_size == 0
    assert paged.is_as_it_was()


@pytest.mark.parametrize("waits", [True, False])
def test_a_pool_that_is_slow_to_sync_does_not_cost_the_ram(paged, waits):
    """It is not asked for that any more once RAM is saved, and waits in memory."""
    paged.hypervisor.reports_pauses = waits
    paged.guest().ram = streams.guest_stream(LARGE if waits else LARGE + LARGE // 2)
    syncs, late, sealing = [], [], []

    def slow():
        (late if sealing else syncs).append(None)
        raise PoolError("zpool sync", "took longer than 60 s")

    paged.hooks.at["pool.sync"] = slow
    paged.heard.at[SEALING] = lambda: sealing.append(None)
    assert can_be_restored(paged, snapshot(paged))
    assert paged.heard.notes == []
    assert syncs or waits
    assert late == []


def test_a_count_that_fails_does_not_cost_the_ram(paged):
    snapshot(paged)
    paged.heard.at[SEALING] = lambda: paged.hooks.at.update(
        {"pool.written_since": failing(PoolError("zfs get", "busy"))}
    )
    record = snapshot(paged, "s2")
    assert can_be_restored(paged, record)
    assert ram(record).pages.stored_bytes == 0


def test_a_page_snapshot_that_cannot_be_found_is_destroyed(paged):
    """ZFS has taken it, and fails to list it."""

    def taken(name, snapshot):
        paged.snapshotted(name, snapshot)
        if name == dataset(paged):
            paged.hooks.at["pool.snapshots"] = failing_once(PoolError("zfs list", "busy"))

    paged.pool.snapshotted = taken
    with pytest.raises(RunFailedError, match=r"busy.*crash-consistent"):
        snapshot(paged)
    only_a_crash_snapshot_is_left(paged)


def test_after_an_error_that_cost_the_ram_a_whole_image_is_saved_first(paged):
    """Whatever it was: it may come again."""
    refuse = failing(PoolError("zfs snapshot", "out of space"))
    paged.heard.at[SEALING] = lambda: paged.hooks.at.update({"pool.snapshot": refuse})
    with pytest.raises(RunFailedError, match="out of space"):
        snapshot(paged)
    paged.hooks.at.clear()
    record = snapshot(paged, "s2")
    assert ram(record).name == "ram.save"
    assert any("whole image first" in text for text in paged.heard.steps)


@pytest.mark.parametrize("released", [False, True])
def test_a_run_whose_job_was_aborted_tries_pages_again_unless_its_guardian_did_it(paged, released):
    def abort():
        if released:
            (journal,) = paged.paths.journal.glob("*.jsonl")
            release_mark(journal).touch()
        paged.hypervisor.abort_job(paged.guest().uuid)

    paged.hooks.at["capture.writing"] = abort
    with pytest.raises(SnaporchError, match="canceled by client"):
        snapshot(paged)
    mark = root(paged) / "image-first"
    assert mark.exists() is released
    assert not released or mark.read_bytes() == b"time\n"


def test_pages_are_not_tried_again_if_the_image_after_them_fails_too(paged, monkeypatch):
    """Or if its admin has suspended the guest."""
    paged.guest().ram = streams.guest_stream(LARGE)
    no_room_for_pages(monkeypatch, times=1)
    admin = partial(paged.hypervisor.suspend, paged.guest().uuid)
    paged.hooks.at["capture.writing"] = admin
    with pytest.raises(SnaporchError, match="No space left on device"):
        snapshot(paged)
    assert paged.guest().state is DomainState.PAUSED
    assert (root(paged) / "image-first").read_bytes() == b""


def test_pages_are_tried_again_if_the_image_after_them_was_taken_apart(paged, monkeypatch):
    paged.guest().ram = streams.guest_stream(LARGE)
    no_room_for_pages(monkeypatch, times=1)
    record = snapshot(paged)
    repeated_as_image(paged, record, "No space left on device")
    assert ram(record).name == "ram.rest"
    assert not (root(paged) / "image-first").exists()


def test_an_error_after_the_guest_has_left_its_images_has_an_image_first_noted(paged):
    paged.with_pages(ram_strategy="overlay")
    paged.hooks.at["capture.switched"] = failing(HypervisorError("web", "odd thing"))
    with pytest.raises(SnaporchError, match="odd thing"):
        snapshot(paged)
    assert (root(paged) / "image-first").read_bytes() == b""


def test_pages_that_took_too_long_are_not_tried_again_for_seven_days(world):
    """Images do not show that pages have become faster."""
    late = [0.0]
    world.clock = Clock(monotonic=lambda: time.monotonic() + late[0])
    world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    world.with_pages(ram_time_budget="30s", on_ram_budget="abort")
    mark = root(world) / "image-first"

    def go_on():
        late[0] += 60

    world.hooks.at["capture.writing"] = go_on
    with pytest.raises(RunFailedError, match="more than 30 s"):
        snapshot(world)
    world.hooks.at.clear()
    assert mark.read_bytes() == b"time\n"
    for name, days, stays in (("s2", 0, True), ("s3", 6.9, True), ("s4", 7.1, False)):
        noted = time.time() - days * 86400
        os.utime(mark, (noted, noted))
        world.heard.steps.clear()
        assert ram(snapshot(world, name)).name == "ram.rest"
        assert any("whole image first" in text for text in world.heard.steps)
        assert mark.exists() is stays
    world.heard.steps.clear()
    snapshot(world, "s5")
    assert not any("whole image first" in text for text in world.heard.steps)


def test_pages_that_could_not_be_sealed_in_time_have_taken_too_long(paged, monkeypatch):
    def too_slow(_watch, _moved):
        raise RunFailedError("web", "the bundle store has taken nothing for 300 s")

    monkeypatch.setattr(SealingWatch, "check", too_slow)
    with pytest.raises(RunFailedError, match="without its RAM"):
        snapshot(paged)
    assert (root(paged) / "image-first").read_bytes() == b"time\n"


def test_a_pool_for_pages_that_does_not_answer_costs_no_snapshot(paged, monkeypatch):
    """Its disks hang, say; the guest's own pools do not."""
    hangs = threading.Event()
    monkeypatch.setattr(ram_strategy, "_PAGES_SECONDS", 0.1)
    monkeypatch.setattr(ram_strategy, "pages_target", lambda *_: hangs.wait(10))
    try:
        record = snapshot(paged)
    finally:
        hangs.set()
    assert record.level is Level.RAM
    assert any("the pool for pages does not answer" in text for text in paged.heard.steps)


def test_a_rate_holds_for_the_image_after_pages_that_failed(world):
    """It was lifted, to end the stream; it is lifted again if RAM changes faster."""
    world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    world.with_pages(ram_rate=1000)
    world.guest().ram_bytes, world.guest().resident_bytes = 1, 0
    world.guest().ram = streams.guest_stream(LARGE).replace(b"\x03ram", b"\x03rom")
    world.hypervisor.reports_pauses = False
    snapshot(world)
    assert len([text for text in world.heard.notes if "faster than the rate" in text]) == 2


def test_a_guest_that_is_to_be_ended_gets_an_image_first(world):
    """It would stay paused while its pages are read back."""
    world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    world.with_pages(ram_strategy="manual")
    seen = []

    def end(record, _check):
        seen.append((files(record), any(READING_BACK in text for text in world.heard.steps)))
        raise RunFailedError("web", "was not fenced", "look")

    with pytest.raises(SnaporchError, match="was not fenced"):
        take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s1"), end=end)
    assert seen == [(IMAGE_FILES, False)]


@pytest.mark.parametrize(("capture", "step"), [("auto", SAVING), ("file", MOVING)])
def test_guests_of_another_pool_do_not_wait_for_pages(world, capture, step):
    """Guests whose disks are in the pool of the pages: snapshots in their pauses would."""
    world.add_guest(disks={"vda": "flash/web"})
    world.with_pages(ram_capture=capture)
    world.hypervisor.reports_pauses = False
    world.guest().ram = streams.guest_stream(2 * LARGE)
    syncs = []

    def count():
        world.hooks.at["pool.sync"] = lambda: syncs.append(None)

    def end():
        world.hooks.at.pop("pool.sync", None)

    world.heard.at[step] = count
    world.hooks.at["capture.switched"] = world.heard.at[READING_BACK] = end
    assert can_be_restored(world, snapshot(world))
    assert syncs


def test_the_recovery_of_a_run_asks_only_for_the_guests_own_pages(paged):
    uuid = killed_while_pages_are_read_back(paged)
    paged.pool.create("slow/data")
    asked, snapshots = [], paged.pool.snapshots
    paged.hooks.at["pool.local_properties"] = lambda: asked.append("all")
    recover(paged.context, uuid)
    assert asked == []
    assert [each.name for each in snapshots([dataset(paged)])] == []


def test_a_run_that_a_signal_ended_tries_pages_again(paged):
    paged.hooks.at["capture.writing"] = lambda: setattr(
        paged.context.interrupt, "signum", signal.SIGTERM
    )
    with pytest.raises(InterruptedRunError, match="SIGTERM"):
        snapshot(paged)
    assert not (root(paged) / "image-first").exists()


def test_a_mark_that_cannot_be_set_does_not_hide_the_error(paged, tmp_path):
    def refuse():
        (root(paged) / "image-first").symlink_to(tmp_path / "elsewhere")
        paged.hooks.at["pool.snapshot"] = failing(PoolError("zfs snapshot", "out of space"))

    paged.heard.at[SEALING] = refuse
    with pytest.raises(RunFailedError, match="out of space"):
        snapshot(paged)
    assert not (tmp_path / "elsewhere").exists()


class Usage:
    """A full pool."""

    free = 0
    total = 1 << 40


def test_a_pool_without_room_is_not_touched(paged, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage())
    record = snapshot(paged)
    assert files(record) == IMAGE_FILES
    assert not (root(paged) / "pages").exists()
    assert any("whole image first" in text for text in paged.heard.steps)
    assert any("make room in the pool" in text for text in paged.heard.notes)


def has_free(monkeypatch, megabytes):
    """Besides what is kept for others."""
    real = shutil.disk_usage("/")._replace(total=1 << 40, free=(1 << 30) + (megabytes << 20))
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: real)


def test_a_pool_without_room_for_the_memory_that_a_guest_may_still_use_gets_an_image(
    paged, monkeypatch
):
    has_free(monkeypatch, 15)
    assert ram(snapshot(paged)).name == "ram.rest"
    assert any("pages may need 16 MiB, 15 MiB are free" in text for text in paged.heard.steps)


def page_room(world):
    place = page_dataset(world.context, world.hypervisor.domain("web").uuid)
    return PageRoom(world.context, place)


def test_pages_that_zfs_does_not_count_yet_are_synced_before_room_runs_out(paged, monkeypatch):
    has_free(monkeypatch, 80)
    room, syncs = page_room(paged), []
    paged.hooks.at["pool.sync"] = lambda: syncs.append(len(syncs))
    room.settle()
    room.settle()
    assert syncs == []
    room.settle()
    assert syncs == [0]
    has_free(monkeypatch, 0)
    with pytest.raises(OSError, match="kept for others"):
        room.settle()


def test_pages_that_cannot_be_synced_take_no_room_of_others(paged, monkeypatch):
    has_free(monkeypatch, 40)
    room = page_room(paged)
    paged.hooks.at["pool.sync"] = failing(PoolError("zpool sync", "took longer than 60 s"))
    room.settle(at_once=True)
    with pytest.raises(OSError, match="kept for others"):
        room.settle(at_once=True)


def test_a_foreign_dataset_is_left_alone(paged):
    paged.pool.create(dataset(paged))
    record = snapshot(paged)
    assert files(record) == IMAGE_FILES
    assert not (root(paged) / "pages").exists()


def test_a_stream_whose_end_is_unknown_is_an_image_the_next_time(paged):
    """It is found too late to save RAM again."""
    whole = paged.guest().ram
    paged.guest().ram = whole[: whole.index(b"\x04the devices")]
    with pytest.raises(RunFailedError, match=r"without the state of the devices.*crash-consistent"):
        snapshot(paged)
    only_a_crash_snapshot_is_left(paged)
    record = snapshot(paged, "s2")
    assert record.level is Level.RAM
    assert ram(record).name == "ram.save"
    assert (root(paged) / "image-first").exists()
    paged.guest().ram = whole
    assert ram(snapshot(paged, "s3")).name == "ram.rest"
    assert not (root(paged) / "image-first").exists()
    paged.heard.steps.clear()
    assert ram(snapshot(paged, "s4")).name == "ram.rest"
    assert not any("whole image first" in text for text in paged.heard.steps)


@pytest.mark.parametrize("step", [SEALING, READING_BACK])
def test_a_run_killed_before_its_seal_leaves_no_complete_bundle(paged, step):
    paged.heard.at[step] = paged.hooks.kill
    with pytest.raises(KilledError):
        snapshot(paged)
    paged.heard.at.clear()
    paged.hooks.revive()
    recover(paged.context, paged.hypervisor.domain("web").uuid)
    only_a_crash_snapshot_is_left(paged)
    assert can_be_restored(paged, snapshot(paged, "s2"))


def killed_while_pages_are_read_back(world):
    world.heard.at[READING_BACK] = world.hooks.kill
    with pytest.raises(KilledError):
        snapshot(world)
    world.heard.at.clear()
    world.hooks.revive()
    return world.hypervisor.domain("web").uuid


def test_pages_of_a_run_that_was_killed_are_destroyed_as_foreseen(paged):
    snapshot(paged, "s0")
    uuid = killed_while_pages_are_read_back(paged)
    pages = f"{dataset(paged)}@s1"
    assert f"destroy {pages}" in [str(each) for each in preview(paged.context, uuid)]
    assert f"destroyed {pages}" in [str(each) for each in recover(paged.context, uuid)]
    assert [each.name for each in paged.pool.snapshots([dataset(paged)])] == ["s0"]


def test_pages_stay_if_the_bundle_may_be_sealed(paged):
    """The store with the unfinished bundle may be missing."""
    uuid = killed_while_pages_are_read_back(paged)
    paged.paths.bundles.rename(paged.root / "elsewhere")
    recover(paged.context, uuid)
    assert [each.name for each in paged.pool.snapshots([dataset(paged)])] == ["s1"]


def test_pages_that_cannot_be_destroyed_do_not_hinder_the_recovery(paged):
    uuid = killed_while_pages_are_read_back(paged)
    paged.hooks.at["pool.destroy_snapshots"] = failing(PoolError("zfs destroy", "busy"))
    recover(paged.context, uuid)
    assert any("pages of RAM may be left" in text for text in paged.heard.notes)
    assert list(paged.paths.journal.glob("*.jsonl")) == []
    assert paged.is_as_it_was()


def test_a_signal_while_pages_are_read_back_does_not_cost_the_ram(paged):
    paged.heard.at[READING_BACK] = lambda: setattr(
        paged.context.interrupt, "signum", signal.SIGTERM
    )
    assert can_be_restored(paged, snapshot(paged))


def test_the_second_snapshot_writes_only_what_changed(paged, monkeypatch):
    snapshot(paged)
    real, places = os.pwrite, []

    def noted(descriptor, data, place):
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name == "pages":
            places.append((place, len(data)))
        return real(descriptor, data, place)

    monkeypatch.setattr(os, "pwrite", noted)
    paged.guest().ram = streams.guest_stream(seed=4, changed=(7, 9))
    record = snapshot(paged, "s2")
    assert places == [(7 * 4096, 4096), (9 * 4096, 4096)]
    assert can_be_restored(paged, record)
