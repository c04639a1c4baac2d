"""What makes a guest's RAM stay here; see also test_bundle_copies.py."""

import pytest

from snaporch.bundle.manifest import read_manifest
from snaporch.replication.ram_in_clear import encrypted_disks
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot


@pytest.fixture
def manifest_of(world):
    """Takes a snapshot of a guest with a second disk, which may be encrypted."""

    def take(*, encrypted):
        world.add_guest(disks={"vda": "tank/web", "vdb": "tank/secret"})
        world.pool.create("tank/secret", encrypted=encrypted)
        taken = take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s1"))
        world.pool.destroy_snapshots(["tank/secret@s1"])
        world.pool.destroy_dataset("tank/secret")
        return read_manifest(world.paths.bundles / taken.uuid / taken.run)

    return take


def found(world, manifest):
    datasets = {each.dataset for each in manifest.snapshots}
    return encrypted_disks(world.context, datasets, [manifest, None])


def test_a_dataset_that_is_gone_counts(world, manifest_of):
    manifest = manifest_of(encrypted=True)
    assert found(world, manifest) == ["tank/secret is gone, and may be encrypted"]
    without = manifest.model_copy(update={"surroundings": None})
    assert "tank/secret is gone, and may be encrypted" in found(world, without)


def test_one_that_is_gone_and_was_not_encrypted_does_not_count(world, manifest_of):
    assert found(world, manifest_of(encrypted=False)) == []
