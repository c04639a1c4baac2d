"""``snaporch verify --on NAME --test-restore``, on the machine that has the copies."""

import json
import shutil

import pytest

from snaporch.bundle.manifest import BackingFileEntry, manifest_bytes, read_manifest
from snaporch.errors import ExitCode
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot

COPY = "backup/vm1/tank:web"


@pytest.fixture
def backup(host):
    """A machine with a copy of a guest that it does not have."""
    host.add_guest()
    taken = take_snapshot(host.context, host.hypervisor.domain("web"), SnapshotRequest("s1"))
    host.pool.copy_to("tank/web", COPY, "vm1")
    shutil.move(host.root / "zfs/tank/web", host.root / "zfs" / COPY)
    host.pool.take_out("tank/web")
    host.hypervisor.guests.clear()
    shutil.move(host.paths.bundles, host.root / "pulled")
    host.bundle = host.root / "pulled" / taken.uuid / taken.run
    (host.bundle / "copy.json").write_text('{"dataset": "backup/vm1"}')
    bundles, schedule = (json.dumps(str(host.root / each)) for each in ("pulled", "schedule"))
    text = host.config_file.read_text().replace("[paths]\n", f"[paths]\nschedule = {schedule}\n")
    source = f'[source.vm1]\nhost = "vm1"\ndataset = "backup/vm1"\nbundles = {bundles}\n'
    host.config_file.write_text(text + source)
    return host


def test_a_copy_that_is_restored_is_in_status_and_metrics(backup, snaporch):
    answer = snaporch("verify", "--on", "vm1", "--test-restore", "web", "--quiet")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == "web@s1  vm1  passed, a clone resumed from RAM\n"
    status = snaporch("status", "--json").json
    (document,) = status["test_restores"]
    assert (document["replica"], document["domain"], document["passed"]) == ("vm1", "web", True)
    assert "copy-failed" not in {each["code"] for each in status["problems"]}
    assert "replica   vm1: 1 of 1 test restores passed; done " in snaporch("status").out
    metrics = snaporch("status", "--prometheus", "-").out
    labels = 'domain="web",replica="vm1"'
    assert f'snaporch_copies_test_restored{{{labels},result="passed"}} 1.0' in metrics
    assert f"snaporch_copies_newest_test_restore_timestamp_seconds{{{labels}}} " in metrics


def test_a_copy_that_cannot_be_restored_fails_and_status_repeats_it(backup, snaporch):
    (backup.bundle / "ram.save").write_bytes(b"")
    answer = snaporch("verify", "--on", "vm1", "--test-restore", "--all", "--json")
    assert answer.code == ExitCode.FAILED
    (document,) = answer.json
    assert (document["passed"], document["replica"]) == (False, "vm1")
    problems = {each["code"]: each for each in snaporch("status", "--json").json["problems"]}
    assert problems["copy-failed"]["subject"] == "web"
    again = "snaporch verify --on vm1 --test-restore web@s1"
    assert problems["copy-failed"]["text"].endswith(again)
    metrics = snaporch("status", "--prometheus", "-").out
    assert "snaporch_copies_newest_test_restore_timestamp_seconds{" not in metrics


def not_to_be_run(bundle):
    """A backing file outside the snapshot, which is unknown here."""
    manifest = read_manifest(bundle)
    file = BackingFileEntry(path="/base.img", bytes=1, inode=2, mtime_ns=3)
    disks = tuple(each.model_copy(update={"beneath": (file,)}) for each in manifest.disks)
    changed = manifest.model_copy(update={"disks": disks})
    (bundle / "manifest.json").write_bytes(manifest_bytes(changed))


def test_a_copy_of_which_no_clone_ran_has_not_passed(backup, snaporch):
    not_to_be_run(backup.bundle)
    why = "not restored: it is unknown whether its backing file /base.img has changed"
    answer = snaporch("verify", "--on", "vm1", "--test-restore", "web", "--quiet")
    assert answer.code == ExitCode.REFUSED
    assert answer.out == f"web@s1  vm1  {why}; checksums and GUIDs are correct\n"
    assert answer.err == f"snaporch: web@s1: {why}\n"
    answer = snaporch("verify", "--on", "vm1", "--test-restore", "--all", "--json")
    assert answer.code == ExitCode.NOT_FOUND
    assert answer.err == "snaporch: vm1: no copy was restored; see `snaporch status`\n"
    (document,) = answer.json
    assert (document["passed"], document["reached"]) == (False, "checked")
    assert document["failure"] == f"web@s1: {why}"
    (document,) = snaporch("status", "--json").json["test_restores"]
    assert (document["passed"], document["failed_steps"]) == (False, [])
    out = snaporch("status").out
    assert "replica   vm1: 0 of 1 test restores passed; done " in out
    assert "replica   vm1: not restored: web@s1\n" in out
    metrics = snaporch("status", "--prometheus", "-").out
    labels = 'domain="web",replica="vm1"'
    for result, count in (("passed", 0), ("failed", 0), ("not-restored", 1)):
        assert f'snaporch_copies_test_restored{{{labels},result="{result}"}} {count}.0' in metrics
    assert "snaporch_copies_newest_test_restore_timestamp_seconds{" not in metrics


def test_an_earlier_test_restore_stays_proven_and_keeps_its_time(backup, snaporch):
    assert snaporch("verify", "--on", "vm1", "--test-restore", "web").code == 0
    before = snaporch("status", "--json").json["test_restores"][0]["reached_at"]
    not_to_be_run(backup.bundle)
    assert snaporch("verify", "--on", "vm1", "--test-restore", "web").code == ExitCode.REFUSED
    (document,) = snaporch("status", "--json").json["test_restores"]
    assert (document["passed"], document["reached_at"]) == (True, before)


def test_a_copy_that_is_still_arriving_is_no_failure(backup, snaporch):
    (backup.bundle / "copy.json").unlink()
    answer = snaporch("verify", "--on", "vm1", "--test-restore", "web", "--quiet")
    assert answer.code == ExitCode.REFUSED
    step = "to compare its checksums: snaporch verify --on vm1 web@s1"
    assert answer.err == f"snaporch: web@s1: its bundle has not arrived; {step}\n"
    answer = snaporch("verify", "--on", "vm1", "--test-restore", "--all", "--quiet")
    assert answer.code == ExitCode.NOT_FOUND
    assert "web@s1  vm1  note: not restored: its bundle has not arrived\n" in answer.err
    assert "vm1: no copy was restored" in answer.err
    assert snaporch("status", "--json").json["test_restores"] == []


def test_without_copies_nothing_is_well(backup, snaporch):
    backup.pool.take_out(COPY)
    shutil.rmtree(backup.bundle.parent)
    answer = snaporch("verify", "--on", "vm1", "--test-restore", "--all")
    assert answer.code == ExitCode.NOT_FOUND
    assert "vm1: there are no copies yet" in answer.err


@pytest.mark.parametrize(
    "words",
    [
        ("--test-restore", "web@s1"),
        ("--on", "vm1", "--test-restore", "--checksums", "web"),
        ("--on", "vm1", "--disks", "web"),
    ],
)
def test_options_that_do_not_fit_are_refused(backup, snaporch, words):
    assert snaporch("verify", *words).code == ExitCode.USAGE
