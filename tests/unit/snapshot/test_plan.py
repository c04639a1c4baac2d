import re
import shutil
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from fakes.domain_xml import DiskSpec

from snaporch.bundle.compress import Compression
from snaporch.bundle.compression_tuning import RamSaveTimes
from snaporch.bundle.manifest import Role
from snaporch.catalog.run_snapshots import by_pool
from snaporch.context import Clock
from snaporch.errors import ExitCode, RefusedError, UnavailableError, UsageError
from snaporch.hypervisor import Pause
from snaporch.known_faults import Component
from snaporch.model import DomainState, GroupRun, Level, Strategy
from snaporch.snapshot.bundle_parts import build_manifest
from snaporch.snapshot.locate_disks import locate_disks
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.snapshot.snapshot_name import check_snapshot_name
from snaporch.zfs.resolver import Resolver


def planned(world, domain, name=None, **defaults):
    return make_plan(
        world.with_defaults(compression="none", **defaults), domain, SnapshotRequest(name)
    )


# -- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["s", "before-upgrade", "a.b:c_d-e", "2025", "two words", "-x"])
def test_names_that_zfs_allows(name):
    check_snapshot_name(name)


@pytest.mark.parametrize(
    "name",
    ["", "s\n", "a@b", "a/b", "a#b", "a%b", "Bär", "a\tb", "a\0b", "*", ".", ".."],
)
def test_names_that_zfs_refuses_are_wrong_usage(name):
    with pytest.raises(UsageError) as caught:
        check_snapshot_name(name)
    assert caught.value.exit_code == ExitCode.USAGE
    assert str(caught.value).isprintable()


def test_the_default_name_is_the_time_in_utc(world):
    before = datetime.now(UTC).replace(microsecond=0)
    made = planned(world, world.add_guest())
    taken = re.fullmatch(r"snaporch_(\d{8}T\d{6}Z)_manual", made.snapshot)[1]
    moment = datetime.strptime(taken, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    assert before <= moment <= datetime.now(UTC)


def test_a_second_run_in_the_same_second_gets_a_number(world):
    moment = datetime(2025, 6, 1, 12, 0, 0, tzinfo=UTC)
    world.clock = Clock(now=lambda: moment)
    world.with_defaults()
    domain = world.add_guest(disks={"vda": "tank/a", "vdb": "tank/b"})
    names = []
    for dataset in ("tank/a", "tank/b", "tank/a"):
        names.append(planned(world, domain).snapshot)
        world.pool.snapshot([f"{dataset}@{names[-1]}"], {})
    assert names == [
        "snaporch_20250601T120000Z_manual",
        "snaporch_20250601T120000Z.2_manual",
        "snaporch_20250601T120000Z.3_manual",
    ]


def test_a_requested_name_that_exists_on_any_dataset_is_refused(world):
    domain = world.add_guest(disks={"vda": "tank/a", "vdb": "flash/b"})
    world.pool.snapshot(["flash/b@mine"], {})
    with pytest.raises(RefusedError, match="web@mine: a snapshot of that name exists"):
        planned(world, domain, "mine")


def test_the_same_name_elsewhere_does_not_matter(world):
    world.add_guest("other")
    world.pool.snapshot(["tank/other@mine"], {})
    assert planned(world, world.add_guest(), "mine").snapshot == "mine"


def test_a_name_longer_than_zfs_allows_is_refused_before_anything_happens(world):
    domain = world.add_guest()
    room = 255 - len("tank/web@")
    assert planned(world, domain, "n" * room)
    with pytest.raises(RefusedError, match="is longer than ZFS allows"):
        planned(world, domain, "n" * (room + 1))


# -- disks --------------------------------------------------------------------------------------


def test_every_writable_local_disk_is_in(world):
    domain = world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web", "vdc": "tank/web"})
    made = planned(world, domain, "s")
    assert [d.disk.target for d in made.disks] == ["vda", "vdb", "vdc"]
    assert [d.name for d in made.datasets] == ["flash/web", "tank/web"]
    assert by_pool(made.full_names) == [["flash/web@s"], ["tank/web@s"]]


def test_a_pools_datasets_are_taken_together(world):
    domain = world.add_guest(disks={"vda": "tank/b", "vdb": "flash/a", "vdc": "tank/a"})
    made = planned(world, domain, "s")
    assert by_pool(made.full_names) == [["flash/a@s"], ["tank/a@s", "tank/b@s"]]


LEFT_OUT = {
    "cdrom": (DiskSpec("x", "/a.iso", device="cdrom"), "removable (cdrom)", False),
    "floppy": (DiskSpec("x", None, device="floppy"), "removable (floppy)", False),
    "readonly": (DiskSpec("x", "/a.img", readonly=True), "read-only", False),
    "network": (
        DiskSpec("x", None, kind="network"),
        "not a local file or device (network)",
        True,
    ),
    "elsewhere": (DiskSpec("x", "/dev/null"), "not on ZFS but on tmpfs", True),
}


@pytest.mark.parametrize(("spec", "reason", "matters"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_disk_is_left_out_for_a_reason(world, spec, reason, matters):
    made = planned(world, world.add_guest(more=(spec,)))
    (out,) = made.left_out
    assert (out.disk.target, out.reason, out.matters) == ("x", reason, matters)
    assert [d.disk.target for d in made.disks] == ["vda"]


@pytest.mark.parametrize(
    ("shareable", "other", "together", "reported"),
    [
        (True, DomainState.RUNNING, False, True),
        (True, DomainState.PAUSED, False, True),
        (True, DomainState.OFF, False, False),
        (True, DomainState.RUNNING, True, False),
        (False, DomainState.RUNNING, False, False),
    ],
)
def test_a_disk_that_others_write_to_is_reported(world, shareable, other, together, reported):
    shared = DiskSpec("vdb", str(world.image("tank/shared", "vdb.img")), shareable=shareable)
    domain = world.add_guest(more=(shared,))
    second = world.add_guest("db", {}, more=(shared,), state=other)
    group = GroupRun("both", "r", ((domain.uuid, "web"), (second.uuid, "db")))
    context = world.with_defaults(ram_strategy="auto")
    made = make_plan(context, domain, SnapshotRequest("s"), group=group if together else None)
    assert [text.split(":")[0] for text in made.shared_disk_warnings] == (
        ["db writes to vdb, too, and is not frozen"] if reported else []
    )


def test_an_excluded_disk_is_not_read(world):
    domain = world.add_guest(more=(DiskSpec("vdb", "/does/not/exist"),))
    made = planned(world, domain, exclude_disks=["vdb"])
    assert made.left_out[0].reason == "excluded by the configuration"
    assert made.left_out[0].describe() == "vdb (/does/not/exist): excluded by the configuration"


def test_without_any_disk_on_zfs_the_reasons_are_named(world):
    domain = world.add_guest(disks={}, more=(DiskSpec("vda", "/dev/null"),))
    with pytest.raises(RefusedError, match=r"no disk on ZFS \(vda .*not on ZFS but on tmpfs"):
        planned(world, domain)


def test_without_any_disk_at_all(world):
    with pytest.raises(RefusedError, match="it has no disks"):
        planned(world, world.add_guest(disks={}))


def test_a_missing_disk_is_refused_and_named(world):
    domain = world.add_guest(more=(DiskSpec("vdb", "/does/not/exist"),))
    with pytest.raises(RefusedError, match=r"web: vdb \(/does/not/exist\): No such file"):
        planned(world, domain)


def test_a_disk_without_read_permission_asks_for_root(world):
    def forbidden(path):
        raise PermissionError(13, "Permission denied", path)

    domain = world.add_guest()
    with pytest.raises(UnavailableError, match="run snaporch as root"):
        locate_disks(Resolver(stat=forbidden), domain)


# -- the strategy -------------------------------------------------------------------------------


def test_a_running_guest_gets_ram_and_overlays(world):
    made = planned(world, world.add_guest())
    assert made.level is Level.RAM
    (overlay,) = made.facts.overlays
    assert overlay.base == made.disks[0].path
    assert overlay.overlay == str(world.paths.overlays / made.run / "vda.qcow2")
    assert (overlay.base_kind, overlay.base_format) == ("file", "raw")


def test_a_paused_guest_gets_ram_and_needs_no_overlays(world):
    made = planned(world, world.add_guest(state=DomainState.PAUSED))
    assert made.level is Level.RAM
    assert made.facts.overlays == ()


def test_a_guest_that_is_off_gets_neither(world):
    made = planned(world, world.add_guest(state=DomainState.OFF))
    assert made.level is Level.OFF
    assert made.facts.overlays == ()


def test_every_run_has_a_name_of_its_own(world):
    domain = world.add_guest()
    assert planned(world, domain).run != planned(world, domain).run


@pytest.mark.parametrize(
    ("state", "step"),
    [
        (DomainState.CRASHED, "destroy it first"),
        (DomainState.STOPPING, "wait until it is off"),
        (DomainState.SUSPENDED, "dompmwakeup"),
    ],
)
def test_a_state_that_cannot_be_captured_is_refused(world, state, step):
    domain = replace(world.add_guest(), state=state)
    with pytest.raises(RefusedError, match=step):
        planned(world, domain)


def test_a_guest_that_libvirt_is_busy_with_is_refused(world):
    domain = world.add_guest()
    world.guest().job = "migration out"
    with pytest.raises(RefusedError, match=r"busy with it \(migration out\)"):
        planned(world, domain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "lun"}, "cannot have an overlay"),
        ({"transient": True}, "transient"),
        ({"cache": "unsafe"}, "cache='unsafe'"),
    ],
)
def test_a_disk_that_cannot_have_an_overlay_is_refused(world, changes, message):
    domain = world.add_guest()
    spoilt = replace(domain, disks=(replace(domain.disks[0], **changes),))
    with pytest.raises(RefusedError, match=rf"web: no ram snapshot is possible: vda .*{message}"):
        planned(world, spoilt)


@pytest.mark.parametrize("ram_strategy", ["auto", "manual"])
def test_a_lun_is_in_a_manual_snapshot(world, ram_strategy):
    """QEMU writes to it as to any other disk while the guest runs, and it is paused with them."""
    domain = world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    first, second = domain.disks
    lun = replace(domain, disks=(first, replace(second, device="lun")))
    made = planned(world, lun, ram_strategy=ram_strategy)
    assert (made.strategy, made.downgrade) == (Strategy.MANUAL, "")
    assert {each.disk.target for each in made.disks} == {"vda", "vdb"}
    assert {"tank/web", "flash/web"} <= {each.name for each in made.datasets}


@pytest.mark.parametrize(
    "spoilt",
    [
        DiskSpec("vdb", "/dev/null", cache="unsafe"),
        DiskSpec("vdb", "/dev/null", device="lun"),
    ],
)
def test_a_disk_that_is_left_out_blocks_nothing(world, spoilt):
    made = planned(world, world.add_guest(more=(spoilt,)), exclude_disks=["vdb"])
    assert made.strategy is Strategy.OVERLAY
    assert made.downgrade == ""


def test_a_transient_disk_blocks_ram_even_if_it_is_left_out(world):
    """libvirt looks at every disk before it saves RAM (its ``qemuMigrationSrcIsAllowed``)."""
    domain = world.add_guest(more=(DiskSpec("vdb", "/dev/null", transient=True),))
    with pytest.raises(RefusedError, match="vdb is transient"):
        planned(world, domain, exclude_disks=["vdb"])
    assert planned(world, domain, exclude_disks=["vdb"], level="paused").level is Level.PAUSED


def test_a_blocker_of_one_strategy_leaves_the_other(world):
    world.add_guest()
    world.guest().checkpoints = ["monday"]
    made = planned(world, world.hypervisor.domain("web"), ram_strategy="auto")
    assert made.strategy is Strategy.MANUAL


def test_an_overlay_that_another_tool_left_is_refused(world):
    """Its base on ZFS no longer changes, so the snapshot would be outdated."""
    world.add_guest()
    source = world.hypervisor.domain("web").disks[0].source
    below = f'<backingStore type="file"><source file="{source}"/></backingStore><target dev="vda"'
    live = world.guest().live.replace(source, "/dev/null")
    world.guest().live = live.replace('<target dev="vda"', below)
    world.image("tank/web", "other.img")
    other = str(world.root / "zfs/tank/web/other.img")
    disk = f'<disk type="file"><source file="{other}"/><target dev="vdb"/></disk></devices>'
    world.guest().live = world.guest().live.replace("</devices>", disk)
    with pytest.raises(RefusedError, match=r"the overlay /dev/null over .*tank/web.*") as caught:
        planned(world, world.hypervisor.domain("web"))
    assert "virsh blockcommit web vda --active --pivot" in str(caught.value)


def test_too_little_room_for_ram_is_refused(world):
    domain = world.add_guest()
    world.guest().ram_bytes = 1 << 60
    with pytest.raises(RefusedError, match=r"has \d+ MiB free, RAM needs about 659706976665 MiB"):
        planned(world, domain)


def test_levels_without_ram_need_no_room_for_it(world):
    domain = world.add_guest()
    world.guest().ram_bytes = 1 << 60
    world.paths = world.paths.model_copy(update={"overlay_reserve_mib": 1 << 30})
    assert planned(world, domain, level="paused").strategy is Strategy.PAUSED


@pytest.mark.parametrize("level", ["paused", "crash"])
def test_levels_without_overlays_have_none_in_their_facts(world, level):
    assert planned(world, world.add_guest(), level=level).facts.overlays == ()


# -- the overlay directory ----------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "overlays", "deep/er"])
def test_overlays_inside_a_snapshotted_dataset_are_refused(world, below):
    domain = world.add_guest()
    inside = world.root / "zfs" / "tank" / "web" / below
    world.paths = world.paths.model_copy(update={"overlays": inside})
    with pytest.raises(RefusedError, match=r"the overlay directory .* lies in tank/web"):
        planned(world, domain)


def test_overlays_in_another_dataset_are_fine(world):
    domain = world.add_guest()
    other = world.image("tank/scratch", "x").parent
    world.paths = world.paths.model_copy(update={"overlays": other})
    assert planned(world, domain)


def test_too_little_room_for_overlays_is_refused(world):
    domain = world.add_guest()
    world.paths = world.paths.model_copy(update={"overlay_reserve_mib": 1 << 30})
    with pytest.raises(RefusedError, match=rf"{1 << 30} MiB are needed"):
        planned(world, domain)


def test_planning_changes_nothing(world):
    planned(world, world.add_guest())
    assert world.hooks.log == []
    assert sorted(path.name for path in world.root.iterdir()) == ["proc", "zfs"]


# -- settings -----------------------------------------------------------------------------------


def test_compression_follows_the_settings(world):
    domain = world.add_guest()
    context = world.with_defaults(compression="gzip", compression_level=7, compression_threads=3)
    how = make_plan(context, domain).compression
    assert (how.method, how.level, how.threads) == (Compression.GZIP, 7, 3)


def saved_before(context, domain, pace):
    """The bundle of the last snapshot, with the times of saving its RAM."""
    plan = make_plan(context, domain)
    bundle = context.store.create(domain.uuid, plan.run)
    part = bundle.add_text("ram.save", Role.RAM, "RAM").model_copy(update={"pace": pace})
    versions, moment = context.hypervisor.versions(domain), datetime.now(UTC)
    pause = Pause(None, 0.0)
    bundle.seal(
        build_manifest(
            context.resolver, plan, plan.level, [part], [], versions, pause, moment, moment
        )
    )


@pytest.mark.parametrize(
    ("compression", "pace", "level"),
    [
        ("auto", None, 1),
        ("auto", RamSaveTimes(1, 10.0, 0.0, 0.0), -1),
        ("zstd", RamSaveTimes(1, 10.0, 0.0, 9.0), 3),
        ("gzip", RamSaveTimes(5, 10.0, 0.0, 9.0), 1),
    ],
)
def test_the_compression_level_follows_the_last_snapshot(world, compression, pace, level):
    domain = world.add_guest()
    context = world.with_defaults(compression=compression)
    saved_before(context, domain, pace)
    assert make_plan(context, domain).compression.level == level


def test_a_configured_compression_level_is_kept(world):
    domain = world.add_guest()
    context = world.with_defaults(compression_level=0)
    saved_before(context, domain, RamSaveTimes(1, 10.0, 0.0, 0.0))
    assert make_plan(context, domain).compression.level == 0


def test_an_old_libvirt_gets_what_it_can_read(world):
    world.hypervisor.zstd = False
    made = make_plan(world.with_defaults(), world.add_guest())
    assert made.compression.method is Compression.GZIP


@pytest.mark.parametrize("what", ["nvram", "tpm"])
def test_firmware_files_that_could_not_be_restored_are_refused(world, tmp_path, what):
    (tmp_path / "file").write_bytes(b"then")
    domain = world.add_guest(**{what: str(tmp_path / "file")})
    assert make_plan(world.context, domain)
    (tmp_path / "file").unlink()
    (tmp_path / "file").symlink_to("/dev/null")
    with pytest.raises(RefusedError, match="not a regular file"):
        make_plan(world.context, domain)


@pytest.mark.parametrize("which", ["live_xml", "inactive_xml"])
@pytest.mark.parametrize(
    ("before", "more"),
    [
        ("</os>", "<nvram type='block'><source dev='/dev/zvol/gone'/></nvram>"),
        ("</os>", "<nvram type='network'><source protocol='nbd' name='x'/></nvram>"),
        ("</devices>", "<tpm><backend type='external'/></tpm>"),
    ],
)
def test_firmware_that_is_in_no_file_is_refused_by_the_xml_alone(world, which, before, more):
    """Also if the device does not exist at the moment."""
    domain = world.add_guest()
    changed = getattr(domain, which).replace(before, more + before)
    with pytest.raises(RefusedError) as caught:
        make_plan(world.context, replace(domain, **{which: changed}))
    assert caught.value.step


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_running_tpm_without_state_is_refused(world, tmp_path, kind):
    (tmp_path / "state").touch() if kind == "file" else (tmp_path / "state").mkdir()
    domain = world.add_guest(tpm=str(tmp_path / "state"))
    if kind == "file":
        (tmp_path / "state").unlink()
    with pytest.raises(RefusedError, match="no state of it in"):
        make_plan(world.context, domain)


def test_a_tpm_in_the_home_directory_of_a_session_is_refused(world, tmp_path):
    config = world.context.config.model_copy(update={"libvirt_uri": "qemu:///session"})
    context = replace(world.context, config=config)
    domain = world.add_guest(state=DomainState.OFF)
    default = "<tpm><backend type='emulator'/></tpm></devices>"
    changed = domain.inactive_xml.replace("</devices>", default)
    with pytest.raises(RefusedError, match="below the home directory") as caught:
        make_plan(context, replace(domain, inactive_xml=changed))
    assert "<source type='dir'" in caught.value.step
    named = changed.replace("'emulator'/>", "'emulator'><source type='dir' path='/t'/></backend>")
    assert make_plan(context, replace(domain, inactive_xml=named))
    assert make_plan(world.context, replace(domain, inactive_xml=changed))


def test_a_tpm_that_never_ran_has_no_state_yet(world, tmp_path):
    domain = world.add_guest(tpm=str(tmp_path / "none"), state=DomainState.OFF)
    assert make_plan(world.context, domain)


def test_a_guest_that_libvirt_cannot_read_is_refused(world):
    domain = replace(world.add_guest(), problem="Timed out during operation")
    with pytest.raises(UnavailableError, match="Timed out during operation"):
        make_plan(world.context, domain)


# -- known faults -------------------------------------------------------------------------------


def test_an_emulator_that_was_started_before_the_upgrade_counts_as_the_old_one(world):
    world.hypervisor.installed[Component.QEMU] = "11.0.2"
    more = DiskSpec("vdb", str(world.image("flash/web", "vdb.img")), discard="unmap")
    domain = world.add_guest(more=(more,))
    context = world.with_defaults(ram_strategy="auto")
    assert make_plan(context, domain, awaited=60).strategy is Strategy.OVERLAY
    world.guest().outdated = True
    assert make_plan(context, domain, awaited=60).strategy is Strategy.MANUAL


@pytest.mark.parametrize(
    ("emulator", "discard", "strategy"),
    [
        ("10.0.10", "unmap", Strategy.MANUAL),
        ("unknown", "unmap", Strategy.MANUAL),
        ("10.0.11", "unmap", Strategy.OVERLAY),
        ("10.0.10", "ignore", Strategy.OVERLAY),
        ("10.0.10", None, Strategy.OVERLAY),
    ],
)
def test_no_overlays_for_discards_with_an_emulator_that_corrupts_them(
    world, emulator, discard, strategy
):
    """For sanoid an overlay is preferred otherwise."""
    world.hypervisor.installed[Component.QEMU] = emulator
    more = DiskSpec("vdb", str(world.image("flash/web", "vdb.img")), discard=discard)
    domain = world.add_guest(more=(more,))
    context = world.with_defaults(ram_strategy="auto")
    assert make_plan(context, domain, awaited=60).strategy is strategy
    wished = planned(world, domain, ram_strategy="overlay")
    assert wished.strategy is Strategy.OVERLAY


@pytest.mark.parametrize("what", ["overlays", "journal"])
def test_no_overlay_where_a_power_loss_empties_it_or_its_journal(world, what):
    domain = world.add_guest()
    place = getattr(world.paths, what)
    place.mkdir(parents=True, exist_ok=True)
    world.resolver.forgetful[place] = "tmpfs"
    with pytest.raises(RefusedError, match=f"is on tmpfs.*set paths.{what}"):
        planned(world, domain)
    assert planned(world, domain, ram_strategy="auto").strategy is Strategy.MANUAL


# -- the store ----------------------------------------------------------------------------------


def test_a_store_that_is_not_mounted_is_refused(world):
    """An empty directory, as a mount point is before its pool is imported."""
    domain = world.add_guest()
    take_snapshot(world.context, domain, SnapshotRequest("s1"))
    world.paths.bundles.rename(world.root / "elsewhere")
    for _ in range(2):
        with pytest.raises(RefusedError, match=r"have their bundles in one \(1\)") as caught:
            make_plan(world.context, domain, SnapshotRequest("s2"))
        assert f"touch {world.paths.bundles}/.snaporch-store" in caught.value.step
        world.paths.bundles.mkdir(exist_ok=True)
    assert list(world.paths.bundles.iterdir()) == []
    world.paths.bundles.rmdir()
    (world.root / "elsewhere").rename(world.paths.bundles)
    take_snapshot(world.context, domain, SnapshotRequest("s2"))


@pytest.mark.parametrize("empty", [True, False])
def test_a_store_may_be_empty_or_older_than_its_marker(world, empty):
    domain = world.add_guest()
    record = take_snapshot(world.context, domain, SnapshotRequest("s1"))
    if empty:
        shutil.rmtree(world.paths.bundles / record.uuid)
    else:
        (world.paths.bundles / ".snaporch-store").unlink()
    take_snapshot(world.context, domain, SnapshotRequest("s2"))
    assert (world.paths.bundles / ".snaporch-store").is_file()


# -- reservations -------------------------------------------------------------------------------


def test_a_reservation_without_room_for_a_snapshot_is_refused(world):
    """Otherwise each try would fail after minutes of saving RAM."""
    domain = world.add_guest(disks={"vda": "tank/web", "vdb": "tank/more", "vdc": "flash/web"})
    mib = 1 << 20
    for name, room in (("tank/web", 9), ("tank/more", 9), ("flash/web", 5)):
        world.pool.write(name, bytes(5 * mib))
        world.pool.reserve(name, 40 * mib, room=room * mib)
    with pytest.raises(RefusedError) as caught:
        make_plan(world.context, domain)
    assert caught.value.reason.startswith(
        "a snapshot of tank/more, tank/web needs 10 MiB free, 9 MiB are"
    )
    assert caught.value.step.endswith("zfs set refreservation=none tank/more tank/web")
    world.pool.reserve("tank/web", 4 * mib, room=9 * mib)
    assert make_plan(world.context, domain)
    world.pool.reserve("flash/web", 40 * mib, room=5 * mib - 1)
    with pytest.raises(RefusedError, match="flash/web needs 5 MiB free, 4 MiB are"):
        make_plan(world.context, domain)
