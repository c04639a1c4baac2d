import errno
import os
import select
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import images
from fakes.domain_xml import DiskSpec
from fakes.hooks import failing, failing_once
from fakes.leftovers import nothing_left_open

from snaporch import command_log
from snaporch.bundle.manifest import Role
from snaporch.bundle.save_image import read_header
from snaporch.catalog.records import all_records
from snaporch.disks.qemu_img import OverlayError
from snaporch.errors import (
    AttentionError,
    BusyError,
    ExitCode,
    InterruptedRunError,
    NotFoundError,
    RefusedError,
    RunFailedError,
    SnaporchError,
    UnavailableError,
)
from snaporch.hypervisor import HypervisorError, StartHookProblem
from snaporch.journal import Note, Step, append_note, read_journals
from snaporch.locks import domain_lock
from snaporch.model import BundleState, DomainState, Level
from snaporch.recovery.recover_runs import recover_leftovers
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import PoolError

TWO = {"vda": "tank/web", "vdb": "flash/web"}
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def snapshot(world, name="s1", *, taker=None, **options):
    domain, request = world.hypervisor.domain("web"), SnapshotRequest(name, **options)
    return take_snapshot(world.context, domain, request, taker=taker)


def records(world):
    return all_records(world.context.store, world.pool.snapshots())


def interrupt(world, signum=15):
    """Return a hook that acts as Ctrl-C."""

    def come():
        world.context.interrupt.signum = signum

    return come


# -- without failures ---------------------------------------------------------------------------


def test_the_calls_for_a_running_guest_in_order(world):
    world.add_guest(disks=TWO)
    snapshot(world)
    assert world.hooks.acts() == [
        "overlays.make",
        "overlays.make",
        "hypervisor.capture",
        "pool.snapshot",
        "pool.snapshot",
        "hypervisor.commit",
        "pool.set_properties",
    ]


def test_a_running_guest_is_as_it_was_afterwards(world):
    world.add_guest(disks=TWO)
    before = world.guest().live, world.guest().inactive, world.guest().state
    snapshot(world)
    assert world.on_bases()
    assert world.guest().sources()[0] == {
        "vda": str(world.root / "zfs/tank/web/web-vda.img"),
        "vdb": str(world.root / "zfs/flash/web/web-vdb.img"),
    }
    assert world.guest().state is before[2]
    assert world.leftovers() == []


def test_a_run_logs_its_commands_with_its_fields(world):
    world.add_guest()
    before = command_log.current_fields()
    seen = []
    world.hooks.at["pool.snapshot"] = lambda: seen.append(command_log.current_fields())
    before = command_log.current_fields()
    record = snapshot(world)
    whole = {"DOMAIN": "web", "SNAPSHOT": "s1", "RUN": record.run, "STEP": "pool-snapshot"}
    assert seen == [whole]
    assert command_log.current_fields() == before


def test_the_record_that_list_shows(world):
    world.add_guest(disks=TWO)
    record = snapshot(world)
    assert (record.domain, record.snapshot) == ("web", "s1")
    assert (record.level, record.state) == (Level.RAM, BundleState.COMPLETE)
    assert record.datasets == ("flash/web", "tank/web")
    assert record.pause_ms == 7.5
    assert record.ram_bytes == len(world.guest().ram)
    assert records(world) == [record]


def test_the_snapshots_are_taken_while_the_guest_is_on_overlays(world):
    world.add_guest()
    seen = []
    world.hooks.at["pool.snapshot"] = lambda: seen.append(world.on_bases())
    snapshot(world)
    assert seen == [False]


def test_until_it_is_sealed_a_snapshot_is_recorded_as_a_crash(world):
    world.add_guest()
    seen = []

    def look():
        (taken,) = world.pool.snapshots()
        seen.append(dict(taken.properties))

    world.hooks.at["hypervisor.commit"] = look
    record = snapshot(world)
    assert seen == [
        {
            "run": record.run,
            "uuid": record.uuid,
            "domain": "web",
            "bundle": f"{record.uuid}/{record.run}",
            "level": "crash",
        }
    ]
    assert world.pool.snapshots()[0].properties["level"] == "ram"


def test_the_bundle_holds_ram_as_it_was(world):
    world.add_guest()
    record = snapshot(world)
    world.hypervisor.destroy(record.uuid)
    ram = world.guest().ram
    world.hypervisor.restore(Path(record.bundle) / "ram.save", running=True)
    assert world.guest().ram == ram
    assert world.context.store.verify(f"{record.uuid}/{record.run}").was_running


def test_the_bundle_names_its_snapshots(world):
    world.add_guest(disks=TWO)
    record = snapshot(world)
    manifest = world.context.store.manifest(f"{record.uuid}/{record.run}")
    listed = {(entry.dataset, entry.guid) for entry in manifest.snapshots}
    assert listed == {(s.dataset, s.guid) for s in world.pool.snapshots()}
    assert manifest.part(Role.LIVE_XML).name == "domain.live.xml"
    assert [disk.target for disk in manifest.disks] == ["vda", "vdb"]


def test_nvram_and_tpm_state_are_stored(world):
    vars_fd = world.root / "vars.fd"
    vars_fd.write_bytes(b"nvram")
    tpm = world.root / "tpm2"
    tpm.mkdir()
    (tpm / "tpm2-00.permall").write_bytes(b"secret")
    world.add_guest(nvram=str(vars_fd), tpm=str(tpm))
    record = snapshot(world)
    manifest = world.context.store.manifest(f"{record.uuid}/{record.run}")
    assert manifest.part(Role.NVRAM).source == str(vars_fd)
    assert manifest.part(Role.TPM).source == str(tpm / "tpm2-00.permall")
    assert (Path(record.bundle) / "nvram.fd").read_bytes() == b"nvram"


def test_a_disk_that_is_left_out_is_reported(world):
    world.add_guest(more=(DiskSpec("vdb", "/dev/null"), DiskSpec("sda", None, device="cdrom")))
    snapshot(world)
    assert world.heard.notes == [
        "left out: vdb (/dev/null): not on ZFS but on tmpfs",
        "RAM and the disks that are left out will be of different instants",
    ]
    assert "left out: sda: removable (cdrom)" in world.heard.steps


@pytest.mark.parametrize(("way", "noted"), [("overlay", True), ("manual", False)])
def test_a_missing_start_hook_is_reported(world, way, noted):
    world.add_guest()
    world.with_defaults(ram_strategy=way)
    world.hypervisor.why_unguarded = StartHookProblem("it is not there", "snaporch install")
    snapshot(world)
    assert bool(world.heard.notes) is noted
    assert all("it is not there; run: snaporch install" in text for text in world.heard.notes)


def test_a_shared_disk_is_reported(world):
    shared = DiskSpec("vdb", str(world.image("tank/shared", "vdb.img")), shareable=True)
    world.with_defaults(ram_strategy="manual")
    world.add_guest(more=(shared,))
    world.add_guest("db", {}, more=(shared,))
    snapshot(world)
    assert any("only a snapshot of both as a group" in note for note in world.heard.notes)


def test_a_guest_with_a_cd_drive_gets_a_whole_bundle(world):
    world.add_guest(more=(DiskSpec("sda", None, device="cdrom"),))
    assert snapshot(world).state is BundleState.COMPLETE


def test_a_paused_guest_needs_no_overlays_and_stays_paused(world):
    world.add_guest(state=DomainState.PAUSED)
    record = snapshot(world)
    assert world.hooks.acts() == ["hypervisor.capture", "pool.snapshot", "pool.set_properties"]
    assert (record.level, record.state) == (Level.RAM, BundleState.COMPLETE)
    assert world.guest().state is DomainState.PAUSED
    assert not world.context.store.manifest(f"{record.uuid}/{record.run}").was_running


def test_a_paused_guest_that_is_resumed_meanwhile_is_recorded_as_crash(world):
    world.add_guest(state=DomainState.PAUSED)
    world.hooks.at["pool.snapshot"] = lambda: world.hypervisor.resume(world.guest().uuid)
    assert snapshot(world).level is Level.CRASH
    assert "did not stay as it was" in world.heard.notes[0]


def test_a_guest_that_is_off_gets_a_plain_snapshot(world):
    world.add_guest(state=DomainState.OFF)
    record = snapshot(world)
    assert world.hooks.acts() == ["pool.snapshot", "pool.set_properties"]
    assert (record.level, record.state) == (Level.OFF, BundleState.COMPLETE)
    assert (record.ram_bytes, record.pause_ms) == (None, 0.0)
    assert world.leftovers() == []


@pytest.mark.parametrize("what", ["started", "removed", "managed save"])
def test_a_guest_that_did_not_stay_off_is_recorded_as_crash(world, what):
    domain = world.add_guest(state=DomainState.OFF)

    def happen():
        if what == "started":
            world.hypervisor.start(domain.uuid, paused=False)
        else:
            del world.hypervisor.guests[domain.uuid]

    if what == "managed save":
        world.guest().managed_save = True
    else:
        world.hooks.at["pool.snapshot"] = happen
    assert snapshot(world).level is Level.CRASH


def test_a_transient_guest(world):
    world.add_guest(persistent=False)
    record = snapshot(world)
    assert record.state is BundleState.COMPLETE
    assert world.on_bases()


def test_ram_by_file(world):
    world.add_guest()
    world.with_defaults(ram_capture="file")
    record = snapshot(world)
    assert record.ram_bytes == len(world.guest().ram)
    assert world.leftovers() == []
    assert read_header(Path(record.bundle) / "ram.save").data_length > 0


def test_progress_is_reported(world):
    world.add_guest()
    snapshot(world)
    assert world.heard.steps[0] == "ram snapshot @s1 of tank/web (overlay)"
    assert world.heard.steps[-1] == "done: ram snapshot s1"
    assert world.heard.amounts


def test_a_host_of_replicas_begins_a_store_for_its_own_guests(world):
    """Except for a guest whose own snapshots show that the store existed."""
    world.add_guest(disks=TWO)
    world.pool.create("backup/mail")
    foreign = {"bundle": "other/r1", "run": "r1", "domain": "mail", "uuid": "other"}
    world.pool.snapshot(
        ["backup/mail@x"], {f"snaporch:{key}": each for key, each in foreign.items()}
    )
    assert snapshot(world).state is BundleState.COMPLETE
    shutil.rmtree(world.paths.bundles)
    with pytest.raises(RefusedError, match=r"in one \(1\).*is its file system mounted"):
        snapshot(world, "s2")


def test_two_runs_one_after_the_other(world):
    world.add_guest()
    snapshot(world, "s1")
    snapshot(world, "s2")
    assert [record.snapshot for record in records(world)] == ["s1", "s2"]


# -- failure at each step -----------------------------------------------------------------------

BEFORE_POOL = {
    "hypervisor.capture": HypervisorError("web", "no"),
    "capture.writing": HypervisorError("web", "lost the monitor"),
    "capture.switched": HypervisorError("web", "failed to resume"),
    "pool.snapshot": PoolError("zfs snapshot", "out of space"),
}
AFTER_POOL = {
    "hypervisor.commit": failing_once(HypervisorError("vda", "job failed")),
    "hypervisor.versions": failing(HypervisorError("web", "connection lost")),
}


def assert_as_it_was(world):
    assert world.on_bases()
    assert world.guest().state is DomainState.RUNNING
    assert world.leftovers() == []


@pytest.mark.parametrize("mode", ["stream", "file"])
@pytest.mark.parametrize(("place", "error"), BEFORE_POOL.items(), ids=BEFORE_POOL)
def test_a_failure_up_to_the_pool_snapshot_leaves_no_trace(world, place, error, mode):
    world.add_guest(disks=TWO)
    world.with_defaults(ram_capture=mode)
    world.hooks.at[place] = failing(error)
    with pytest.raises(RunFailedError) as caught:
        snapshot(world)
    assert error.reason in str(caught.value)
    assert "the guest is as it was and nothing was kept" in str(caught.value)
    assert caught.value.exit_code == ExitCode.FAILED
    assert_as_it_was(world)
    assert world.pool.names() == []
    assert list(world.paths.bundles.glob("*/*")) == []


def test_snapshots_of_a_partial_failure_over_two_pools_are_destroyed(world):
    world.add_guest(disks=TWO)
    world.hooks.at["pool.snapshot tank"] = failing(PoolError("tank/web", "out of space"))
    with pytest.raises(RunFailedError, match="out of space"):
        snapshot(world)
    assert "pool.snapshot flash/web@s1" in world.hooks.log
    assert "pool.destroy_snapshots flash/web@s1" in world.hooks.log
    assert_as_it_was(world)
    assert world.pool.names() == []


@pytest.mark.parametrize(("place", "hook"), AFTER_POOL.items(), ids=AFTER_POOL)
def test_a_failure_after_the_pool_snapshot_keeps_it_as_a_crash(world, place, hook):
    world.add_guest(disks=TWO)
    world.hooks.at[place] = hook
    with pytest.raises(RunFailedError, match="only as crash-consistent, without its RAM"):
        snapshot(world)
    assert_as_it_was(world)
    (record,) = records(world)
    assert record.level is Level.CRASH
    assert record.datasets == ("flash/web", "tank/web")


def test_a_level_that_cannot_be_recorded_keeps_the_journal_for_recovery(world):
    """The bundle is sealed, so the snapshot is complete once its level is recorded."""
    world.add_guest(disks=TWO)
    world.hooks.at["pool.set_properties"] = failing(PoolError("zfs set", "pool is suspended"))
    with pytest.raises(AttentionError, match="snaporch recover") as caught:
        snapshot(world)
    assert "pool is suspended" in str(caught.value)
    assert "crash-consistent" not in str(caught.value)
    assert world.on_bases()
    assert [path.suffix for path in world.paths.journal.iterdir()] == [".jsonl"]
    del world.hooks.at["pool.set_properties"]
    assert snapshot(world, "s2").level is Level.RAM
    assert [(r.snapshot, r.level) for r in records(world)] == [("s1", "ram"), ("s2", "ram")]
    assert_as_it_was(world)


def test_a_level_recorded_on_the_second_try_is_not_called_a_crash(world):
    world.add_guest(disks=TWO)
    world.hooks.at["pool.set_properties"] = failing_once(PoolError("zfs set", "busy"))
    message = ""
    try:
        snapshot(world)
    except RunFailedError as error:
        message = str(error)
    assert_as_it_was(world)
    (record,) = records(world)
    assert (record.level, record.state) == (Level.RAM, BundleState.COMPLETE)
    assert "only as crash-consistent" not in message


def test_sealing_that_fails_leaves_level_crash_and_no_bundle(world, monkeypatch):
    world.add_guest()
    real = os.fsync

    def sync(descriptor):
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name == "ram.save":
            raise NO_SPACE
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(RunFailedError, match="No space left"):
        snapshot(world)
    assert_as_it_was(world)
    (record,) = records(world)
    assert (record.level, record.state) == (Level.CRASH, BundleState.NONE)
    assert world.pool.snapshots()[0].properties["level"] == "crash"


def test_a_snapshot_that_is_destroyed_at_once_is_noticed(world):
    world.add_guest(disks=TWO)

    def destroy():
        world.hooks.at.pop("pool.snapshots", None)
        world.pool.destroy_snapshots(["tank/web@s1"])

    def arm():
        world.hooks.at["pool.snapshots"] = destroy

    world.hooks.at["pool.snapshot tank"] = arm
    with pytest.raises(RunFailedError, match="destroyed by another program"):
        snapshot(world)
    assert_as_it_was(world)


def test_a_bundle_that_cannot_be_begun_keeps_its_own_exit_code(world):
    world.add_guest()
    world.paths.bundles.touch()
    with pytest.raises(UnavailableError) as caught:
        snapshot(world)
    assert caught.value.exit_code == ExitCode.UNAVAILABLE
    world.paths.bundles.unlink()
    assert_as_it_was(world)


def test_overlays_that_cannot_be_made_leave_no_trace(world):
    world.add_guest(disks=TWO)

    def make():
        if world.hooks.acts().count("overlays.make") == 2:
            raise OverlayError("qemu-img create", "No space left on device")

    world.hooks.at["overlays.make"] = make
    with pytest.raises(SnaporchError, match="No space left"):
        snapshot(world)
    assert_as_it_was(world)


def test_a_journal_that_cannot_be_written_stops_the_run_before_anything(world):
    world.add_guest()
    world.paths.journal.touch()
    with pytest.raises((UnavailableError, OSError)):
        snapshot(world)
    assert world.hooks.log == []


@pytest.mark.parametrize("step", Step)
@pytest.mark.parametrize("event", ["begin", "end"])
def test_a_full_disk_under_the_journal_at_any_step(world, refuse_line, step, event):
    world.add_guest(disks=TWO)
    refuse_line(f'"event": "{event}", "step": "{step}"')
    with (
        nothing_left_open(world.kill_guardians),
        pytest.raises(RunFailedError, match="No space left"),
    ):
        snapshot(world)
    assert_as_it_was(world)


def test_a_failure_that_is_a_bug_is_undone_too(world):
    world.add_guest()
    world.hooks.at["pool.snapshot"] = failing(ZeroDivisionError("a bug"))
    with pytest.raises(RunFailedError, match="ZeroDivisionError: a bug"):
        snapshot(world)
    assert_as_it_was(world)


# -- RAM that cannot be streamed ----------------------------------------------------------------


@pytest.fixture
def when_reader_has_failed(world):
    """The guest is not switched to its overlays before it is known that the pipe's reader failed.

    Saving RAM would not be tried again.
    """

    def wait():
        pipe = world.paths.runtime / f"{world.guest().uuid}.ram"
        with suppress(FileNotFoundError):  # the reader, which ended, removed it
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            try:
                poll = select.poll()
                poll.register(descriptor, 0)  # an error is reported when there is no reader
                assert poll.poll(30_000)
            finally:
                os.close(descriptor)

    def once():
        del world.hooks.at["capture.writing"]
        wait()

    world.hooks.at["capture.writing"] = once


@pytest.fixture
def full_store(world, ram_store):
    """The bundle store is full while RAM arrives."""
    world.add_guest()
    world.guest().ram = images.qemu_stream(32 << 20)  # more than waits in memory
    ram_store.error = NO_SPACE


def test_a_stream_that_is_no_image_is_repeated_with_a_file(world, when_reader_has_failed):
    world.add_guest(disks=TWO)
    world.hypervisor.garbles_pipes = True
    record = snapshot(world)
    assert (record.level, record.state) == (Level.RAM, BundleState.COMPLETE)
    assert world.hooks.acts().count("hypervisor.capture") == 2
    assert "repeating with a file" in world.heard.notes[0]
    assert_as_it_was(world)


def test_a_capture_that_fails_once_is_repeated_with_a_file(world):
    world.add_guest()
    world.hooks.at["capture.writing"] = failing_once(HypervisorError("web", "pipe failure"))
    assert snapshot(world).level is Level.RAM
    assert_as_it_was(world)


def test_a_full_store_is_not_retried(world, full_store, when_reader_has_failed):
    world.with_defaults(compression="none")
    with pytest.raises(RunFailedError, match="No space left on device"):
        snapshot(world)
    assert world.hooks.acts().count("hypervisor.capture") == 1
    assert_as_it_was(world)


def test_the_cause_is_reported_and_not_libvirts_broken_pipe(
    world, full_store, when_reader_has_failed
):
    world.with_defaults(ram_capture="stream", compression="none")
    with pytest.raises(RunFailedError, match="No space left on device") as caught:
        snapshot(world)
    assert "Broken pipe" not in str(caught.value)


def test_a_configured_stream_is_not_replaced_by_a_file(world):
    world.add_guest()
    world.with_defaults(ram_capture="stream")
    world.hooks.at["capture.writing"] = failing_once(HypervisorError("web", "pipe failure"))
    with pytest.raises(RunFailedError, match="pipe failure"):
        snapshot(world)
    assert_as_it_was(world)


def test_a_capture_that_switched_the_guest_is_never_repeated(world):
    world.add_guest()
    world.hooks.at["capture.switched"] = failing_once(HypervisorError("web", "failed to resume"))
    with pytest.raises(RunFailedError):
        snapshot(world)
    assert world.hooks.acts().count("hypervisor.capture") == 1
    assert "hypervisor.commit" in world.hooks.acts()
    assert_as_it_was(world)


# -- signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["overlays.make", "capture.writing", "capture.switched"])
def test_a_signal_before_the_pool_snapshot_undoes_the_run(world, place):
    world.add_guest(disks=TWO)
    world.hooks.at[place] = interrupt(world)
    with pytest.raises(InterruptedRunError) as caught:
        snapshot(world)
    assert caught.value.signum == 15
    assert "pool.snapshot" not in world.hooks.acts()
    assert_as_it_was(world)
    assert world.pool.names() == []


@pytest.mark.parametrize("place", ["pool.snapshot", "hypervisor.commit", "pool.set_properties"])
def test_a_signal_from_the_pool_snapshot_on_lets_the_run_finish(world, place):
    world.add_guest(disks=TWO)
    world.hooks.at[place] = interrupt(world)
    record = snapshot(world)
    assert (record.level, record.state) == (Level.RAM, BundleState.COMPLETE)
    assert_as_it_was(world)


def test_a_signal_before_the_run_starts_nothing(world):
    world.add_guest()
    interrupt(world)()
    with pytest.raises(InterruptedRunError):
        snapshot(world)
    assert world.hooks.log == []
    assert world.leftovers() == []


# -- when recovery fails ------------------------------------------------------------------------


def test_a_guest_that_stays_on_overlays_needs_attention_and_keeps_everything(world):
    world.add_guest()
    world.hooks.at["hypervisor.commit"] = failing(HypervisorError("vda", "job failed"))
    with pytest.raises(AttentionError) as caught:
        snapshot(world)
    assert caught.value.exit_code == ExitCode.ATTENTION
    assert f"snaporch recover {world.guest().uuid}" in str(caught.value)
    assert "@s1 was kept, but only as crash-consistent, without its RAM" in str(caught.value)
    assert [(record.level, record.state) for record in records(world)] == [("crash", "none")]
    assert not world.on_bases()
    left = world.leftovers()
    assert any(name.endswith("vda.qcow2") for name in left)
    assert any(name.startswith("journal/") for name in left)


def test_the_next_run_recovers_first(world):
    world.add_guest()
    world.hooks.at["hypervisor.commit"] = failing(HypervisorError("vda", "job failed"))
    with suppress(AttentionError):
        snapshot(world, "s1")
    del world.hooks.at["hypervisor.commit"]
    assert not list(world.paths.bundles.rglob("ram.save"))
    record = snapshot(world, "s2")
    assert record.level is Level.RAM
    assert [(each.snapshot, each.level) for each in records(world)] == [
        ("s1", "crash"),
        ("s2", "ram"),
    ]
    assert not list(world.paths.bundles.glob("*/.*.partial"))
    assert "committed vda" in world.heard.notes[0]
    assert_as_it_was(world)


def test_snapshots_that_cannot_be_destroyed_need_attention(world):
    world.add_guest(disks=TWO)
    world.hooks.at["pool.snapshot tank"] = failing(PoolError("tank", "out of space"))
    world.hooks.at["pool.destroy_snapshots"] = failing(PoolError("flash", "is suspended"))
    with pytest.raises(AttentionError) as caught:
        snapshot(world)
    assert "out of space" in str(caught.value)
    assert "is suspended" in str(caught.value)
    assert world.on_bases()
    assert any(name.startswith("journal/") for name in world.leftovers())


def test_the_first_cause_is_reported_even_if_recovery_fails(world):
    world.add_guest()
    world.hooks.at["pool.snapshot"] = failing(PoolError("zfs snapshot", "out of space"))
    world.hooks.at["hypervisor.commit"] = failing(HypervisorError("vda", "job failed"))
    with pytest.raises(AttentionError) as caught:
        snapshot(world)
    assert "out of space" in str(caught.value)
    assert "job failed" in str(caught.value)


# -- before anything is touched -----------------------------------------------------------------


def test_a_refusal_has_its_own_exit_code_and_leaves_nothing(world):
    world.add_guest()
    world.pool.snapshot(["tank/web@s1"], {})
    world.hooks.log.clear()
    with pytest.raises(RefusedError):
        snapshot(world)
    assert world.hooks.log == []
    assert world.leftovers() == []


def test_a_locked_domain_is_busy(world):
    domain = world.add_guest()
    held = domain_lock(
        world.paths.runtime, "web", domain.uuid, "x", wait="0s", interrupt=world.context.interrupt
    )
    with held, pytest.raises(BusyError):
        snapshot(world)
    assert world.hooks.log == []


@pytest.fixture
def elsewhere(world):
    """The same host with other paths in the configuration, except for the journal."""
    there = world.root / "elsewhere"
    paths = world.paths.model_copy(
        update={"runtime": there / "runtime", "overlays": there / "o", "bundles": there / "b"}
    )
    config = world.context.config.model_copy(update={"paths": paths})
    return replace(world.context, config=config)


def test_the_lock_does_not_depend_on_the_configuration(world, elsewhere):
    """A run under way is not mistaken for a killed one."""
    seen = []

    def meanwhile():
        with pytest.raises(BusyError) as caught:
            take_snapshot(elsewhere, world.hypervisor.domain("web"), SnapshotRequest("s2"))
        recover_leftovers(elsewhere)
        seen.append((str(caught.value), world.hypervisor.busy_with(world.guest().uuid)))

    world.add_guest()
    world.hooks.at["capture.writing"] = meanwhile
    assert snapshot(world).state is BundleState.COMPLETE
    ((error, job),) = seen
    assert error.startswith("web: held by snapshot")
    assert job == "snapshot"
    assert world.is_as_it_was()


def test_a_domain_that_vanished_meanwhile_is_not_found(world):
    domain = world.add_guest()
    world.hypervisor.guests.clear()
    with pytest.raises(NotFoundError):
        take_snapshot(world.context, domain, SnapshotRequest("s1"))


def test_the_domain_is_read_again_under_its_lock(world):
    """The guest may have been started before the lock was taken."""
    domain = world.add_guest(state=DomainState.OFF)
    world.hypervisor.start(domain.uuid, paused=False)
    record = take_snapshot(world.context, domain, SnapshotRequest("s1"))
    assert record.level is Level.RAM


def test_no_descriptor_and_no_thread_is_left(world):
    world.add_guest(disks=TWO)
    snapshot(world, "warm-up")
    with nothing_left_open(world.kill_guardians):
        snapshot(world, "s1")
        world.hooks.at["capture.writing"] = failing(HypervisorError("web", "no"))
        with suppress(RunFailedError):
            snapshot(world, "s2")


# -- what the guardian has noted ----------------------------------------------------------------


def guardian_notes(world, note, then):
    def come():
        (journal,) = read_journals(world.paths.journal)
        append_note(journal.path, note)
        then()
        raise PoolError("tank", "no")

    return come


def test_a_pause_after_the_guardians_release_is_left_alone(world):
    world.add_guest()

    def paused_by_its_owner():
        world.guest().state, world.guest().paused_reason = DomainState.PAUSED, "user"

    come = guardian_notes(world, Note.RELEASED, paused_by_its_owner)
    world.hooks.at["pool.snapshot tank"] = come
    with pytest.raises(RunFailedError):
        snapshot(world, level="paused")
    assert world.guest().state is DomainState.PAUSED


def test_a_guest_that_ended_during_the_guardians_pivot_needs_attention(world):
    """The guest may have written to its base since."""
    world.add_guest()
    world.with_defaults(ram_strategy="overlay")

    def ended():
        (journal,) = read_journals(world.paths.journal)
        world.write_overlay(journal.facts.overlays[0].overlay)
        world.guest().live, world.guest().state = None, DomainState.OFF

    world.hooks.at["pool.snapshot tank"] = guardian_notes(world, Note.PIVOTING, ended)
    with pytest.raises(AttentionError, match="either may be the newer"):
        snapshot(world)
