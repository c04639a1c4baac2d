import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fakes.domain_xml import DiskSpec
from fakes.images import qcow2

from snaporch.bundle.manifest import MANIFEST_NAME
from snaporch.catalog.keep import KEEP_HOLD, keep, unkeep
from snaporch.config import Config
from snaporch.errors import NotFoundError, RefusedError, UsageError
from snaporch.model import DomainState, Level
from snaporch.restore.bundle_checks import check_bundle
from snaporch.restore.losses import losses
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.run import check_as_shown, restore
from snaporch.restore.select import split_name
from snaporch.restore.shared_dataset_checks import check_own_places
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import BlockingMount

from .plans import plan, refusal


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("web@s1", ("web", "s1")),
        ("web@home@s1", ("web@home", "s1")),
        ("Bärs <vm>@two words", ("Bärs <vm>", "two words")),
    ],
)
def test_a_name_is_domain_and_snapshot(text, parts):
    assert split_name(text) == parts


@pytest.mark.parametrize("text", ["", "web", "@s1", "web@", "web@a/b", "web@a#b"])
def test_an_invalid_name_is_wrong_usage(text):
    with pytest.raises(UsageError):
        split_name(text)


def test_a_plan_has_the_snapshots_and_the_ram_and_changes_nothing(story, world):
    made = plan(world)
    assert made.record == story.record
    assert made.ram == Path(story.record.bundle) / "ram.save"
    assert (made.running, made.boot, made.newer) == (True, False, ())
    assert {s.full_name for s in made.snapshots} == {"flash/web@s1", "tank/web@s1"}
    assert world.hooks.log == []


def test_a_domain_can_be_named_by_uuid(story, world):
    assert plan(world, domain=story.domain.uuid).record == story.record


def test_a_cold_restore_boots_and_does_not_resume(story, world):
    made = plan(world, cold=True)
    assert (made.ram, made.boot) == (None, True)


def test_a_guest_that_was_off_stays_off(make_story, world):
    make_story(state=DomainState.OFF)
    made = plan(world)
    assert (made.ram, made.boot, made.running) == (None, False, False)


def test_a_guest_that_was_paused_comes_back_paused(make_story, world):
    make_story(state=DomainState.PAUSED)
    assert not plan(world).running


@pytest.mark.parametrize("bundle", ["there", "gone"])
def test_a_crash_consistent_snapshot_is_booted(story, world, bundle):
    world.pool.set_properties(["tank/web@s1", "flash/web@s1"], {"snaporch:level": "crash"})
    if bundle == "gone":
        shutil.rmtree(story.record.bundle)
    made = plan(world)
    assert (made.ram, made.boot) == (None, True)


def test_ram_of_another_time_than_the_disks_is_never_resumed(make_story, world):
    """The guest was paused, and its owner resumed it before the pools were snapshotted."""
    uuid = make_story(state=DomainState.PAUSED).domain.uuid
    world.hooks.at["pool.snapshot"] = lambda: world.hypervisor.resume(uuid)
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s2"))
    made = plan(world, "s2")
    assert made.record.level is Level.CRASH
    assert (made.ram, made.boot) == (None, True)


def test_an_undefined_domain_can_be_restored_from_its_bundle(story, world):
    world.hypervisor.guests.clear()
    assert plan(world).domain is None


def test_losses_are_shown(story, world):
    story.snapshot("s2")
    lines = losses(world.context, plan(world, discard_newer=True))
    assert lines[0] == "the state of the running guest web, which will be stopped"
    assert "what was written to tank/web since the snapshot (0 KiB)" in lines
    assert "tank/web@s2, which is newer" in lines


def test_changes_of_the_definition_are_shown(story, world):
    guest = world.guest()
    guest.inactive = guest.inactive.replace("</name>", "</name><title>new</title>")
    lines = losses(world.context, plan(world))
    at = lines.index("its definition as it is now (virsh dumpxml --inactive):")
    gone, back = lines[at + 1 : at + 3]
    assert gone.startswith("    - ")
    assert "<title>new</title>" in gone
    assert back.startswith("    + ")
    assert "<title>" not in back


def test_of_many_changes_of_the_definition_the_first_are_shown_and_the_rest_counted(story, world):
    guest = world.guest()
    guest.inactive = guest.inactive.replace("</name>", "</name>" + 30 * "\n<!-- new -->")
    lines = losses(world.context, plan(world))
    at = lines.index("its definition as it is now (virsh dumpxml --inactive):")
    assert lines[at + 20] == "    - <!-- new -->"
    assert lines[at + 21] == "    and 12 lines more"


def test_a_definition_that_may_stay(story, world):
    guest = world.guest()
    guest.inactive = guest.inactive.replace("</name>", "</name><title>new</title>")
    made = plan(world, cold=True, keep_definition=True)
    assert not any("definition" in loss for loss in losses(world.context, made))
    restore(world.context, made, safety=False)
    assert "<title>new</title>" in world.guest().inactive


def test_no_ram_is_resumed_with_another_definition(story, world):
    with pytest.raises(RefusedError, match="only with the definition that it was saved with"):
        plan(world, keep_definition=True)
    world.hypervisor.guests.clear()
    with pytest.raises(RefusedError, match="no definition to keep"):
        plan(world, disks_only=True, keep_definition=True)


def test_a_definition_that_is_kept_has_to_name_the_disks(story, world):
    guest = world.guest()
    (image,) = (world.root / "zfs" / "tank" / "web").glob("*.img")
    guest.inactive = guest.inactive.replace(str(image), str(image) + ".moved")
    world.hypervisor.destroy(guest.uuid)
    made = plan(world, disks_only=True, keep_definition=True)
    with pytest.raises(RefusedError, match="does not name"):
        check_bundle(world.context, made)


def test_the_kept_definition_of_a_running_guest_is_the_inactive_one(story, world):
    guest = world.guest()
    (image,) = (world.root / "zfs" / "tank" / "web").glob("*.img")
    guest.inactive = guest.inactive.replace(str(image), f"{image}.moved")
    made = plan(world, cold=True, keep_definition=True)
    with pytest.raises(RefusedError, match="does not name"):
        check_bundle(world.context, made)


def test_a_definition_that_is_kept_has_to_name_the_uefi_variables(world, tmp_path):
    then, now = tmp_path / "then_VARS.fd", tmp_path / "now_VARS.fd"
    then.write_bytes(b"then")
    now.write_bytes(b"now")
    world.add_guest("web", nvram=str(then))
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s1"))
    assert plan(world, cold=True, keep_definition=True)
    world.guest().inactive = world.guest().inactive.replace(str(then), str(now))
    with pytest.raises(RefusedError, match=r"does not have nvram.fd in .*then_VARS.fd"):
        plan(world, cold=True, keep_definition=True)


def test_no_password_is_shown(story, world):
    graphics = '<graphics type="vnc" passwd="secret"/></devices>'
    world.guest().inactive = world.guest().inactive.replace("</devices>", graphics)
    lines = losses(world.context, plan(world))
    assert any("graphics" in loss for loss in lines)
    assert not any("secret" in loss for loss in lines)


def test_a_definition_that_was_changed_since_it_was_shown(story, world):
    shown = check_bundle(world.context, plan(world, cold=True))
    guest = world.guest()
    guest.inactive = guest.inactive.replace("</name>", "</name><title>new</title>")
    with pytest.raises(RefusedError, match="changed since it was shown: its definition"):
        check_as_shown(shown, check_bundle(world.context, plan(world, cold=True)))


def test_another_snapshot_without_a_manifest_is_not_the_one_that_was_shown(story, world):
    shutil.rmtree(story.record.bundle)
    shown = plan(world, cold=True)
    (found,) = world.pool.snapshots(["tank/web"])
    world.pool.destroy_snapshots([found.full_name])
    marks = {f"snaporch:{key}": text for key, text in found.properties.items()}
    world.pool.snapshot([found.full_name], marks)
    with pytest.raises(RefusedError, match="changed since it was shown: the snapshot"):
        check_as_shown(shown, plan(world, cold=True))


# -- not found ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("domain", "name", "step"),
    [("web", "s9", "snaporch list web"), ("wbe", "s1", "`snaporch list`")],
)
def test_a_misspelt_name_gets_the_command_that_lists_names(story, world, domain, name, step):
    with pytest.raises(NotFoundError, match=step):
        plan(world, name, domain=domain)


def test_a_zfs_snapshot_that_is_not_ours_is_not_found(story, world):
    world.pool.snapshot(["tank/web@mine"], {})
    with pytest.raises(NotFoundError):
        plan(world, "mine")


# -- refused ------------------------------------------------------------------------------------


def test_a_missing_zfs_snapshot_is_refused(story, world):
    world.pool.destroy_snapshots(["flash/web@s1"])
    world.hooks.log.clear()
    assert "some of its snapshots are missing: flash/web@s1" in refusal(world)
    assert "are missing" in refusal(world, cold=True)


def test_a_replaced_zfs_snapshot_is_refused(story, world):
    world.pool.remake("flash/web@s1")
    assert "are missing" in refusal(world)


def test_incomplete_ram_is_refused(story, world):
    (Path(story.record.bundle) / "ram.save").unlink()
    assert "the bundle is incomplete; boot it with --cold" in refusal(world)
    assert plan(world, cold=True).boot


def test_a_missing_bundle_is_refused(story, world):
    shutil.rmtree(story.record.bundle)
    assert "the bundle is missing; boot it with --cold" in refusal(world)
    assert plan(world, cold=True).boot


@pytest.mark.parametrize("content", [None, "{", '{"format": 2}'])
def test_an_unreadable_manifest_is_refused(story, world, content):
    path = Path(story.record.bundle) / MANIFEST_NAME
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert "boot it with --cold" in refusal(world)
    assert plan(world, cold=True).boot


def test_without_a_bundle_every_disk_must_have_its_snapshot(story, world):
    shutil.rmtree(story.record.bundle)
    world.pool.destroy_snapshots(["flash/web@s1"])
    world.hooks.log.clear()
    assert "has no snapshot of flash/web" in refusal(world, cold=True)


def test_an_undefined_domain_without_a_bundle_is_refused(story, world):
    shutil.rmtree(story.record.bundle)
    world.hypervisor.guests.clear()
    assert "is undefined, and its bundle is missing" in refusal(world, cold=True)


def test_a_renamed_domain_is_refused(story, world):
    world.guest().name = "web new"
    text = refusal(world)
    assert "has the name web new now; shut it off, and run: virsh domrename 'web new' web" in text


def test_a_name_that_another_domain_has_is_refused(story, world):
    world.guest().name = "web-old"
    world.add_guest("web2")
    world.guest("web2").name = "web"
    del world.hypervisor.guests[story.domain.uuid]
    assert "another domain has this name" in refusal(world)


def test_a_dataset_with_a_disk_of_another_domain_is_refused(story, world):
    world.add_guest("mail", {"vda": "tank/web"})
    assert "the domain mail has disks on tank/web too" in refusal(world)


def test_a_disk_of_several_guests_is_restored_by_hand(story, world):
    """Each cannot have a dataset of its own for it."""
    world.add_guest("mail", {"vda": "tank/mail", "vdb": "tank/web"})
    world.with_defaults()
    own_step = "give each guest a dataset of its own"
    assert refusal(world).endswith(own_step)
    document = world.context.config.model_dump(exclude_unset=True)
    document |= {"domain": {"mail": {"exclude_disks": ["vdb"]}}}
    world.context.config = Config.model_validate(document)
    said = refusal(world)
    assert "the domain mail has disks on tank/web too" in said
    assert said.endswith("restore both by hand: docs/how-to/groups.md, 'A disk of several guests'")
    document["domain"]["mail"]["exclude_disks"] = ["vda"]
    world.context.config = Config.model_validate(document)
    assert refusal(world).endswith(own_step)


@pytest.mark.parametrize("place", ["bundles", "journal", "overlays"])
def test_a_dataset_with_files_of_snaporch_is_refused(story, world, place):
    """A rollback would also roll back, for example, the journal of the restore itself."""
    inside = world.root / "zfs" / "tank" / "web" / place
    inside.mkdir()
    paths = world.context.config.paths.model_copy(update={place: inside})
    world.context.config = world.context.config.model_copy(update={"paths": paths})
    with pytest.raises(RefusedError, match=f"{place} lies in tank/web, and would be rolled back"):
        check_own_places(world.context, story.record, Path("/elsewhere"))


def test_newer_snapshots_need_consent(story, world):
    story.snapshot("s2")
    world.hooks.log.clear()
    said = refusal(world)
    assert "newer snapshots would be destroyed" in said
    assert "tank/web@s2" in said
    assert "--discard-newer" in said
    assert set(plan(world, discard_newer=True).newer) == {"flash/web@s2", "tank/web@s2"}


def test_newer_bookmarks_need_consent_too(story, world):
    world.pool.snapshot(["tank/web@x"], {})
    world.pool.bookmark("tank/web@x", "sent")
    world.pool.destroy_snapshots(["tank/web@x"])
    world.hooks.log.clear()
    assert "newer bookmarks would be destroyed: tank/web#sent" in refusal(world)
    world.pool.snapshot(["tank/web@y"], {})
    world.hooks.log.clear()
    said = refusal(world)
    assert "newer snapshots and bookmarks would be destroyed: " in said
    assert "tank/web@y" in said


@pytest.mark.parametrize("start", ["snaporch-pull-vault-", "snaporch-offsite-"])
@pytest.mark.parametrize("other", ["snaporch-notes", "snaporch-offsite-17"])
def test_bookmarks_of_copies_are_shown_and_need_no_consent(story, world, start, other):
    """snaporch has made them, and they hold no data; their names have their GUIDs."""
    world.pool.snapshot(["tank/web@x"], {})
    own = f"{start}{world.pool.snapshots(['tank/web'])[-1].guid}"
    for name in (own, other):
        world.pool.bookmark("tank/web@x", name)
    world.pool.destroy_snapshots(["tank/web@x"])
    world.hooks.log.clear()
    assert f"newer bookmarks would be destroyed: tank/web#{other};" in refusal(world)
    world.pool.destroy_bookmark(f"tank/web#{other}")
    made = plan(world)
    assert made.newer == (f"tank/web#{own}",)
    expected = f"tank/web#{own}, where later copies begin: the next copy may be a full one"
    assert expected in losses(world.context, made)


def test_newer_snapshots_with_clones_are_refused(story, world):
    world.pool.snapshot(["tank/web@x"], {})
    world.pool.clone("tank/web@x", "tank/copy")
    world.hooks.log.clear()
    assert "tank/web@x (clone tank/copy)" in refusal(world, discard_newer=True)


def test_newer_snapshots_that_are_held_are_refused(story, world):
    world.pool.snapshot(["tank/web@x"], {})
    world.pool.hold(["tank/web@x"], "backup")
    world.hooks.log.clear()
    assert "newer snapshots are held: tank/web@x" in refusal(world, discard_newer=True)


@pytest.mark.parametrize("still_held", [True, False])
def test_newer_snapshots_that_are_kept_are_refused(story, world, still_held):
    story.snapshot("s2")
    kept = [each for each in world.pool.snapshots() if each.name == "s2"]
    keep(world.pool, kept, datetime.now(UTC))
    if not still_held:
        for each in kept:
            world.pool.release([each.full_name], KEEP_HOLD)
    world.hooks.log.clear()
    said = refusal(world, discard_newer=True)
    assert "newer snapshots are kept: flash/web@s2, tank/web@s2" in said
    assert said.endswith("release them first: snaporch unkeep web@s2")
    unkeep(world.pool, [each for each in world.pool.snapshots() if each.name == "s2"])
    assert plan(world, discard_newer=True).newer


def test_newer_snapshots_that_another_guest_has_mounted_are_refused(story, world):
    world.pool.snapshot(["tank/web@x"], {})
    world.hooks.log.clear()
    world.pool.foreign = [BlockingMount("tank/web@x", "the guest db", "u-db")]
    assert "tank/web@x is mounted by the guest db" in refusal(world, discard_newer=True)
    world.pool.foreign = [BlockingMount("tank/web@x", "the guest web", world.guest().uuid)]
    assert plan(world, discard_newer=True).newer == ("tank/web@x",)


def test_a_safety_snapshot_of_an_earlier_restore_is_no_obstacle(story, world):
    world.pool.snapshot(["tank/web@snaporch-safety_x-0"], {})
    assert not any("safety" in loss for loss in losses(world.context, plan(world)))


def test_a_held_or_cloned_safety_snapshot_is_an_obstacle(story, world):
    """It would stop the rollback when the guest is off already."""
    world.pool.snapshot(["tank/web@snaporch-safety_x-0"], {})
    world.pool.clone("tank/web@snaporch-safety_x-0", "tank/copy")
    world.hooks.log.clear()
    assert "tank/copy" in refusal(world, discard_newer=True)


@pytest.fixture
def split(world, tmp_path):
    """A snapshot with RAM of a guest with another disk, which is not on ZFS."""
    (tmp_path / "data.img").touch()
    domain = world.add_guest(more=(DiskSpec("vdz", str(tmp_path / "data.img")),))
    return take_snapshot(world.context, domain, SnapshotRequest("s1"))


def test_ram_is_not_resumed_over_a_disk_of_another_time(split, world):
    world.hooks.log.clear()
    text = refusal(world)
    assert "vdz (not on ZFS" in text
    assert "--despite-other-disks" in text
    assert plan(world, cold=True).ram is None
    assert make_restore_plan(world.context, "web", "s1", despite_other_disks=True).ram is not None


def test_the_reason_is_stored_as_a_code_and_printed_as_text(split, world):
    manifest = json.loads((Path(split.bundle) / "manifest.json").read_text())
    out = next(disk for disk in manifest["disks"] if disk["target"] == "vdz")
    assert (out["left_out"], out["apart"]) == ("not-on-zfs", True)
    world.hooks.log.clear()
    assert f"vdz ({out['left_out_detail']})" in refusal(world)


def test_a_medium_or_read_only_disk_does_not_prevent_resuming(world, tmp_path):
    more = (
        DiskSpec("sda", "/media.iso", "cdrom", readonly=True),
        DiskSpec("vdb", "/golden.img", readonly=True),
    )
    take_snapshot(world.context, world.add_guest(more=more), SnapshotRequest("s1"))
    assert plan(world).ram is not None


@pytest.fixture
def overlaid(world):
    """A snapshot of a guest whose image has a backing file in another dataset; and that file."""
    base, top = world.image("flash/golden", "base.img"), world.image("tank/web", "top.img")
    top.write_bytes(qcow2(str(base), "raw"))
    domain = world.add_guest("web", {}, more=(DiskSpec("vda", str(top), format="qcow2"),))
    take_snapshot(world.context, domain, SnapshotRequest("s1"))
    world.hooks.log.clear()
    return base


def test_a_file_beneath_a_disk_that_is_in_no_snapshot_has_to_be_the_same(overlaid, world):
    assert plan(world).ram is not None
    with overlaid.open("r+b") as image:
        image.write(b"committed")
    for cold in (False, True):
        text = refusal(world, cold=cold)
        assert f"{overlaid}, which lies beneath vda and is not in the snapshot, was changed" in text
        assert "--despite-other-disks" in text
    assert make_restore_plan(world.context, "web", "s1", despite_other_disks=True).ram is not None


def test_a_backing_file_that_is_changed_while_the_copy_is_written(overlaid, world):
    made = plan(world)
    world.hooks.at["pool.send_increment"] = lambda: overlaid.write_bytes(b"committed")
    with pytest.raises(RefusedError, match=r"lies beneath vda .* was changed"):
        restore(world.context, made, safety=True)
    assert world.guest().state is DomainState.RUNNING
    assert "pool.rollback" not in world.hooks.acts()


def test_a_missing_backing_file(overlaid, world):
    overlaid.unlink()
    assert "cannot be read (No such file or directory)" in refusal(world)


def test_a_backing_file_with_another_owner_is_the_same(overlaid, world):
    """libvirt makes the emulator's user the owner of images, and records the previous one."""
    overlaid.chmod(0o640)
    assert plan(world).ram is not None


def test_a_file_beneath_a_disk_that_is_in_the_snapshot_has_to_be_where_it_was(world, tmp_path):
    base, top = world.image("tank/web", "base.img"), world.image("tank/web", "top.img")
    (tmp_path / "link").symlink_to(base)
    top.write_bytes(qcow2(str(tmp_path / "link"), "raw"))
    domain = world.add_guest("web", {}, more=(DiskSpec("vda", str(top), format="qcow2"),))
    take_snapshot(world.context, domain, SnapshotRequest("s1"))
    base.write_bytes(b"goes back with the snapshot")
    assert plan(world).ram is not None
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(world.image("flash/golden", "other.img"))
    world.hooks.log.clear()
    assert "leads to flash/golden" in refusal(world)


def test_a_store_that_is_not_mounted_is_reported(story, world):
    world.paths.bundles.rename(world.root / "elsewhere")
    assert "have their bundles in one" in refusal(world, cold=True)
