"""Old chains in a repository are deleted, after what stays was read."""

import hashlib
import json
import shutil
from datetime import UTC, datetime, timedelta

import pytest
from fakes.cloud import Cloud
from fakes.manifests import of_snapshots
from fakes.pool import FakePool

from snaporch.bundle.manifest import manifest_bytes
from snaporch.config import Config
from snaporch.errors import BusyError
from snaporch.interrupt import Interrupt
from snaporch.locks import REPLICATION, domain_lock
from snaporch.replication.restic import ResticRepository
from snaporch.schedule.prune_chains import prune_chains

ALL = 1 << 62
WEB, DATA = "tank/web", "tank/data"
UUID = "4b1d2f0e-0000-4000-8000-000000000001"
NOW = datetime.now(UTC).replace(microsecond=0)


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """Two chains of two snapshots each, a day apart, with their bundles."""
    made = Cloud(tmp_path / "cloud", FakePool(WEB))
    monkeypatch.setenv("PATH", str(made.tools), prepend=":")
    made.options = {"chain": 1, "keep": {"last": 2}}
    add(made, 1, 2, 3, 4)
    return made


def add(cloud, *days, bundles=True):
    for day in days:
        take(cloud, WEB, day)
    cloud.destination().send(WEB, raw=False, until=ALL)
    if bundles:
        store(cloud, *days)


def take(cloud, dataset, day):
    run, name = f"run-{day}", f"{dataset}@day-{day}"
    cloud.take(name, uuid=UUID, run=run, domain="web", bundle=f"{UUID}/{run}")
    cloud.pool.age(name, NOW - timedelta(days=30 - day))


def manifest(cloud, day):
    own = [each for each in cloud.pool.snapshots() if each.name == f"day-{day}"]
    return manifest_bytes(of_snapshots(f"{UUID}/run-{day}", *own))


def store(cloud, *days):
    for day in days:
        bundle = cloud.place / "store" / UUID / f"run-{day}"
        bundle.mkdir(parents=True)
        (bundle / "manifest.json").write_bytes(manifest(cloud, day))
        sums = {"manifest.json": hashlib.sha256(manifest(cloud, day)).hexdigest()}
        assert cloud.destination().store(bundle, f"{UUID}/{bundle.name}", sums) == []


def prune(cloud, *, dry_run=False, opened=None, interrupt=None):
    places = {"runtime": "runtime", "bundles": "store", "schedule": "schedule"}
    paths = {name: cloud.place / place for name, place in places.items()}
    replica = cloud.section()
    config = Config.model_validate({"replica": {"cloud": replica}, "paths": paths})
    opened = opened or (lambda _name, _replica: cloud.repository())
    return prune_chains(config, cloud.pool, opened, interrupt or Interrupt(), dry_run=dry_run)


def there(cloud):
    contents = cloud.repository().contents()
    streams = [each.snapshot.name for each in contents.streams.values()]
    return streams, sorted(each.partition("/")[2] for each in contents.bundles)


def entries(cloud):
    paths = (cloud.place / "repository" / "snapshots").iterdir()
    return [json.loads(path.read_text())["tags"] for path in paths]


def lines(done):
    return [f"{each.found.title}  {each.action.done}  {each.reason}" for each in done.decisions]


def test_old_chains_go_with_their_bundles_and_nothing_of_them_stays(cloud):
    before = len([*(cloud.place / "repository" / "data").iterdir()])
    done = prune(cloud)
    assert done.failures == []
    assert lines(done) == [
        f"chain {WEB}@day-1 to day-2 in cloud  deleted  no rule keeps any of its 2 snapshots",
        f"chain {WEB}@day-3 to day-4 in cloud  kept  the newest chain of its dataset",
    ]
    assert there(cloud) == (["day-3", "day-4"], ["run-3", "run-4"])
    assert not [tags for tags in entries(cloud) if "snapshot=day-1" in tags]
    assert len([*(cloud.place / "repository" / "data").iterdir()]) < before
    add(cloud, 5)
    assert there(cloud)[0] == ["day-3", "day-4", "day-5"]


def dumps(cloud):
    """How often restic was asked for a file, from here on; the log is reset."""
    log = cloud.place / "asked"
    fake = cloud.tools / "restic"
    if not log.exists():
        fake.rename(cloud.tools / "restic.real")
        fake.write_text(f'#!/bin/sh\necho "$1" >>"{log}"\nexec "$0.real" "$@"\n')
        fake.chmod(0o755)
    asked = log.read_text().splitlines() if log.exists() else []
    log.write_text("")
    return asked.count("dump")


def test_a_manifest_that_is_not_on_this_host_is_read_once(cloud):
    cloud.options["keep"] = {"last": 9}
    for day in (1, 2):
        shutil.rmtree(cloud.place / "store" / UUID / f"run-{day}")
    dumps(cloud)
    assert [each.action.value for each in prune(cloud).decisions] == ["keep", "keep"]
    assert dumps(cloud) == 2
    assert [each.action.value for each in prune(cloud).decisions] == ["keep", "keep"]
    assert dumps(cloud) == 0
    (cached,) = (cloud.place / "cache").glob("manifests-*")
    assert len([*cached.iterdir()]) == 2
    cloud.options["keep"] = {"last": 2}
    assert [each.action.value for each in prune(cloud).decisions] == ["delete", "keep"]
    prune(cloud)
    assert [*cached.iterdir()] == []


def test_a_dry_run_says_what_goes_and_reads_and_changes_nothing(cloud):
    found = entries(cloud)
    cloud.fail("dump", 99)
    done = prune(cloud, dry_run=True)
    assert [each.action.value for each in done.decisions] == ["delete", "keep"]
    assert done.freed > 0
    assert entries(cloud) == found


def test_without_keep_nothing_is_asked(cloud):
    cloud.options = {}
    assert prune(cloud, opened=None).decisions == []


def test_nothing_goes_if_the_chain_that_stays_is_damaged(cloud):
    cloud.damage(cloud.stream(f"{WEB}@day-4", f"{WEB}@day-3"))
    found = entries(cloud)
    done = prune(cloud)
    (failure,) = done.failures
    assert f"cloud: {WEB}@day-4: cannot be read" in failure.line()
    assert "no chain is deleted" in failure.line()
    assert lines(done)[0].endswith("kept  stays, because what would stay cannot be read")
    assert entries(cloud) == found


def test_nothing_goes_if_the_newest_bundle_is_damaged(cloud):
    cloud.damage(manifest(cloud, 4))
    found = entries(cloud)
    (failure,) = prune(cloud).failures
    assert "cloud: web@day-4: its bundle is damaged (manifest.json)" in failure.line()
    assert entries(cloud) == found


@pytest.fixture
def two_disks(tmp_path, monkeypatch):
    """Makes a guest on two datasets; a chain of the second one has ``data`` increments."""

    def make(days, keep, *, data=1):
        made = Cloud(tmp_path / "cloud", FakePool(WEB, DATA))
        monkeypatch.setenv("PATH", str(made.tools), prepend=":")
        for day in range(1, days + 1):
            take(made, WEB, day)
            take(made, DATA, day)
        for dataset, chain in ((DATA, data), (WEB, 1)):
            made.options = {"chain": chain, "keep": keep}
            made.destination().send(dataset, raw=False, until=ALL)
        store(made, *range(1, days + 1))
        return made

    return make


def unread(cloud, thing):
    """Nothing goes, because this cannot be read."""
    found = entries(cloud)
    done = prune(cloud)
    (failure,) = done.failures
    assert f"cloud: {thing}: cannot be read" in failure.line()
    assert not any("deleted" in each or "changed" in each for each in lines(done))
    assert entries(cloud) == found


def test_damage_in_one_dataset_keeps_the_chains_of_the_guests_others(two_disks):
    """Otherwise the whole days would lose one disk, and the others have lost the other."""
    made = two_disks(4, {"last": 2})
    made.damage(made.stream(f"{DATA}@day-3", ""))
    unread(made, f"{DATA}@day-3")


def test_datasets_that_lose_no_chain_are_read_too(two_disks):
    made = two_disks(8, {"last": 1}, data=30)
    made.damage(made.stream(f"{DATA}@day-5", f"{DATA}@day-4"))
    unread(made, f"{DATA}@day-5")


def test_what_is_read_is_what_can_come_back(cloud):
    """The bundle of the newest snapshot has not arrived, and its chain is another one."""
    cloud.options["keep"] = {"last": 1}
    add(cloud, 5, bundles=False)
    cloud.damage(cloud.stream(f"{WEB}@day-4", f"{WEB}@day-3"))
    unread(cloud, f"{WEB}@day-4")


def test_a_chain_with_a_snapshot_dated_ahead_is_not_the_newest(cloud):
    cloud.options["keep"] = {"last": 1}
    add(cloud, 5, 6)
    ahead, then = (NOW + timedelta(days=400)), (NOW - timedelta(days=28))
    cloud.change_record("day-2", *(f"created={int(each.timestamp())}" for each in (then, ahead)))
    cloud.damage(cloud.stream(f"{WEB}@day-6", f"{WEB}@day-5"))
    unread(cloud, f"{WEB}@day-6")


@pytest.mark.parametrize("lost", [False, True])
def test_what_was_read_must_be_what_stays(cloud, lost):
    """While prune reads, a replication adds a snapshot, or another program forgets one."""
    add(cloud, 5, 6)

    def meanwhile():
        cloud.forget("snapshot=day-5") if lost else add(cloud, 7)

    cloud.heard.at[f"reading {WEB}@day-6"] = meanwhile
    done = prune(cloud)
    assert done.failures == []
    assert ("day-1" in there(cloud)[0]) is lost
    assert any("changed at this moment" in each for each in lines(done)) is lost


def test_a_first_copy_that_stopped_before_its_bundles_stays(cloud):
    """The streams of all days are there; the next replication stores the bundles."""
    cloud.forget("kind=bundle")
    cloud.options["keep"] = {"daily": 365}
    add(cloud, 5, 6, bundles=False)
    names = [f"day-{day}" for day in range(1, 7)]
    assert there(cloud)[0] == names
    assert prune(cloud).failures == []
    assert there(cloud)[0] == names
    store(cloud, 5, 6)
    assert prune(cloud).failures == []
    assert there(cloud)[0] == names


def test_a_chain_that_was_forgotten_for_a_repair_takes_no_whole_one_with_it(two_disks):
    made = two_disks(7, {"last": 3})
    contents = made.repository().contents()
    (damaged,) = (e for e in contents.chains() if e[0].snapshot.full_name == f"{DATA}@day-5")
    tag = f"{DATA}@{damaged[0].snapshot.guid}"
    made.repository().forget([each.id for each in contents.stored if each.chain == tag])
    assert prune(made).failures == []
    assert there(made)[1] == [f"run-{day}" for day in range(3, 8)]


def test_a_dataset_that_is_gone_does_not_stop_it(cloud):
    cloud.pool.rename(WEB, "tank/other")
    assert prune(cloud).failures == []
    assert there(cloud)[0] == ["day-3", "day-4"]


def test_nothing_goes_while_the_bundle_store_is_not_mounted(cloud):
    shutil.rmtree(cloud.place / "store" / UUID)
    found = entries(cloud)
    (failure,) = prune(cloud).failures
    assert "there is no bundle in it; is it mounted?" in failure.line()
    assert entries(cloud) == found


def test_a_restic_prune_that_failed_is_repeated(cloud):
    cloud.fail("prune", 1)
    (failure,) = prune(cloud).failures
    assert "restic prune: no server" in failure.line()
    before = len([*(cloud.place / "repository" / "data").iterdir()])
    assert prune(cloud).failures == []
    after = len([*(cloud.place / "repository" / "data").iterdir()])
    assert after < before
    cloud.fail("prune", 1)
    assert prune(cloud).failures == []  # nothing is due


def test_a_server_that_only_appends_is_named(cloud):
    (cloud.place / "repository" / "append-only").touch()
    found = entries(cloud)
    (failure,) = prune(cloud).failures
    assert "restic snapshots that were forgotten are still there" in failure.line()
    assert "may its key delete? see: restic -r" in failure.line()
    assert entries(cloud) == found


def test_nothing_goes_while_a_replication_runs(cloud):
    found = entries(cloud)
    runtime = cloud.place / "runtime"
    with domain_lock(runtime, REPLICATION, REPLICATION, "replicate", wait=0, interrupt=Interrupt()):
        (failure,) = prune(cloud).failures
    assert isinstance(failure, BusyError)
    assert entries(cloud) == found


def test_what_an_interruption_leaves_goes_with_the_next_prune(cloud):
    """Each of the first prunes is interrupted after another step."""

    class OneStep(ResticRepository):
        def forget(self, snapshots):
            super().forget(snapshots)
            cloud.fail("forget", 1)

    def opened(name, replica):
        return OneStep(name, replica, Interrupt(), cloud.heard, cache=cloud.place / "cache")

    for _ in range(4):
        (failure,) = prune(cloud, opened=opened).failures
        assert "restic forget: no server" in failure.line()
        assert there(cloud)[0][-2:] == ["day-3", "day-4"]
    assert prune(cloud).failures == []
    assert there(cloud) == (["day-3", "day-4"], ["run-3", "run-4"])
    old = [tags for tags in entries(cloud) if {"snapshot=day-1", "snapshot=day-2"} & {*tags}]
    assert not [tags for tags in old if "kind=stream" in tags]
