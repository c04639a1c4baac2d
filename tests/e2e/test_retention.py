"""Four hundred days of snapshots in a real pool, by a clock that the test sets."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import BUNDLES, must, zfs_snapshots

from snaporch.bundle.manifest import (
    DiskEntry,
    Manifest,
    Role,
    SnapshotEntry,
    VersionsEntry,
)
from snaporch.cli.command_host import CommandHost
from snaporch.cli.session import open_session
from snaporch.model import Level
from snaporch.schedule.apply_retention import apply_retention
from snaporch.schedule.forecast import make_forecasts
from snaporch.zfs import PREFIX

CONFIG = Path("/etc/snaporch/snaporch.toml")
ZONE = ZoneInfo("Europe/Berlin")
START = datetime(2026, 1, 1, 22, 30, tzinfo=UTC)
"""Half past eleven in Berlin, and half past midnight of the next day there from April on."""
DAYS = 400
EVERY = 10
"""Days between two runs of retention."""
DATASETS = ("tank/aged", "flash/aged")
RAM_DAY = 3
HELD_DAY = 30
POLICY = """
[schedule]
timezone = "Europe/Berlin"
[policy.nightly]
domains = ["aged"]
keep = { daily = 7, weekly = 8, monthly = 12, yearly = 3 }
[prune]
trash_keep = "0s"
"""


@pytest.fixture
def guest():
    CONFIG.parent.mkdir(exist_ok=True)
    CONFIG.write_text(POLICY)
    disks = [Disk("file", "tank/aged"), Disk("zvol", "flash/aged")]
    made = Guest.create("aged", disks=disks, start=False)
    yield made
    must("zfs", "release", "keep", f"tank/aged@{name_of(HELD_DAY)}")
    made.remove()
    CONFIG.unlink()


def moment(day):
    return START + timedelta(days=day)


def name_of(day):
    return f"snaporch_{moment(day):%Y%m%dT%H%M%SZ}_nightly"


def run_of(day):
    return f"{moment(day):%Y%m%dT%H%M%SZ}-{day:08x}"


def level_of(day):
    return Level.RAM if day == RAM_DAY else Level.OFF


def take(context, domain, days):
    """Snapshots of these days as runs leave them: marks and small bundles."""
    for day in days:
        marks = {
            "run": run_of(day), "uuid": domain.uuid, "domain": domain.name,
            "bundle": f"{domain.uuid}/{run_of(day)}", "level": level_of(day).value,
            "retention": "nightly",
        }  # fmt: skip
        properties = {f"{PREFIX}{key}": value for key, value in marks.items()}
        for dataset in DATASETS:
            context.pool.snapshot([f"{dataset}@{name_of(day)}"], properties)
    taken = context.pool.snapshots(DATASETS)
    for day in days:
        seal(context, domain, day, [found for found in taken if found.name == name_of(day)])


def seal(context, domain, day, taken):
    bundle = context.store.create(domain.uuid, run_of(day))
    part = bundle.add_text("domain.xml", Role.INACTIVE_XML, domain.inactive_xml)
    bundle.seal(
        Manifest(
            run=run_of(day),
            domain=domain.name,
            uuid=domain.uuid,
            snapshot=name_of(day),
            level=level_of(day),
            was_running=level_of(day) is Level.RAM,
            started=moment(day),
            created=moment(day),
            finished=moment(day),
            snapshots=tuple(
                SnapshotEntry(dataset=s.dataset, name=s.name, guid=s.guid, createtxg=s.createtxg)
                for s in taken
            ),
            disks=tuple(
                DiskEntry(target=disk.target, source=disk.source, format=disk.format, dataset=where)
                for disk, where in zip(domain.disks, DATASETS, strict=True)
            ),
            parts=(part,),
            versions=VersionsEntry(snaporch="1", libvirt="1", emulator="1", machine="pc"),
        )
    )


def expected(last_day):
    """Days whose snapshots stay, computed without the code under test."""
    days = list(range(last_day, -1, -1))
    kept = set()
    rules = {
        7: lambda local: local.date(),
        8: lambda local: local.isocalendar()[:2],
        12: lambda local: (local.year, local.month),
        3: lambda local: local.year,
    }
    for count, period in rules.items():
        newest = {}
        for day in days:
            newest.setdefault(period(moment(day).astimezone(ZONE)), day)
        kept |= set(list(newest.values())[:count])
    return kept | {RAM_DAY, HELD_DAY}


def names(dataset):
    return {full.split("@")[1] for full in zfs_snapshots() if full.startswith(f"{dataset}@")}


def test_four_hundred_days(guest):
    with open_session(CommandHost(), None, quiet=True) as context:
        domain = context.hypervisor.domain("aged")
        for first in range(0, DAYS, EVERY):
            days = range(first, first + EVERY)
            take(context, domain, days)
            if HELD_DAY in days:
                must("zfs", "hold", "keep", f"tank/aged@{name_of(HELD_DAY)}")
            now = moment(days[-1]) + timedelta(minutes=5)
            assert apply_retention(context, make_forecasts(context, now), now).failures == []
        now = moment(DAYS - 1) + timedelta(minutes=10)
        assert apply_retention(context, make_forecasts(context, now), now).deleted == []
        (outlook,) = make_forecasts(context, now)
    stays = {name_of(day) for day in expected(DAYS - 1)}
    assert 20 < len(stays) < 35
    for dataset in DATASETS:
        assert names(dataset) == stays
    assert len(list(BUNDLES.glob(f"{domain.uuid}/*"))) == len(stays)
    reasons = {verdict.taken.snapshot: verdict.reason for verdict in outlook.retention}
    assert reasons[name_of(RAM_DAY)] == "the last good RAM snapshot"
    assert reasons[name_of(HELD_DAY)].startswith("held")
