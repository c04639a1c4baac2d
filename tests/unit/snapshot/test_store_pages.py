"""A whole image of RAM is stored as pages after the run, or stays as it is."""

import errno
import json
import os
import shutil
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from fakes import streams
from fakes.hooks import KilledError, failing, no_room_for_pages

from snaporch.bundle.manifest import Role, read_manifest
from snaporch.catalog.records import all_records
from snaporch.model import BundleState, Level
from snaporch.schedule.forecast import make_forecasts
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import RAM_PROPERTY, PoolError

SECOND = 2
WRITING, READING_BACK = "writing what changed in RAM", "reading RAM back"
"""The steps, by the beginning of what is reported."""


@pytest.fixture
def paged(world):
    """A guest whose RAM is stored as pages below ``tank/ram``."""
    world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    return world.with_pages(ram_capture="file")


def snapshot(world, name="s1"):
    domain = world.hypervisor.domain("web")
    return take_snapshot(world.context, domain, SnapshotRequest(name))


def ram(record):
    return read_manifest(Path(record.bundle)).part(Role.RAM)


def dataset(world):
    return f"tank/ram/{world.hypervisor.domain('web').uuid}"


def files(record):
    return sorted(os.listdir(record.bundle))


def test_the_image_is_replaced_by_pages_and_the_rest(paged):
    record = snapshot(paged)
    part = ram(record)
    assert (part.name, part.compression) == ("ram.rest", "pages")
    assert files(record) == ["domain.live.xml", "domain.xml", "manifest.json", "ram.rest"]
    assert (part.pages.dataset, part.pages.name) == (dataset(paged), "s1")
    (taken,) = paged.pool.snapshots([dataset(paged)])
    assert (taken.guid, taken.createtxg) == (part.pages.guid, part.pages.createtxg)
    assert taken.properties["ram"] == f"{record.uuid}/{record.run}"
    assert taken.properties["ram-pools"] == "flash,tank"
    assert paged.context.store.verify(f"{record.uuid}/{record.run}")
    assert paged.is_as_it_was()


def test_the_record_is_complete(paged):
    record = snapshot(paged)
    assert (record.level, record.state) == (Level.RAM, BundleState.COMPLETE)
    (listed,) = all_records(paged.context.store, paged.pool.snapshots())
    assert listed == record
    assert record.datasets == ("flash/web", "tank/web")


def test_for_policies_the_snapshot_is_complete(paged):
    """Its pages are in a snapshot that is not one of the domain's disks."""
    snapshot(paged)
    (outlook,) = make_forecasts(paged.context, datetime.now(UTC))
    assert [record.state for record in outlook.records] == [BundleState.COMPLETE]


def test_the_dataset_is_made_once_and_as_configured(paged):
    snapshot(paged)
    paged.guest().ram = streams.guest_stream(seed=4, changed=(7,))
    snapshot(paged, "s2")
    assert paged.hooks.acts().count("pool.create_filesystem") == 1
    names = ["recordsize", "compression", "atime", "snapdir", RAM_PROPERTY]
    assert paged.pool.local_properties(names) == {
        dataset(paged): {
            "recordsize": "16384",
            "snapdir": "hidden",
            "compression": "zstd",
            "atime": "off",
            RAM_PROPERTY: paged.hypervisor.domain("web").uuid,
        }
    }


def test_the_page_file_and_its_directory_are_private(paged):
    snapshot(paged)
    root = paged.root / "zfs" / dataset(paged)
    assert root.stat().st_mode & 0o777 == 0o700
    assert (root / "pages").stat().st_mode & 0o777 == 0o600


def test_images_stay_whole_unless_configured(world):
    world.add_guest()
    record = snapshot(world)
    assert ram(record).name == "ram.save"
    assert "tank/ram" not in {d.name for d in world.pool.datasets()}


def test_levels_without_ram_are_not_touched(paged):
    paged.with_defaults(ram_store="pages", level="paused")
    record = snapshot(paged)
    assert record.level is Level.PAUSED
    assert ram(record) is None
    assert paged.heard.notes == []


def test_a_snapshot_name_that_a_killed_run_left_does_not_matter(paged):
    first = snapshot(paged)
    paged.pool.destroy_snapshots(["tank/web@s1"])
    paged.pool.destroy_snapshots(["flash/web@s1"])
    second = snapshot(paged)
    assert ram(second).pages.name == f"s1_{second.run}"
    assert ram(first).pages.name == "s1"


def test_a_dataset_that_cannot_be_made_leaves_the_image(paged):
    paged.hooks.at["pool.create_filesystem"] = failing(PoolError("zfs create", "no such pool"))
    stays(paged, snapshot(paged), "no such pool")


def test_a_snapshot_that_cannot_be_taken_leaves_the_image(paged):
    no = failing(PoolError("zfs snapshot", "out of space"))
    paged.heard.at[WRITING] = lambda: paged.hooks.at.update({"pool.snapshot": no})
    stays(paged, snapshot(paged), "out of space")


def stays(world, record, words):
    """The complete bundle has the whole image, and a note was printed."""
    assert (record.level, record.state) == (Level.RAM, BundleState.COMPLETE)
    assert ram(record).name == "ram.save"
    assert files(record) == ["domain.live.xml", "domain.xml", "manifest.json", "ram.save"]
    world.context.store.verify(f"{record.uuid}/{record.run}")
    (note,) = [text for text in world.heard.notes if "stays a whole image" in text]
    assert words in note


def test_an_unknown_stream_leaves_the_image(paged):
    paged.guest().ram = streams.guest_stream().replace(b"\x03ram", b"\x03rom")
    stays(paged, snapshot(paged), "where memory should begin")


def test_a_full_disk_leaves_the_image(paged, monkeypatch):
    no_room_for_pages(monkeypatch)
    stays(paged, snapshot(paged), "/tank/ram/pages: No space left on device")


def test_a_pool_without_room_for_all_pages_leaves_the_image(paged, monkeypatch):
    """The guests write to the pool too."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage())
    stays(paged, snapshot(paged), "make room in the pool")
    assert not (paged.root / "zfs" / dataset(paged) / "pages").exists()


class Usage:
    """A full pool."""

    free = 0
    total = 1 << 40


def test_a_dataset_that_is_not_mounted_leaves_the_image(paged):
    paged.resolver.mount_points[dataset(paged)] = None
    stays(paged, snapshot(paged), "zfs mount")


def test_a_foreign_dataset_is_left_alone(paged):
    paged.pool.create(dataset(paged))
    stays(paged, snapshot(paged), f"zfs set {RAM_PROPERTY}=")
    assert not (paged.root / "zfs" / dataset(paged)).exists()


def test_a_signal_stops_the_move_and_not_the_run(paged):
    paged.heard.at[WRITING] = lambda: setattr(paged.context.interrupt, "signum", 15)
    stays(paged, snapshot(paged), "SIGTERM")


@pytest.mark.parametrize(
    ("place", "image_is_named"), [("write", True), ("snapshot", True), ("unlink", False)]
)
def test_a_run_killed_at_any_point_leaves_a_whole_snapshot(
    paged, monkeypatch, place, image_is_named
):
    def unlink(path, *arguments, **options):
        if path.name == "ram.save":
            raise KilledError
        real(path, *arguments, **options)

    def die(*_arguments):
        raise KilledError

    real = Path.unlink
    with monkeypatch.context() as here:
        if place == "write":
            paged.heard.at[WRITING] = lambda: paged.hooks.at.update({"pool.snapshot": die})
        elif place == "snapshot":
            paged.heard.at[READING_BACK] = lambda: here.setattr(os, "fsync", die)
        else:
            here.setattr(Path, "unlink", unlink)
        with pytest.raises(KilledError):
            snapshot(paged)
    paged.heard.at.clear()
    paged.hooks.at.clear()
    (record,) = all_records(paged.context.store, paged.pool.snapshots())
    assert (record.level, record.state) == (Level.RAM, BundleState.COMPLETE)
    paged.context.store.verify(f"{record.uuid}/{record.run}")
    assert (ram(record).name == "ram.save") is image_is_named
    assert (Path(record.bundle) / "ram.save").exists()
    second = snapshot(paged, "s2")
    assert ram(second).name == "ram.rest"


def test_a_manifest_that_may_have_been_replaced_finds_all_its_parts(paged, monkeypatch):
    """The disk fails when the directory is synced: either manifest may be on it later."""
    real, calls = os.fsync, []

    def fail_second(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        calls.append(os.path.isdir(path))
        if calls.count(True) == SECOND:
            raise OSError(errno.EIO, "Input/output error", path)
        real(descriptor)

    paged.heard.at[READING_BACK] = lambda: monkeypatch.setattr(os, "fsync", fail_second)
    record = snapshot(paged)
    assert "Input/output error" in paged.heard.notes[-1]
    assert {"ram.save", "ram.rest"} <= set(files(record))
    assert paged.context.store.verify(f"{record.uuid}/{record.run}")


def test_the_cost_of_the_second_image_comes_from_zfs(paged):
    first = snapshot(paged)
    assert (
        ram(first).pages.stored_bytes
        == paged.pool.sizes([f"{dataset(paged)}@s1"])[f"{dataset(paged)}@s1"][1]
    )
    paged.pool.write(dataset(paged), b"x" * 777)
    assert ram(snapshot(paged, "s2")).pages.stored_bytes == 777
    assert first.stored_bytes == sum(
        part["bytes"] + (part.get("pages") or {"stored_bytes": 0})["stored_bytes"]
        for part in json.loads((Path(first.bundle) / "manifest.json").read_text())["parts"]
    )


def test_pages_that_cannot_be_read_back_leave_the_image(paged):
    """The contents of the snapshot are checked, not what was written."""

    def differently(name, snapshot):
        paged.snapshotted(name, snapshot)
        for pages in (paged.root / "zfs" / name).glob(f".zfs/snapshot/{snapshot}/pages"):
            pages.write_bytes(pages.read_bytes().replace(b"\x07\x09", b"\x07\x08", 1))

    paged.pool.snapshotted = differently
    stays(paged, snapshot(paged), "it is damaged")


def test_a_rest_that_cannot_be_read_back_leaves_the_image(paged):
    def damage():
        (rest,) = paged.paths.bundles.glob("*/*/ram.rest")
        rest.write_bytes(rest.read_bytes()[:-1] + b"?")

    paged.heard.at[READING_BACK] = damage
    stays(paged, snapshot(paged), "it is damaged")


def test_a_page_snapshot_that_is_destroyed_at_once_leaves_the_image(paged):
    def destroy(name, snapshot):
        if name == dataset(paged):
            paged.hooks.at["pool.snapshots"] = partial(gone, f"{name}@{snapshot}")

    def gone(taken):
        del paged.hooks.at["pool.snapshots"]
        paged.pool.destroy_snapshots([taken])

    paged.pool.snapshotted = destroy
    stays(paged, snapshot(paged), "destroyed as soon as it was taken")


@pytest.mark.parametrize(("was", "now"), [("", "hidden"), ("disabled", "hidden"), ("visible",) * 2])
def test_pages_can_be_read_where_a_pool_has_snapdir_disabled(paged, was, now):
    """Whether it is inherited by a dataset of an earlier snaporch, or set on it."""
    snapshot(paged)
    paged.pool.set_properties([dataset(paged)], {"snapdir": was})
    snapshot(paged, "s2")
    assert paged.pool.local_properties(["snapdir"])[dataset(paged)] == {"snapdir": now}
