"""The RAM image of a running guest is decompressed before the guest is stopped."""

import shutil
from dataclasses import replace

import pytest
from fakes.hooks import failing, failing_once

from snaporch.bundle.compress import Compression, CompressionSettings
from snaporch.bundle.manifest import Role
from snaporch.bundle.page_image import decompress_image
from snaporch.bundle.save_image import HEADER_SIZE, SaveImageError, SaveImageWriter, read_header
from snaporch.errors import AttentionError, InterruptedRunError, RefusedError
from snaporch.hypervisor import HypervisorError
from snaporch.known_faults import Component
from snaporch.model import DomainState
from snaporch.recovery.recover_runs import recover
from snaporch.reserve import free_room
from snaporch.restore.bundle_checks import check_bundle
from snaporch.restore.plain_image import is_worth_it, make_plain, resumes_plain
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.run import restore
from snaporch.restore.safety_copy import safety_copy_bytes
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import PoolError

GIB = 1 << 30


def plan_of(world):
    plan = make_restore_plan(world.context, "web", "s1", discard_newer=True)
    return check_bundle(world.context, plan)


def put_back(world):
    return restore(world.context, plan_of(world), safety=False)


def plain_images(world):
    return [
        path
        for path in world.paths.bundles.glob("*/.*.partial/ram.save")
        if read_header(path).compression == 0
    ]


def seen_at(world, act):
    """What there is of plain images when ``act`` is reached."""
    seen = []
    world.hooks.at[act] = lambda: seen.append(len(plain_images(world)))
    return seen


@pytest.mark.parametrize(
    ("size", "memory", "room", "worth"),
    [
        (GIB, 2 * GIB, 4 * GIB, True),
        (GIB + 1, 2 * GIB, 8 * GIB, False),
        (GIB + 1, 8 * GIB, 4 * GIB, False),
        (GIB, 0, 8 * GIB, False),
    ],
)
def test_it_pays_where_memory_and_store_have_room(size, memory, room, worth):
    assert is_worth_it(size, memory=memory, room=room) is worth


def test_a_running_guest_is_stopped_after_its_image_is_plain(story, world):
    stopping, resuming = seen_at(world, "hypervisor.destroy"), seen_at(world, "hypervisor.restore")
    put_back(world)
    assert stopping == [1]
    assert resuming == [1]
    assert world.guest().ram == story.ram
    assert world.leftovers() == []


def test_pages_become_a_plain_image_too(world):
    world.add_guest(disks={"vda": "tank/web"})
    world.with_pages()
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s1"))
    stopping = seen_at(world, "hypervisor.destroy")
    put_back(world)
    assert stopping == [1]


def little_memory(world):
    world.set_memory(2 * plan_of(world).manifest.part(Role.RAM).payload_bytes - 1)


def off(world):
    world.guest().state, world.guest().live = DomainState.OFF, None


def newer_emulator(world):
    world.hypervisor.installed = {Component.LIBVIRT: "11.3.0", Component.QEMU: "11.0.2"}


@pytest.mark.parametrize("how", [little_memory, off, newer_emulator])
def test_elsewhere_the_guest_resumes_from_the_image_as_stored(story, world, how):
    how(world)
    resuming = seen_at(world, "hypervisor.restore")
    put_back(world)
    assert resuming == [0]
    assert world.guest().ram == story.ram


def test_an_image_of_another_size_than_in_the_manifest_is_left_to_libvirt(story, world):
    plan = plan_of(world)
    part = plan.manifest.part(Role.RAM)
    target = world.root / "plain"
    for wrong in (1, -1):
        other = part.model_copy(update={"payload_bytes": part.payload_bytes + wrong})
        assert not make_plain(world.context, "web", plan.ram, other, target)
        assert "another size" in world.context.progress.notes[-1]
        assert not target.exists()


def test_no_more_is_decompressed_than_the_manifest_has(story, world):
    """An image that libvirt compressed has its compressed size there."""
    image, target = world.root / "large", world.root / "plain"
    writer = SaveImageWriter(image, CompressionSettings(Compression.ZSTD), trailer=False)
    data = plan_of(world).ram.read_bytes()
    header = read_header(plan_of(world).ram)
    writer.write(replace(header, compression=0).pack() + data[HEADER_SIZE:][: header.data_length])
    writer.write(b"QEVM" + bytes(64 << 20))
    writer.finish()
    part = plan_of(world).manifest.part(Role.RAM)
    most = []
    world.context.progress.amount = lambda _thing, done, _total: most.append(done)
    assert not make_plain(world.context, "web", image, part, target)
    assert all(done <= part.payload_bytes for done in most)
    assert "another size" in world.context.progress.notes[-1]
    assert not target.exists()


def test_a_damaged_image_is_refused_before_the_guest_is_stopped(story, world):
    plan = plan_of(world)
    data = bytearray(plan.ram.read_bytes())
    data[-12] ^= 0xFF
    plan.ram.chmod(0o600)
    plan.ram.write_bytes(data)
    with pytest.raises(RefusedError, match="damaged"):
        restore(world.context, plan, safety=False)
    assert world.guest().state is DomainState.RUNNING
    assert world.leftovers() == []


def test_the_safety_copy_has_its_room_first(story, world):
    part = plan_of(world).manifest.part(Role.RAM)
    room = free_room(world.context.store.root)
    assert resumes_plain(world.context, part, room // 2)
    assert not resumes_plain(world.context, part, room - part.payload_bytes)


def test_what_newer_snapshots_have_counts_for_the_safety_copy(story, world):
    pool = world.context.pool
    targets = plan_of(world).snapshots
    before = safety_copy_bytes(pool, targets)
    for dataset in story.record.datasets:
        world.pool.write(dataset, b"x" * 1000)
        pool.snapshot([f"{dataset}@newer"], {})
        world.pool.write(dataset, b"")
    assert safety_copy_bytes(pool, targets) > before


def test_zfs_that_gives_no_number_does_not_end_the_restore(story, world):
    world.hooks.at["pool.written_since"] = failing_once(PoolError("tank/web", "no"))
    resuming = seen_at(world, "hypervisor.restore")
    restore(world.context, plan_of(world), safety=True)
    assert resuming == [0]


def test_no_store_is_made_for_it(story, world):
    part = plan_of(world).manifest.part(Role.RAM)
    root = world.context.store.root
    root.rename(root.with_suffix(".away"))
    assert not resumes_plain(world.context, part, 0)
    root.mkdir(mode=0o700)  # an empty mount point
    assert not resumes_plain(world.context, part, 0)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("how", [{"together": "pair"}, {"keep_running": True, "safety": True}])
def test_beside_other_images_the_guest_resumes_from_the_image_as_stored(story, world, how):
    resuming = seen_at(world, "hypervisor.restore")
    restore(world.context, plan_of(world), **({"safety": False} | how))
    assert resuming == [0]
    assert world.guest().ram == story.ram


def test_a_bundle_elsewhere_is_not_decompressed_into_the_store(story, world):
    plan = plan_of(world)
    place = world.root / "elsewhere"
    shutil.copytree(plan.record.bundle, place)
    moved = replace(plan, record=replace(plan.record, bundle=str(place)), ram=place / "ram.save")
    resuming = seen_at(world, "hypervisor.restore")
    restore(world.context, moved, safety=False)
    assert resuming == [0]


def test_an_image_that_only_libvirt_can_decompress_is_left_to_it(story, world):
    plan = plan_of(world)
    other, target = world.root / "other", world.root / "plain"
    data = plan.ram.read_bytes()
    other.write_bytes(replace(read_header(plan.ram), compression=3).pack() + data[HEADER_SIZE:])
    part = plan.manifest.part(Role.RAM)
    assert not make_plain(world.context, "web", other, part, target)
    assert "format 3" in world.context.progress.notes[-1]
    assert not target.exists()


def test_a_broken_image_leaves_no_plain_one(story, world):
    image, target = world.root / "broken", world.root / "plain"
    data = bytearray(plan_of(world).ram.read_bytes())
    data[-12] ^= 0xFF
    image.write_bytes(data)
    with pytest.raises(SaveImageError, match="decompressed"):
        decompress_image(image, target, lambda _done: None)
    assert not target.exists()


def test_a_signal_meanwhile_leaves_the_guest_running(story, world):
    plan = plan_of(world)
    world.context.interrupt.signum = 2
    with pytest.raises(InterruptedRunError):
        make_plain(
            world.context, "web", plan.ram, plan.manifest.part(Role.RAM), world.root / "plain"
        )
    assert not (world.root / "plain").exists()
    assert world.guest().state is DomainState.RUNNING


def test_recovery_resumes_from_the_plain_image_and_deletes_it(story, world):
    world.hooks.at["hypervisor.restore"] = failing(HypervisorError("ram", "no"))
    with pytest.raises(AttentionError):
        put_back(world)
    assert len(plain_images(world)) == 1
    world.hooks.at.clear()
    recover(world.context, world.guest().uuid)
    assert world.guest().ram == story.ram
    assert world.leftovers() == []
