"""A disk that is a partition is treated neither as its volume nor as another partition."""

from pathlib import Path

import pytest
from fakes import manifests

from snaporch.bundle.manifest import MANIFEST_NAME
from snaporch.clone.clone import CloneRequest, check_clone
from snaporch.errors import RefusedError
from snaporch.extract.extract import choose_disks
from snaporch.model import DatasetKind, VerifyDepth
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.source import complete_source, find_records
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.verify.verify import VerifyOptions, verify


@pytest.fixture
def record(world):
    """A guest on the first partition of ``tank/vol``; a file takes the place of its node."""
    world.pool.create("tank/vol", DatasetKind.VOLUME)
    world.pool.write("tank/vol", b"then")
    (disk,) = world.add_guest("part", {"vda": "tank/vol"}).disks
    world.resolver.volumes.add("tank/vol")
    world.resolver.partitions[disk.source] = 1
    return take_snapshot(world.context, world.hypervisor.domain("part"), SnapshotRequest("s1"))


@pytest.fixture(params=["noted", "of an earlier bundle"])
def source(request, record, world):
    path = Path(record.bundle) / MANIFEST_NAME
    manifest = manifests.load(path)
    assert manifest["disks"][0]["partition"] == 1
    if request.param != "noted":
        del manifest["disks"][0]["partition"]
        manifests.store(path, manifest)
    return complete_source(world.context, find_records(world.context, "part@s1")[-1])


def test_it_is_neither_cloned_nor_copied_as_the_whole_volume(source, world, tmp_path):
    request = CloneRequest("test", resumed=True)
    with pytest.raises(RefusedError, match="vda is partition 1 of tank/vol, not all of it"):
        check_clone(world.context, source, request)
    with pytest.raises(RefusedError, match="vda is partition 1 of tank/vol, not all of it"):
        choose_disks(world.resolver, source, None, tmp_path / "out")


def test_it_is_verified_without_a_clone_that_runs(source, world):
    outcome = verify(world.context, source.record, VerifyOptions(disks=True))
    assert (outcome.passed, outcome.reached, outcome.disks) == (True, VerifyDepth.CHECKED, True)
    assert "not run: its disk vda is a part of a volume" in outcome.proof
    assert "hypervisor.restore" not in world.hooks.acts()


@pytest.mark.parametrize("now", [2, None])
def test_it_is_not_rolled_back_where_its_path_is_another_now(record, world, now):
    assert make_restore_plan(world.context, "part", "s1", disks_only=True)
    (source,) = world.resolver.partitions
    world.resolver.partitions.clear()
    if now is not None:
        world.resolver.partitions[source] = now
    with pytest.raises(RefusedError, match=f"leads to tank/vol, partition {now} now"):
        make_restore_plan(world.context, "part", "s1", disks_only=True)
