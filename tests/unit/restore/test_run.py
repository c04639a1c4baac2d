import errno
import os
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fakes.hooks import failing
from fakes.hypervisor import Agent

from snaporch.catalog.keep import keep
from snaporch.errors import (
    AttentionError,
    BusyError,
    ExitCode,
    InterruptedRunError,
    RefusedError,
    SnaporchError,
)
from snaporch.hypervisor import HypervisorError
from snaporch.model import DomainState
from snaporch.prune.decision import ItemKind
from snaporch.prune.scan import scan_store
from snaporch.recovery.recover_runs import recover
from snaporch.restore import steps
from snaporch.restore.journal import HostFile
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.run import restore
from snaporch.restore.source import find_records, reading_lock
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import PoolError


def plan(world, name="s1", **more):
    return make_restore_plan(world.context, "web", name, discard_newer=True, **more)


def put_back(world, name="s1", *, cold=False, safety=True):
    return restore(world.context, plan(world, name, cold=cold), safety=safety)


# -- a whole restore ---------------------------------------------------------------------------


def test_the_calls_of_a_restore_in_order(story, world):
    put_back(world)
    acts = world.hooks.acts()
    assert acts[: acts.index("pool.rollback")] == [
        "pool.hold",  # the targets
        "pool.hold",
        "pool.snapshot",  # safety, one pool after the other
        "pool.snapshot",
        "pool.send_increment",
        "pool.send_increment",
        "hypervisor.define",  # barred
        "hypervisor.destroy",
        "pool.snapshot",  # the changes until the guest was off
        "pool.snapshot",
        "pool.send_increment",
        "pool.send_increment",
        "hypervisor.drop_managed_save",
        "pool.destroy_snapshots",
    ]
    assert acts.count("pool.rollback") == 2
    after = acts[len(acts) - acts[::-1].index("pool.rollback") :]
    assert [act for act in after if act.startswith("hypervisor.")] == [
        "hypervisor.restore",
        "hypervisor.define",
        "hypervisor.set_guest_clock",
    ]
    assert world.leftovers() == []


def test_little_is_asked_of_zfs_while_the_guest_is_away(story, world):
    asked = []
    world.hooks.at["pool.listing"] = lambda: asked.append(world.guest().state)
    put_back(world)
    # for the record of the safety copy, after it was written, and before each rollback
    assert asked.count(DomainState.OFF) == 2 + len(story.record.datasets)


def test_the_guest_resumes_where_it_was(story, world):
    restored = put_back(world)
    assert world.guest().ram == story.ram
    assert story.content() == {b"first"}
    assert (restored.state, restored.resumed) == (DomainState.RUNNING, True)
    assert restored.clock_set is False


def test_the_clock_is_set_where_an_agent_answers(story, world):
    world.guest().agent = Agent.ANSWERS
    assert put_back(world).clock_set


def test_a_paused_guest_comes_back_paused(make_story, world):
    make_story(state=DomainState.PAUSED)
    restored = put_back(world)
    assert restored.state is DomainState.PAUSED
    assert "hypervisor.set_guest_clock" not in world.hooks.acts()


def test_a_guest_that_was_off_is_rolled_back_and_stays_off(make_story, world):
    story = make_story(state=DomainState.OFF)
    restored = put_back(world)
    assert (restored.state, restored.resumed) == (DomainState.OFF, False)
    assert story.content() == {b"first"}
    assert "hypervisor.destroy" not in world.hooks.acts()


def test_a_cold_restore_boots(story, world):
    restored = put_back(world, cold=True)
    assert (restored.state, restored.resumed) == (DomainState.RUNNING, False)
    assert "hypervisor.start" in world.hooks.acts()
    assert "hypervisor.restore" not in world.hooks.acts()


def manage_save(world):
    """``virsh managedsave``."""
    guest = world.guest()
    image = world.root / "web.save"
    world.hypervisor.save(guest.uuid, image)
    guest.managed_save = True
    world.hypervisor.managed_saves[guest.uuid] = image
    world.hooks.log.clear()


def test_a_managed_save_is_dropped_before_it_could_be_resumed(story, world):
    manage_save(world)
    put_back(world, cold=True)
    acts = world.hooks.acts()
    assert acts.index("hypervisor.drop_managed_save") < acts.index("hypervisor.start")
    assert not world.guest().managed_save


def test_the_record_of_a_copy_is_complete_or_missing(story, world, monkeypatch):
    """A prune that finds an incomplete record treats the copy as damaged."""
    written, real = [], os.fsync

    def fsync(descriptor):
        written.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    put_back(world)
    assert ".undo.json" in written
    assert "undo.json" not in written
    (copy,) = [each for each in scan_store(world.paths.bundles) if each.kind is ItemKind.SAFETY]
    (copy.path / ".undo.json").touch()  # left by a restore that was killed
    (copy,) = [each for each in scan_store(world.paths.bundles) if each.kind is ItemKind.SAFETY]
    assert copy.problem == ""


def test_an_undefined_domain_comes_back(story, world):
    world.hypervisor.guests.clear()
    assert put_back(world).state is DomainState.RUNNING
    assert world.guest().inactive == story.domain.inactive_xml


def test_the_definition_is_that_of_the_snapshot(story, world):
    changed = world.guest().inactive.replace("16384", "32768")
    world.hypervisor.define(changed)
    put_back(world)
    assert world.guest().inactive == story.domain.inactive_xml


def test_newer_snapshots_and_bookmarks_go_before_the_rollback(story, world):
    story.snapshot("s2")
    world.pool.bookmark("tank/web@s2", "sent")
    put_back(world)
    assert sorted(n for n in world.pool.names()) == ["flash/web@s1", "tank/web@s1"]
    assert world.pool.newer("tank/web@s1") == []


def test_nvram_and_tpm_state_are_restored(make_story, world):
    vars_fd = world.root / "vars.fd"
    vars_fd.write_bytes(b"then")
    vars_fd.chmod(0o640)
    state = world.root / "tpm2"
    state.mkdir()
    (state / "tpm2-00.permall").write_bytes(b"secret")
    make_story(nvram=str(vars_fd), tpm=str(state))
    vars_fd.write_bytes(b"now")
    vars_fd.chmod(0o600)
    shutil.rmtree(state)
    put_back(world)
    assert vars_fd.read_bytes() == b"then"
    assert vars_fd.stat().st_mode & 0o777 == 0o640
    assert (state / "tpm2-00.permall").read_bytes() == b"secret"
    assert [p.name for p in state.iterdir()] == ["tpm2-00.permall"]


def test_tpm_state_in_one_file_comes_back_and_may_be_undone(make_story, world):
    state = world.root / "tpm" / "state"
    state.parent.mkdir()
    state.write_bytes(b"then")
    state.chmod(0o640)
    make_story(tpm=str(state))
    state.write_bytes(b"now")
    script = Path(put_back(world).undo)
    assert state.read_bytes() == b"then"
    assert state.stat().st_mode & 0o777 == 0o640
    assert (script.parent / "tpm.state").read_bytes() == b"now"
    shutil.rmtree(state.parent)
    lines = its_files(script.read_text())
    subprocess.run(["sh", "-e"], input="\n".join(lines), cwd=script.parent, text=True, check=True)
    assert state.read_bytes() == b"now"


def its_files(text):
    """The script's lines about files, with the functions that they call."""
    head = text.partition("mkdir -p -m 700")[0]
    files = [line for line in text.splitlines() if line.startswith(("sound /", "put "))]
    return [head.partition('cd "$(dirname')[0], head.partition('"$0")"\n')[2], *files]


def test_the_tpm_of_a_transient_guest_is_kept_before_it_ends(make_story, world):
    """libvirt deletes the TPM state when the guest ends."""
    state, vars_fd = world.root / "state", world.root / "vars.fd"
    state.write_bytes(b"then")
    vars_fd.write_bytes(b"then")
    make_story(tpm=str(state), nvram=str(vars_fd), persistent=False)
    state.write_bytes(b"now")
    vars_fd.write_bytes(b"now")
    kept = Path(put_back(world).undo).parent
    assert state.read_bytes() == b"then"
    assert (kept / "tpm.state").read_bytes() == b"now"
    assert (kept / "nvram.fd").read_bytes() == b"now"


def test_secrets_are_never_readable_by_others_while_they_are_put_back(
    make_story, world, monkeypatch
):
    state = world.root / "tpm2"
    state.mkdir()
    (state / "tpm2-00.permall").write_bytes(b"secret")
    (state / "tpm2-00.permall").chmod(0o600)
    make_story(tpm=str(state))
    modes = []
    real = os.fchown

    def fchown(descriptor, uid, gid):
        modes.append(os.fstat(descriptor).st_mode & 0o077)
        real(descriptor, uid, gid)

    monkeypatch.setattr(os, "fchown", fchown)
    before = os.umask(0o022)
    try:
        put_back(world, safety=False)
    finally:
        os.umask(before)
    assert modes == [0]


# -- the safety copy ----------------------------------------------------------------------------


def test_the_restore_can_be_undone_by_a_script(story, world):
    restored = put_back(world)
    script = Path(restored.undo)
    assert script.stat().st_mode & 0o777 == 0o700
    text = script.read_text()
    for dataset in story.datasets:
        assert f"zfs rollback -r {dataset}@s1\n" in text
        assert text.count(f"zfs receive -F {dataset} < ") == 2
    assert "virsh define domain.xml\n" in text
    streams = sorted(path.name for path in script.parent.glob("*.zfs"))
    assert streams == ["000.zfs", "001.zfs", "002.zfs", "003.zfs"]
    assert all((script.parent / name).exists() for name in streams)


def test_the_second_stream_begins_where_the_first_ended(story, world):
    put_back(world)
    sent = [line.split()[1:] for line in world.hooks.log if line.startswith("pool.send_increment")]
    for dataset in story.datasets:
        first, second = [pair for pair in sent if pair[0].startswith(f"{dataset}@")]
        assert first[0] == f"{dataset}@s1"
        assert second[0] == first[1]


def test_the_script_is_shell(story, world):
    restored = put_back(world)
    subprocess.run(["sh", "-n", restored.undo], check=True)


def test_the_script_marks_newer_snapshots_as_snaporchs_again(story, world):
    """Streams have no properties; without them the snapshots would have no owner after the undo."""
    newer = story.snapshot("s2")
    world.pool.snapshot(["tank/web@foreign"], {})
    text = Path(put_back(world).undo).read_text()
    for dataset in story.datasets:
        (line,) = [row for row in text.splitlines() if row.endswith(f" {dataset}@s2")]
        assert line.startswith("zfs set ")
        assert f" snaporch:run={newer.run} " in line
        assert " snaporch:level=ram " in line
        assert text.index(line) > text.rindex(f"zfs receive -F {dataset}")
    assert "@s1\n" not in text.partition("zfs receive")[2]
    assert "foreign" not in text


def test_names_are_quoted_in_the_script(world):
    world.add_guest(disks={"vda": "tank/vm one's"})
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s1"))
    text = Path(put_back(world).undo).read_text()
    assert """zfs rollback -r 'tank/vm one'"'"'s@s1'\n""" in text


def test_without_safety_nothing_is_copied(story, world):
    restored = put_back(world, safety=False)
    assert restored.undo is None
    assert story.safety() == ([], [])
    assert "pool.send_increment" not in world.hooks.acts()


@pytest.mark.parametrize("free", [0, 2 * len(b"now") - 1])
def test_no_room_for_the_safety_copy_is_refused_and_nothing_was_touched(
    story, world, monkeypatch, free
):
    """There has to be room for the streams of both datasets together."""
    full = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: full)
    with pytest.raises(RefusedError, match="--no-safety"):
        put_back(world)
    assert_untouched(story, world)


def test_nvram_tpm_and_managed_save_are_kept_with_it(make_story, world):
    vars_fd, state = world.root / "vars.fd", world.root / "tpm2"
    vars_fd.write_bytes(b"then")
    state.mkdir()
    (state / "tpm2-00.permall").write_bytes(b"secret then")
    make_story(nvram=str(vars_fd), tpm=str(state))
    vars_fd.write_bytes(b"now")
    (state / "tpm2-00.permall").write_bytes(b"secret now")
    (state / "tpm2-00.volatilestate").write_bytes(b"volatile now")
    manage_save(world)
    script = Path(put_back(world).undo)
    kept = script.parent
    assert (kept / "nvram.fd").read_bytes() == b"now"
    assert (kept / "tpm.tpm2-00.permall").read_bytes() == b"secret now"
    assert (kept / "tpm.tpm2-00.volatilestate").read_bytes() == b"volatile now"
    assert (kept / "managed.save").read_bytes().endswith(b"QEVM later")
    text = script.read_text()
    assert f"put nvram.fd {vars_fd.parent} {vars_fd.name}\n" in text
    assert f"put tpm.tpm2-00.permall {state} tpm2-00.permall\n" in text
    assert "its managed save image: virsh restore --bypass-cache $PWD/managed.save" in text
    files = its_files(text)
    precious = world.root / "precious"
    precious.write_text("the host's")
    vars_fd.unlink()
    vars_fd.symlink_to(precious)
    subprocess.run(["sh", "-e"], input="\n".join(files), cwd=kept, text=True, check=True)
    assert precious.read_text() == "the host's"
    assert not vars_fd.is_symlink()
    assert vars_fd.read_bytes() == b"now"
    assert (state / "tpm2-00.permall").read_bytes() == b"secret now"
    elsewhere = world.root / "elsewhere"
    state.rename(elsewhere)
    (elsewhere / "tpm2-00.permall").write_bytes(b"the host's")
    state.symlink_to(elsewhere)
    done = subprocess.run(["sh", "-e"], input="\n".join(files), cwd=kept, text=True, check=False)
    assert done.returncode == 5
    assert (elsewhere / "tpm2-00.permall").read_bytes() == b"the host's"
    state.unlink()
    elsewhere.rename(state)
    made = plan(world)
    restore(world.context, made, safety=True, keep_running=True)
    found = [each for each in scan_store(world.paths.bundles) if each.kind is ItemKind.SAFETY]
    assert [each.problem for each in found] == ["", ""], "prune must know every file of it"
    assert any((each.path / "running.save").exists() for each in found)


def test_a_managed_save_that_is_copied_is_on_stable_storage(story, world, monkeypatch, to_disk):
    """libvirt's directory may be on another file system; the image there is deleted next."""

    def link(*_paths):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    manage_save(world)
    kept = Path(put_back(world).undo).parent / "managed.save"
    assert kept.read_bytes().endswith(b"QEVM later")
    assert kept.stat().st_mode & 0o777 == 0o600
    assert to_disk.index("managed.save") < to_disk.index("undo.sh")


def test_the_script_bars_the_guest_until_everything_is_restored(story, world):
    text = Path(put_back(world).undo).read_text()
    text = text.replace("rm -f undone\n", "")
    order = ["flock -n 9", "virsh define barred.xml", "zfs rollback", "zfs receive", "rm -f "]
    places = [text.index(word) for word in [*order, "virsh define domain.xml", "touch undone"]]
    assert places == sorted(places)
    kept = Path(story.safety()[1][0])
    assert "run-snaporch-recover-first" in (kept / "barred.xml").read_text()
    assert (kept / "domain.xml").read_text() == story.domain.inactive_xml


# -- failures before the rollback ---------------------------------------------------------------


def assert_untouched(story, world, *, state=DomainState.RUNNING):
    assert story.content() == {b"now"}
    assert world.guest().state is state
    assert "pool.rollback" not in world.hooks.acts()
    assert story.safety() == ([], [])


@pytest.mark.parametrize("place", ["pool.snapshot", "pool.snapshot tank", "pool.send_increment"])
def test_a_safety_copy_that_fails_leaves_the_guest_running(story, world, place):
    world.hooks.at[place] = failing(PoolError("zfs", "some failure"))
    with pytest.raises(SnaporchError, match="some failure"):
        put_back(world)
    assert_untouched(story, world)


def test_a_signal_during_the_safety_copy_leaves_the_guest_running(story, world):
    def come():
        world.context.interrupt.signum = 2

    world.hooks.at["pool.send_increment"] = come
    with pytest.raises(InterruptedRunError):
        put_back(world)
    assert_untouched(story, world)


def test_a_guest_that_cannot_be_stopped_leaves_no_trace(story, world):
    world.hooks.at["hypervisor.destroy"] = failing(HypervisorError("web", "device busy"))
    with pytest.raises(SnaporchError, match="device busy") as caught:
        put_back(world)
    assert caught.value.exit_code == ExitCode.FAILED
    assert_untouched(story, world)


def test_a_store_that_is_full_once_the_guest_is_off_is_named(story, world, monkeypatch):
    full = shutil.disk_usage("/")._replace(free=0)
    world.hooks.at["hypervisor.destroy"] = lambda: monkeypatch.setattr(
        shutil, "disk_usage", lambda _path: full
    )
    with pytest.raises(SnaporchError, match=r"no room for the safety copy.*the guest is off"):
        put_back(world)
    assert_untouched(story, world, state=DomainState.OFF)


def test_what_is_written_while_the_safety_copy_is_saved_needs_room_too(story, world, monkeypatch):
    """Saving may have taken hours. The guest is not stopped for a copy that does not fit."""
    sent = []

    def write():
        sent.append(world.guest().state)
        if len(sent) == len(story.record.datasets):
            world.pool.write("tank/web", b"x" * 1000)
            left = shutil.disk_usage("/")._replace(free=1000)
            monkeypatch.setattr(shutil, "disk_usage", lambda _path: left)

    world.hooks.at["pool.send_increment"] = write
    with pytest.raises(RefusedError, match="no room for the safety copy"):
        put_back(world)
    assert world.guest().state is DomainState.RUNNING
    assert "hypervisor.destroy" not in world.hooks.acts()
    assert world.leftovers() == []


def test_a_snapshot_that_appears_while_the_record_is_written_is_not_destroyed(story, world):
    def appear_once():
        if world.guest().state is DomainState.OFF:
            del world.hooks.at["pool.user_properties"]
            world.pool.snapshot(["tank/web@hourly"], {})

    world.hooks.at["pool.user_properties"] = appear_once
    with pytest.raises(
        SnaporchError, match=r"tank/web@hourly appeared meanwhile.*the guest is off"
    ):
        put_back(world)
    assert "tank/web@hourly" in world.pool.names()
    assert "pool.rollback" not in world.hooks.acts()


def test_streams_of_encrypted_datasets_are_raw(story, world):
    world.pool._datasets["tank/web"].encrypted = True
    put_back(world)
    sent = [line.split() for line in world.hooks.log if line.startswith("pool.send_increment")]
    raw = {(words[1].partition("@")[0], words[-1] == "raw") for words in sent}
    assert raw == {("tank/web", True), ("flash/web", False)}
    assert len(sent) == 4  # while the guest ran, and once it was off


def test_a_safety_copy_that_cannot_be_completed_says_that_the_guest_is_off(story, world):
    def fail_once_off():
        if world.guest().state is DomainState.OFF:
            raise PoolError("zfs send", "some failure")

    world.hooks.at["pool.send_increment"] = fail_once_off
    with pytest.raises(SnaporchError, match="the guest is off, its disks are as they were"):
        put_back(world)
    assert_untouched(story, world, state=DomainState.OFF)


# -- failures after it --------------------------------------------------------------------------

AFTER = {
    "pool.rollback": PoolError("zfs rollback", "dataset is busy"),
    "hypervisor.drop_managed_save": HypervisorError("web", "no"),
    "hypervisor.restore": HypervisorError("web", "restore: no such CPU"),
}


@pytest.mark.parametrize(("place", "error"), AFTER.items(), ids=AFTER)
def test_a_failure_after_the_guest_was_stopped_names_the_command_that_finishes(
    story, world, place, error
):
    world.hooks.at[place] = failing(error)
    with pytest.raises(AttentionError) as caught:
        put_back(world)
    message = str(caught.value)
    assert error.reason in message
    assert "the guest is off" in message
    assert "fix the cause, then: snaporch recover web (or boot it: snaporch restore" in message
    assert caught.value.exit_code == ExitCode.ATTENTION


@pytest.mark.parametrize("place", AFTER)
@pytest.mark.parametrize("way", ["recover", "restore"])
def test_that_command_finishes_it_and_so_does_another_restore(story, world, place, way):
    world.hooks.at[place] = failing(AFTER[place])
    with pytest.raises(AttentionError):
        put_back(world)
    with pytest.raises(HypervisorError, match="run-snaporch-recover-first"):
        world.hypervisor.start(story.domain.uuid, paused=False)
    del world.hooks.at[place]
    if way == "recover":
        assert recover(world.context, story.domain.uuid)
    else:
        put_back(world, safety=False)
    assert world.guest().ram == story.ram
    assert story.content() == {b"first"}
    assert world.guest().inactive == story.domain.inactive_xml
    assert world.leftovers() == []


def test_a_definition_that_cannot_be_restored_is_restored_later(story, world):
    def fail():
        if world.guest().ram == story.ram:
            raise HypervisorError("domain XML", "define: no")

    world.hooks.at["hypervisor.define"] = fail
    with pytest.raises(AttentionError, match="the guest is running"):
        put_back(world)
    del world.hooks.at["hypervisor.define"]
    recover(world.context, story.domain.uuid)
    assert world.guest().inactive == story.domain.inactive_xml
    assert world.guest().state is DomainState.RUNNING
    assert world.leftovers() == []


def test_a_guest_that_cannot_be_booted_can_be_started_by_hand(story, world):
    world.hooks.at["hypervisor.start"] = failing(HypervisorError("web", "no"))
    with pytest.raises(AttentionError, match="the guest is off; fix the cause") as caught:
        put_back(world, cold=True)
    assert "cannot be started" not in str(caught.value)
    del world.hooks.at["hypervisor.start"]
    world.hypervisor.start(story.domain.uuid, paused=False)
    recover(world.context, story.domain.uuid)
    assert world.hooks.acts().count("hypervisor.start") == 2
    assert world.leftovers() == []


def test_odd_names_are_quoted_in_that_command(story, world):
    story.snapshot("two words")
    world.hooks.at["pool.rollback"] = failing(PoolError("zfs rollback", "busy"))
    with pytest.raises(AttentionError, match="restore --cold 'web@two words'"):
        put_back(world, "two words")


def test_a_signal_after_the_rollback_began_is_too_late(story, world):
    def come():
        world.context.interrupt.signum = 15

    world.hooks.at["pool.rollback"] = come
    assert put_back(world).resumed


def test_a_snapshot_that_appeared_meanwhile_is_not_destroyed(story, world):
    made = plan(world)

    def appear():
        world.pool.snapshot(["tank/web@hourly"], {})

    world.hooks.at["hypervisor.destroy"] = appear
    with pytest.raises(SnaporchError, match="tank/web@hourly appeared meanwhile"):
        restore(world.context, made, safety=True)
    assert "tank/web@hourly" in world.pool.names()


def test_a_guest_that_was_started_meanwhile_is_not_stopped(make_story, world):
    """The user agreed to other losses."""
    make_story()
    guest = world.guest()

    def start():
        guest.boot += 1

    world.hooks.at["pool.send_increment"] = start
    with pytest.raises(RefusedError, match="was started meanwhile"):
        put_back(world)
    assert guest.state is DomainState.RUNNING
    assert not {"hypervisor.destroy", "pool.rollback"} & set(world.hooks.acts())
    assert world.leftovers() == []


def test_nothing_is_rolled_back_while_a_snapshot_is_read(story, world):
    made = plan(world)
    (record,) = find_records(world.context, "web@s1")
    with reading_lock(world.context, record), pytest.raises(BusyError, match="cloned, verified"):
        restore(world.context, made, safety=True)
    assert story.content() == {b"now"}
    assert world.guest().state is DomainState.RUNNING
    assert story.safety() == ([], [])
    restore(world.context, made, safety=True)
    assert story.content() == {b"first"}


def test_a_snapshot_that_appeared_meanwhile_is_found_before_the_guest_is_stopped(story, world):
    made = plan(world)
    world.hooks.at["pool.send_increment"] = lambda: appear(world)
    with pytest.raises(RefusedError, match="tank/web@hourly appeared meanwhile"):
        restore(world.context, made, safety=True)
    assert_untouched(story, world)


def test_another_snapshot_in_the_place_of_the_target_is_found_before_the_guest_is_stopped(
    story, world
):
    """The name came back, with other content."""
    made = plan(world)
    world.pool.destroy_snapshots(["tank/web@s1"])
    world.pool.snapshot(["tank/web@s1"], {})
    with pytest.raises(PoolError, match="tank/web@s1: is missing"):
        restore(world.context, made, safety=True)
    assert_untouched(story, world)


def test_a_snapshot_that_is_kept_at_the_last_moment_is_not_destroyed(story, world):
    story.snapshot("s2")
    made = plan(world)

    def keep_it():
        kept = [each for each in world.pool.snapshots() if each.name == "s2"]
        keep(world.pool, kept, datetime.now(UTC))

    world.hooks.at["hypervisor.drop_managed_save"] = keep_it
    with pytest.raises(AttentionError, match="stopped half way"):
        restore(world.context, made, safety=True)
    assert {"tank/web@s2", "flash/web@s2"} <= {*world.pool.names()}
    assert story.content() == {b"now"}


def test_a_path_that_leads_elsewhere_meanwhile_is_found_before_the_guest_is_stopped(story, world):
    """Saving may have taken hours."""
    image, other = Path(story.domain.disks[0].source), world.image("flash/moved", "web.img")

    def lead_elsewhere():
        if not image.is_symlink():
            image.unlink()
            image.symlink_to(other)

    world.hooks.at["pool.send_increment"] = lead_elsewhere
    with pytest.raises(RefusedError, match=r"and leads to flash/moved web[.]img now"):
        put_back(world)
    assert_untouched(story, world)


def appear(world):
    if "tank/web@hourly" not in world.pool.names():
        world.pool.snapshot(["tank/web@hourly"], {})


def test_the_names_of_restored_files_are_on_stable_storage(tmp_path, to_disk):
    copy, place = tmp_path / "copy", tmp_path / "nvram" / "web.fd"
    copy.write_bytes(b"then")
    steps._put_back(HostFile(str(copy), str(place), None, None, None))
    assert place.read_bytes() == b"then"
    fresh = to_disk[0]
    assert fresh.startswith(".snaporch.")
    assert to_disk == [fresh, f"{fresh} -> web.fd", "nvram"]


def test_the_script_is_on_stable_storage_before_anything_is_rolled_back(story, world, to_disk):
    synced = []
    world.hooks.at["pool.rollback"] = lambda: synced.append(list(to_disk))
    restored = put_back(world)
    directory = Path(restored.undo).parent
    written = synced[0][: len(synced[0]) - synced[0][::-1].index("undo.sh")]
    after = synced[0][len(written) :]
    assert after[:2] == [directory.name, directory.parent.name]


# -- the bundle ---------------------------------------------------------------------------------


def test_the_result_as_json(story, world):
    restored = put_back(world)
    document = restored.as_json()
    assert document == story.record.as_json() | {
        "domain_state": "running",
        "resumed": True,
        "clock_set": False,
        "undo": restored.undo,
    }
