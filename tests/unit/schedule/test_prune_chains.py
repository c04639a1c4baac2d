"""Old chains in a repository are deleted, after what stays was read."""

import hashlib
import json
from datetime import UTC, datetime, timedelta

import pytest
from fakes.cloud import Cloud
from fakes.pool import FakePool

from snaporch.config import Config
from snaporch.errors import BusyError
from snaporch.interrupt import Interrupt
from snaporch.locks import REPLICATION, domain_lock
from snaporch.replication.restic import ResticRepository
from snaporch.schedule.prune_chains import prune_chains

ALL = 1 << 62
WEB = "tank/web"
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


def add(cloud, *days):
    for day in days:
        run, name = f"run-{day}", f"{WEB}@day-{day}"
        cloud.take(name, uuid=UUID, run=run, domain="web", bundle=f"{UUID}/{run}")
        cloud.pool.age(name, NOW - timedelta(days=30 - day))
    destination = cloud.destination()
    destination.send(WEB, raw=False, until=ALL)
    for day in days:
        bundle = cloud.place / f"run-{day}"
        bundle.mkdir()
        (bundle / "manifest.json").write_text(f"{{{day}}}")
        sums = {"manifest.json": hashlib.sha256(f"{{{day}}}".encode()).hexdigest()}
        assert destination.store(bundle, f"{UUID}/{bundle.name}", sums) == []


def prune(cloud, *, dry_run=False, opened=None, interrupt=None):
    paths = {"runtime": cloud.place / "runtime", "bundles": cloud.place / "store"}
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
    assert "no older chain is deleted" in failure.line()
    assert lines(done)[0].endswith("kept  stays, because what would stay cannot be read")
    assert entries(cloud) == found


def test_nothing_goes_if_the_newest_bundle_is_damaged(cloud):
    cloud.damage(b"{4}")
    found = entries(cloud)
    (failure,) = prune(cloud).failures
    assert "cloud: web@day-4: its bundle is damaged (manifest.json)" in failure.line()
    assert entries(cloud) == found


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
