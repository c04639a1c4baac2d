"""Pulling a guest, from the words of the request to the copies and bundles."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from fakes.pull_case import ROOT, UUID

from snaporch.bundle.manifest import (
    MANIFEST_NAME,
    DatasetEntry,
    SnapshotEntry,
    SurroundingsEntry,
)
from snaporch.bundle.store import COPY_NAME
from snaporch.errors import InterruptedRunError
from snaporch.model import Level
from snaporch.pull.source_listing import MAX_SNAPSHOTS
from snaporch.zfs.pulled import Counts

WEB = f"{ROOT}/tank:web"
FLASH = f"{ROOT}/flash:web"
DB = f"{ROOT}/tank:db"


def errors(result):
    return [each.line() for each in result.failures]


def test_all_of_a_guest_comes_and_the_next_pull_brings_what_is_new(case):
    case.take("r1")
    result = case.pull()
    assert (errors(result), result.arrived, result.skipped) == ([], ["r1"], [])
    assert case.here() == [f"{FLASH}@r1", f"{WEB}@r1"]
    assert case.bundles_here() == ["r1"]
    case.take("r2")
    result = case.pull()
    assert (errors(result), result.arrived) == ([], ["r2"])
    assert case.send.sent[-1].startswith("-Lc -i tank/web@r1 tank/web@r2")
    result = case.pull()
    assert (errors(result), result.arrived, result.newest is not None) == ([], [], True)


def test_what_is_pulled_is_the_layout_of_a_replica_with_its_marks(case):
    case.take("r1")
    case.pool.set_properties(["tank/web"], {"snaporch:policy": "hourly"})
    case.pull()
    (copy,) = [each for each in case.zfs.found if each.full_name == f"{WEB}@r1"]
    uuid = UUID.format(1)
    assert copy.properties == {
        "run": "r1",
        "uuid": uuid,
        "domain": "web",
        "level": "ram",
        "bundle": f"{uuid}/r1",
        "copy": "vm1",
    }
    assert case.zfs.policy == {WEB: "hourly"}
    assert case.zfs.options[WEB] == ["-o", "canmount=noauto"]
    record = json.loads((case.bundles / uuid / "r1" / COPY_NAME).read_text())
    assert record["dataset"] == ROOT


def test_a_mark_that_has_a_value_keeps_it(case):
    case.take("r1")
    case.pull()
    case.pool.set_properties(["tank/web@r1"], {"snaporch:level": "off", "snaporch:domain": "db"})
    case.pool.set_properties(["tank/web@r1"], {"snaporch:torn": "yes"})
    case.pull()
    (copy,) = [each for each in case.zfs.found if each.full_name == f"{WEB}@r1"]
    assert copy.properties["level"] == "ram"
    assert copy.properties["domain"] == "web"
    assert copy.properties["torn"] == "yes"


def test_marks_go_to_the_snapshot_with_the_guid_and_not_to_one_with_the_name(case):
    case.take("r1")
    case.pull()
    case.take("r2")
    case.pull()
    case.zfs.found = [replace(each, properties={}) for each in case.zfs.found]
    case.pool.destroy_snapshots(["tank/web@r1"])
    case.pool.rename_snapshot("tank/web@r2", "r1")
    case.pull()
    (copy,) = [each for each in case.zfs.found if each.full_name == f"{WEB}@r1"]
    assert copy.properties == {}


def test_the_chain_goes_on_from_a_bookmark_when_the_snapshot_is_gone(case):
    case.take("r1")
    case.pull()
    for name in ("tank/web@r1", "flash/web@r1"):
        case.pool.destroy_snapshots([name])
    case.take("r2")
    assert errors(case.pull()) == []
    assert any(sent.startswith("-Lc -i tank/web#snaporch-pull-nas-") for sent in case.send.sent)
    assert len(case.pool.bookmarks("tank/web")) == 2


def test_bookmarks_do_not_become_more(case):
    for number in range(5):
        case.take(f"r{number}")
        case.pull()
    assert len(case.pool.bookmarks("tank/web")) == 2


def test_a_copy_that_has_diverged_is_kept_and_its_dataset_is_refused(case):
    case.take("r1")
    case.pull()
    case.pool.destroy_snapshots(["tank/web@r1"])
    for name in case.pool.bookmarks("tank/web"):
        case.pool.destroy_bookmark(name)
    case.take("r2")
    result = case.pull()
    assert f"{FLASH}@r2" in case.here()
    assert f"{WEB}@r2" not in case.here()
    (error,) = errors(result)
    assert f"zfs rename {WEB} {WEB}-kept-" in error
    assert result.skipped == ["r2"]


def test_a_run_that_has_not_ended_waits_and_is_no_failure(case):
    case.take("r1")
    case.take("r2")
    case.unfinished = {"r2"}
    result = case.pull()
    assert (errors(result), result.arrived) == ([], ["r1"])
    assert sorted(result.waiting) == ["flash/web@r2", "tank/web@r2"]
    case.unfinished = set()
    assert case.pull().arrived == ["r2"]


def test_a_run_of_which_a_part_waits_is_no_failure(case):
    """Another guest that uses one of the datasets has a run that has not ended."""
    marks = {"snaporch:run": "x", "snaporch:uuid": UUID.format(2), "snaporch:domain": "db"}
    case.take("r1")
    case.pool.snapshot(["tank/web@x"], marks)
    case.take("r2")
    case.unfinished = {"x"}
    result = case.pull()
    assert (errors(result), result.arrived, result.skipped) == ([], ["r1"], [])
    assert result.waiting == ("tank/web@r2",)
    case.unfinished = set()
    assert case.pull().arrived == ["r2"]


def test_a_transfer_that_was_cut_is_continued(case):
    case.take("r1")
    case.send.cut = 1
    result = case.pull()
    assert result.skipped == ["r1"]
    assert "incomplete stream" in errors(result)[0]
    guid = case.pool.snapshots(["flash/web"])[0].guid
    case.send.resumes = "flash/web@r1"
    case.send.contents = (
        "resume token contents:\nnvlist version: 0\n\tobject = 0x1\n\toffset = 0x0\n\tbytes = 0x1\n"
        f"\ttoguid = {guid:#x}\n\ttoname = flash/web@r1\n\tcompressok = 1\n"
        "full\tflash/web@r1\t400\nsize\t400\n"
    )
    result = case.pull()
    assert errors(result) == []
    assert case.zfs.streams[f"{FLASH}@r1"].startswith("-t ")
    assert result.arrived == ["r1"]


def has_a_part(case):
    """A part of the first snapshot has arrived, and the source would continue it."""
    case.take("r1")
    case.zfs.tokens[FLASH] = "1-a-b-789c"
    guid = case.pool.snapshots(["flash/web"])[0].guid
    case.send.resumes = "flash/web@r1"
    case.send.contents = (
        "resume token contents:\nnvlist version: 0\n\tobject = 0x1\n\toffset = 0x0\n"
        f"\tbytes = 0x1\n\ttoguid = {guid:#x}\n\ttoname = flash/web@r1\n"
        "full\tflash/web@r1\t400\nsize\t400\n"
    )


@pytest.mark.parametrize(
    "obstacle",
    [
        "cannot receive resume stream: destination backup/vm1/flash:web space quota exceeded.",
        "cannot receive resume stream: out of space",
        "cannot receive resume stream: pool I/O is currently suspended",
    ],
)
def test_what_has_arrived_is_kept_while_this_machine_cannot_store_more(case, obstacle):
    has_a_part(case)
    case.zfs.refusals = [obstacle]
    result = case.pull()
    assert obstacle in errors(result)[0]
    assert (case.zfs.done, case.zfs.tokens[FLASH]) == ([], "1-a-b-789c")
    assert case.progress.notes == []
    assert case.pull().arrived == ["r1"]
    assert case.zfs.streams[f"{FLASH}@r1"].startswith("-t ")


@pytest.mark.parametrize("how", ["source", "zfs"])
def test_a_transfer_that_cannot_be_continued_begins_again(case, how):
    has_a_part(case)
    if how == "source":
        case.send.contents = ""
    else:
        case.zfs.refusals = ["cannot receive resume stream: the snapshot is another one"]
    result = case.pull()
    assert errors(result) == []
    assert case.zfs.done == [f"discard {FLASH}"]
    assert result.arrived == ["r1"]
    assert "begins again" in case.progress.notes[0]


def test_a_bundle_that_is_not_whole_there_is_a_failure_and_the_others_come(case):
    case.take("r1")
    case.take("r2")
    (case.store.root / UUID.format(1) / "r1" / "ram.save").unlink()
    result = case.pull()
    assert (result.skipped, result.arrived) == (["r1"], ["r2"])
    assert "is not whole on the source" in errors(result)[0]


def test_a_bundle_that_arrives_damaged_does_not_count_and_comes_again(case):
    case.take("r1")
    path = case.store.root / UUID.format(1) / "r1" / "ram.save"
    path.write_bytes(b"RAM")
    result = case.pull()
    assert (result.arrived, result.skipped, result.newest) == ([], ["r1"], None)
    assert case.bundles_here() == []
    assert "arrived damaged" in errors(result)[0]
    path.write_bytes(b"ram")
    assert case.pull().arrived == ["r1"]


def test_a_bundle_that_was_cut_is_continued_and_did_not_count(case):
    case.take("r1")
    uuid = UUID.format(1)
    partial = case.bundles / uuid / ".r1.copying"
    partial.mkdir(parents=True)
    source = case.store.root / uuid / "r1" / MANIFEST_NAME
    (partial / MANIFEST_NAME).write_bytes(source.read_bytes())
    (partial / "ram.save").write_bytes(b"ra")
    assert errors(case.pull()) == []
    (wanted,) = [each.files for each in case.host.requests if each.verb == "bundle"]
    assert {each.name: each.offset for each in wanted} == {"ram.save": 2}
    assert (case.bundles / uuid / "r1" / "ram.save").read_bytes() == b"ram"


def test_a_snapshot_that_was_pruned_here_is_no_failure(case):
    case.take("r1")
    case.take("r2")
    case.pull()
    case.zfs.found = [each for each in case.zfs.found if each.name == "r2"]
    result = case.pull()
    assert (errors(result), result.skipped, result.dropped) == ([], [], ["r1"])


def test_a_zfs_snapshot_that_the_manifest_names_must_be_here(case):
    case.take("r1")
    case.pool.destroy_snapshots(["flash/web@r1"])
    result = case.pull()
    assert (result.arrived, result.skipped) == ([], ["r1"])
    assert "flash/web@r1 is not here" in errors(result)[0]


def test_limits_of_a_source_bind_root_too(case):
    case.take("r1")
    case.zfs.counts = lambda _root: Counts(1, MAX_SNAPSHOTS)
    result = case.pull()
    assert case.here() == []
    assert f"there are {MAX_SNAPSHOTS} snapshots of this source already" in errors(result)[0]


def test_copies_that_would_be_mounted_are_refused_before_anything(case):
    case.take("r1")
    case.zfs.is_there = True
    case.zfs.inherited["mountpoint"] = "/backup"
    with pytest.raises(Exception, match="zfs set mountpoint=none backup/vm1"):
        case.pull()
    assert case.here() == []


def test_an_encrypted_dataset_comes_as_it_is(case):
    case.pool.create("tank/db", encrypted=True)
    case.take("r1", 2, parts=(), level="off")
    assert errors(case.pull(2)) == []
    assert case.send.sent == ["-w tank/db@r1"]


def sealed(case):
    """A guest whose dataset is encrypted, with a snapshot that was pulled."""
    case.pool.create("tank/db", encrypted=True)
    case.take("r1", 2, parts=None)
    assert errors(case.pull(2)) == []
    case.take("r2", 2, parts=None)


def test_a_stream_with_the_key_of_the_copy_follows_it(case):
    sealed(case)
    assert errors(case.pull(2)) == []
    assert case.here() == [f"{DB}@r1", f"{DB}@r2"]


def test_a_stream_with_another_key_is_refused_until_the_admin_accepts_the_key(case):
    sealed(case)
    case.send.key = b"other"
    (error,) = errors(case.pull(2))
    assert case.here() == [f"{DB}@r1"]
    found = re.search(rf"zfs set snaporch:new-key=([0-9a-f]{{32}}) {DB};", error)
    case.zfs.accepted[DB] = found[1]
    case.send.key = b"third"
    assert len(errors(case.pull(2))) == 1
    assert case.here() == [f"{DB}@r1"]
    case.send.key = b"other"
    assert errors(case.pull(2)) == []
    assert case.here() == [f"{DB}@r1", f"{DB}@r2"]


def test_an_interrupted_stream_is_not_continued_with_another_key(case):
    sealed(case)
    case.send.cut = 1
    assert len(errors(case.pull(2))) == 1
    (base, snapshot) = case.pool.snapshots(["tank/db"])
    case.send.contents, case.send.resumes = "resume token contents:\n", snapshot.full_name
    case.send.contents += f"\ttoguid = {snapshot.guid:#x}\n\tfromguid = {base.guid:#x}\n"
    case.send.contents += f"\ttoname = {snapshot.full_name}\n\trawok = 1\n"
    case.send.key = b"other"
    (error,) = errors(case.pull(2))
    assert "another key" in error
    assert case.here() == [f"{DB}@r1"]


def test_bundles_of_encrypted_guests_are_pulled_to_an_encrypted_place_only(case):
    case.pool.create("tank/db", encrypted=True)
    case.take("r1", 2)
    result = case.pull(2)
    (error,) = errors(result)
    assert error.startswith("vm1: db: tank/db is encrypted, and its RAM would be here in clear: ")
    assert "have the bundles of [source.vm1] on an encrypted dataset" in error
    assert (case.here(), case.bundles_here(), result.skipped) == ([f"{DB}@r1"], [], ["r1"])
    case.zfs.encrypted.add(str(case.bundles))
    assert errors(case.pull(2)) == []
    assert case.bundles_here() == ["r1"]


def test_a_dataset_that_was_encrypted_when_the_bundle_was_made_counts(case):
    case.take("r1", 2, parts=None)
    entry = DatasetEntry(dataset="tank/old", properties={}, encryption_root="tank/old")
    around = SurroundingsEntry(datasets=(entry,))
    case.bundle("r1", 2, (("ram.save", b"ram"),), surroundings=around)
    uuid = UUID.format(2)
    case.pool.set_properties(["tank/db@r1"], {"snaporch:bundle": f"{uuid}/r1"})
    (error,) = errors(case.pull(2))
    assert "tank/old is encrypted, and its RAM would be here in clear" in error


@pytest.mark.parametrize("place", ["", ROOT])
def test_pages_in_clear_of_an_encrypted_guest_are_pulled_to_an_encrypted_place_only(case, place):
    case.pool.create("tank/web", encrypted=True)
    case.zfs.encrypted |= {str(case.bundles), place}
    case.take("r1")
    case.pool.set_properties(["flash/web@r1"], {"snaporch:ram": f"{UUID.format(1)}/r1"})
    found = errors(case.pull())
    if place:
        assert found == []
        return
    assert f"{FLASH}@r1" not in case.here()
    assert [each for each in found if "its pages of RAM would be here in clear" in each]


def test_a_signal_leaves_no_copy_without_its_marks(case):
    case.take("r1", 2)
    case.take("r2", 2)
    append, number = case.zfs.append, 0

    def until_the_signal(*args, **options):
        nonlocal number
        number += 1
        if number == 2:
            raise InterruptedRunError("vm1", "signal", 15)
        append(*args, **options)

    case.zfs.append = until_the_signal
    with pytest.raises(InterruptedRunError):
        case.pull(2)
    assert [(e.name, e.properties["run"], e.properties["copy"]) for e in case.zfs.found] == [
        ("r1", "r1", "vm1")
    ]


def test_datasets_whose_streams_are_cut_count_too(case, monkeypatch):
    monkeypatch.setattr("snaporch.pull.local_copies.MAX_DATASETS", 1)
    case.take("r1")
    case.send.cut = 2
    result = case.pull()
    assert len(case.zfs.tokens) == 1
    assert any("there are 1 datasets" in each for each in errors(result))


def test_the_bundle_of_a_run_with_two_names_comes_once(case):
    case.take("r1", 2)
    (own,) = case.pool.snapshots(["tank/db"])
    marks = {f"snaporch:{key}": value for key, value in own.properties.items()}
    case.pool.snapshot(["tank/db@again"], marks)
    result = case.pull(2)
    assert (errors(result), result.arrived) == ([], ["r1", "again"])
    assert [each.verb for each in case.host.requests].count("bundle") == 1


def take_both(case, level=Level.RAM):
    """sanoid's ``hourly`` and ``daily`` of one call: one run, and one bundle that names both."""
    uuid, run = UUID.format(1), "20260101T000000Z-0000aaaa"
    marks = {"run": run, "uuid": uuid, "domain": "web", "bundle": f"{uuid}/{run}"}
    for name in ("hourly", "daily"):
        for dataset in ("flash/web", "tank/web"):
            properties = {f"snaporch:{key}": value for key, value in marks.items()}
            case.pool.snapshot([f"{dataset}@{name}"], properties)
    case.bundle(run, 1, (("ram.save", b"ram"),), snapshot="hourly", level=level)


def test_one_name_of_a_run_is_enough_if_the_other_was_pruned_on_the_source(case):
    take_both(case)
    for dataset in ("flash/web", "tank/web"):
        case.pool.destroy_snapshots([f"{dataset}@hourly"])
    result = case.pull()
    assert (errors(result), result.arrived, result.skipped) == ([], ["daily"], [])
    assert case.bundles_here() == ["20260101T000000Z-0000aaaa"]


def test_one_name_of_a_run_is_enough_if_the_other_was_pruned_here(case):
    take_both(case)
    assert case.pull().arrived == ["hourly", "daily"]
    case.zfs.found = [each for each in case.zfs.found if each.name == "daily"]
    result = case.pull()
    assert (errors(result), result.skipped, result.dropped) == ([], [], ["hourly"])
    assert result.newest is not None


def test_of_a_run_that_is_not_one_instant_each_name_is_needed_by_itself(case):
    take_both(case, Level.CRASH)
    for name in ("flash/web@daily", "tank/web@hourly"):
        case.pool.destroy_snapshots([name])
    result = case.pull()
    assert (result.arrived, sorted(result.skipped)) == ([], ["daily", "hourly"])
    assert any("flash/web@daily is not here" in each for each in errors(result))


def share(case):
    """A snapshot of two guests in one dataset, with the marks of ``web`` only, and both bundles."""
    case.take("20260101T000000Z-0000aaaa")
    own = [e for e in case.pool.snapshots() if e.dataset == "tank/web"]
    entries = tuple(
        SnapshotEntry(dataset=e.dataset, name=e.name, guid=e.guid, createtxg=e.createtxg)
        for e in own
    )
    run = "20260101T000000Z-0000bbbb"
    case.bundle(run, 2, (("ram.save", b"db"),), snapshots=entries, snapshot=own[0].name)
    return run, own[0].name


def test_the_bundle_of_a_guest_whose_snapshots_have_the_marks_of_another_comes(case):
    run, name = share(case)
    result = case.pull(2)
    assert (errors(result), result.arrived) == ([], [name])
    assert (case.bundles / UUID.format(2) / run / "ram.save").read_bytes() == b"db"
    result = case.pull(2)
    assert (errors(result), result.arrived, result.newest is not None) == ([], [], True)


def test_that_bundle_must_be_whole_too(case):
    run, name = share(case)
    (case.store.root / UUID.format(2) / run / "ram.save").unlink()
    result = case.pull(2)
    assert result.skipped == [name]
    assert "is not whole on the source" in errors(result)[0]


def test_a_run_whose_dataset_was_renamed_on_the_source_names_the_rename(case):
    """``rebuild`` looks for the copy by the name in the manifest."""
    case.take("r1", 2)
    case.pool.rename("tank/db", "tank/db2")
    result = case.pull(2)
    assert (case.here(), result.skipped, result.newest) == ([f"{ROOT}/tank:db2@r1"], ["r1"], None)
    (error,) = errors(result)
    assert "its snapshot of tank/db is one of tank/db2 now" in error
    assert "on the source: zfs rename tank/db2 tank/db" in error


def test_a_run_that_was_pulled_before_its_dataset_was_renamed_is_whole(case):
    case.take("r1", 2)
    case.pull(2)
    case.pool.rename("tank/db", "tank/db2")
    result = case.pull(2)
    assert (errors(result), result.skipped) == ([], [])
    assert result.newest is not None


def test_what_a_manifest_names_is_looked_for_only_if_it_can_be_a_dataset(case):
    entry = SnapshotEntry(dataset="tank/a@b", name="r1", guid=5, createtxg=5)
    case.take("r1", 2, parts=())
    shutil.rmtree(case.store.root / UUID.format(2) / "r1")
    case.bundle("r1", 2, (("ram.save", b"ram"),), snapshots=(entry,))
    asked, copies = [], case.zfs.copies
    case.zfs.copies = lambda root, names: asked.extend(names) or copies(root, names)
    assert "tank/a@b@r1 is not here" in errors(case.pull(2))[0]
    assert {*asked} == {f"{ROOT}/tank:db"}
