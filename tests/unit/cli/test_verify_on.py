"""``snaporch verify --on``."""

import json
import shutil
from contextlib import ExitStack

import pytest
from fakes.hooks import failing
from fakes.rebuild_source import FakeSource
from fakes.replica import FakeReplica

from snaporch.bundle.manifest import with_checksum
from snaporch.catalog.records import all_records
from snaporch.config import Config
from snaporch.errors import ExitCode, UnavailableError
from snaporch.interrupt import Interrupt
from snaporch.locks import REPLICATION, domain_lock
from snaporch.replication.interface import ReplicaError
from snaporch.replication.replicate import replicate
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot

REPLICA = '[replica.nas]\nhost = "nas"\ndataset = "backup/kvm"\nbundles = "/backup/nas"\n'


@pytest.fixture
def copied(host, command_host):
    """A guest with a copy on a replica; libvirt is away."""
    host.add_guest()
    text = host.config_file.read_text()
    schedule = json.dumps(str(host.root / "schedule"))
    text = text.replace("[paths]\n", f"[paths]\nschedule = {schedule}\n")
    host.config_file.write_text(text + REPLICA)
    nas = {"host": "nas", "dataset": "backup/kvm", "bundles": "/backup/nas"}
    document = host.context.config.model_dump() | {"replica": {"nas": nas}}
    host.context.config = Config.model_validate(document)
    host.there = FakeReplica(host.pool, host.root / "there", host.hooks)
    host.there.create()
    taken = take_snapshot(host.context, host.hypervisor.domain("web"), SnapshotRequest("s1"))
    records = all_records(host.context.store, host.pool.snapshots())
    replicate(host.context, records, "nas", host.there)
    host.bundle = host.root / "there" / taken.uuid / taken.run
    source = FakeSource(host.pool, host.there, host.hooks)
    command_host.open_copies = lambda *_given: source
    host.open_hypervisor = command_host.open_hypervisor
    command_host.open_hypervisor = failing(UnavailableError("libvirt", "is away"))
    return host


def test_a_good_copy_passes_without_libvirt(copied, snaporch):
    answer = snaporch("verify", "--on", "nas", "web@s1", "--quiet")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("web@s1  nas  passed, ")
    assert "files and its ZFS snapshots are as this host has recorded" in answer.out
    assert copied.lowered == ["verify"]
    (document,) = snaporch("verify", "--on", "nas", "--all", "--json").json
    assert (document["passed"], document["replica"], document["compared_with"]) == (
        True,
        "nas",
        "here",
    )
    assert (document["skipped"], document["failure"]) == (None, None)


def test_a_failed_copy_is_in_the_exit_code_and_in_status(copied, snaporch, command_host):
    (copied.bundle / "ram.save").write_bytes(b"")
    answer = snaporch("verify", "--on", "nas", "web", "--quiet")
    assert (answer.code, answer.out) == (ExitCode.FAILED, "web@s1  nas  FAILED\n")
    assert "nas: web@s1: verification of the copy failed: ram.save has 0 bytes" in answer.err
    command_host.open_hypervisor = copied.open_hypervisor
    status = snaporch("status", "--json").json
    assert [each["code"] for each in status["problems"]] == ["copy-failed"]
    assert [each["passed"] for each in status["copies"]] == [False]
    assert snaporch("status", "web", "--json").json["copies"] == status["copies"]


def test_a_replica_without_copies_is_not_well(copied, snaporch):
    copied.there.drop("tank/web@s1")
    shutil.rmtree(copied.bundle)
    copied.pool.clear_properties(["tank/web@s1"], ["snaporch:replicated"])
    answer = snaporch("verify", "--on", "nas", "--all")
    assert answer.code == ExitCode.NOT_FOUND
    assert "replica nas: no copy was verified; see: snaporch replicate --all --to nas" in answer.err


def test_a_named_copy_that_cannot_be_verified_is_a_failure(copied, snaporch):
    copied.pool.clear_properties(["tank/web@s1"], ["snaporch:replicated"])
    shutil.rmtree(copied.bundle)
    answer = snaporch("verify", "--on", "nas", "web@s1", "--quiet", "--json")
    assert answer.code == ExitCode.NOT_FOUND
    assert "its copy was not verified: it has not arrived completely" in answer.err
    (document,) = answer.json
    assert (document["passed"], document["skipped"]) == (
        None,
        "it has not arrived completely; see: snaporch status",
    )


def test_a_replica_that_is_lost_midway_leaves_a_count(copied, snaporch):
    listings = []

    def lose():
        listings.append(1)
        if len(listings) > 1:
            raise ReplicaError("nas", "cannot be reached")

    copied.hooks.at["replica.snapshots"] = lose
    answer = snaporch("verify", "--on", "nas", "--all", "--quiet")
    assert answer.code == ExitCode.FAILED
    assert "nas: cannot be reached" in answer.err
    assert "replica nas: 1 copies were not verified; try again" in answer.err


def test_no_replication_runs_meanwhile(copied, snaporch):
    with ExitStack() as held:
        lock = domain_lock(
            copied.paths.runtime, REPLICATION, REPLICATION, "replicate", wait=0,
            interrupt=Interrupt(),
        )  # fmt: skip
        held.enter_context(lock)
        answer = snaporch("verify", "--on", "nas", "--all")
    assert answer.code == ExitCode.BUSY


@pytest.mark.parametrize(
    "words",
    [(), ("web", "--all"), ("--due",), ("web", "--disks"), ("web", "--checksums"),
     ("web", "--sample", "1")],
    ids=" ".join,
)  # fmt: skip
def test_a_call_that_makes_no_sense_is_refused(copied, snaporch, words):
    assert snaporch("verify", "--on", "nas", *words).code == ExitCode.USAGE


@pytest.mark.parametrize("words", [("--all",), ("--due",), ("web@s1",)], ids=" ".join)
def test_an_empty_name_does_not_mean_the_snapshots_here(copied, snaporch, words):
    answer = snaporch("verify", "--on", "", *words)
    assert answer.code == ExitCode.USAGE
    assert "--on has no name of a replica" in answer.err


def test_a_misspelt_name_is_refused_before_any_bundle_is_read(copied, snaporch):
    copied.hooks.log.clear()
    answer = snaporch("verify", "--on", "nas", "web@s1", "mail")
    assert answer.code == ExitCode.NOT_FOUND
    assert "mail: replica nas has no copy of it, but of: web" in answer.err
    assert copied.hooks.log == []


def test_a_misspelt_name_does_not_hide_a_loss(copied, snaporch):
    (copied.bundle / "ram.save").write_bytes(b"")
    assert snaporch("verify", "--on", "nas", "--all").code == ExitCode.FAILED
    copied.there.drop("tank/web@s1")
    shutil.rmtree(copied.bundle)
    copied.pool.destroy_snapshots(["tank/web@s1"])
    shutil.rmtree(copied.paths.bundles)
    answer = snaporch("verify", "--on", "nas", "mail", "--json")
    assert answer.code == ExitCode.FAILED
    assert "copies that were verified before are not on the replica any more: @s1" in answer.err
    assert "mail: replica nas has no copy of it" in answer.err
    assert answer.json == []


def test_in_object_storage_it_is_said_that_no_stream_was_read(copied, snaporch):
    (document,) = snaporch("verify", "--on", "nas", "--all", "--json").json
    assert document["streams_read"] is None
    section = '[replica.nas]\nengine = "restic"\nrepository = "/r"\npassword_file = "/p"\n'
    text = copied.config_file.read_text()
    copied.config_file.write_text(text.replace(REPLICA, section))
    answer = snaporch("verify", "--on", "nas", "--all", "--quiet")
    assert "files and the records of its streams are as this host" in answer.out
    assert answer.out.endswith("; the streams were not read\n")
    (document,) = snaporch("verify", "--on", "nas", "--all", "--json").json
    assert (document["passed"], document["streams_read"]) == (True, False)
    copied.there.drop("tank/web@s1")
    shutil.rmtree(copied.bundle)
    copied.pool.destroy_snapshots(["tank/web@s1"])
    shutil.rmtree(copied.paths.bundles)
    answer = snaporch("verify", "--on", "nas", "--all")
    assert "not deleted on purpose, see: docs/how-to/object-storage.md" in answer.err


def test_a_result_that_cannot_be_recorded_is_shown(copied, snaporch):
    (copied.root / "schedule").mkdir()
    (copied.root / "schedule" / "copies").symlink_to("missing")
    answer = snaporch("verify", "--on", "nas", "--all", "--quiet")
    assert answer.code == ExitCode.UNAVAILABLE
    assert "web@s1  nas  passed" in answer.out
    assert "copies" in answer.err
    (copied.bundle / "ram.save").write_bytes(b"")
    answer = snaporch("verify", "--on", "nas", "--all", "--quiet")
    assert answer.code == ExitCode.FAILED
    assert "web@s1  nas  FAILED" in answer.out
    assert "ram.save has 0 bytes" in answer.err


def test_a_failed_copy_counts_more_than_one_that_was_not_verified(copied, snaporch):
    copied.add_guest("db", {"vda": "tank/db"})
    for name in ("s0", "s1"):
        take_snapshot(copied.context, copied.hypervisor.domain("db"), SnapshotRequest(name))
    records = all_records(copied.context.store, copied.pool.snapshots())
    replicate(
        copied.context, [each for each in records if each.domain == "db"], "nas", copied.there
    )
    copied.pool.clear_properties(["tank/db@s0"], ["snaporch:replicated"])
    (first,) = [each for each in records if (each.domain, each.snapshot) == ("db", "s0")]
    shutil.rmtree(copied.root / "there" / first.uuid / first.run)
    (copied.bundle / "ram.save").write_bytes(b"")
    answer = snaporch("verify", "--on", "nas", "db@s0", "web@s1", "--quiet")
    assert "its copy was not verified" in answer.err.splitlines()[0]
    assert answer.code == ExitCode.FAILED


def test_a_copy_that_is_gone_is_in_the_exit_code_once(copied, snaporch):
    (copied.bundle / "ram.save").write_bytes(b"")
    assert snaporch("verify", "--on", "nas", "--all").code == ExitCode.FAILED
    take_snapshot(copied.context, copied.hypervisor.domain("web"), SnapshotRequest("s2"))
    records = all_records(copied.context.store, copied.pool.snapshots())
    replicate(copied.context, records[1:], "nas", copied.there)
    copied.there.drop("tank/web@s1")
    copied.pool.destroy_snapshots(["tank/web@s1"])
    shutil.rmtree(copied.paths.bundles / records[0].uuid / records[0].run)
    answer = snaporch("verify", "--on", "nas", "--all", "--quiet")
    assert answer.code == ExitCode.FAILED
    assert "nas: web: copies that were verified before are not on the replica" in answer.err
    assert snaporch("verify", "--on", "nas", "--all").code == ExitCode.OK


def test_an_encrypted_copy_is_compared_with_what_was_sent(copied, snaporch, age):
    nas = copied.context.config.replica["nas"].model_dump() | {"encrypt_to": [age.keys[0]]}
    document = copied.context.config.model_dump() | {"replica": {"nas": nas}}
    copied.context.config = Config.model_validate(document)
    records = all_records(copied.context.store, copied.pool.snapshots())
    replicate(copied.context, records, "nas", copied.there)
    path = copied.bundle / "ram.save.age"
    answer = snaporch("verify", "--on", "nas", "web@s1", "--json")
    assert (answer.code, answer.json[0]["compared_with"]) == (0, "here"), answer.err
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    answer = snaporch("verify", "--on", "nas", "web@s1", "--quiet")
    assert answer.code == ExitCode.FAILED
    assert "ram.save.age is damaged" in answer.err
    path.write_bytes(content)
    manifest = copied.bundle / "manifest.json"
    text = manifest.read_text().replace(age.keys[0], age.keys[1])
    assert text != manifest.read_text()
    lines = text.rsplit(',\n  "sha256"', 1)[0]
    manifest.write_bytes(with_checksum(lines + "\n}"))
    answer = snaporch("verify", "--on", "nas", "web@s1", "--quiet")
    assert "manifest.json is not the one of this host" in answer.err


def test_without_a_guest_the_usage_is_that_of_copies(copied, snaporch):
    answer = snaporch("verify", "--on", "nas")
    assert answer.code == ExitCode.USAGE
    assert "--on nas: expected DOMAIN..., DOMAIN@SNAPSHOT... or --all" in answer.err
    assert "--due" not in answer.err
