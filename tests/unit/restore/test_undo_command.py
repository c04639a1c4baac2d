"""``snaporch undo``: brings a safety copy back, checked like a restore."""

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from fakes.hooks import failing

from snaporch.catalog.safety_copy_holds import UNDO_HOLD, release_bases
from snaporch.default_paths import HostPaths
from snaporch.errors import AttentionError, BusyError, RefusedError
from snaporch.interrupt import Interrupt
from snaporch.model import DomainState
from snaporch.recovery.recover_runs import preview, recover
from snaporch.restore import processes_in_datasets
from snaporch.restore.journal import HOLD, RestoreStep, unfinished
from snaporch.restore.losses import losses
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.run import restore
from snaporch.restore.safety_catalog import safety_copies
from snaporch.restore.select_undo import choose_copy
from snaporch.restore.source import reading_lock
from snaporch.restore.undo_command import guests_left_barred, undo_command
from snaporch.restore.undo_plan import make_undo_plan
from snaporch.verify.verify import VerifyOptions, verify
from snaporch.zfs import PoolError
from snaporch.zfs.resolver import Resolver, parse_mount

from .test_recovery import DATASETS, MOMENTS, cannot_be_started, die, kill  # noqa: F401
from .test_run import manage_save


def put_back(world, name="s1", *, keep_running=False, **how):
    made = make_restore_plan(world.context, "web", name, discard_newer=True, **how)
    return restore(world.context, made, safety=True, keep_running=keep_running)


def plan(world, name=None, **how):
    return make_undo_plan(world.context, choose_copy(world.context, "web", name), **how)


def undo(world, name=None, *, safety=True, **how):
    return restore(world.context, plan(world, name, **how), safety=safety)


def held(world):
    return [name for name in world.pool.names() if HOLD in world.pool.holds(name)]


def kept(world):
    return [name for name in world.pool.names() if UNDO_HOLD in world.pool.holds(name)]


@pytest.fixture
def restored(story, world):
    put_back(world)
    story.write(b"since")
    world.hooks.log.clear()
    return story


def assert_untouched(world, *contents):
    assert {world.pool.read(dataset) for dataset in DATASETS} == set(contents)
    assert world.guest().state is DomainState.RUNNING
    assert world.leftovers() == []
    assert held(world) == []
    acts = set(world.hooks.acts())
    assert not acts & {"hypervisor.destroy", "pool.rollback", "pool.receive"}


def test_disks_and_definition_come_back_and_the_guest_is_off(restored, world):
    undone = undo(world)
    assert restored.content() == {b"now"}
    assert (undone.state, undone.resumed) == (DomainState.OFF, False)
    assert world.guest().inactive == restored.domain.inactive_xml
    assert world.leftovers() == []
    assert held(world) == []


def test_the_running_state_is_resumed(story, world):
    put_back(world, keep_running=True)
    undone = undo(world)
    assert (undone.state, undone.resumed) == (DomainState.RUNNING, True)
    assert world.guest().ram == b"QEVM later"
    assert story.content() == {b"now"}


def test_the_running_state_may_be_ignored(story, world):
    put_back(world, keep_running=True)
    assert undo(world, disks_only=True).state is DomainState.OFF


def test_newer_snapshots_come_back_with_their_guids_properties_and_bookmarks(story, world):
    story.snapshot("s2")
    properties = {"org:note": "keep it", "org:raw": "a\tb\nno character: \udcff"}
    world.pool.set_properties(["tank/web@s2"], properties)
    world.pool.snapshot(["tank/web@gone"], {})
    world.pool.bookmark("tank/web@s2", "sent")
    world.pool.bookmark("tank/web@gone", "lost")
    world.pool.destroy_snapshots(["tank/web@gone"])
    before = world.pool.user_properties(["tank/web@s2", "flash/web@s2"])
    guids = {each.full_name: each.guid for each in world.pool.snapshots() if each.name == "s2"}
    made = make_restore_plan(world.context, "web", "s1", discard_newer=True)
    lines = losses(world.context, made)
    assert "tank/web#lost for good: its snapshot does not exist any more" in lines
    assert not any("#sent for good" in loss for loss in lines)
    restored = restore(world.context, made, safety=True)
    text = Path(restored.undo).read_text(errors="surrogateescape")
    assert "zfs bookmark tank/web@s2 'tank/web#sent'\n" in text
    assert "'org:note=keep it' 'org:raw=a\tb\nno character: \udcff'" in text
    undo(world)
    found = {each.full_name: each.guid for each in world.pool.snapshots() if each.name == "s2"}
    assert found == guids
    assert world.pool.user_properties(["tank/web@s2", "flash/web@s2"]) == before
    assert list(world.pool.bookmarks("tank/web")) == ["tank/web#sent"]


def test_an_undo_can_be_undone(restored, world):
    undo(world)
    first, second = safety_copies(world.context.store, "web")
    assert second.manifest.snapshot == first.name
    undo(world, discard_newer=True)
    assert restored.content() == {b"since"}


def test_a_second_undo_with_the_same_copy_rolls_back_to_its_last_snapshot(restored, world):
    """Its last snapshots came back, so nothing has to be received again."""
    (copy,) = safety_copies(world.context.store, "web")
    undo(world)
    restored.write(b"written after it")
    world.hooks.log.clear()
    undo(world, copy.name)
    assert restored.content() == {b"now"}
    assert "pool.receive" not in world.hooks.acts()


def test_files_are_restored(make_story, world):
    vars_fd, state = world.root / "vars.fd", world.root / "tpm2"
    vars_fd.write_bytes(b"then")
    state.mkdir()
    (state / "tpm2-00.permall").write_bytes(b"secret then")
    make_story(nvram=str(vars_fd), tpm=str(state))
    vars_fd.write_bytes(b"now")
    vars_fd.chmod(0o640)
    (state / "tpm2-00.permall").write_bytes(b"secret now")
    put_back(world)
    undo(world)
    assert vars_fd.read_bytes() == b"now"
    assert vars_fd.stat().st_mode & 0o777 == 0o640
    assert (state / "tpm2-00.permall").read_bytes() == b"secret now"


def test_a_managed_save_made_since_is_deleted(restored, world):
    """A start would resume it on disks of another time."""
    guest = world.guest()
    manage_save(world)
    assert any("managed save" in loss for loss in losses(world.context, plan(world)))
    undo(world)
    assert not guest.managed_save


# -- refused, and nothing was touched -----------------------------------------------------------


def refused(world, *words, **how):
    world.hooks.log.clear()
    with pytest.raises(RefusedError) as caught:
        undo(world, **how)
    for word in words:
        assert word in caught.value.line()
    assert_untouched(world, b"since")


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_replaced_target_is_refused(restored, world, dataset):
    world.pool.remake(f"{dataset}@s1")
    refused(world, f"{dataset}@s1 (GUID ", "is missing")


def test_a_dataset_that_was_renamed_gets_its_name_back_first(restored, world):
    world.pool.rename("tank/web", "tank/web2")
    with pytest.raises(RefusedError) as caught:
        plan(world)
    assert caught.value.reason == "its snapshot of tank/web is one of tank/web2 now"
    assert caught.value.step == "zfs rename tank/web2 tank/web; then try again"
    world.pool.rename("tank/web2", "tank/web")
    undo(world)
    assert restored.content() == {b"now"}


def test_undoing_in_the_wrong_order_names_the_right_order(story, world):
    later = story.snapshot("s2")
    put_back(world, "s2")
    put_back(world, "s1")
    first, second = safety_copies(world.context.store, "web")
    story.write(b"since")
    world.hooks.log.clear()
    with pytest.raises(
        RefusedError, match=f"snaporch undo web --copy {second.name} .--dry-run names"
    ):
        undo(world, first.name)
    assert_untouched(world, b"since")
    undo(world)
    undo(world, first.name, discard_newer=True)
    assert later.run


def test_newer_snapshots_that_are_held_or_cloned_are_refused(restored, world):
    world.pool.snapshot(["tank/web@daily"], {})
    refused(world, "tank/web@daily", "--discard-newer")
    world.pool.hold(["tank/web@daily"], "backup")
    refused(world, "held: tank/web@daily", discard_newer=True)
    world.pool.release(["tank/web@daily"], "backup")
    world.pool.clone("tank/web@daily", "tank/test")
    refused(world, "clone tank/test", discard_newer=True)


def test_too_little_room_on_the_pool_is_refused(restored, world):
    world.pool.room = -(1 << 20)
    refused(world, "no room on ")


@pytest.mark.parametrize("name", ["000.zfs", "003.zfs", "domain.xml"])
@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_an_incomplete_copy_is_refused(restored, world, name, how):
    (copy,) = safety_copies(world.context.store, "web")
    path = copy.directory / name
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    refused(world, name)


def test_disks_that_another_process_uses_are_refused(restored, world):
    world.start_process(4711, "flash/web")
    refused(world, "flash/web is in use by process 4711")


def test_disks_that_a_process_uses_just_before_the_stop_are_refused(restored, world):
    world.hooks.at["pool.send_increment"] = lambda: world.start_process(4711, "flash/web")
    refused_after = pytest.raises(RefusedError, match="is in use by process 4711")
    with refused_after:
        undo(world)
    assert_untouched(world, b"since")


def test_another_domain_with_the_same_disks_is_refused(restored, world):
    world.add_guest("db", disks={"vda": "tank/web"})
    refused(world, "the domain db has disks on tank/web")


def test_a_disk_whose_path_leads_elsewhere_is_refused(restored, world):
    image = world.root / "zfs" / "tank" / "web" / "web-vda.img"
    image.rename(image.with_name("moved.img"))
    image.symlink_to(world.image("tank/other", "other.img"))
    refused(world, "leads to tank/other")


def test_a_renamed_guest_is_refused(restored, world):
    (copy,) = safety_copies(world.context.store, "web")
    world.guest().name = "www"
    with pytest.raises(RefusedError, match="has the name www now"):
        make_undo_plan(world.context, copy)


# -- interrupted --------------------------------------------------------------------------------

PLACES = [RestoreStep.SAFETY, RestoreStep.STOP, *DATASETS, RestoreStep.FILES, RestoreStep.DEFINE]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("place", PLACES)
def test_killed_and_recovered(restored, world, kill, place, moment):  # noqa: F811
    with kill(moment, place):
        undo(world)
    uuid = restored.domain.uuid
    if len(restored.content()) > 1:
        assert cannot_be_started(world, uuid)
    assert preview(world.context, uuid)
    (result,) = recover(world.context, uuid)
    begun = place not in (RestoreStep.SAFETY, RestoreStep.STOP) or (moment, place) == (
        "after",
        RestoreStep.STOP,
    )
    assert restored.content() == {b"now" if begun else b"since"}
    assert ("finished" if begun else "undid") + " the undo of its restore" in str(result)
    assert world.guest().state is (DomainState.OFF if begun else DomainState.RUNNING)
    assert world.guest().inactive == restored.domain.inactive_xml
    assert world.leftovers() == []
    assert held(world) == []


@pytest.mark.parametrize("act", ["pool.receive", "pool.received", "pool.set_properties"])
@pytest.mark.parametrize("way", ["recover", "undo"])
def test_killed_while_a_stream_is_received(restored, world, kill, act, way):  # noqa: F811
    """A half-received dataset is rolled back, and received again."""
    restored.snapshot("s2")
    undo(world, discard_newer=True)
    (_, copy) = safety_copies(world.context.store, "web")
    restored.write(b"later")

    world.hooks.at[act] = lambda: die(world)
    with kill("never", RestoreStep.STOP):
        undo(world, copy.name, discard_newer=True)
    del world.hooks.at[act]
    assert cannot_be_started(world, restored.domain.uuid)
    if way == "recover":
        recover(world.context, restored.domain.uuid)
    else:
        undo(world, copy.name, discard_newer=True)
    assert restored.content() == {b"since"}
    assert {f"{name}@s2" for name in DATASETS} <= set(world.pool.names())
    assert held(world) == []
    assert world.leftovers() == []


def test_a_stream_that_cannot_be_received_names_the_next_step(restored, world):
    world.hooks.at["pool.receive"] = failing(PoolError("zfs receive", "no"))
    with pytest.raises(AttentionError) as caught:
        undo(world)
    del world.hooks.at["pool.receive"]
    copies = safety_copies(world.context.store, "web")
    assert "the undo stopped half way" in caught.value.line()
    assert f"or go back: snaporch undo web --copy {copies[-1].name})" in caught.value.line()
    undo(world, copies[-1].name)
    assert restored.content() == {b"since"}
    assert held(world) == []


def test_an_undo_that_stops_after_newer_snapshots_came_back_names_the_option(story, world):
    story.snapshot("s2")
    put_back(world)
    world.hooks.at["pool.set_properties"] = failing(PoolError("zfs set", "no"))
    with pytest.raises(AttentionError) as caught:
        undo(world)
    del world.hooks.at["pool.set_properties"]
    copies = safety_copies(world.context.store, "web")
    command = f"snaporch undo web --copy {copies[-1].name} --discard-newer)"
    assert command in caught.value.line()
    undo(world, copies[-1].name, discard_newer=True)


def test_an_undo_during_which_the_guest_was_redefined_is_named_with_its_options(story, world, kill):  # noqa: F811
    story.snapshot("s2")
    put_back(world)
    (copy,) = safety_copies(world.context.store, "web")
    with kill("after", "flash/web"):
        undo(world)
    world.hypervisor.define(story.domain.inactive_xml)
    world.pool.snapshot(["tank/web@s9"], {})
    with pytest.raises(AttentionError) as caught:
        recover(world.context, story.domain.uuid)
    command = f"do it again: snaporch undo web --copy {copy.name} --discard-newer"
    assert caught.value.step == command


def test_a_guest_left_barred_after_newer_snapshots_came_back_needs_the_option(story, world):
    story.snapshot("s2")
    put_back(world)
    (copy,) = safety_copies(world.context.store, "web")
    guest = world.guest()
    guest.live, guest.state = None, DomainState.OFF
    guest.inactive = (copy.directory / "barred.xml").read_text()
    world.pool.snapshot(["tank/web@s2"], {})
    (error,) = guests_left_barred(world.context)
    assert f"snaporch undo web --copy {copy.name} --discard-newer, or" in error.line()


def test_the_command_that_undoes_has_the_options_without_which_it_is_refused(restored, world):
    (copy,) = safety_copies(world.context.store, "web")
    assert undo_command(world.context, copy, is_last=True) == "snaporch undo web"
    assert undo_command(world.context, copy) == f"snaporch undo web --copy {copy.name}"
    (world.root / "zfs/tank/web/note").write_text("of another program")
    command = undo_command(world.context, copy, is_last=True)
    assert command == "snaporch undo web --also-roll-back"
    undo(world, also_roll_back=True)


def test_the_command_of_an_undo_that_is_impossible_has_no_options(restored, world):
    (copy,) = safety_copies(world.context.store, "web")
    world.pool.release(["tank/web@s1"], UNDO_HOLD)
    world.pool.destroy_snapshots(["tank/web@s1"])
    assert undo_command(world.context, copy, is_last=True) == "snaporch undo web"


@pytest.mark.parametrize("place", [*DATASETS, RestoreStep.FILES, RestoreStep.RESUME])
def test_an_interrupted_restore_is_undone(story, world, kill, place):  # noqa: F811
    with kill("after" if place != RestoreStep.RESUME else "ahead", place):
        put_back(world)
    undo(world, safety=False)
    assert story.content() == {b"now"}
    assert world.guest().inactive == story.domain.inactive_xml
    assert world.leftovers() == []
    assert held(world) == []


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_target_destroyed_in_the_middle_of_a_restore(story, world, kill, dataset):  # noqa: F811
    """It was held, so it was destroyed by force. Datasets not yet rolled back are unchanged."""
    with kill("ahead", "tank/web"):
        put_back(world)
    assert held(world) == ["flash/web@s1", "tank/web@s1"]
    world.pool.release([f"{dataset}@s1"], HOLD)
    uuid = story.domain.uuid
    if dataset == "tank/web":
        world.pool.destroy_snapshots([f"{dataset}@s1"])
        with pytest.raises(
            AttentionError, match=r"tank/web@s1: is missing.*go back: snaporch undo"
        ):
            recover(world.context, uuid)
        undo(world)
        assert story.content() == {b"now"}
    else:
        world.pool.destroy_snapshots([f"{dataset}@s1"])
        recover(world.context, uuid)
        assert story.content() == {b"first"}
    assert world.leftovers() == []
    assert held(world) == []


def test_a_second_restore_that_fails_releases_no_hold_of_the_first(story, world, kill):  # noqa: F811
    with kill("after", "flash/web"):
        put_back(world)
    world.hooks.at["pool.send_increment"] = failing(PoolError("zfs send", "some failure"))
    with pytest.raises(PoolError):
        put_back(world)
    assert held(world) == ["flash/web@s1", "tank/web@s1"]


def test_a_guest_that_the_script_has_left_barred(restored, world):
    (copy,) = safety_copies(world.context.store, "web")
    guest = world.guest()
    guest.live, guest.state = None, DomainState.OFF
    guest.inactive = (copy.directory / "barred.xml").read_text()
    world.pool.rollback("flash/web@s1")
    (error,) = guests_left_barred(world.context)
    assert f"snaporch undo web --copy {copy.name}" in error.line()
    process = world.start_process(4711, "tank/web")
    with pytest.raises(RefusedError, match="is in use"):
        undo(world)
    assert cannot_be_started(world, guest.uuid)
    shutil.rmtree(process)
    undo(world)
    assert restored.content() == {b"now"}
    assert guest.inactive == restored.domain.inactive_xml
    assert guests_left_barred(world.context) == []
    assert unfinished(world.paths.journal, guest.uuid) == []


# -- base snapshots of copies --------------------------------------------------------------------

BASES = ["flash/web@s1", "tank/web@s1"]


def test_a_copy_holds_the_base_snapshots_of_its_streams(restored, world):
    assert (held(world), kept(world)) == ([], BASES)
    with pytest.raises(PoolError, match="busy"):
        world.pool.destroy_snapshots(["tank/web@s1"])
    plan(world)


def test_a_base_snapshot_of_two_copies_stays_held_for_the_second(restored, world):
    undo(world)
    first, second = safety_copies(world.context.store, "web")
    release_bases(world.pool, first.directory)
    assert kept(world) == BASES
    for path in first.directory.iterdir():
        path.unlink()
    release_bases(world.pool, second.directory)
    assert kept(world) == []


def test_a_copy_without_a_list_of_holds_blocks_nothing(restored, world):
    other = world.paths.bundles / world.guest().uuid / "safety-20000101T000000.000000Z"
    other.mkdir()
    (other / "undo.json").touch()
    undo(world)
    assert (held(world), kept(world)) == ([], BASES)


def test_a_restore_without_a_copy_holds_nothing(story, world):
    made = make_restore_plan(world.context, "web", "s1", discard_newer=True)
    restore(world.context, made, safety=False)
    assert (held(world), kept(world)) == ([], [])


def test_an_older_restore_destroys_the_base_snapshots_of_a_newer_copy(story, world):
    """Its undo, which restores those snapshots, holds them again."""
    story.snapshot("s2")
    put_back(world, "s2")
    later = sorted(f"{dataset}@s2" for dataset in DATASETS)
    assert sorted(kept(world)) == later
    put_back(world)
    assert kept(world) == BASES
    undo(world)
    assert sorted(kept(world)) == sorted([*BASES, *later])


def test_recovery_holds_the_base_snapshots_too(story, world, kill):  # noqa: F811
    with kill("after", RestoreStep.STOP):
        put_back(world)
    recover(world.context, story.domain.uuid)
    assert (held(world), kept(world)) == ([], BASES)


# -- users of a dataset --------------------------------------------------------------------------


def test_open_files_of_a_process_are_found_by_their_mount(tmp_path):
    process = tmp_path / "17"
    (process / "fd").mkdir(parents=True)
    (process / "fdinfo").mkdir()
    (process / "fd" / "3").touch()
    (process / "fdinfo" / "3").write_text("pos:\t0\nflags:\t02\nmnt_id:\t40\nino:\t2\n")
    (process / "cmdline").write_bytes(b"qemu\0-uuid\0u-1\0")
    line = "40 1 0:50 / /tank/web rw - zfs tank/web rw\n"
    (process / "mountinfo").write_text(line)
    host = Resolver(HostPaths(proc=tmp_path))
    found = list(processes_in_datasets.processes_on(host, ["tank/web"], "u-2"))
    assert found == [("17", "tank/web")]
    assert list(processes_in_datasets.processes_on(host, ["tank/web"], "u-1")) == []
    assert list(processes_in_datasets.processes_on(host, ["tank/other"], "u-2")) == []


def test_a_mounted_snapshot_is_unmounted_or_refused(monkeypatch, tmp_path):
    host = Resolver(HostPaths(proc=tmp_path))
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text("40 1 0:50 / /mnt/x rw - zfs tank/web@s2 rw\n")
    asked, refuses = tmp_path / "asked", tmp_path / "refuses"
    program = tmp_path / "umount"
    program.write_text(
        f"#!/bin/sh\necho $* >> {asked}\n"
        f"[ ! -e {refuses} ] || {{ echo target is busy. >&2; exit 32; }}\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    processes_in_datasets.check_not_in_use(host, "web", ["tank/web@s1"])
    assert not asked.exists()
    processes_in_datasets.check_not_in_use(host, "web", ["tank/web@s2"])
    assert asked.read_text() == "-- /mnt/x\n"
    refuses.touch()
    with pytest.raises(RefusedError, match=r"tank/web@s2.* is in use \(target is busy"):
        processes_in_datasets.check_not_in_use(host, "web", ["tank/web@s2"])


# -- readers of snapshots ------------------------------------------------------------------------


def test_nothing_is_rolled_back_while_a_snapshot_is_read(restored, world):
    with (
        reading_lock(world.context, restored.record),
        pytest.raises(BusyError, match="cloned, verif"),
    ):
        undo(world)
    assert_untouched(world, b"since")


def test_a_reader_of_a_snapshot_is_waited_for(restored, world):
    reader, looks = ExitStack(), []
    reader.enter_context(reading_lock(world.context, restored.record))

    class EndsAtSecondLook(Interrupt):
        def check(self, thing):
            looks.append(thing)
            if len(looks) == 2:
                reader.close()

    world.context.interrupt = EndsAtSecondLook()
    restore(world.context, plan(world), safety=False, wait=60)
    assert restored.content() == {b"now"}


def test_no_snapshot_is_read_while_it_is_rolled_back(restored, world):
    caught = []

    def read():
        with pytest.raises(BusyError, match="is being rolled back"):
            verify(world.context, restored.record, VerifyOptions(run=False))
        with (
            pytest.raises(BusyError, match="is being rolled back"),
            reading_lock(world.context, restored.record),
        ):
            pass
        caught.append(True)

    world.hooks.at["pool.rollback"] = read
    undo(world)
    assert caught


def test_several_processes_may_read_snapshots(restored, world):
    with reading_lock(world.context, restored.record):
        verify(world.context, restored.record, VerifyOptions(run=False))


@pytest.mark.parametrize("problem", ["cloned", "held", "in use"])
def test_a_problem_that_appears_during_the_save_is_found_before_the_stop(
    story, world, tmp_path, problem
):
    """This holds for the second dataset too: nothing is rolled back before the failure."""
    story.snapshot("s2")
    full = "tank/web@s2"

    def appear():
        if problem == "cloned":
            world.pool.clone(full, "tank/test")
        elif problem == "held":
            world.pool.hold([full], "backup")
        else:
            line = f"40 1 0:50 / {tmp_path}/none rw - zfs {full} rw"  # which umount refuses
            world.resolver.table.append(parse_mount(line))

    world.hooks.at["pool.send_increment"] = lambda: (world.hooks.at.clear(), appear())
    with pytest.raises(RefusedError, match=r"tank/web@s2"):
        put_back(world)
    assert_untouched(world, b"now")
