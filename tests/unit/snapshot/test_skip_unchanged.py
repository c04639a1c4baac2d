"""A policy takes no new snapshot of a guest that is off and unchanged."""

import itertools
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fakes.domain_xml import DiskSpec
from fakes.hooks import failing
from fakes.images import qcow2

from snaporch.bundle.firmware_files import read_host_file
from snaporch.catalog.records import all_records
from snaporch.config import Config
from snaporch.context import Clock
from snaporch.errors import SnaporchError
from snaporch.model import DomainState, Level, VerificationResult, VerifyDepth
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.verify.verify import write_result
from snaporch.zfs import PoolError

DISKS = {"vda": "tank/web", "vdb": "flash/web"}


@pytest.fixture
def off(world, tmp_path):
    nvram = tmp_path / "web.fd"
    nvram.write_bytes(b"boot order")
    tpm = tmp_path / "tpm2-00.permall"
    tpm.write_bytes(b"sealed")
    world.add_guest(disks=DISKS, state=DomainState.OFF, nvram=str(nvram), tpm=str(tpm))
    policy = {"hourly": {"every": "1h"}, "nightly": {"every": "1d"}}
    world.context.config = Config.model_validate(
        {"paths": world.paths.model_dump(), "policy": policy}
    )
    return world


@pytest.fixture
def clock(off):
    """Names of runs have seconds, so each run of a test is a second later."""
    seconds = itertools.count(1_800_000_000)
    off.context.clock = Clock(now=lambda: datetime.fromtimestamp(next(seconds), UTC))


def take(world, policy="hourly", **more):
    domain = world.hypervisor.domain("web")
    options = {"policy": policy, "if_changed": True} | more
    return take_snapshot(world.context, domain, SnapshotRequest(**options))


def count(world):
    return len(all_records(world.context.store, world.pool.snapshots()))


def test_no_new_snapshot_while_nothing_changes(off, clock):
    first = take(off)
    before = datetime.now(UTC).replace(microsecond=0)
    again = take(off)
    assert (again.run, count(off)) == (first.run, 1)
    assert first.unchanged is None
    assert again.unchanged >= before
    assert off.leftovers() == []


def test_without_if_changed_a_snapshot_is_taken(off, clock):
    assert take(off, if_changed=False).run != take(off, if_changed=False).run


def test_each_policy_has_its_own_last_snapshot(off, clock):
    assert take(off).run != take(off, "nightly").run


def _write(world):
    world.pool.write("flash/web", b"by the host")


def _define(world):
    guest = world.guest()
    guest.inactive = guest.inactive.replace("</domain>", "<title>x</title></domain>")


def _set_variables(world):
    Path(world.hypervisor.domain("web").nvram).write_bytes(b"other order")


def _set_tpm(world):
    Path(world.hypervisor.domain("web").tpm_state.path).write_bytes(b"unseal")


def _relink(world):
    """The same definition leads to another image of the same dataset."""
    path = world.root / "zfs/tank/web/web-vda.img"
    path.rename(path.with_name("other.img"))
    path.symlink_to("other.img")


def _lose_variables(world):
    Path(world.hypervisor.domain("web").nvram).unlink()


def _start(world):
    world.hypervisor.start(world.guest().uuid, paused=False)


def _save(world):
    world.guest().managed_save = True


def _fail(at):
    def fail(world):
        world.hooks.at[at] = failing(PoolError("zfs", "does not say"))

    return fail


def _verdict(world):
    (record,) = all_records(world.context.store, world.pool.snapshots())
    failed = VerificationResult(datetime.now(UTC), passed=False, reached=VerifyDepth.NOTHING)
    write_result(world.context, record, failed)


def _lose_a_part(world):
    (record,) = all_records(world.context.store, world.pool.snapshots())
    (Path(record.bundle) / "nvram.fd").unlink()


def _spoil_a_part(world):
    """A flipped bit; the size is the same."""
    (record,) = all_records(world.context.store, world.pool.snapshots())
    part = Path(record.bundle) / "nvram.fd"
    part.write_bytes(part.read_bytes().swapcase())


def _lose_a_disk(world):
    (record,) = all_records(world.context.store, world.pool.snapshots())
    world.pool.destroy_snapshots([f"flash/web@{record.snapshot}"])


@pytest.mark.parametrize(
    "change",
    [
        _write,
        _define,
        _set_variables,
        _set_tpm,
        _relink,
        _lose_variables,
        _start,
        _save,
        _fail("pool.written_since"),
        _fail("pool.sync"),
        _verdict,
        _lose_a_part,
        _spoil_a_part,
        _lose_a_disk,
    ],
)
def test_any_change_or_failed_check_takes_a_new_snapshot(off, clock, change):
    first = take(off)
    change(off)
    assert take(off).run != first.run


def test_a_snapshot_of_the_running_guest_does_not_count(off, clock):
    off.hypervisor.start(off.guest().uuid, paused=False)
    first = take(off)
    assert first.level is not Level.OFF
    off.guest().live, off.guest().state = None, DomainState.OFF
    assert take(off).run != first.run


def test_the_last_snapshot_is_found_by_transaction_group_not_by_clock(off, clock):
    first = take(off)
    off.pool.write("flash/web", b"later")
    second = take(off)
    for dataset in second.datasets:
        off.pool.age(f"{dataset}@{second.snapshot}", datetime(2020, 1, 1, tzinfo=UTC))
    off.pool.write("flash/web", b"first")  # the same data again
    assert take(off).run not in (first.run, second.run)


def test_the_recorded_time_is_the_begin_of_the_check(off, clock):
    """Data that is written during the check counts as a later change."""
    began = datetime(2026, 6, 1, 12, tzinfo=UTC)
    now = [began]
    take(off)
    off.context.clock = Clock(now=lambda: now[-1])
    off.hooks.at["pool.sync"] = lambda: now.append(began + timedelta(hours=1))
    assert take(off).unchanged == began


def test_volumes_are_flushed_before_the_check(off, clock):
    """Written data may still be in the host's cache of the device."""
    take(off)
    off.hooks.log.clear()
    off.context.flush_volume = lambda path: off.hooks.act("flush", Path(path).name)
    off.hooks.at["pool.sync"] = lambda: off.hooks.act("sync")
    off.hooks.at["pool.written_since"] = lambda: off.hooks.act("ask")
    take(off)
    flush = ["flush web-vda.img", "flush web-vdb.img"]
    assert [line for line in off.hooks.log if line in (*flush, "sync", "ask")] == [
        *flush,
        "sync",
        "ask",
        "ask",
    ]


def test_the_check_ends_with_the_guests_state(off, clock):
    first = take(off)
    off.hooks.at["pool.written_since"] = lambda: off.guest().live or _start(off)
    with pytest.raises(SnaporchError, match="started or stopped"):
        take(off)
    assert count(off) == 1
    assert all("unchanged" not in each.properties for each in off.pool.snapshots())
    assert first.unchanged is None


def test_the_check_itself_writes_nothing(off, clock):
    """ZFS counts a new access time as written."""
    base, top = off.image("tank/over", "base.img"), off.image("tank/over", "top.img")
    base.write_bytes(qcow2())
    top.write_bytes(qcow2(str(base), "qcow2"))
    nvram = Path(off.hypervisor.domain("web").nvram)
    over = (DiskSpec("vda", str(top), format="qcow2"),)
    off.add_guest("web", {}, state=DomainState.OFF, more=over, nvram=str(nvram))
    first = take(off)
    moment = 10**18
    for path in (base, top, nvram):
        os.utime(path, ns=(moment, path.stat().st_mtime_ns))
    assert take(off).run == first.run
    assert {path.stat().st_atime_ns for path in (base, top, nvram)} == {moment}


def test_a_file_that_cannot_be_opened_with_noatime_is_read(tmp_path, monkeypatch):
    path, real = tmp_path / "image", os.open
    path.write_bytes(b"data")

    def refuse(path, flags, **more):
        if flags & os.O_NOATIME:
            raise PermissionError
        return real(path, flags, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert read_host_file(path)[0] == b"data"


def test_an_unrecognizable_backing_file_counts_as_changed(off, clock):
    """A device or vmdk: its manifest entry is the same whatever was written to it."""
    base, top = off.image("flash/golden", "base.vmdk"), off.image("tank/over", "top.img")
    top.write_bytes(qcow2(str(base), "vmdk"))
    over = (DiskSpec("vda", str(top), format="qcow2"),)
    off.add_guest("web", {}, state=DomainState.OFF, more=over)
    assert take(off).run != take(off).run
