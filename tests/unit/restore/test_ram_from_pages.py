"""Restore, extract and verify RAM that is in pages."""

import os
import shutil
from pathlib import Path

import pytest
from fakes import streams
from fakes.hooks import failing

from snaporch.bundle.manifest import Role
from snaporch.bundle.save_image import read_header
from snaporch.catalog.records import all_records
from snaporch.clone.clone import CloneRequest, check_clone, clone
from snaporch.errors import AttentionError, BusyError, RefusedError, RunFailedError
from snaporch.hypervisor import HypervisorError
from snaporch.model import BundleState, Level
from snaporch.recovery.recover_runs import recover
from snaporch.restore.bundle_checks import check_bundle
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.ram_from_pages import check_pages, extract_ram
from snaporch.restore.run import restore
from snaporch.restore.source import IncompleteError, complete_source, find_records
from snaporch.show import describe
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.verify.verify import VerifyOptions, verify


@pytest.fixture
def paged(world):
    """A guest that has run on since its snapshot ``s1``, whose RAM is in pages."""
    world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    world.with_pages()
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s1"))
    world.then = world.guest().ram
    world.guest().ram = streams.guest_stream(seed=9, changed=(2, 3))
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s2"))
    world.hooks.log.clear()
    return world


def source(world, name="s1"):
    return complete_source(world.context, find_records(world.context, f"web@{name}")[-1])


def go_back(world, name="s1", **options):
    plan = make_restore_plan(world.context, "web", name, discard_newer=True, **options)
    return restore(world.context, check_bundle(world.context, plan), safety=False)


def page_file(world, name="s1"):
    uuid = world.hypervisor.domain("web").uuid
    return world.root / "zfs/tank/ram" / uuid / ".zfs/snapshot" / name / "pages"


def spoil(path):
    with path.open("r+b") as stream:
        stream.seek(5000)
        byte = stream.read(1)[0]
        stream.seek(5000)
        stream.write(bytes([byte ^ 1]))


def same_memory(one, other):
    """The same pages and devices; only the order of sections differs."""
    return streams.contents(one) == streams.contents(other)


def test_a_restore_resumes_what_was_captured(paged):
    restored = go_back(paged)
    assert restored.resumed
    assert same_memory(paged.guest().ram, paged.then)
    assert not same_memory(paged.guest().ram, streams.guest_stream(seed=9, changed=(2, 3)))
    assert paged.leftovers() == []


def test_each_snapshot_has_its_own_pages(paged):
    go_back(paged, "s2")
    assert same_memory(paged.guest().ram, streams.guest_stream(seed=9, changed=(2, 3)))


def test_damaged_pages_are_found_before_anything_is_touched(paged):
    spoil(page_file(paged))
    with pytest.raises(RefusedError, match=r"damaged.*--cold"):
        go_back(paged)
    assert paged.hooks.acts() == []
    assert paged.leftovers() == []


def test_a_damaged_rest_is_found_before_anything_is_touched(paged):
    spoil_rest(paged)
    with pytest.raises(RefusedError, match="SHA-256"):
        go_back(paged)
    assert paged.hooks.acts() == []


def spoil_rest(world):
    path = Path(source(world).directory) / "ram.rest"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_no_room_for_the_image_is_known_before_anything_is_touched(paged, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage())
    with pytest.raises(RefusedError, match="no room"):
        go_back(paged)
    assert paged.hooks.acts() == []
    assert paged.leftovers() == []


class Usage:
    """A full file system."""

    free = total = 0


def test_a_store_that_cannot_be_written_is_an_error_in_words(paged, monkeypatch):
    real = os.fsync

    def full(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("/ram.save"):
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailedError, match="nothing was touched"):
        go_back(paged)
    assert paged.leftovers() == []


def test_a_restore_that_fails_half_way_keeps_its_image_for_the_next_try(paged):
    paged.hooks.at["hypervisor.restore"] = failing(HypervisorError("ram", "no"))
    with pytest.raises(AttentionError):
        go_back(paged)
    assert list(paged.paths.bundles.glob("*/.*.partial/ram.save"))
    paged.hooks.at.clear()
    recover(paged.context, paged.hypervisor.domain("web").uuid)
    assert same_memory(paged.guest().ram, paged.then)
    assert paged.leftovers() == []


def test_a_restore_that_is_undone_leaves_no_image(paged):
    paged.hooks.at["hypervisor.destroy"] = failing(HypervisorError("web", "no"))
    with pytest.raises((RunFailedError, HypervisorError)):
        go_back(paged)
    assert paged.leftovers() == []


def test_booting_from_the_disks_needs_no_pages(paged):
    spoil(page_file(paged))
    go_back(paged, cold=True)
    assert paged.guest().live is not None


def test_without_its_pages_a_snapshot_has_no_ram(paged):
    entry = source(paged).manifest.pages
    paged.pool.destroy_snapshots([f"{entry.dataset}@{entry.name}"])
    (record,) = [
        r for r in all_records(paged.context.store, paged.pool.snapshots()) if r.snapshot == "s1"
    ]
    assert (record.state, record.level) == (BundleState.INCOMPLETE, Level.CRASH)
    with pytest.raises(RefusedError, match="--cold"):
        go_back(paged)
    with pytest.raises(IncompleteError, match="are missing"):
        source(paged)


def test_pages_are_found_in_a_replica(paged):
    entry = source(paged).manifest.pages
    full = f"{entry.dataset}@{entry.name}"
    paged.pool.replicate(full, "flash/copy")
    target = paged.root / "zfs/flash/copy/.zfs/snapshot/s1"
    target.mkdir(parents=True)
    page_file(paged).rename(target / "pages")
    paged.pool.destroy_snapshots([full])
    go_back(paged)
    assert same_memory(paged.guest().ram, paged.then)


def test_a_clone_resumes_under_its_own_name(paged):
    request = CloneRequest("test", resumed=True)
    check_clone(paged.context, source(paged), request)
    made = clone(paged.context, source(paged), request)
    assert made.resumed
    guest = paged.guest("test")
    assert same_memory(guest.ram, paged.then)
    assert "<name>test</name>" in guest.live


def name_pages_of(paged, uuid):
    """The snapshot came from a replica, and its pages are in the dataset of another guest."""
    own = paged.hypervisor.domain("web").uuid
    paged.pool.set_properties(["tank/web@s1", "flash/web@s1"], {"snaporch:copy": "nas"})
    assert complete_source(paged.context, find_records(paged.context, "web@s1")[-1])
    paged.pool.rename(f"tank/ram/{own}", f"tank/ram/{uuid}")


def test_a_snapshot_that_came_from_a_replica_has_only_pages_of_its_guest(paged):
    """The manifest may be forged: it could name the RAM of another guest of this host."""
    name_pages_of(paged, "4b1d2f0e-0000-4000-8000-0000000000db")
    with pytest.raises(IncompleteError, match="the pages of its RAM are missing"):
        source(paged)
    with pytest.raises(RefusedError, match=r"pages of its RAM are missing.*--cold"):
        go_back(paged)
    assert source(paged, "s2").has_ram


def test_verify_reads_every_page(paged):
    record = find_records(paged.context, "web@s1")[-1]
    assert verify(paged.context, record, VerifyOptions(run=False)).passed
    spoil(page_file(paged))
    outcome = verify(paged.context, record, VerifyOptions(run=False))
    assert not outcome.passed
    assert "damaged" in outcome.failure.line()


def test_a_page_file_that_cannot_be_read_is_an_error_in_words(paged, monkeypatch):
    def broken(*_arguments):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(IncompleteError, match="Input/output"):
        check_pages(paged.context, "web@s1", source(paged).part(Role.RAM))


def test_extracting_ram_gives_an_image_for_libvirt(paged, tmp_path):
    done = extract_ram(paged.context, source(paged), tmp_path)
    path = tmp_path / "web@s1-ram.save"
    assert (done.target, done.path) == ("ram", str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_header(path).was_running
    with pytest.raises(RefusedError, match="exists"):
        extract_ram(paged.context, source(paged), tmp_path)


def test_extracting_ram_that_is_an_image_copies_it(paged, tmp_path):
    paged.with_defaults()
    take_snapshot(paged.context, paged.hypervisor.domain("web"), SnapshotRequest("s3"))
    extract_ram(paged.context, source(paged, "s3"), tmp_path / "image")
    kept = source(paged, "s3").directory / "ram.save"
    assert (tmp_path / "image").read_bytes() == kept.read_bytes()
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    with pytest.raises(IncompleteError, match="SHA-256"):
        extract_ram(paged.context, source(paged, "s3"), tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir() if "image" in path.name) == ["image"]
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("in_pages", [True, False])
def test_two_extracts_of_ram_do_not_write_one_file(paged, tmp_path, in_pages):
    if not in_pages:
        paged.with_defaults()
    take_snapshot(paged.context, paged.hypervisor.domain("web"), SnapshotRequest("s3"))
    seen = []

    def amount(*_given):
        if not seen:
            seen.append(True)
            with pytest.raises(BusyError, match="another process writes it"):
                extract_ram(paged.context, source(paged, "s1"), tmp_path / "image")

    paged.heard.amount = amount
    extract_ram(paged.context, source(paged, "s3"), tmp_path / "image")
    assert seen == [True]
    assert read_header(tmp_path / "image").was_running
    assert list(tmp_path.glob("*image*")) == [tmp_path / "image"]


@pytest.mark.parametrize("in_pages", [True, False])
def test_extracted_ram_does_not_use_up_the_room_of_guests(paged, tmp_path, monkeypatch, in_pages):
    if not in_pages:
        paged.with_defaults()
    take_snapshot(paged.context, paged.hypervisor.domain("web"), SnapshotRequest("s3"))
    real = shutil.disk_usage(tmp_path)
    looks = [real.total] if in_pages else []
    left = lambda _path: real._replace(free=looks.pop() if looks else 0)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", left)
    with pytest.raises(RunFailedError, match="are kept for others"):
        extract_ram(paged.context, source(paged, "s3"), tmp_path / "image")
    assert not list(tmp_path.glob("*image*"))


def test_damaged_pages_are_not_extracted(paged, tmp_path):
    spoil(page_file(paged))
    with pytest.raises(IncompleteError, match="damaged"):
        extract_ram(paged.context, source(paged), tmp_path / "image")
    assert not list(tmp_path.glob("*image*"))


def test_the_manual_steps_name_the_command_that_makes_an_image(paged):
    record = find_records(paged.context, "web@s2")[-1]
    lines = describe(paged.context, record).by_hand
    made = next(line for line in lines if "extract --ram" in line)
    image = made.split()[4]
    assert f"virsh restore {image} --running" in lines[-2]
