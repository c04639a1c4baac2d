"""Restores that are killed at every step, and their recovery."""

import secrets
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes import manifests
from fakes.claimed_volume import ClaimedVolume
from fakes.hooks import failing

from snaporch.config import Config
from snaporch.context import Context
from snaporch.errors import AttentionError, BusyError, RefusedError, SnaporchError
from snaporch.fence import Fence
from snaporch.hypervisor import HypervisorError
from snaporch.journal import JournalError
from snaporch.model import DatasetKind, DomainState
from snaporch.prune.prune import prune
from snaporch.recovery.recover_runs import preview, recover
from snaporch.restore.journal import Ending, RestoreJournal, RestoreStep, unfinished
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.recovery_decision import (
    RestoreAction,
    RestoreObservation,
    choose_action,
    decide,
)
from snaporch.restore.run import restore
from snaporch.restore.source import find_records, reading_lock
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import PoolError

DATASETS = ("flash/web", "tank/web")
MOMENTS = ("ahead", "before", "after")
STEPS = {
    "resume": [
        RestoreStep.SAFETY,
        RestoreStep.STOP,
        *DATASETS,
        RestoreStep.FILES,
        RestoreStep.RESUME,
        RestoreStep.DEFINE,
    ],
    "cold": [
        RestoreStep.SAFETY,
        RestoreStep.STOP,
        *DATASETS,
        RestoreStep.FILES,
        RestoreStep.DEFINE,
        RestoreStep.BOOT,
    ],
    "disks_only": [
        RestoreStep.SAFETY,
        RestoreStep.STOP,
        *DATASETS,
        RestoreStep.FILES,
        RestoreStep.DEFINE,
    ],
}


class Killed(BaseException):
    """The process is killed here, and runs no more code."""


def die(world):
    """Ends the process, which then cannot undo anything: it would look at the guest first."""
    world.hooks.at["hypervisor.find"] = failing(Killed())
    raise Killed


@pytest.fixture
def kill(world, monkeypatch):
    """Makes the next restore end at a point."""

    @contextmanager
    def at(moment, place):
        original = RestoreJournal.step

        def here(now, step, of):
            if (now, place) == (moment, of or step):
                die(world)

        @contextmanager
        def step(journal, step, of=""):
            here("ahead", step, of)
            with original(journal, step, of):
                here("before", step, of)
                yield
                here("after", step, of)

        with monkeypatch.context() as patched:
            patched.setattr(RestoreJournal, "step", step)
            with pytest.raises(Killed):
                yield
        world.hooks.at.pop("hypervisor.find", None)

    return at


def put_back(world, name="s1", *, keep_running=False, safety=True, **how):
    made = make_restore_plan(world.context, "web", name, discard_newer=True, **how)
    return restore(world.context, made, safety=safety, keep_running=keep_running)


def begins(moment, place):
    """Whether the guest was stopped by then, so that the restore is finished."""
    return place not in (RestoreStep.SAFETY, RestoreStep.STOP) or (moment, place) == (
        "after",
        RestoreStep.STOP,
    )


def cannot_be_started(world, uuid):
    with pytest.raises(SnaporchError):
        world.hypervisor.start(uuid, paused=False)
    return True


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("how", "place"), [(how, place) for how, places in STEPS.items() for place in places]
)
def test_killed_and_recovered(story, world, kill, how, place, moment):
    options = {} if how == "resume" else {how: True}
    with kill(moment, place):
        put_back(world, **options)
    uuid = story.domain.uuid
    if len(story.content()) > 1:
        assert cannot_be_started(world, uuid)
    log = list(world.hooks.log)
    assert preview(world.context, uuid)
    assert world.hooks.log == log
    (text,) = map(str, recover(world.context, uuid))
    assert world.leftovers() == []
    assert world.guest().inactive == story.domain.inactive_xml
    if not begins(moment, place):
        assert "undid the restore of @s1" in text
        assert story.content() == {b"now"}
        assert world.guest().state is DomainState.RUNNING
        assert world.guest().ram == b"QEVM later"
        assert story.safety() == ([], [])
        return
    assert "finished the restore of @s1" in text
    assert story.content() == {b"first"}
    state = DomainState.OFF if how == "disks_only" else DomainState.RUNNING
    assert world.guest().state is state
    if how == "resume":
        assert world.guest().ram == story.ram
    (directory,) = story.safety()[1]
    assert (directory / "undo.sh").exists()


def test_recovery_rolls_back_nothing_while_a_snapshot_is_read(story, world, kill):
    story.snapshot("s2")
    with kill("after", RestoreStep.STOP):
        put_back(world)
    (record,) = find_records(world.context, "web@s2")
    busy = pytest.raises(BusyError, match="cloned, verified, copied or mounted")
    with reading_lock(world.context, record), busy:
        recover(world.context, story.domain.uuid)
    assert story.content() == {b"now"}
    recover(world.context, story.domain.uuid)
    assert story.content() == {b"first"}


def test_datasets_already_rolled_back_may_be_read_during_the_rest(story, world, kill):
    with kill("before", RestoreStep.FILES):
        put_back(world)
    (record,) = find_records(world.context, "web@s1")
    with reading_lock(world.context, record):
        recover(world.context, story.domain.uuid)
    assert world.guest().state is DomainState.RUNNING


def test_recovery_rolls_no_volume_back_beneath_the_host(story, world, kill, monkeypatch):
    with kill("after", RestoreStep.STOP):
        put_back(world)
    world.pool._datasets["tank/web"].kind = DatasetKind.VOLUME
    volume = ClaimedVolume(world, "tank/web", monkeypatch)
    volume.claim("dm-3")
    with pytest.raises(AttentionError, match="and this host uses it: dm-3"):
        recover(world.context, story.domain.uuid)
    assert story.content() == {b"now"}
    volume.release()
    recover(world.context, story.domain.uuid)
    assert story.content() == {b"first"}


def test_recovery_checks_holds_before_the_first_rollback(story, world, kill):
    story.snapshot("s2")
    with kill("ahead", "flash/web"):
        put_back(world)
    world.pool.hold(["tank/web@s2"], "backup")
    with pytest.raises(AttentionError, match="newer snapshots are held: tank/web@s2"):
        recover(world.context, story.domain.uuid)
    assert story.content() == {b"now"}


def test_killed_after_the_guest_was_destroyed_and_before_the_copy_was_complete(story, world, kill):
    """The copy is made again, and is complete."""

    world.hooks.at["hypervisor.destroy"] = lambda: world.hooks.at.update(
        {"pool.send_increment": lambda: die(world)}
    )
    with kill("never", RestoreStep.STOP):
        put_back(world)
    world.hooks.at.clear()
    assert world.guest().state is DomainState.OFF
    recover(world.context, story.domain.uuid)
    assert story.content() == {b"first"}
    (directory,) = story.safety()[1]
    script = (directory / "undo.sh").read_text()
    streams = sorted(path.name for path in directory.glob("*.zfs"))
    assert len(streams) == 4
    assert all(f"< {name}\n" in script for name in streams)


@pytest.mark.parametrize(
    ("moment", "place"),
    [("after", RestoreStep.STOP), ("after", DATASETS[0]), ("before", RestoreStep.RESUME)],
)
def test_the_restore_of_a_fenced_guest_stays_as_it_is_until_the_fence_is_gone(
    story, world, kill, moment, place
):
    """It may run elsewhere, and its datasets here may have received what is newer."""
    with kill(moment, place):
        put_back(world)
    world.fences.put(Fence(story.domain.uuid, "web"))
    for each in DATASETS:
        world.pool.snapshot([f"{each}@received"], {})
    world.hooks.log.clear()
    (left,) = recover(world.context, story.domain.uuid)
    assert "stays interrupted: it is fenced" in str(left)
    assert not {"pool.rollback", "hypervisor.restore", "hypervisor.define"} & {*world.hooks.acts()}
    assert {f"{each}@received" for each in DATASETS} <= {*world.pool.names()}
    assert cannot_be_started(world, story.domain.uuid)
    with pytest.raises(RefusedError, match="is fenced"):
        take_snapshot(world.context, world.hypervisor.domain("web"))
    world.fences.remove(story.domain.uuid)
    recover(world.context, story.domain.uuid)
    assert world.guest().state is DomainState.RUNNING
    assert unfinished(world.paths.journal, story.domain.uuid) == []


def test_the_next_snapshot_of_the_domain_finishes_it_first(story, world, kill):
    with kill("after", "flash/web"):
        put_back(world)
    world.context.interrupt.signum = None
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s2"))
    assert "finished the restore of @s1" in world.heard.notes[-1]
    assert world.pool.read("tank/web") == b"first"


def test_a_command_that_cannot_finish_a_restore_refuses_and_names_the_one_that_can(
    story, world, kill
):
    with kill("after", "flash/web"):
        put_back(world)
    poor = Context(world.context.config, world.hypervisor, world.pool, world.heard)
    with pytest.raises(AttentionError, match="a restore of it was interrupted; run: snaporch rec"):
        take_snapshot(poor, world.hypervisor.domain("web"), SnapshotRequest("s2"))


def test_a_new_restore_replaces_an_interrupted_one(story, world, kill):
    later = story.snapshot("s2")
    with kill("ahead", "tank/web"):
        put_back(world, "s2")
    put_back(world, "s1")
    assert story.content() == {b"first"}
    assert world.guest().inactive == story.domain.inactive_xml
    assert world.leftovers() == []
    assert later.run


def test_a_second_restore_that_fails_early_leaves_the_first_to_be_finished(story, world, kill):
    story.snapshot("s2")
    with kill("after", "flash/web"):
        put_back(world, "s1")
    world.hooks.at["pool.send_increment"] = failing(PoolError("zfs send", "some failure"))
    with pytest.raises(PoolError):
        put_back(world, "s1")
    del world.hooks.at["pool.send_increment"]
    assert cannot_be_started(world, story.domain.uuid)
    assert len(unfinished(world.paths.journal, story.domain.uuid)) == 1
    recover(world.context, story.domain.uuid)
    assert story.content() == {b"first"}
    assert world.guest().ram == story.ram


@pytest.mark.parametrize("place", [RestoreStep.STOP, "flash/web", RestoreStep.RESUME])
def test_a_second_restore_that_is_killed_too_is_recovered(story, world, kill, place):
    for _ in range(2):
        with kill("after", place):
            put_back(world)
    recover(world.context, story.domain.uuid)
    assert story.content() == {b"first"}
    assert world.guest().state is DomainState.RUNNING
    assert world.guest().inactive == story.domain.inactive_xml
    assert world.leftovers() == []


@pytest.mark.parametrize("order", ["first-second", "second-first"])
def test_a_restore_killed_before_it_removed_the_previous_journal_is_finished(
    story, world, kill, monkeypatch, order
):
    """The second restore is finished and the first is not, whichever is found first."""
    later = story.snapshot("s2")
    story.write(b"now")
    names = iter(["0001", "0002"] if order == "first-second" else ["0002", "0001"])
    monkeypatch.setattr(secrets, "token_hex", lambda _size: next(names))
    with kill("after", "flash/web"):
        put_back(world, "s2")

    world.hooks.at["pool.release"] = failing(Killed())
    with pytest.raises(Killed):
        put_back(world, "s1", cold=True)
    world.hooks.at.clear()
    assert len(unfinished(world.paths.journal, story.domain.uuid)) == 2
    said = " ".join(map(str, recover(world.context, story.domain.uuid)))
    assert "finished the restore of @s1" in said
    assert "hypervisor.restore" not in world.hooks.acts()
    assert story.content() == {b"first"}
    assert world.leftovers() == []
    assert later.run


def test_a_guest_that_was_undefined_cannot_be_started_half_way(story, world, kill):
    world.hypervisor.guests.clear()
    with kill("after", "flash/web"):
        put_back(world)
    assert world.hypervisor.find(story.domain.uuid) is None
    recover(world.context, story.domain.uuid)
    assert world.guest().ram == story.ram
    assert world.guest().inactive == story.domain.inactive_xml


def test_a_snapshot_that_appeared_since_is_reported_when_it_is_destroyed(story, world, kill):
    """The guest was off already, so it holds nothing that the safety copy has not."""
    with kill("after", "flash/web"):
        put_back(world)
    world.pool.snapshot(["tank/web@hourly"], {})
    recover(world.context, story.domain.uuid)
    assert "tank/web@hourly" not in world.pool.names()
    assert any("destroying tank/web@hourly" in note for note in world.heard.notes)


def test_a_target_that_was_destroyed_since_is_not_guessed(story, world, kill):
    with kill("after", "flash/web"):
        put_back(world)
    world.pool.remake("tank/web@s1")
    with pytest.raises(AttentionError, match="tank/web@s1: is missing"):
        recover(world.context, story.domain.uuid)
    assert world.pool.read("tank/web") == b"now"
    assert cannot_be_started(world, story.domain.uuid)


@pytest.mark.parametrize(("moment", "place"), [("after", "flash/web"), ("ahead", "tank/web")])
def test_nothing_is_rolled_back_under_a_guest_that_was_started(story, world, kill, moment, place):
    with kill(moment, place):
        put_back(world)
    world.guest().live, world.guest().state = story.domain.inactive_xml, DomainState.RUNNING
    with pytest.raises(AttentionError, match="virsh destroy web, then: snaporch recover web"):
        recover(world.context, story.domain.uuid)
    assert world.pool.read("tank/web") == b"now"


def test_a_guest_that_was_redefined_and_may_have_run_is_not_rolled_back(story, world, kill):
    with kill("after", "flash/web"):
        put_back(world)
    world.hypervisor.define(story.domain.inactive_xml)
    with pytest.raises(AttentionError, match="snaporch restore web@s1"):
        recover(world.context, story.domain.uuid)
    assert world.pool.read("tank/web") == b"now"


def test_the_restore_is_named_with_what_was_accepted_of_another_hosts_snapshot(story, world, kill):
    world.pool.set_properties([f"{e}@s1" for e in story.datasets], {"snaporch:copy": "nas"})
    directory = Path(story.record.bundle)
    for path in directory.glob("domain*.xml"):
        text = path.read_text()
        path.write_text(text.replace("</domain>", "<seclabel type='none'/></domain>"))
    manifests.with_sums(directory)
    with kill("after", "flash/web"):
        put_back(world, cold=True, accepted=("seclabel",))
    world.hypervisor.define(story.domain.inactive_xml)
    with pytest.raises(AttentionError) as caught:
        recover(world.context, story.domain.uuid)
    step = "do it again: snaporch restore web@s1 --accept seclabel --cold"
    assert caught.value.step == step


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ({}, ""),
        ({"cold": True}, " --cold"),
        ({"disks_only": True}, " --disks-only"),
        ({"paused": True}, " --paused"),
    ],
    ids=str,
)
def test_the_restore_is_named_with_the_options_that_it_needs_now(story, world, kill, how, options):
    with kill("after", "flash/web"):
        put_back(world, **how)
    world.hypervisor.define(story.domain.inactive_xml)
    for newer, more in (((), ""), (("tank/web@s9",), " --discard-newer")):
        for name in newer:
            world.pool.snapshot([name], {})
        with pytest.raises(AttentionError) as caught:
            recover(world.context, story.domain.uuid)
        assert caught.value.step == f"do it again: snaporch restore web@s1{options}{more}"


@pytest.fixture
def volumes(story, world):
    """The guest's disks are no files."""
    for name in story.datasets:
        world.pool._datasets[name].kind = DatasetKind.VOLUME
        world.resolver.volumes.add(name)


@pytest.mark.parametrize("kind", ["files", "volumes"])
def test_data_that_a_resumed_guest_wrote_is_never_rolled_back(story, world, kill, request, kind):
    """The guest was resumed, its restore was killed, and the guest ended hours later."""
    if kind == "volumes":
        request.getfixturevalue("volumes")
    with kill("after", RestoreStep.RESUME):
        put_back(world)
    world.hypervisor.destroy(story.domain.uuid)
    story.write(b"hours of work")
    (text,) = map(str, recover(world.context, story.domain.uuid))
    assert "it is off, with its disks as it left them" in text
    assert story.content() == {b"hours of work"}
    assert world.guest().inactive == story.domain.inactive_xml
    assert world.leftovers() == []


def test_reading_the_disk_files_does_not_count_as_writing(story, world, kill):
    """ZFS counts the access times that it writes."""
    with kill("before", RestoreStep.RESUME):
        put_back(world)
    for dataset in story.datasets:
        world.pool.write(dataset, b"first, read")
    (text,) = map(str, recover(world.context, story.domain.uuid))
    assert "it is running" in text
    assert world.guest().ram == story.ram


def test_data_in_a_file_that_no_definition_names_is_not_rolled_back(story, world, kill):
    """The file of a disk that is attached to the running guest only, or a data file."""
    with kill("after", RestoreStep.RESUME):
        put_back(world)
    world.hypervisor.destroy(story.domain.uuid)
    Path(story.domain.disks[0].source).with_name("data.raw").write_bytes(b"hours of work")
    (text,) = map(str, recover(world.context, story.domain.uuid))
    assert "it is off, with its disks as it left them" in text
    assert world.guest().state is DomainState.OFF


def test_nothing_is_decided_while_a_file_system_is_not_mounted(story, world, kill):
    with kill("before", RestoreStep.RESUME):
        put_back(world)
    world.resolver.mount_points.update(dict.fromkeys(DATASETS))
    with pytest.raises(AttentionError, match=r"not mounted.*zfs mount -l .*snaporch recover"):
        recover(world.context, story.domain.uuid)
    assert cannot_be_started(world, story.domain.uuid)
    world.resolver.mount_points.clear()
    (text,) = map(str, recover(world.context, story.domain.uuid))
    assert "it is running" in text


@pytest.mark.usefixtures("volumes")
def test_disks_that_may_have_been_written_are_not_rolled_back(story, world, kill):
    """ZFS does not report the bytes written since the guest was to be resumed."""
    with kill("after", RestoreStep.RESUME):
        put_back(world)
    world.hypervisor.destroy(story.domain.uuid)
    story.write(b"hours of work")
    world.hooks.at["pool.written_since"] = failing(PoolError("zfs get", "the pool is busy"))
    recover(world.context, story.domain.uuid)
    assert story.content() == {b"hours of work"}


def probes(world, old, *, dry_run):
    """Choose the action; whether a snapshot was taken to count what was written."""
    world.hooks.log.clear()
    choose_action(world.context, old, dry_run=dry_run)
    return any("pool.snapshot" in entry for entry in map(str, world.hooks.log))


@pytest.mark.usefixtures("volumes")
def test_only_a_recovery_that_changes_something_takes_a_snapshot_to_count_writes(
    story, world, kill
):
    with kill("after", RestoreStep.RESUME):
        put_back(world)
    (old,) = unfinished(world.paths.journal, story.domain.uuid)
    assert not probes(world, old, dry_run=False), "the guest runs: what it wrote does not matter"
    world.hypervisor.destroy(story.domain.uuid)
    assert not probes(world, old, dry_run=True)
    assert probes(world, old, dry_run=False)


@pytest.mark.usefixtures("volumes")
def test_no_snapshot_is_taken_if_no_guest_was_resumed(story, world, kill):
    with kill("ahead", RestoreStep.RESUME):
        put_back(world)
    (old,) = unfinished(world.paths.journal, story.domain.uuid)
    world.hooks.log.clear()
    assert choose_action(world.context, old, dry_run=False) is RestoreAction.FORWARD
    assert world.hooks.log == []


@pytest.mark.usefixtures("volumes")
def test_a_dataset_without_a_count_of_written_bytes_may_have_been_written(story, world, kill):
    """Its target is missing, so only the other dataset was counted, both times, and is the same."""

    def lose_target():
        full = "tank/web@s1"
        for tag in world.pool.holds(full):
            world.pool.release([full], tag)
        world.pool.destroy_snapshots([full])
        world.hooks.at.clear()

    counts = {"pool.snapshot tank": lose_target}
    world.hooks.at["pool.rollback"] = lambda: world.hooks.at.update(counts)
    with kill("after", RestoreStep.RESUME):
        put_back(world)
    world.hypervisor.destroy(story.domain.uuid)
    world.pool.write("tank/web", b"hours of work")
    (text,) = map(str, recover(world.context, story.domain.uuid))
    assert "it is off, with its disks as it left them" in text
    assert world.pool.read("tank/web") == b"hours of work"


@pytest.mark.usefixtures("volumes")
def test_data_that_the_rollback_wrote_does_not_count_as_the_guests(story, world, kill):
    """ZFS counts some KiB after a rollback, and after mounting."""
    rollback = world.pool.rollback

    def with_a_trace(snapshot):
        rollback(snapshot)
        world.pool.write(snapshot.partition("@")[0], b"first, mounted")

    world.pool.rollback = with_a_trace
    with kill("before", RestoreStep.RESUME):
        put_back(world)
    (text,) = map(str, recover(world.context, story.domain.uuid))
    assert "it is running" in text
    assert world.guest().ram == story.ram


def test_no_pruning_deletes_the_safety_copy_of_an_interrupted_restore(story, world, kill):
    """It is the only copy of the disks' earlier content."""
    config = Config.model_validate(
        {"paths": world.paths.model_dump(), "prune": {"safety_keep": "0s", "trash_keep": "0s"}}
    )
    with kill("before", RestoreStep.RESUME):
        put_back(world)
    prune(config, world.pool)
    assert story.safety()[1]
    recover(world.context, story.domain.uuid)
    prune(config, world.pool)
    assert story.safety()[1] == []


def test_a_journal_with_an_unknown_entry(story, world, kill):
    with kill("after", "flash/web"):
        put_back(world)
    (path,) = world.paths.journal.glob("*.jsonl")
    with path.open("a") as stream:
        stream.write('{"event": "begin", "step": "teleport"}\n')
    with pytest.raises(JournalError, match="use the snaporch that wrote it"):
        recover(world.context, story.domain.uuid)


# -- a guest that is started meanwhile ----------------------------------------------------------


def start(world, story):
    """Start the guest, as an admin does from a file with its definition."""
    guest = world.guest()
    guest.live, guest.state, guest.boot = story.domain.inactive_xml, DomainState.RUNNING, 77


@pytest.mark.parametrize("place", ["hypervisor.destroy", "pool.send_increment"])
def test_a_guest_started_between_stop_and_rollback_is_not_rolled_back(story, world, place):
    """Its definition was barred, but the admin started it from a file."""

    def start_by_another_program():
        guest = world.guest()
        if place == "hypervisor.destroy":
            end = world.hypervisor._end

            def end_and_start(guest):
                end(guest)
                start(world, story)

            world.hypervisor._end = end_and_start
        elif guest.state is DomainState.OFF:
            start(world, story)

    world.hooks.at[place] = start_by_another_program
    with pytest.raises(SnaporchError, match="started by another program"):
        put_back(world)
    world.hooks.at.clear()
    if place == "pool.send_increment":  # the start came after the last check
        (text,) = map(str, recover(world.context, story.domain.uuid))
        assert "undid the restore" in text
    assert story.content() == {b"now"}
    assert world.guest().state is DomainState.RUNNING
    assert world.guest().inactive == story.domain.inactive_xml
    assert story.safety() == ([], [])
    assert world.leftovers() == []


def test_a_guest_started_while_the_copy_was_written_is_left_alone(make_story, world):
    story = make_story(state=DomainState.OFF)
    world.hooks.at["pool.send_increment"] = lambda: start(world, story)
    with pytest.raises(RefusedError, match="was started meanwhile"):
        put_back(world)
    assert story.content() == {b"now"}
    assert world.guest().inactive == story.domain.inactive_xml
    assert story.safety() == ([], [])
    assert world.leftovers() == []


# -- the running state --------------------------------------------------------------------------


def test_the_running_state_is_kept_and_the_script_resumes_it(story, world):
    script = Path(put_back(world, keep_running=True).undo)
    assert "hypervisor.save" in world.hooks.acts()
    assert "hypervisor.destroy" not in world.hooks.acts()
    saved = script.parent / "running.save"
    assert saved.read_bytes().endswith(b"QEVM later")
    before, _, resumes = script.read_text().partition("\ntouch undone && sync undone .\n")
    assert "virsh restore" not in before.partition("virsh define domain.xml")[2]
    assert 'virsh restore --bypass-cache "$PWD/running.save" ||' in resumes
    assert world.guest().ram == story.ram


def test_a_restore_that_fails_after_saving_the_running_state_resumes_the_guest(story, world):
    def fail():
        if world.guest().state is DomainState.OFF:
            raise PoolError("zfs send", "some failure")

    world.hooks.at["pool.send_increment"] = fail
    with pytest.raises(PoolError):
        put_back(world, keep_running=True)
    assert world.guest().state is DomainState.RUNNING
    assert world.guest().ram == b"QEVM later"
    assert world.guest().inactive == story.domain.inactive_xml
    assert story.safety() == ([], [])


def test_a_running_state_saved_before_a_kill_is_kept(story, world, kill):
    def die_when_off():
        if world.guest().state is DomainState.OFF:
            die(world)

    world.hooks.at["pool.send_increment"] = die_when_off
    with kill("never", RestoreStep.STOP):
        put_back(world, keep_running=True)
    world.hooks.at.clear()
    recover(world.context, story.domain.uuid)
    (directory,) = story.safety()[1]
    assert (directory / "running.save").read_bytes().endswith(b"QEVM later")
    assert "virsh restore" in (directory / "undo.sh").read_text()


def test_a_running_state_that_cannot_be_saved_is_refused_before_anything_is_touched(story, world):
    guest = world.guest()
    for name in ("live", "inactive"):
        text = getattr(guest, name).replace("</devices>", "<hostdev type='pci'/></devices>")
        setattr(guest, name, text)
    with pytest.raises(RefusedError, match="its running state cannot be kept"):
        put_back(world, keep_running=True)
    assert world.hooks.log == []


def test_a_guest_that_is_off_has_no_running_state(make_story, world):
    make_story(state=DomainState.OFF)
    put_back(world, keep_running=True)
    assert "no running state to keep" in world.heard.notes[-1]


def test_a_guest_whose_ram_cannot_be_saved_keeps_running(story, world):
    world.hooks.at["hypervisor.save"] = failing(HypervisorError("web", "no space"))
    with pytest.raises(HypervisorError, match="no space"):
        put_back(world, keep_running=True)
    assert world.guest().ram == b"QEVM later"
    assert world.guest().inactive == story.domain.inactive_xml
    assert world.leftovers() == []


# -- the decision -------------------------------------------------------------------------------


def observations():
    flags = [
        "active",
        "barred",
        "untouched",
        "stopping",
        "together",
        "all_off",
        "rolling",
        "rolled_back",
        "resuming",
    ]
    for number in range(1 << len(flags)):
        for ending in Ending:
            yield RestoreObservation(
                **{name: bool(number >> bit & 1) for bit, name in enumerate(flags)}, ending=ending
            )


def test_no_decision_rolls_back_under_a_guest_or_over_its_writes():
    for observed in observations():
        action = decide(observed)
        if action is RestoreAction.FORWARD:
            assert not observed.active
            assert observed.rolling or (observed.stopping and not observed.together)
            if observed.rolling and not observed.rolled_back:
                assert observed.barred
            if observed.rolled_back and observed.ending is Ending.RESUME and observed.resuming:
                assert (observed.barred and observed.untouched) or not observed.rolling
        if action is RestoreAction.UNDO:
            assert not observed.rolling
            assert not (observed.all_off and observed.active)  # others may be rolled back
        done = observed.rolling and observed.rolled_back and observed.active
        assert (action is RestoreAction.COMPLETE) is done
