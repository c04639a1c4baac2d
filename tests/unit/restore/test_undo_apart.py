"""``snaporch undo`` resumes no RAM over a disk that it does not bring back."""

from pathlib import Path

import pytest
from fakes.domain_xml import DiskSpec
from fakes.images import qcow2

from snaporch.errors import RefusedError
from snaporch.model import DomainState
from snaporch.restore.safety_catalog import safety_copies
from snaporch.restore.undo_command import undo_command
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot

from .test_undo_command import put_back, undo


def snapshot(world):
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s1"))


def refusal(world, **how):
    world.hooks.log.clear()
    with pytest.raises(RefusedError) as caught:
        undo(world, **how)
    assert "hypervisor.destroy" not in world.hooks.acts()
    assert "pool.rollback" not in world.hooks.acts()
    return caught.value.line()


@pytest.fixture
def excluded(world):
    """A running guest after a restore that kept its RAM and excluded ``vdb``."""
    world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    world.with_defaults(exclude_disks=["vdb"])
    snapshot(world)
    world.pool.write("tank/web", b"now")
    script = put_back(world, cold=True, keep_running=True).undo
    world.pool.write("flash/web", b"written since")
    return Path(script)


def test_ram_is_not_resumed_over_a_disk_that_was_not_rolled_back(excluded, world):
    text = refusal(world)
    assert "its RAM would be resumed over vdb (excluded by the configuration)" in text
    assert "use --disks-only" in text
    (copy,) = safety_copies(world.context.store, "web")
    assert undo_command(world.context, copy, is_last=True) == "snaporch undo web --disks-only"
    assert undo(world, disks_only=True).state is DomainState.OFF
    assert world.pool.read("tank/web") == b"now"
    assert world.pool.read("flash/web") == b"written since"


def test_the_script_does_not_resume_over_an_excluded_disk(excluded):
    text = excluded.read_text()
    assert "virsh restore" not in text
    assert "RAM is not resumed over vdb" in text


@pytest.mark.parametrize("there", [True, False])
def test_ram_is_not_resumed_over_a_disk_added_after_the_snapshot(story, world, there):
    """The new disk may be one that cannot be examined."""
    image = world.image("tank/data", "web-vdc.img")
    disk = f"<disk type='file' device='disk'><driver name='qemu' type='raw'/>\
<source file='{image}'/><target dev='vdc' bus='virtio'/></disk></devices>"
    guest = world.guest()
    guest.inactive = guest.inactive.replace("</devices>", disk)
    guest.live = guest.live.replace("</devices>", disk)
    if not there:
        image.unlink()
    put_back(world, keep_running=True)
    assert "over vdc (was not rolled back)" in refusal(world)


def test_read_only_media_do_not_prevent_resuming(world):
    media = world.root / "media.iso"
    media.touch()
    more = (DiskSpec("sda", str(media), "cdrom", readonly=True),)
    world.add_guest(disks={"vda": "tank/web"}, more=more)
    snapshot(world)
    script = put_back(world, keep_running=True).undo
    assert "virsh restore" in Path(script).read_text()
    assert undo(world).resumed


@pytest.mark.parametrize("state", ["changed", "unknown", None])
def test_ram_is_resumed_only_over_unchanged_backing_files(world, state):
    base, top = world.image("flash/golden", "base.img"), world.image("tank/web", "top.img")
    top.write_bytes(qcow2(str(base), "raw"))
    world.add_guest("web", {}, more=(DiskSpec("vda", str(top), format="qcow2"),))
    snapshot(world)
    if state == "unknown":
        top.write_bytes(b"QFI\xfb is no header")
    put_back(world, keep_running=True, despite_other_disks=True)
    if state == "changed":
        base.write_bytes(b"committed")
    if state is None:
        assert undo(world).resumed
        return
    what = base if state == "changed" else top
    text = refusal(world)
    assert f"{what}, which lies beneath vda" in text
    assert "or use --disks-only" in text
    assert undo(world, disks_only=True).state is DomainState.OFF


@pytest.mark.parametrize("state", ["changed", "unknown"])
def test_disks_are_not_brought_back_over_a_changed_backing_file(world, state):
    """This holds without RAM too; then a backing file of unknown state is no reason to refuse."""
    base, top = world.image("flash/golden", "base.img"), world.image("tank/web", "top.img")
    top.write_bytes(qcow2(str(base), "raw"))
    world.add_guest("web", {}, more=(DiskSpec("vda", str(top), format="qcow2"),))
    snapshot(world)
    if state == "unknown":
        top.write_bytes(b"QFI\xfb is no header")
    put_back(world, despite_other_disks=True)
    if state == "changed":
        base.write_bytes(b"committed")
        assert f"{base}, which lies beneath vda" in refusal(world)
    assert undo(world, disks_only=state == "changed").state is DomainState.OFF


def test_the_paths_of_the_disks_are_in_the_record(excluded, world):
    (copy,) = safety_copies(world.context.store, "web")
    vda, vdb = copy.manifest.disks
    assert (vda.dataset, vda.is_apart) == ("tank/web", False)
    assert (vdb.dataset, vdb.is_apart) == (None, True)
