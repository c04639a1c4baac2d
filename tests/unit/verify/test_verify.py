import errno
import fcntl
import json
import os
from datetime import timedelta
from pathlib import Path

import pytest
from fakes import streams
from fakes.domain_xml import DiskSpec
from fakes.hooks import failing
from fakes.hypervisor import Agent
from fakes.images import qcow2

from snaporch import default_paths
from snaporch.bundle import store
from snaporch.bundle.manifest import MANIFEST_NAME, BackingFileEntry, manifest_bytes, read_manifest
from snaporch.bundle.store import BundleStore
from snaporch.catalog.records import all_records
from snaporch.config import Config
from snaporch.errors import (
    BusyError,
    InterruptedRunError,
    RefusedError,
    RunFailedError,
    UnavailableError,
)
from snaporch.extract import disk_reader
from snaporch.hypervisor import GuestExit, HypervisorError, LostLibvirtError
from snaporch.model import (
    BundleState,
    DatasetKind,
    DomainState,
    Level,
    VerifyDepth,
    VerifyStep,
    iso,
)
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.source import PUT_BACK, find_records
from snaporch.show import describe, provenance
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.snapshot.store_pages import store_as_pages
from snaporch.verify.verify import VerifyOptions, check_options, longest_ago, verify, verify_all
from snaporch.zfs import PoolError


def record(world, text="web@s1"):
    return find_records(world.context, text)[-1]


def check(world, text="web@s1", **options):
    return verify(world.context, record(world, text), VerifyOptions(**options))


def taken(world, name, level=None, **guest):
    """Another guest with a snapshot ``s1``."""
    world.add_guest(name, **guest)
    domain = world.hypervisor.domain(name)
    return take_snapshot(world.context, domain, SnapshotRequest("s1", level))


def nothing_of_it(world):
    clones = list(world.paths.clones.glob("*")) if world.paths.clones.exists() else []
    datasets = [d.name for d in world.pool.datasets() if "verify" in d.name]
    domains = [guest.name for guest in world.hypervisor.guests.values() if "verify" in guest.name]
    return clones == datasets == domains == []


@pytest.fixture(autouse=True)
def original(story):
    return story


@pytest.mark.parametrize("level", [None, "crash"])
def test_the_original_keeps_the_state_of_its_tpm(world, tmp_path, level):
    """libvirt deletes what the XML of a transient domain names, when it ends."""
    (tmp_path / "state").write_bytes(b"then")
    taken(world, "tpm", level, tpm=str(tmp_path / "state"))
    outcome = check(world, "tpm@s1")
    assert outcome.passed, outcome.failure
    assert outcome.reached in (VerifyDepth.RESUMED, VerifyDepth.BOOTED)
    assert (tmp_path / "state").read_bytes() == b"then"
    assert list((world.root / "swtpm").iterdir()) == []


# -- passing ------------------------------------------------------------------------------------


def test_a_complete_snapshot_passes_and_its_clone_is_removed(original, world):
    outcome = check(world)
    assert (outcome.passed, outcome.reached, outcome.failure) == (True, VerifyDepth.RESUMED, None)
    assert nothing_of_it(world)
    assert world.guest("web").state is DomainState.RUNNING
    assert original.content() == {b"now"}


def test_the_clone_was_resumed_from_its_ram_without_a_network(original, world):
    seen = []
    world.hypervisor.restored = lambda guest: seen.append((guest.name, guest.ram, guest.inactive))
    check(world)
    ((name, ram, inactive),) = seen
    assert name.startswith("web-verify-")
    assert (ram, inactive) == (original.ram, None)


def test_the_result_is_on_every_zfs_snapshot_and_in_the_list(world):
    outcome = check(world)
    texts = {s.properties["verified"] for s in world.pool.snapshots() if s.name == "s1"}
    assert texts == {outcome.verdict.as_text()}
    assert record(world).verified.reached is VerifyDepth.RESUMED


def test_a_snapshot_with_marks_of_another_guest_gets_no_result(original, world):
    """Two guests share the dataset: its `verified` is of the other guest."""
    world.pool.set_properties(
        ["flash/web@s1"], {"snaporch:run": "another", "snaporch:verified": "x"}
    )
    assert verify(world.context, original.record, VerifyOptions()).passed
    found = {each.dataset: each.properties.get("verified", "") for each in world.pool.snapshots()}
    assert "passed resumed" in found["tank/web"]
    assert found["flash/web"] == "x"


def results(world):
    """What is written on the ZFS snapshots, by their names."""
    return {each.name: each.properties.get("verified") for each in world.pool.snapshots()}


def test_damage_of_a_bundle_is_on_all_names_of_the_run_until_it_passes(original, world):
    """sanoid takes such an hourly and a daily snapshot at the same instant."""
    world.take_again("daily")
    ram = Path(original.record.bundle) / "ram.save"
    kept = ram.read_bytes()
    break_bundle(original, "flipped")
    check(world, "web@s1")
    assert results(world)["daily"] == results(world)["s1"]
    assert not record(world, "web@daily").verified.passed
    ram.write_bytes(kept)
    assert check(world, "web@s1", run=False).passed
    assert record(world, "web@daily").verified.passed


def test_at_level_crash_each_name_has_its_own_result(world):
    """The disks of one are not those of the other."""
    taken(world, "cold", "crash")
    world.take_again("daily", "tank/cold")
    assert check(world, "cold@s1", run=False).passed
    assert record(world, "cold@daily").verified is None


def test_a_guest_that_was_paused_has_to_run(world):
    taken(world, "still", state=DomainState.PAUSED)
    assert check(world, "still@s1").reached is VerifyDepth.RESUMED


@pytest.mark.parametrize("level", ["crash", "paused"])
def test_without_ram_a_clone_is_booted(world, level):
    taken(world, "cold", level=level)
    outcome = check(world, "cold@s1")
    assert (outcome.passed, outcome.reached) == (True, VerifyDepth.BOOTED)
    assert nothing_of_it(world)


def test_a_guest_that_was_off_is_booted(world):
    taken(world, "off", state=DomainState.OFF)
    assert check(world, "off@s1").reached is VerifyDepth.BOOTED


def test_checksums_alone_run_nothing(world):
    outcome = check(world, run=False)
    assert (outcome.passed, outcome.reached) == (True, VerifyDepth.CHECKED)
    assert "hypervisor.restore" not in world.hooks.acts()
    assert "pool.clone" not in world.hooks.acts()


@pytest.fixture
def shown(world):
    """The files of ``s1`` as the mounted datasets show them; each image with this content."""

    def show(content):
        for dataset, name in (("tank/web", "web-vda.img"), ("flash/web", "web-vdb.img")):
            folder = world.root / "zfs" / dataset / ".zfs" / "snapshot" / "s1"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    return show


@pytest.mark.parametrize("run", [True, False])
def test_all_data_of_the_disks_is_read_if_asked_for(world, shown, run):
    shown(b"x" * (3 << 20))
    outcome = check(world, run=run, disks=True)
    assert (outcome.passed, outcome.disks) == (True, True)
    assert "all data of 2 disks and backing files was read (6144 KiB)" in outcome.proof
    assert record(world).verified.disks
    first = record(world).verified
    assert not check(world, run=run).disks
    assert record(world).verified.disks_at == first.at


def test_a_volume_is_read_from_a_clone_that_is_removed_again(world):
    world.pool.create("tank/vol", DatasetKind.VOLUME)
    world.pool.write("tank/vol", b"x" * 4096)
    taken(world, "vol", disks={"vda": "tank/vol"})
    outcome = check(world, "vol@s1", run=False, disks=True)
    assert "all data of 1 disks and backing files was read (4 KiB)" in outcome.proof
    assert nothing_of_it(world)


def test_a_damaged_disk_fails(world, shown, monkeypatch):
    shown(b"x")

    def damaged(*_):
        raise OSError(errno.EIO, "Input/output error")

    assert check(world, run=False).passed
    monkeypatch.setattr(disk_reader.os, "pread", damaged)
    outcome = check(world, disks=True)
    assert (outcome.passed, outcome.disks, outcome.reached) == (False, False, VerifyDepth.CHECKED)
    assert "cannot be read (Input/output error)" in outcome.failure.line()
    assert not record(world).verified.passed
    assert (record(world).level, record(world).state) == (Level.RAM, BundleState.COMPLETE)
    assert "pool.clone" not in world.hooks.acts()


def test_an_image_that_is_not_in_the_snapshot_fails(world):
    assert "the image is not in the snapshot" in check(world, disks=True).failure.line()


def test_an_error_of_the_host_while_reading_gives_no_result(world, shown, monkeypatch):
    shown(b"x")

    def hindered(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(disk_reader.os, "pread", hindered)
    with pytest.raises(RunFailedError, match="Cannot allocate memory"):
        check(world, disks=True)
    assert record(world).verified is None


def test_a_signal_interrupts_the_reading_of_disks(world, shown):
    shown(b"x")

    def signal(*_):
        world.context.interrupt.signum = 2

    world.heard.step = lambda _subject, text: signal() if text.startswith("reading") else None
    with pytest.raises(InterruptedRunError):
        check(world, disks=True)
    assert record(world).verified is None


@pytest.mark.parametrize("level", ["ram", "paused", "crash"])
def test_without_all_disks_in_the_snapshot_no_clone_is_run(world, level):
    """A boot without one of its disks proves nothing, and may fail for that reason alone."""
    (world.root / "z.img").touch()
    taken(world, "more", level, more=(DiskSpec("vdz", str(world.root / "z.img")),))
    outcome = check(world, "more@s1")
    assert (outcome.passed, outcome.reached) == (True, VerifyDepth.CHECKED)
    assert any("vdz is not in the snapshot" in line for line in outcome.proof)
    assert "pool.clone" not in world.hooks.acts()


def test_the_agent_of_a_guest_that_had_one_has_to_answer(world):
    taken(world, "talks", agent=Agent.ANSWERS)
    silent = check(world, "talks@s1")
    assert not silent.passed
    assert "agent does not answer" in silent.failure.line()

    def wake(guest):
        guest.agent = Agent.ANSWERS

    world.hypervisor.restored = wake
    assert "the guest's agent answers" in check(world, "talks@s1").proof


def test_a_screenshot_is_stored(world, tmp_path):
    def show(guest):
        guest.screen = b"picture"

    world.hypervisor.restored = show
    outcome = check(world, screenshots=tmp_path)
    assert Path(outcome.screenshot) == tmp_path / "web@s1.png"
    assert Path(outcome.screenshot).read_bytes() == b"picture"


def test_a_screenshot_does_not_follow_a_link_in_its_directory(world, tmp_path):
    (tmp_path / "other").write_bytes(b"precious")
    (tmp_path / "web@s1.png").symlink_to(tmp_path / "other")
    world.hypervisor.restored = lambda guest: setattr(guest, "screen", b"picture")
    assert Path(check(world, screenshots=tmp_path).screenshot).read_bytes() == b"picture"
    assert (tmp_path / "other").read_bytes() == b"precious"


def test_a_guest_without_a_screen_passes_too(world, tmp_path):
    outcome = check(world, screenshots=tmp_path)
    assert (outcome.passed, outcome.screenshot) == (True, None)
    assert "has no screen, so there is no screenshot" in world.heard.notes


def test_a_screenshot_that_fails_is_not_a_missing_screen(world, tmp_path):
    """It proves nothing of the snapshot, so that the verification passes."""
    world.hooks.at["hypervisor.screenshot"] = failing(HypervisorError("clone", "no room in /var"))
    outcome = check(world, screenshots=tmp_path)
    assert (outcome.passed, outcome.screenshot) == (True, None)
    assert "there is no screenshot: no room in /var" in world.heard.notes


# -- failing ------------------------------------------------------------------------------------


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def break_bundle(original, how):
    bundle = Path(original.record.bundle)
    if how == "flipped":
        flip(bundle / "ram.save")
    elif how == "short":
        (bundle / "ram.save").write_bytes(b"LibvirtQemudSave")
    elif how == "gone":
        (bundle / "domain.xml").unlink()
    elif how == "manifest":
        (bundle / "manifest.json").unlink()


@pytest.mark.parametrize("how", ["flipped", "short", "gone", "manifest"])
def test_a_broken_bundle_fails(original, world, how):
    break_bundle(original, how)
    outcome = check(world)
    assert (outcome.passed, outcome.reached) == (False, VerifyDepth.NOTHING)
    assert outcome.failure
    assert "pool.clone" not in world.hooks.acts()
    assert not record(world).verified.passed


@pytest.mark.parametrize("how", ["gone", "other"])
def test_a_missing_or_wrong_zfs_snapshot_fails(world, how):
    if how == "gone":
        world.pool.destroy_snapshots(["flash/web@s1"])
    else:
        world.pool.remake("flash/web@s1")
    outcome = check(world)
    assert not outcome.passed
    assert "flash/web@s1" in outcome.failure.line()


def test_a_part_that_has_grown_has_the_wrong_size(original, world):
    with (Path(original.record.bundle) / "domain.xml").open("ab") as stream:
        stream.write(b"\n\n")
    reason = "domain.xml of its bundle is missing, or of the wrong size"
    failure = check(world).failure
    assert (failure.reason, failure.step) == (reason, PUT_BACK)
    assert record(world).state is BundleState.INCOMPLETE


def test_a_failed_result_replaces_a_passed_one(original, world):
    assert check(world).passed
    break_bundle(original, "flipped")
    check(world)
    assert not record(world).verified.passed


def test_a_lesser_verification_does_not_replace_a_stronger_one(original, world):
    check(world)
    resumed = record(world).verified
    outcome = check(world, run=False)
    assert outcome.as_json()["reached"] == "checked"
    found = record(world).verified
    assert (found.at, found.passed) == (outcome.at.replace(microsecond=0), True)
    assert (found.reached, found.reached_at) == (VerifyDepth.RESUMED, resumed.at)


def test_a_failed_verification_ends_what_an_earlier_one_has_proved(original, world):
    ram = Path(original.record.bundle) / "ram.save"
    kept = ram.read_bytes()
    check(world)
    break_bundle(original, "flipped")
    check(world, run=False)
    assert (record(world).has_failed, record(world).state) == (True, BundleState.DAMAGED)
    ram.write_bytes(kept)
    check(world, run=False)
    assert record(world).verified.reached is VerifyDepth.CHECKED


def test_a_stronger_result_on_one_zfs_snapshot_only_does_not_count(original, world):
    """Writing the result was interrupted."""
    check(world, run=False)
    text = "2025-06-01T12:00:00Z passed resumed"
    world.pool.set_properties(["flash/web@s1"], {"snaporch:verified": text})
    check(world, run=False)
    assert record(world).verified.reached is VerifyDepth.CHECKED


def failed_steps(world):
    verified = record(world).verified
    assert verified.passed is not bool(verified.failed_steps)
    return verified.failed_steps


def test_nothing_is_rolled_back_while_a_snapshot_is_verified(original, world):
    tried = original.refused_rollbacks("hypervisor.restore")
    assert check(world).passed
    assert tried


def test_a_failed_script_stays_failed_until_a_script_passes(original, world, tmp_path):
    check(world, script=script(tmp_path, "exit 3"))
    first = record(world).verified
    for options in ({"run": False}, {}):
        outcome = check(world, **options)
        assert not outcome.passed
        assert outcome.failure.line() == (
            "web@s1: what was checked now is right, but it failed before in: script; "
            "snaporch verify --script PATH web@s1"
        )
        assert failed_steps(world) == (VerifyStep.SCRIPT,)
    assert record(world).verified.at >= first.at
    assert check(world, script=script(tmp_path, "exit 0")).passed
    assert failed_steps(world) == ()


def test_ram_that_cannot_be_resumed_stays_failed_until_a_clone_runs(original, world):
    world.hooks.at["hypervisor.restore"] = failing(HypervisorError("ram", "load of migration"))
    check(world)
    del world.hooks.at["hypervisor.restore"]
    assert not check(world, run=False).passed
    assert failed_steps(world) == (VerifyStep.CLONE,)
    assert check(world).passed


def test_a_lesser_failure_does_not_hide_a_deeper_one(original, world, tmp_path):
    kept = (Path(original.record.bundle) / "ram.save").read_bytes()
    check(world, script=script(tmp_path, "exit 3"))
    break_bundle(original, "flipped")
    check(world, run=False)
    assert record(world).state is BundleState.DAMAGED
    assert failed_steps(world) == (VerifyStep.CHECKSUMS, VerifyStep.SCRIPT)
    (Path(original.record.bundle) / "ram.save").write_bytes(kept)
    check(world, run=False)
    assert record(world).state is BundleState.COMPLETE
    assert failed_steps(world) == (VerifyStep.SCRIPT,)


def test_a_disk_that_could_not_be_read_stays_failed_until_it_is_read(world, shown, monkeypatch):
    def damaged(*_):
        raise OSError(errno.EIO, "Input/output error")

    shown(b"x")
    with monkeypatch.context() as patch:
        patch.setattr(disk_reader.os, "pread", damaged)
        check(world, disks=True, run=False)
    assert failed_steps(world) == (VerifyStep.DISKS,)
    assert not check(world).passed
    assert check(world, disks=True, run=False).passed


@pytest.mark.parametrize("other", ["flash/web@s1", "tank/web@s1"])
@pytest.mark.parametrize("text", ["", "2025-06-01T12:00:00Z passed resumed"])
def test_a_failure_on_one_zfs_snapshot_only_counts(original, world, tmp_path, other, text):
    """Writing the result was interrupted."""
    check(world, script=script(tmp_path, "exit 3"))
    world.pool.set_properties([other], {"snaporch:verified": text})
    assert not check(world, run=False).passed
    assert failed_steps(world) == (VerifyStep.SCRIPT,)


def test_a_damaged_bundle_is_not_shown_as_ram_until_it_passes(original, world):
    kept = (Path(original.record.bundle) / "ram.save").read_bytes()
    break_bundle(original, "flipped")
    assert (record(world).level, record(world).state) == (Level.RAM, BundleState.COMPLETE)
    check(world)
    assert (record(world).level, record(world).state) == (Level.CRASH, BundleState.DAMAGED)
    assert describe(world.context, record(world)).by_hand == ()
    (Path(original.record.bundle) / "ram.save").write_bytes(kept)
    assert check(world, run=False).passed
    assert (record(world).level, record(world).state) == (Level.RAM, BundleState.COMPLETE)


def test_ram_that_could_not_be_resumed_has_no_commands_by_hand(original, world):
    assert describe(world.context, record(world)).by_hand
    world.hooks.at["hypervisor.restore"] = failing(HypervisorError("ram", "load of migration"))
    assert check(world).reached is VerifyDepth.CHECKED
    assert record(world).state is BundleState.COMPLETE
    assert describe(world.context, record(world)).by_hand == ()


def test_ram_that_libvirt_cannot_resume_fails(world):
    world.hooks.at["hypervisor.restore"] = failing(HypervisorError("ram", "load of migration"))
    outcome = check(world)
    assert (outcome.passed, outcome.reached) == (False, VerifyDepth.CHECKED)
    assert "could not be resumed (load of migration)" in outcome.failure.line()
    assert nothing_of_it(world)


def test_a_guest_whose_cpus_do_not_run_fails(world):
    def hang(guest):
        guest.hangs = True

    world.hypervisor.restored = hang
    outcome = check(world)
    assert "CPUs did nothing" in outcome.failure.line()
    assert outcome.reached is VerifyDepth.CHECKED
    assert nothing_of_it(world)


def test_a_guest_whose_cpus_ran_only_while_it_was_resumed_fails(world):
    """Resuming it uses their time once."""
    asked = []

    def hang():
        asked.append(len(asked))
        for guest in world.hypervisor.guests.values():
            guest.hangs = "verify" in guest.name and len(asked) > 2

    world.hooks.at["hypervisor.vitals"] = hang
    assert "CPUs did nothing" in check(world).failure.line()
    assert nothing_of_it(world)


def test_a_guest_that_crashes_fails(world):
    def crash():
        for guest in world.hypervisor.guests.values():
            if "verify" in guest.name:
                guest.state = DomainState.CRASHED

    world.hooks.at["hypervisor.vitals"] = crash
    assert "is crashed, not running" in check(world).failure.line()
    assert nothing_of_it(world)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("hypervisor.vitals", "its emulator exited"),
        ("hypervisor.resume", "could not be resumed"),  # before it ran
    ],
)
def test_an_emulator_that_exits_fails_the_snapshot(world, place, reason):
    def vanish():
        for uuid, guest in list(world.hypervisor.guests.items()):
            if "verify" in guest.name:
                del world.hypervisor.guests[uuid]

    world.hooks.at[place] = vanish
    assert reason in check(world).failure.line()
    assert nothing_of_it(world)


# -- what would be shared ------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["hypervisor.restore", "hypervisor.resume"])
def test_a_clone_that_has_a_disk_of_the_original_open_does_not_run(original, world, place):
    """Whatever the reason, and whether QEMU opens the disk before or after the clone runs."""
    disk = original.domain.disks[0].source

    def open_it():
        for guest in world.hypervisor.guests.values():
            if "verify" in guest.name:
                guest.opened = [disk]

    world.hypervisor.restored = lambda _guest: open_it() if place.endswith("restore") else None
    world.hooks.at[place] = open_it
    outcome = check(world)
    assert (outcome.passed, outcome.reached) == (True, VerifyDepth.CHECKED)
    assert [text for text in outcome.proof if disk in text and text.startswith("not run: ")]
    assert nothing_of_it(world)
    assert ("hypervisor.vitals" in world.hooks.acts()) is False
    assert ("hypervisor.resume" in world.hooks.acts()) is (place == "hypervisor.resume")


def test_an_emulator_whose_files_cannot_be_read_gives_no_result(world):
    def hidden(uuid):
        raise UnavailableError(uuid, "its emulator cannot be found")

    world.hypervisor.open_files = hidden
    with pytest.raises(UnavailableError):
        check(world)
    assert record(world).verified is None
    assert nothing_of_it(world)


# -- the user's script ---------------------------------------------------------------------------


def script(tmp_path, text):
    path = tmp_path / "check"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_script_has_the_clone_in_its_environment(world, tmp_path):
    wanted = "$SNAPORCH_DOMAIN $SNAPORCH_SNAPSHOT $SNAPORCH_LEVEL $SNAPORCH_RESUMED"
    path = script(
        tmp_path, f'echo "{wanted} $SNAPORCH_CLONE $SNAPORCH_CLONE_UUID" > {tmp_path}/out'
    )
    outcome = check(world, script=path)
    words = (tmp_path / "out").read_text().split()
    assert outcome.passed
    assert words[:4] == ["web", "s1", "ram", "1"]
    assert words[4].startswith("web-verify-")
    assert len(words[5]) == 36


@pytest.mark.parametrize(("text", "status"), [("exit 3", 3), ("kill -9 $$", -9)])
def test_a_script_that_fails_fails_the_snapshot(world, tmp_path, text, status):
    outcome = check(world, script=script(tmp_path, text))
    assert (outcome.passed, outcome.reached) == (False, VerifyDepth.RESUMED)
    assert f"exited with status {status}" in outcome.failure.line()
    assert nothing_of_it(world)


def test_a_script_that_hangs_is_killed_with_all_its_children(world, tmp_path):
    path = script(tmp_path, f"sleep 1000 & echo $! > {tmp_path}/child; wait")
    outcome = check(world, script=path, script_seconds=1)
    assert "did not exit within 1 s" in outcome.failure.line()
    child = int((tmp_path / "child").read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.mark.parametrize("what", ["absent", "plain", "pictures"])
def test_missing_scripts_and_directories_are_refused_first(tmp_path, what):
    (tmp_path / "plain").write_text("")
    options = {
        "absent": VerifyOptions(script=tmp_path / "absent"),
        "plain": VerifyOptions(script=tmp_path / "plain"),
        "pictures": VerifyOptions(screenshots=tmp_path / "absent"),
    }
    with pytest.raises(RefusedError):
        check_options(options[what])


# -- the guest's verify_command ------------------------------------------------------------------


@pytest.fixture
def command(world):
    """Snapshot a guest; in its clones the agent answers, and the program ends like this."""

    def prepare(found, level=None, **settings):
        usual = {"verify_command": ["amcheck", "--all"], "verify_command_timeout": "1s"}
        if "db" not in {guest.name for guest in world.hypervisor.guests.values()}:
            taken(world, "db", level, agent=Agent.MISSING)
        world.with_defaults(**(usual | settings))

        def wake(guest):
            guest.agent = Agent.ANSWERS
            guest.programs = {"amcheck": found}

        world.hypervisor.restored = wake

    return prepare


@pytest.mark.parametrize("level", [None, "crash"])
def test_a_command_runs_in_the_guest_and_its_success_is_recorded(world, command, level):
    """The agent need not have been connected when the snapshot was taken."""
    command(GuestExit(0, ""), level)
    outcome = check(world, "db@s1")
    assert outcome.passed, outcome.failure
    assert "amcheck exited with status 0 in the guest" in outcome.proof
    assert "hypervisor.start_in_guest amcheck --all" in world.hooks.log
    assert outcome.as_json()["command_passed"]
    assert record(world, "db@s1").verified.command
    shown = dict(provenance(record(world, "db@s1"), None))["verified"]
    assert shown.endswith(f"{outcome.reached}, verify_command passed")
    check(world, "db@s1", run=False)
    again = dict(provenance(record(world, "db@s1"), None))["verified"]
    assert f", verify_command passed on {iso(outcome.at)}" in again
    assert nothing_of_it(world)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (GuestExit(2, "one\n\x1b[31mindex broken\n"), "status 2 in the guest: one \\x1b[31mindex"),
        (GuestExit(-9, ""), "exited with status -9 in the guest"),
        (GuestExit(1, "x" * 5000 + "end"), "xxend"),
        (None, "amcheck did not exit in the guest within 1 s"),
    ],
)
def test_a_command_that_fails_fails_the_snapshot(world, command, found, reason):
    command(found)
    outcome = check(world, "db@s1")
    assert (outcome.passed, outcome.reached) == (False, VerifyDepth.RESUMED)
    assert reason in outcome.failure.line()
    assert len(outcome.failure.line()) < 500
    verified = record(world, "db@s1").verified
    assert (verified.failed_steps, verified.command) == ((VerifyStep.COMMAND,), False)
    assert (record(world, "db@s1").level, record(world, "db@s1").state) == (
        Level.RAM,
        BundleState.COMPLETE,
    )
    assert nothing_of_it(world)


def test_a_program_that_the_guest_does_not_have_fails(world, command):
    command(None, verify_command=["absent"])
    line = check(world, "db@s1").failure.line()
    assert "absent could not be run in the guest (No such file or directory)" in line


def test_without_an_agent_a_command_fails(world, command):
    """Else a guest whose agent does not start would pass unseen."""
    command(None)
    world.hypervisor.restored = lambda _guest: None
    outcome = check(world, "db@s1")
    assert "its agent does not answer" in outcome.failure.line()
    assert outcome.failed_steps == (VerifyStep.COMMAND,)


def test_a_failed_command_stays_failed_until_it_passes_or_is_not_configured(world, command):
    command(GuestExit(1, ""))
    assert not check(world, "db@s1").passed
    assert "snaporch verify db@s1" in check(world, "db@s1", run=False).failure.line()
    command(GuestExit(0, ""))
    assert check(world, "db@s1").passed
    command(GuestExit(1, ""))
    assert not check(world, "db@s1").passed
    command(None, verify_command=[])
    assert not check(world, "db@s1", run=False).passed
    assert check(world, "db@s1").passed


@pytest.mark.parametrize("is_defined", [True, False])
def test_a_guest_that_was_renamed_has_the_command_of_its_present_name(world, command, is_defined):
    command(GuestExit(1, "index broken"), verify_command=[])
    document = world.context.config.model_dump()
    sections = {"shop" if is_defined else "db": {"verify_command": ["amcheck"]}}
    world.context.config = Config.model_validate(document | {"domain": sections})
    if is_defined:
        world.guest("db").name = "shop"
    else:
        world.hypervisor.guests.pop(world.guest("db").uuid)
    outcome = check(world, "db@s1")
    assert "amcheck exited with status 1 in the guest" in outcome.failure.line()
    assert not check(world, "db@s1", run=False).passed
    assert record(world, "db@s1").verified.failed_steps == (VerifyStep.COMMAND,)


def test_a_command_that_no_clone_can_run_has_not_passed(world):
    """What keeps clones from being run would otherwise hide for ever that it is not run."""
    (world.root / "z.img").touch()
    taken(world, "db", more=(DiskSpec("vdz", str(world.root / "z.img")),))
    world.with_defaults(verify_command=["amcheck"])
    assert check(world, "db@s1", run=False).passed
    outcome = check(world, "db@s1")
    assert (outcome.reached, outcome.failed_steps) == (VerifyDepth.CHECKED, (VerifyStep.COMMAND,))
    assert "no clone can be run: its disk vdz is not in the snapshot" in outcome.failure.line()
    found = record(world, "db@s1")
    assert (found.level, found.state) == (Level.RAM, BundleState.COMPLETE)
    assert not check(world, "db@s1", run=False).passed
    world.with_defaults(verify_command=[])
    assert check(world, "db@s1").passed


def with_kernel(world, path="/srv/vmlinuz"):
    """The guest ``db`` boots a kernel of its host."""
    guest = world.add_guest("db", agent=Agent.MISSING)
    kernel = f"<kernel>{path}</kernel></os>"
    for own in (each for each in world.hypervisor.guests.values() if each.uuid == guest.uuid):
        own.live, own.inactive = (
            each.replace("</os>", kernel) for each in (own.live, own.inactive)
        )
    return take_snapshot(world.context, world.hypervisor.domain("db"), SnapshotRequest("s1"))


def came_back(world, taken):
    world.pool.set_properties([f"{each}@s1" for each in taken.datasets], {"snaporch:copy": "nas"})


@pytest.mark.parametrize("has_command", [True, False])
def test_a_command_of_a_copy_that_failed_stays_failed_when_no_clone_ran(
    world, command, has_command
):
    taken = with_kernel(world)
    command(GuestExit(1, "index broken"))
    assert check(world, "db@s1", on="nas").failed_steps == (VerifyStep.COMMAND,)
    came_back(world, taken)
    world.with_defaults(verify_command=["amcheck", "--all"] if has_command else [])
    outcome = check(world, "db@s1", on="nas")
    assert outcome.not_run.startswith("its XML names '/srv/vmlinuz'")
    assert outcome.failed_steps == ((VerifyStep.COMMAND,) if has_command else ())
    assert outcome.passed is not has_command


def test_no_step_has_a_copy_count_as_own_that_names_a_file_of_this_host(world, command):
    taken = with_kernel(world)
    command(GuestExit(0, ""))
    came_back(world, taken)
    outcome = check(world, "db@s1")
    assert outcome.failed_steps == (VerifyStep.COMMAND,)
    assert outcome.failure.step.startswith("unset verify_command for this guest, or ")
    assert "snaporch:copy" not in " ".join((outcome.failure.step, *outcome.proof))


def test_the_step_that_lets_a_clone_run_is_named(world, command):
    taken = with_kernel(world, world.root / "zfs/tank/db/vmlinuz")
    command(GuestExit(0, ""))
    assert check(world, "db@s1").passed
    came_back(world, taken)
    outcome = check(world, "db@s1")
    mark = f"zfs inherit snaporch:copy {taken.datasets[0]}@s1"
    assert outcome.failed_steps == (VerifyStep.COMMAND,)
    assert outcome.failure.step.startswith("unset verify_command for this guest, or to have it")
    assert mark in outcome.failure.step
    assert any(each.startswith("not run: ") and mark in each for each in outcome.proof)


def test_a_guest_that_exits_during_its_command_fails(world, command):
    command(None, verify_command_timeout="10m")

    def vanish():
        for uuid, guest in list(world.hypervisor.guests.items()):
            if "verify" in guest.name:
                del world.hypervisor.guests[uuid]

    world.hooks.at["hypervisor.exit_in_guest"] = vanish
    assert not check(world, "db@s1").passed
    assert nothing_of_it(world)


def test_libvirt_that_is_lost_during_a_command_gives_no_result(world, command):
    command(None)
    world.hooks.at["hypervisor.exit_in_guest"] = failing(LostLibvirtError("db", "end of file"))
    with pytest.raises(UnavailableError):
        check(world, "db@s1")
    assert record(world, "db@s1").verified is None


def test_a_signal_ends_the_wait_for_a_command(world, command):
    command(None, verify_command_timeout="10m")

    def signal():
        world.context.interrupt.signum = 2

    world.hooks.at["hypervisor.exit_in_guest"] = signal
    with pytest.raises(InterruptedRunError):
        check(world, "db@s1")
    assert nothing_of_it(world)


# -- what is not the snapshot's fault ------------------------------------------------------------


def test_without_memory_there_is_no_result(world):
    world.set_memory(0)
    with pytest.raises(RefusedError, match="of memory"):
        check(world)
    assert record(world).verified is None


def test_a_pool_that_fails_gives_no_result(world):
    world.hooks.at["pool.clone"] = failing(PoolError("zfs", "no space"))
    with pytest.raises(PoolError):
        check(world)
    assert record(world).verified is None
    assert nothing_of_it(world)


@pytest.mark.parametrize("place", [f"hypervisor.{act}" for act in ("restore", "resume", "vitals")])
def test_a_lost_connection_to_libvirt_gives_no_result(world, place):
    world.hooks.at[place] = failing(LostLibvirtError("ram", "end of file"))
    with pytest.raises(UnavailableError, match="end of file"):
        check(world)
    assert record(world).verified is None
    assert nothing_of_it(world)


def test_a_signal_gives_no_result(world):
    def signal():
        world.context.interrupt.signum = 2

    world.hooks.at["hypervisor.restore"] = signal
    with pytest.raises(InterruptedRunError):
        check(world)
    assert record(world).verified is None
    assert nothing_of_it(world)


def test_a_verification_without_a_result_does_not_stop_the_others(original, world):
    original.snapshot("s2")
    records = [record(world), record(world, "web@s2")]
    world.hooks.at["pool.clone"] = failing_first(PoolError("zfs", "no"))
    first, second = verify_all(world.context, records, VerifyOptions())
    assert isinstance(first, PoolError)
    assert second.passed


def failing_first(error):
    left = [error]

    def fail():
        if left:
            raise left.pop()

    return fail


# -- choosing -----------------------------------------------------------------------------------


def test_snapshots_verified_longest_ago_come_first(original, world):
    for name in ("s2", "s3"):
        original.snapshot(name)
    check(world, "web@s1")
    check(world, "web@s2")
    old = record(world, "web@s2").verified
    text = type(old)(old.at - timedelta(days=1), old.passed, old.reached).as_text()
    world.pool.set_properties(["tank/web@s2", "flash/web@s2"], {"snaporch:verified": text})
    records = all_records(world.context.store, world.pool.snapshots())
    assert [r.snapshot for r in longest_ago(records, None)] == ["s3", "s2", "s1"]
    assert [r.snapshot for r in longest_ago(records, 2)] == ["s3", "s2"]


# -- no result ----------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["sums", "header"])
def test_no_result_while_its_ram_is_moved_into_pages(world, monkeypatch, moment):
    """Whenever that happens: a complete snapshot would be reported as damaged."""
    world.guest().ram = streams.guest_stream()
    moves = [take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s2"))]
    world.with_pages()
    read, damage = store.sha256_of, BundleStore.damage

    def move():
        while moves:
            store_as_pages(world.context, moves.pop())

    if moment == "sums":
        monkeypatch.setattr(
            store, "sha256_of", lambda path, on_read: (move(), read(path, on_read))[1]
        )
    else:
        monkeypatch.setattr(BundleStore, "damage", lambda *each: (damage(*each), move())[0])
    with pytest.raises((BusyError, UnavailableError), match="verify it again"):
        check(world, "web@s2")
    assert not moves
    assert record(world, "web@s2").verified is None
    assert check(world, "web@s2").passed


def test_no_result_for_a_damaged_bundle_while_another_run_works_on_the_guest(original, world):
    (Path(original.record.bundle) / "ram.save").unlink()
    lock = default_paths.LOCKS / f"{original.record.uuid}.lock"
    lock.write_text(json.dumps({"doing": "snapshot", "pid": os.getppid(), "since": "now"}))
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match="verify it again"):
            check(world)
    assert not check(world).passed


def test_no_result_where_a_backing_file_cannot_be_read(original, world):
    path = Path(original.record.bundle) / MANIFEST_NAME
    manifest = read_manifest(path.parent)
    far = BackingFileEntry(path="/far/away/base.qcow2", inode=5, bytes=1000, mtime_ns=5)
    first, *others = manifest.disks
    disks = (first.model_copy(update={"beneath": (far,)}), *others)
    path.write_bytes(manifest_bytes(manifest.model_copy(update={"disks": disks})))
    with pytest.raises(UnavailableError, match=r"base\.qcow2.*cannot be read"):
        check(world)
    assert record(world).verified is None


def test_a_changed_backing_file_fails_and_the_bundle_keeps_its_ram(world):
    """If it were `damaged`, no restore could use its RAM, for a file that is no part of it."""
    base, top = world.image("flash/golden", "base.img"), world.image("tank/over", "top.img")
    top.write_bytes(qcow2(str(base), "raw"))
    taken(world, "over", disks={}, more=(DiskSpec("vda", str(top), format="qcow2"),))
    base.write_bytes(b"committed by another program")
    outcome = check(world, "over@s1")
    assert (outcome.passed, outcome.reached) == (False, VerifyDepth.CHECKED)
    assert f"{base}, which lies beneath vda" in outcome.failure.line()
    found = record(world, "over@s1")
    assert (found.level, found.state) == (Level.RAM, BundleState.COMPLETE)
    assert make_restore_plan(world.context, "over", "s1", despite_other_disks=True).ram is not None
