"""10,000 snapshots and 2,000 bundles: the number of calls of ``zfs``.

Only ``zfs`` itself is not real here: a table answers in its format.
"""

import json
import shutil
import uuid as uuids
from datetime import UTC, datetime, timedelta

import pytest
from fakes import zfs_get

from snaporch.bundle.manifest import Manifest, SnapshotEntry, VersionsEntry, manifest_bytes
from snaporch.model import Level
from snaporch.zfs.cli import ZfsCommand

DOMAINS, RUNS, DATASETS = 20, 100, 5
NOW = datetime.now(UTC).replace(microsecond=0)


class Table(ZfsCommand):
    """Listings of ``zfs`` from given rows; counts the calls."""

    def __init__(self, rows):
        super().__init__("zfs")
        self._rows = rows
        self.asked = []

    def _run(self, *arguments):
        if arguments[:4] == ("get", "-Hp", "-t", "filesystem,volume"):  # which are few
            return ""
        self.asked.append(arguments)
        if arguments[0] == "get":
            return zfs_get.answer(arguments, {row["name"]: row for row in self._rows})
        kinds = arguments[arguments.index("-t") + 1].split(",")
        columns = arguments[arguments.index("-o") + 1].split(",")
        wanted = [row for row in self._rows if row["type"] in kinds]
        return "".join("\t".join(row.get(c, "-") for c in columns) + "\n" for row in wanted)


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    """The rows and the bundles that they name, which are made once."""
    store = tmp_path_factory.mktemp("crowd")
    rows = [{"name": "tank", "type": "filesystem", "guid": "1"}]
    for number in range(DOMAINS):
        name = f"vm{number}"
        uuid = str(uuids.uuid5(uuids.NAMESPACE_DNS, name))  # as the fake host gives them
        datasets = [f"tank/{name}-{disk}" for disk in range(DATASETS)]
        rows += [
            {"name": dataset, "type": "filesystem", "guid": f"{number}{disk}1"}
            for disk, dataset in enumerate(datasets)
        ]
        for run in range(RUNS):
            rows += _run(store, name, uuid, datasets, number * RUNS + run)
    return store, rows


def _run(store, domain, uuid, datasets, number):
    at = NOW - timedelta(hours=number % RUNS + 1)
    run, snapshot = f"{at:%Y%m%dT%H%M%SZ}-{number:08x}", f"snaporch_{at:%Y%m%dT%H%M%SZ}_hourly"
    entries = [
        SnapshotEntry(
            dataset=each, name=snapshot, guid=number * 10 + disk + 10**6, createtxg=number + 1
        )
        for disk, each in enumerate(datasets)
    ]
    manifest = Manifest(
        run=run, domain=domain, uuid=uuid, snapshot=snapshot, level=Level.PAUSED, was_running=True,
        started=at, created=at, finished=at, snapshots=tuple(entries), disks=(), parts=(),
        versions=VersionsEntry(snaporch="0", libvirt="0", emulator="0", machine="pc"),
    )  # fmt: skip
    bundle = store / uuid / run
    bundle.mkdir(parents=True)
    (bundle / "manifest.json").write_bytes(manifest_bytes(manifest))
    properties = {
        "run": run, "level": "paused", "bundle": f"{uuid}/{run}", "uuid": uuid, "domain": domain,
        "retention": "hourly",
    }  # fmt: skip
    return [
        {"name": f"{e.dataset}@{snapshot}", "type": "snapshot", "guid": str(e.guid)}
        | {"createtxg": str(e.createtxg), "creation": str(int(at.timestamp())), "userrefs": "0"}
        | {f"snaporch:{key}": value for key, value in properties.items()}
        for e in entries
    ]


@pytest.fixture
def zfs(crowd, host, command_host):
    """A host with these snapshots and bundles; returns its ``zfs``."""
    store, rows = crowd
    shutil.rmtree(host.paths.bundles, ignore_errors=True)
    host.paths.bundles.symlink_to(store)
    table = Table(rows)
    command_host.open_pool = lambda **_: table
    for number in range(DOMAINS):
        disks = {f"vd{'abcde'[disk]}": f"tank/vm{number}-{disk}" for disk in range(DATASETS)}
        host.add_guest(f"vm{number}", disks)
    with host.config_file.open("a") as stream:
        stream.write('[policy.hourly]\nevery = "1h"\ndomains = ["*"]\nkeep = { last = 10 }\n')
    return table


def test_list_calls_zfs_once(zfs, snaporch):
    answer = snaporch("list", "--json")
    assert answer.code == 0, answer.err
    assert len(answer.json) == DOMAINS * RUNS
    assert all(len(each["datasets"]) == DATASETS for each in answer.json)
    assert len(zfs.asked) == 1


def test_a_prune_that_deletes_nothing_calls_zfs_once(zfs, snaporch):
    answer = snaporch("prune", "--dry-run", "--json")
    assert answer.code == 0, answer.err
    assert {item["action"] for item in answer.json["items"]} == {"keep"}
    assert len(answer.json["items"]) == DOMAINS * RUNS
    assert len(zfs.asked) == 1


def test_plan_calls_zfs_once_and_judges_every_snapshot(zfs, snaporch):
    answer = snaporch("plan", "--json")
    assert answer.code == 0, answer.err
    retention = answer.json["retention"]
    assert len(retention) == DOMAINS * RUNS
    kept = [each for each in retention if each["action"] == "keep"]
    assert len(kept) == DOMAINS * 10
    assert len(zfs.asked) == 1


def test_the_crowd_is_one(crowd):
    store, rows = crowd
    assert len([row for row in rows if row["type"] == "snapshot"]) == 10_000
    manifests = list(store.glob("*/*/manifest.json"))
    assert len(manifests) == 2_000
    assert json.loads(manifests[0].read_text())["format"] == 1
