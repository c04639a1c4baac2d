"""Test restores of copies in a pool of this machine, whose guests are not defined here."""

import os
import shutil
import stat

import pytest
from fakes.images import qcow2

from snaporch import default_paths
from snaporch.bundle.manifest import (
    BackingFileEntry,
    ManifestError,
    manifest_bytes,
    read_manifest,
)
from snaporch.bundle.store import copy_name
from snaporch.config import Config
from snaporch.errors import NotFoundError, RefusedError
from snaporch.locks import has_readers
from snaporch.model import BundleState, VerifyDepth
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.snapshot.store_pages import store_as_pages
from snaporch.verify.copies_here import (
    CopiesHere,
    NotRestorableError,
    find_place,
    mount_points,
)
from snaporch.verify.restore_results import RestoreOutcome, restore_results
from snaporch.verify.verify import VerifyOptions
from snaporch.zfs import PREFIX

ROOT = "backup/vm1"


class Backup:
    """A machine with copies of a guest, which it does not have itself."""

    def __init__(self, world):
        self.world = world
        self.bundles = world.root / "pulled"
        source = {"host": "vm1", "dataset": ROOT, "bundles": str(self.bundles)}
        document = world.context.config.model_dump() | {"source": {"vm1": source}}
        world.context.config = Config.model_validate(document)
        self.here = CopiesHere(world.context, "vm1", find_place(world.context.config, "vm1"))

    def copy(self, *datasets, lose=True):
        """Have a copy of datasets and bundles, and without ``lose`` also the originals."""
        pool, zfs = self.world.pool, self.world.root / "zfs"
        for dataset in datasets:
            name = f"{ROOT}/{copy_name(dataset)}"
            pool.copy_to(dataset, name, "vm1")
            if (zfs / dataset).exists():
                shutil.copytree(zfs / dataset, zfs / name)
            if lose:
                pool.take_out(dataset)
                shutil.rmtree(zfs / dataset, ignore_errors=True)
        shutil.copytree(self.world.paths.bundles, self.bundles, dirs_exist_ok=True)
        for bundle in self.bundles.glob("*/*"):
            (bundle / "copy.json").write_text('{"dataset": "backup/vm1"}')
        if lose:
            shutil.rmtree(self.world.paths.bundles)
            self.world.hypervisor.guests.clear()

    def verify(self, name="web@s1", **options):
        (record,) = self.here.find([name])
        return self.here.verify(record, VerifyOptions(**options))

    def properties(self, dataset="tank/web"):
        (found,) = self.world.pool.snapshots([f"{ROOT}/{copy_name(dataset)}"])
        return found.properties

    @property
    def bundle(self):
        (found,) = self.bundles.glob("*/*")
        return found


@pytest.fixture
def backup(world):
    world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    return Backup(world)


def take(world, level=None, guest="web", name="s1"):
    return take_snapshot(
        world.context, world.hypervisor.domain(guest), SnapshotRequest(name, level)
    )


@pytest.mark.parametrize(
    ("level", "reached"), [(None, VerifyDepth.RESUMED), ("crash", VerifyDepth.BOOTED)]
)
def test_a_copy_is_restored_where_its_guest_is_not_defined(backup, level, reached):
    take(backup.world, level)
    backup.copy("tank/web", "flash/web")
    outcome = backup.verify()
    assert outcome.passed, outcome.failure
    assert outcome.reached is reached
    assert backup.world.hypervisor.guests == {}
    assert [e.name for e in backup.world.pool.datasets() if "verify" in e.name] == []
    text = outcome.verdict.as_text()
    assert {backup.properties(each)["verified-here"] for each in ("tank/web", "flash/web")} == {
        text
    }
    assert "verified" not in backup.properties()


def test_the_mark_of_its_host_says_nothing_of_the_copy(backup):
    take(backup.world)
    full = "tank/web@s1", "flash/web@s1"
    backup.world.pool.set_properties(
        full, {f"{PREFIX}verified": "2026-11-21T14:00:00Z failed checked steps:clone"}
    )
    backup.copy("tank/web", "flash/web")
    assert backup.verify().passed


def destroy_copies(backup):
    names = [e.full_name for e in backup.world.pool.snapshots() if e.dataset.startswith(ROOT)]
    backup.world.pool.destroy_snapshots(names)


def test_a_copy_that_was_pruned_before_its_turn_did_not_fail(backup):
    take(backup.world)
    backup.copy("tank/web", "flash/web")
    found = backup.here.find(["web@s1"])
    destroy_copies(backup)
    (outcome,) = backup.here.verify_all(found, VerifyOptions(), 1)
    assert isinstance(outcome, NotRestorableError)
    assert outcome.reason == "was destroyed meanwhile"


def test_a_copy_that_is_destroyed_while_it_is_read_did_not_fail(backup):
    """As by sanoid, which knows nothing of the lock."""
    take(backup.world)
    backup.copy("tank/web", "flash/web")
    clone = backup.world.pool.clone

    def too_late(*words):
        destroy_copies(backup)
        return clone(*words)

    backup.world.pool.clone = too_late
    with pytest.raises(NotRestorableError, match="was destroyed meanwhile"):
        backup.verify()


def test_nothing_of_a_guest_is_pruned_while_a_copy_is_restored(backup):
    take(backup.world)
    backup.copy("tank/web", "flash/web")
    held = []
    clone = backup.world.pool.clone

    def cloning(*words):
        held.append(has_readers(default_paths.LOCKS, backup.here.find([])[0].uuid))
        return clone(*words)

    backup.world.pool.clone = cloning
    assert backup.verify().passed
    assert held == [True, True]


def test_its_files_run_nowhere_else_and_the_clone_can_be_written(backup):
    take(backup.world)
    backup.copy("tank/web", "flash/web")
    made = []
    clone = backup.world.pool.clone
    backup.world.pool.clone = lambda *words: made.append(words[2]) or clone(*words)
    backup.verify()
    wanted = {"readonly": "off", "setuid": "off", "exec": "off", "devices": "off"}
    assert len(made) == 2
    assert all(each.items() >= wanted.items() for each in made)


def test_a_lost_snapshot_is_not_replaced_by_the_original_in_another_pool(backup):
    """A replica in a pool of the same host: the original has the same GUID."""
    take(backup.world)
    backup.copy("tank/web", "flash/web", lose=False)
    assert backup.verify().passed
    backup.world.pool.destroy_snapshots([f"{ROOT}/tank:web@s1"])
    outcome = backup.verify()
    assert not outcome.passed
    assert f"{ROOT}/tank:web@s1 is missing" in outcome.failure.reason


def test_pages_of_ram_of_the_copy_are_not_replaced_by_those_of_the_original(backup):
    world = backup.world
    world.with_pages()
    backup = Backup(world)
    store_as_pages(world.context, take(world))
    (pages,) = {
        each.dataset for each in world.pool.snapshots() if each.dataset.startswith("tank/ram/")
    }
    backup.copy("tank/web", "flash/web", pages, lose=False)
    assert backup.verify().passed
    world.pool.take_out(f"{ROOT}/{copy_name(pages)}")
    outcome = backup.verify()
    assert not outcome.passed
    assert "the pages of its RAM are missing" in outcome.failure.reason


def test_damage_of_the_copied_bundle_fails(backup):
    take(backup.world)
    backup.copy("tank/web", "flash/web")
    data = bytearray((backup.bundle / "ram.save").read_bytes())
    data[-1] ^= 1
    (backup.bundle / "ram.save").write_bytes(data)
    outcome = backup.verify()
    assert not outcome.passed
    assert backup.properties()["verified-here"].split()[1] == "failed"
    (record,) = backup.here.find(["web"])
    assert not record.verified.passed


def test_a_link_in_the_place_of_a_part_is_not_followed(backup, tmp_path):
    take(backup.world)
    backup.copy("tank/web", "flash/web")
    (backup.bundle / "ram.save").rename(tmp_path / "elsewhere")
    (backup.bundle / "ram.save").symlink_to(tmp_path / "elsewhere")
    (record,) = backup.here.find(["web@s1"])
    assert record.state is BundleState.INCOMPLETE


@pytest.mark.parametrize("what", ["part", "manifest", "directory"])
def test_a_copy_with_a_link_or_a_pipe_is_not_read(backup, tmp_path, what):
    take(backup.world)
    backup.copy("tank/web", "flash/web")
    (record,) = backup.here.find(["web@s1"])
    place = {
        "part": backup.bundle / "ram.save",
        "manifest": backup.bundle / "manifest.json",
        "directory": backup.bundle,
    }[what]
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedError, match="no plain file"):
        backup.here.verify(record, VerifyOptions())
    assert "verified-here" not in backup.properties()


def test_a_pipe_instead_of_a_manifest_does_not_block(backup):
    take(backup.world)
    backup.copy("tank/web", "flash/web")
    (backup.bundle / "manifest.json").unlink()
    os.mkfifo(backup.bundle / "manifest.json")
    with pytest.raises(ManifestError, match="not a regular file"):
        read_manifest(backup.bundle)
    (record,) = backup.here.find(["web@s1"])
    with pytest.raises(RefusedError, match="no plain file"):
        backup.here.verify(record, VerifyOptions())


def test_owners_and_modes_of_another_host_do_not_count(backup, tmp_path):
    """A file with the sender's content that anyone runs as root would be the end of this host."""
    variables = tmp_path / "web_VARS.fd"
    variables.write_bytes(b"then")
    backup.world.add_guest("efi", nvram=str(variables))
    take(backup.world, guest="efi")
    backup.copy("tank/efi")
    manifest = read_manifest(backup.bundle)
    parts = tuple(
        each.model_copy(update={"uid": 12345, "gid": 12345, "mode": 0o4755})
        if each.role == "nvram"
        else each
        for each in manifest.parts
    )
    forged = manifest.model_copy(update={"parts": parts})
    (backup.bundle / "manifest.json").write_bytes(manifest_bytes(forged))
    seen = []
    world = backup.world

    def look(*_words):
        (copy,) = world.paths.clones.glob("*/nvram.fd")
        status = copy.stat()
        seen.append((status.st_uid, stat.S_IMODE(status.st_mode)))

    world.hooks.at["hypervisor.restore"] = look
    assert backup.verify("efi@s1").passed
    assert seen == [(os.geteuid(), 0o600)]


def test_an_encrypted_bundle_has_no_result(backup):
    take(backup.world)
    backup.copy("tank/web", "flash/web")
    manifest = read_manifest(backup.bundle)
    encrypted = manifest.model_copy(update={"recipients": ("age1x",)})
    (backup.bundle / "manifest.json").write_bytes(manifest_bytes(encrypted))
    with pytest.raises(NotRestorableError, match="only its key can restore it"):
        backup.verify()
    assert "verified-here" not in backup.properties()


@pytest.mark.parametrize("lacks", ["", "manifest.json", "copy.json"])
def test_a_copy_that_is_still_arriving_has_no_result(backup, lacks):
    take(backup.world)
    backup.copy("tank/web", "flash/web")
    path = backup.bundle / lacks
    path.rename(backup.bundles / ".partial")
    with pytest.raises(NotRestorableError, match="its bundle has not arrived"):
        backup.verify()
    assert "verified-here" not in backup.properties()
    (backup.bundles / ".partial").rename(path)
    assert backup.verify().passed


def test_a_bundle_that_was_lost_after_a_test_restore_fails(backup):
    take(backup.world)
    backup.copy("tank/web", "flash/web")
    assert backup.verify().passed
    shutil.rmtree(backup.bundle)
    assert not backup.verify().passed


def test_a_sample_goes_on_until_so_many_have_a_result(backup):
    for name in ("s1", "s2", "s3"):
        take(backup.world, name=name)
    backup.copy("tank/web", "flash/web")
    records = backup.here.find([])
    first = backup.bundles / records[0].uuid / records[0].run
    manifest = read_manifest(first)
    encrypted = manifest.model_copy(update={"recipients": ("age1x",)})
    (first / "manifest.json").write_bytes(manifest_bytes(encrypted))
    refused, done = backup.here.verify_all(records, VerifyOptions(), 1)
    assert isinstance(refused, NotRestorableError)
    assert done.passed
    assert len([*backup.here.verify_all(records, VerifyOptions(), 3)]) == 3


def test_what_failed_is_repeated_with_the_same_options(backup, tmp_path):
    take(backup.world)
    backup.copy("tank/web", "flash/web")
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o700)
    assert not backup.verify(script=script).passed
    again = backup.verify()
    assert not again.passed
    assert again.failure.step == ("snaporch verify --on vm1 --test-restore --script PATH web@s1")


def test_all_data_of_the_copied_disks_is_read(backup):
    take(backup.world)
    backup.copy("tank/web", "flash/web")
    for each in ("tank/web", "flash/web"):
        name = f"{ROOT}/{copy_name(each)}"
        shutil.copytree(
            backup.world.root / "zfs" / name, backup.world.pool.snapshot_files(name, "s1")
        )
    outcome = backup.verify(disks=True)
    assert outcome.passed, outcome.failure
    assert outcome.disks


def test_a_file_of_its_host_is_no_file_of_this_one(backup):
    """A backing file outside the snapshot, which here is another file or none."""
    take(backup.world)
    backup.copy("tank/web", "flash/web")
    manifest = read_manifest(backup.bundle)
    file = BackingFileEntry(path="/etc/hostname", bytes=1, inode=2, mtime_ns=3)
    disks = [each.model_copy(update={"beneath": (file,)}) for each in manifest.disks]
    changed = manifest.model_copy(update={"disks": tuple(disks)})
    (backup.bundle / "manifest.json").write_bytes(manifest_bytes(changed))
    outcome = backup.verify()
    assert outcome.passed, outcome.failure
    assert outcome.reached is VerifyDepth.CHECKED
    assert outcome.not_run.startswith("it is unknown whether its backing file /etc/hostname")
    (found,) = restore_results(backup.world.context.config, backup.world.pool.snapshots())
    assert found.outcome is RestoreOutcome.NOT_RESTORED
    assert found.as_json()["passed"] is False


def test_a_header_that_leads_out_of_the_copy_fails(backup):
    """The image names a file of this host beneath it, and the manifest hides that."""
    world = backup.world
    secret = world.root / "zfs" / "secret"
    secret.write_bytes(b"x")
    take(world)
    for path in (world.root / "zfs" / "tank" / "web").glob("*.img"):
        path.write_bytes(qcow2(backing=str(secret)))
    backup.copy("tank/web", "flash/web")
    manifest = read_manifest(backup.bundle)
    disks = [e.model_copy(update={"beneath": None, "format": "qcow2"}) for e in manifest.disks]
    changed = manifest.model_copy(update={"disks": tuple(disks)})
    (backup.bundle / "manifest.json").write_bytes(manifest_bytes(changed))
    outcome = backup.verify()
    assert outcome.reached is VerifyDepth.CHECKED
    assert world.hypervisor.guests == {}
    assert not outcome.passed


def test_names_that_are_not_here_are_refused(backup):
    take(backup.world)
    backup.copy("tank/web", "flash/web")
    with pytest.raises(NotFoundError, match="vm1 has no copy of it, but of: web"):
        backup.here.find(["other"])
    with pytest.raises(NotFoundError, match=r"no copies of this name .*\(vm1\)"):
        find_place(backup.world.context.config, "nas")


def test_a_replica_on_another_machine_is_verified_there_by_checksums():
    nas = {"host": "nas", "dataset": "backup/kvm", "bundles": "/backup/nas"}
    config = Config.model_validate({"replica": {"nas": nas}})
    with pytest.raises(NotFoundError) as caught:
        find_place(config, "nas")
    assert caught.value.step == "without --test-restore: snaporch verify --on nas"


def test_where_a_file_system_was_mounted_follows_from_its_disks(backup):
    take(backup.world)
    manifest = read_manifest(next(backup.world.paths.bundles.glob("*/*")))
    assert mount_points(manifest) == {
        each: backup.world.root / "zfs" / each for each in ("tank/web", "flash/web")
    }
    linked = [e.model_copy(update={"source": "/images/disk.img"}) for e in manifest.disks]
    assert mount_points(manifest.model_copy(update={"disks": tuple(linked)})) == {}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("22T14:00:00Z passed resumed", "21T14:00:00Z passed resumed"),
        ("21T14:00:00Z passed resumed", "22T14:00:00Z failed checked steps:clone"),
        ("21T14:00:00Z passed resumed", "22T14:00:00Z passed checked"),
    ],
)
@pytest.mark.parametrize("turn", [1, -1])
def test_of_results_that_differ_the_worst_counts_and_then_the_oldest(backup, first, second, turn):
    take(backup.world)
    backup.copy("tank/web", "flash/web")
    for dataset, text in zip(("tank:web", "flash:web"), (first, second)[::turn], strict=True):
        backup.world.pool.set_properties(
            [f"{ROOT}/{dataset}@s1"], {f"{PREFIX}verified-here": f"2026-11-{text}"}
        )
    (found,) = restore_results(backup.world.context.config, backup.world.pool.snapshots())
    assert found.result.as_text() == f"2026-11-{second}"
    assert (found.replica, found.full_name) == ("vm1", "web@s1")
