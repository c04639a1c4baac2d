"""Copies on a replica are verified where they are."""

import shutil
import signal
from dataclasses import replace

import pytest
from fakes import manifests
from fakes.hooks import failing

from snaporch.bundle.manifest import MANIFEST_NAME
from snaporch.config import Config
from snaporch.errors import InterruptedRunError, NotFoundError, SnaporchError, UnavailableError
from snaporch.model import Level
from snaporch.replication.interface import ReplicaError
from snaporch.replication.replicate import replicate
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.verify.copies import SkippedCopy, choose_copies
from snaporch.verify.copy_decision import Source

FINE = {"s1": "", "s2": ""}


def test_good_copies_pass_and_all_files_were_read(copied):
    found = copied.verify()
    assert {name: each.result.source for name, each in found.items()} == dict.fromkeys(
        FINE, Source.HERE
    )
    files = {path.name for path in copied.there("s1").parent.iterdir()} - {"copy.json"}
    assert (found["s1"].files, found["s1"].problem) == (len(files), None)
    assert copied.recorded() == {"s1": True, "s2": True}
    read = [line for line in copied.world.hooks.log if line.startswith("replica.damaged")]
    assert read == [f"replica.damaged {copied.uuid}/{copied.taken[name].run}" for name in FINE]


def test_no_libvirt_is_asked(copied):
    copied.world.hooks.log.clear()
    copied.verify()
    assert {line.partition(".")[0] for line in copied.world.hooks.log} <= {"replica"}


def test_a_flipped_byte_fails_until_it_was_copied_again(copied):
    copied.flip("s1")
    found = copied.verify()
    assert found["s1"].result.reason == "ram.save is damaged"
    line = found["s1"].problem.line()
    assert "nas: web@s1: verification of the copy failed: ram.save is damaged" in line
    assert "snaporch replicate web --to nas --recheck" in line
    assert copied.recorded() == {"s1": False, "s2": True}
    copied.there("s1").write_bytes((copied.here("s1") / "ram.save").read_bytes())
    assert copied.faults("web@s1") == {"s1": ""}
    assert copied.recorded() == {"s1": True, "s2": True}


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda path: path.unlink(), "ram.save is missing"),
        (lambda path: path.write_bytes(b"ab"), "ram.save has 2 bytes instead of"),
        (lambda path: shutil.rmtree(path.parent), "its bundle is missing"),
        (
            lambda path: (path.parent / MANIFEST_NAME).write_text("{}"),
            "the bundle's manifest.json is missing or damaged",
        ),
        (
            lambda path: (path.parent / MANIFEST_NAME).unlink(),
            "the bundle's manifest.json is missing or damaged",
        ),
        (lambda path: (path.parent / "copy.json").unlink(), "its bundle was not copied whole"),
    ],
)
@pytest.mark.parametrize("is_here", [True, False])
def test_what_is_missing_in_a_bundle_is_named(copied, break_it, reason, is_here):
    if not is_here:
        copied.forget()
    break_it(copied.there("s2"))
    found = copied.faults()
    assert reason in found.pop("s2")
    assert found == {"s1": ""}


@pytest.mark.parametrize("is_here", [True, False])
def test_a_destroyed_snapshot_there_fails(copied, is_here):
    if not is_here:
        copied.forget()
    copied.replica.drop("tank/web@s1")
    assert copied.faults()["s1"] == "the ZFS snapshot tank:web@s1 is missing"


def test_another_snapshot_of_the_name_fails(copied):
    copies = copied.replica.snapshots(["tank/web"])
    wrong = [replace(each, guid=7) if each.name == "s1" else each for each in copies]
    copied.replica.put(wrong)
    reason = copied.faults()["s1"]
    assert reason.startswith("tank:web@s1 is another snapshot of this name (its GUID is 7,")


def test_all_of_a_copy_that_this_host_counts_on_is_missed(copied):
    for dataset in ("tank/web", "flash/web"):
        copied.replica.drop(f"{dataset}@s1")
    shutil.rmtree(copied.there("s1").parent)
    assert "the ZFS snapshot flash:web@s1 is missing" in copied.faults()["s1"]
    copied.forget()  # with the originals, nothing says that it should be there
    verifier = copied.verifier()
    assert [each.snapshot for each in verifier.find()] == ["s2"]
    (lost,) = verifier.lost  # but it failed before
    assert "copies that were verified before are not on the replica any more: @s1" in lost.line()
    assert copied.faults() == {"s2": ""}
    assert copied.recorded() == {"s2": True}


def test_a_failure_is_kept_while_this_host_has_the_snapshot(copied):
    copied.flip("s1")
    copied.verify()
    drop_all(copied, "s1")
    names = [f"{dataset}@s1" for dataset in ("tank/web", "flash/web")]
    copied.world.pool.clear_properties(names, ["snaporch:replicated"])
    verifier = copied.verifier()
    verifier.find()
    assert (verifier.lost, copied.recorded()) == ([], {"s1": False, "s2": True})
    shutil.rmtree(copied.there("s1").parent)
    assert "is missing" in copied.faults("web@s1")["s1"]


def test_a_listing_without_the_guest_does_not_erase_what_was_verified(copied):
    copied.verify()
    copied.forget()
    listed, copied.source.snapshots = copied.source.snapshots, list
    verifier = copied.verifier()
    assert verifier.find() == []
    assert [each.thing for each in verifier.lost] == ["nas: web"]
    copied.source.snapshots = listed
    replaced(copied)
    assert "manifest.json is not the one that was verified 20" in copied.faults()["s1"]


def test_a_guest_that_an_append_only_replica_cannot_list_keeps_its_failure(copied):
    copied.flip("s1")
    copied.verify()
    copied.config.replica["nas"] = copied.config.replica["nas"].model_copy(
        update={"append_only": True}
    )
    copied.forget()
    copied.source.snapshots = list
    for _ in range(2):
        verifier = copied.verifier()
        assert verifier.find() == []
        assert "copies that failed cannot be listed: @s1" in verifier.lost[0].line()
    assert copied.recorded() == {"s1": False, "s2": True}


def replaced(copied):
    """Put another bundle in the place of one, whole in itself."""
    document = manifests.load(copied.there("s1", MANIFEST_NAME))
    manifests.store(copied.there("s1", MANIFEST_NAME), document | {"pause_ms": 1.0})


def test_a_bundle_that_was_replaced_there_fails(copied):
    replaced(copied)
    assert copied.faults()["s1"] == "the bundle's manifest.json is not the one of this host"


def test_after_the_loss_here_the_manifest_of_the_last_verification_counts(copied):
    copied.verify()
    copied.forget()
    assert copied.verify()["s1"].result.source is Source.LAST
    replaced(copied)
    assert "manifest.json is not the one that was verified 20" in copied.faults()["s1"]
    assert "is not the one that was verified" in copied.faults()["s1"]  # it does not learn it


def test_without_any_record_here_only_the_manifest_there_is_compared(copied):
    copied.forget()
    found = copied.verify()["s1"]
    assert (found.result.passed, found.result.source) == (True, Source.REPLICA)
    copied.flip("s1")
    found = copied.verify()["s1"]
    assert (found.result.reason, copied.recorded()["s1"]) == ("ram.save is damaged", False)
    assert "this host has no record of it" in found.problem.line()


def test_a_copy_that_is_not_complete_yet_is_no_failure(copied):
    copied.take("s3")
    copied.world.hooks.at["replica.store"] = failing(ReplicaError("nas", "away"))
    with pytest.raises(ReplicaError):
        copied.replicate()
    found = copied.verify()["s3"]
    assert isinstance(found, SkippedCopy)
    assert found.reason == "it has not arrived completely; see: snaporch status"
    assert copied.recorded() == {"s1": True, "s2": True}


def drop_all(copied, name):
    for dataset in ("tank/web", "flash/web"):
        copied.replica.drop(f"{dataset}@{name}")


def test_a_copy_that_is_pruned_between_listing_and_reading_is_gone(copied):
    verifier = copied.verifier()
    copies = verifier.find()
    drop_all(copied, "s1")
    outcomes = {each.copy.snapshot: each for each in verifier.verify(copies)}
    assert outcomes["s1"].reason == "it was removed from the replica meanwhile"
    assert copied.recorded() == {"s2": True}


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_that_is_pruned_while_it_is_read_is_gone(copied, fails):
    def prune():
        if copied.replica.snapshots(["tank/web"])[0].name == "s1":
            drop_all(copied, "s1")
            copied.flip("s1")
            if fails:
                raise ReplicaError("nas", "du: no such directory")

    copied.world.hooks.at["replica.damaged"] = prune
    outcomes = copied.verify("web@s1")
    assert outcomes["s1"].reason == "it was removed from the replica meanwhile"
    assert copied.recorded() == {}


def test_a_signal_records_nothing_of_the_copy_under_way(copied):
    def stop():
        copied.interrupt.signum = signal.SIGINT

    copied.world.hooks.at["replica.damaged"] = stop
    with pytest.raises(InterruptedRunError):
        copied.verify()
    assert copied.recorded() == {}


def test_a_bundle_that_cannot_be_read_has_no_result_and_the_others_have(copied):
    def fail():
        if len([e for e in copied.world.hooks.log if e.startswith("replica.damaged")]) == 1:
            raise ReplicaError("nas: bundle", "takes over 600 s")

    copied.world.hooks.at["replica.damaged"] = fail
    verifier = copied.verifier()
    first, second = verifier.verify(verifier.find())
    assert isinstance(first, SnaporchError)
    assert second.result.passed
    assert copied.recorded() == {"s2": True}


def test_a_replica_that_does_not_answer_stops_the_rest(copied):
    copied.world.hooks.at["replica.snapshots"] = failing(ReplicaError("nas", "cannot be reached"))
    with pytest.raises(ReplicaError, match="cannot be reached"):
        copied.verify()
    assert copied.recorded() == {}


def test_ram_that_was_moved_into_pages_here_is_copied_again_first(world, copied):
    world.with_pages()
    copied.config = world.context.config.model_copy(
        update={"replica": copied.config.replica, "paths": copied.config.paths}
    )
    world.context.config = copied.config
    copied.take("s3")
    manifest = copied.here("s3") / MANIFEST_NAME
    copied.replicate()
    assert copied.faults("web@s3") == {"s3": ""}
    document = manifests.load(manifest)
    there = copied.there("s3", MANIFEST_NAME)
    for part in document["parts"]:
        part.pop("pages", None)
    manifests.store(there, document)
    assert "its RAM was moved into pages" in copied.verify("web@s3")["s3"].reason


def test_a_missing_snapshot_of_the_pages_fails(world, copied):
    world.with_pages()
    copied.config = world.context.config.model_copy(
        update={"replica": copied.config.replica, "paths": copied.config.paths}
    )
    world.context.config = copied.config
    copied.take("s3")
    copied.replicate()
    copied.replica.drop(f"tank/ram/{copied.uuid}@s3")
    reason = copied.faults("web@s3")["s3"]
    assert reason.startswith("of the pages of its RAM: the ZFS snapshot tank:ram:")


def test_a_snapshot_without_ram_has_its_files_and_guids_checked(copied):
    copied.take("s3", Level.CRASH)
    copied.replicate()
    assert copied.faults("web@s3") == {"s3": ""}


def test_names_choose_copies_and_a_wrong_one_is_refused(copied):
    copies = copied.verifier().find()
    assert [each.snapshot for each in choose_copies(copies, "nas", ["web@s1"])] == ["s1"]
    by_run = f"{copied.uuid}@{copied.taken['s2'].run}"
    assert [each.snapshot for each in choose_copies(copies, "nas", [by_run])] == ["s2"]
    assert len(choose_copies(copies, "nas", [copied.uuid])) == 2
    with pytest.raises(NotFoundError, match="replica nas has no copy of it, but of: web"):
        choose_copies(copies, "nas", ["web@s1", "mail"])


def test_a_sample_begins_with_those_never_verified(copied):
    copied.verify("web@s1")
    verifier = copied.verifier()
    copies = verifier.find()
    assert [each.snapshot for each in verifier.longest_ago(copies)] == ["s2", "s1"]
    assert [each.copy.snapshot for each in verifier.verify_sample(copies, 1)] == ["s2"]


def test_a_copy_that_is_skipped_is_not_one_of_a_sample(copied):
    names = [f"{dataset}@s1" for dataset in ("tank/web", "flash/web")]
    copied.world.pool.clear_properties(names, ["snaporch:replicated"])
    shutil.rmtree(copied.there("s1").parent)
    for name in ("s2", "s2"):
        verifier = copied.verifier()
        outcomes = list(verifier.verify_sample(verifier.find(), 1))
        done = [each.copy.snapshot for each in outcomes if not isinstance(each, SkippedCopy)]
        assert done == [name]
        assert isinstance(outcomes[0], SkippedCopy)


@pytest.mark.parametrize(
    "marks",
    [
        {"domain": "a\udc80"},
        {"uuid": "../../etc"},
        {"run": "../x"},
        {"domain": ""},
        {"domain": "x" * 256},
        {"uuid": ""},
    ],
)
def test_marks_that_cannot_be_are_no_copy(copied, marks):
    """The bundles name it all the same."""
    copied.forget()
    for dataset in ("tank/web", "flash/web"):
        copies = copied.replica.snapshots([dataset])
        forged = [replace(e, properties={**e.properties, **marks}) for e in copies]
        copied.replica.put(forged)
    found = copied.verifier().find()
    runs = [copied.taken[name].run for name in ("s1", "s2")]
    assert [(e.domain, e.uuid, e.run) for e in found] == [("web", copied.uuid, e) for e in runs]
    shutil.rmtree(copied.replica.root)
    copied.replica.root.mkdir()
    assert copied.verifier().find() == []


def test_a_manifest_with_too_many_parts_is_not_carried_out(copied):
    copied.forget()
    path = copied.there("s1", MANIFEST_NAME)
    document = manifests.load(path)
    part = document["parts"][-1]
    document["parts"] += [part | {"name": f"x{number}"} for number in range(64)]
    manifests.store(path, document)
    assert copied.faults()["s1"] == "the bundle's manifest.json is missing or damaged"


def test_names_from_the_replica_are_bounded(copied):
    copied.forget()
    path = copied.there("s1", MANIFEST_NAME)
    document = manifests.load(path)
    for entry in document["snapshots"]:
        entry.update(guid=entry["guid"] + 1, name="x" * 5000)
    manifests.store(path, document)
    reason = copied.faults()["s1"]
    assert reason.startswith("the ZFS snapshot flash:web@xxx")
    assert len(reason) < 1000


def test_files_that_only_the_replica_names_are_not_repeated(copied):
    copied.source.damaged = lambda _reference, _sums: ["\x1b[2J" * 10_000]
    reason = copied.faults("web@s1")["s1"]
    assert reason == "a file beside those of the manifest is damaged"


def test_a_copy_in_a_pool_of_this_host_is_no_record_of_it(copied):
    copied.forget()
    copied.world.pool.create("backup")
    copied.world.pool.create("backup/kvm/tank:web")
    (first, _) = copied.replica.snapshots(["tank/web"])
    marks = {f"snaporch:{key}": value for key, value in first.properties.items()}
    copied.world.pool.snapshot(["backup/kvm/tank:web@s1"], marks)
    copied.flip("s1")
    assert "this host has no record of it" in copied.verify()["s1"].problem.line()


@pytest.mark.parametrize("was_verified", [True, False])
@pytest.mark.parametrize("datasets", [["tank/web"], ["tank/web", "flash/web"]])
def test_what_a_replica_lost_fails_after_the_next_replication_too(copied, datasets, was_verified):
    if was_verified:
        copied.verify()
    for dataset in datasets:
        copied.replica.drop(f"{dataset}@s1")
    copied.replicate()
    assert "nas" in copied.records()[0].dropped
    found = copied.faults()
    assert "the ZFS snapshot tank:web@s1 is missing" in found.pop("s1")
    assert (found, copied.recorded()) == ({"s2": ""}, {"s1": False, "s2": True})
    copied.replicate()
    assert "is missing" in copied.faults()["s1"]


@pytest.mark.parametrize("was_verified", [True, False])
def test_a_copy_of_which_nothing_is_left_fails_if_it_was_verified(copied, was_verified):
    if was_verified:
        copied.verify()
    drop_all(copied, "s1")
    shutil.rmtree(copied.there("s1").parent)
    copied.replicate()
    outcome = copied.verify()["s1"]
    if was_verified:
        assert "is missing" in outcome.result.reason
    else:
        assert outcome.reason == "the replica has nothing of it, and cannot get it any more"


def test_results_that_cannot_be_read_are_an_error_for_each_copy(copied):
    copied.verify()
    copied.results._path("nas", copied.uuid).write_text("[")
    verifier = copied.verifier()
    outcomes = list(verifier.verify_sample(verifier.find(), 1))
    assert [type(each) for each in outcomes] == [UnavailableError] * 2


def mark_for_another_run(copied, name):
    """Guests share the datasets, and the marks are those of the other guest's run."""
    marks = {"domain": "db", "uuid": "4b1d2f0e-0000-4000-8000-0000000000db", "run": "other-1"}
    for dataset in ("tank/web", "flash/web"):
        pool = copied.world.pool
        pool.set_properties([f"{dataset}@{name}"], {f"snaporch:{k}": v for k, v in marks.items()})
        copies = copied.replica.snapshots([dataset])
        kept = [e for e in copies if e.name != name]
        copied.replica.put([replace(e, properties=marks) for e in copies if e.name == name] + kept)


def test_a_guest_whose_snapshots_have_the_marks_of_another_is_verified(copied):
    for name in ("s1", "s2"):
        mark_for_another_run(copied, name)
    copied.flip("s1")
    copies = [e for e in copied.verifier().find() if e.domain == "web"]
    assert [each.snapshot for each in copies] == ["s1", "s2"]
    verifier = copied.verifier()
    verifier.find()
    found = {e.copy.snapshot: e.result.reason for e in verifier.verify(copies)}
    assert found == {"s1": "ram.save is damaged", "s2": ""}
    shutil.rmtree(copied.there("s2").parent)
    assert copied.verify("web@s2")["s2"].result.reason == "its bundle is missing"


def test_such_a_guest_is_found_by_its_bundles_where_no_original_is(copied):
    """As on a machine that has only copies."""
    for name in ("s1", "s2"):
        mark_for_another_run(copied, name)
    copied.flip("s1")
    copied.forget()
    verifier = copied.verifier()
    copies = [each for each in verifier.find() if each.domain == "web"]
    assert {(e.snapshot, e.run, e.is_here) for e in copies} == {
        (name, copied.taken[name].run, False) for name in ("s1", "s2")
    }
    found = {e.copy.snapshot: e.result.reason for e in verifier.verify(copies)}
    assert found == {"s1": "ram.save is damaged", "s2": ""}
    copied.replica.drop("flash/web@s2")
    found = copied.faults("web@s2")
    assert found == {"s2": "the ZFS snapshot flash:web@s2 is missing"}


def by_run(copied):
    """The snapshots by the names of their runs, which have the second only."""
    return sorted(("s1", "s2"), key=lambda name: copied.taken[name].run)


def test_older_copies_with_the_marks_of_another_guest_are_found_beside_a_newer_one(copied):
    """The newest snapshot is the guest's alone, so it has the guest's marks."""
    older, newer = by_run(copied)
    mark_for_another_run(copied, older)
    copied.flip(older)
    copied.forget()
    assert copied.faults("web") == {older: "ram.save is damaged", newer: ""}


def test_a_damaged_copy_stays_damaged_when_a_newer_one_has_the_guests_own_marks(copied):
    older, newer = by_run(copied)
    for name in (older, newer):
        mark_for_another_run(copied, name)
    copied.flip(older)
    copied.forget()
    assert copied.faults("web") == {older: "ram.save is damaged", newer: ""}
    for dataset in ("tank/web", "flash/web"):
        marks = {"domain": "web", "uuid": copied.uuid, "run": copied.taken[newer].run}
        copies = copied.replica.snapshots([dataset])
        copied.replica.put([replace(e, properties=marks) if e.name == newer else e for e in copies])
    verifier = copied.verifier()
    found = {each.snapshot for each in verifier.find() if each.domain == "web"}
    assert (found, verifier.lost) == ({older, newer}, [])
    assert copied.faults(f"web@{older}") == {older: "ram.save is damaged"}


def test_only_manifests_that_no_mark_names_are_read_to_find_copies(copied):
    newer = by_run(copied)[1]
    mark_for_another_run(copied, newer)
    copied.forget()
    copied.source.newest_manifests = lambda: {f"{copied.uuid}/{copied.taken[newer].run}": ""}
    read = []
    copied.source.manifest = lambda reference: read.append(reference) or "{}"
    copied.verifier().find()
    assert read == [f"{copied.uuid}/{copied.taken[newer].run}"]


def test_a_limit_leaves_older_copies_out_and_says_so_but_none_that_was_verified(copied):
    for name in ("s1", "s2"):
        mark_for_another_run(copied, name)
    copied.forget()
    found = [each.snapshot for each in copied.verifier(unmarked=1).find() if each.domain == "web"]
    older, newer = by_run(copied)
    assert found == [newer]
    assert "are not looked at: 1" in str(copied.world.heard.notes)
    copied.flip(older)
    assert copied.faults(f"web@{older}") == {older: "ram.save is damaged"}
    verifier = copied.verifier(unmarked=1)
    assert {each.snapshot for each in verifier.find() if each.domain == "web"} == {"s1", "s2"}
    assert verifier.lost == []


def test_a_manifest_that_the_listing_leaves_out_is_read_by_itself(copied):
    """The manifests of all guests are read up to a limit."""
    for name in ("s1", "s2"):
        mark_for_another_run(copied, name)
    copied.forget()
    newest = f"{copied.uuid}/{copied.taken[by_run(copied)[1]].run}"
    copied.source.newest_manifests = lambda: {newest: ""}
    assert copied.faults("web") == {"s1": "", "s2": ""}


def test_a_verified_copy_whose_manifest_was_damaged_since_is_no_loss(copied):
    mark_for_another_run(copied, "s1")
    copied.forget()
    assert copied.faults("web") == {"s1": "", "s2": ""}
    copied.there("s1", MANIFEST_NAME).write_text("{}")
    verifier = copied.verifier()
    assert "s1" in {each.snapshot for each in verifier.find() if each.domain == "web"}
    assert verifier.lost == []
    assert copied.faults("web@s1") == {"s1": "the bundle's manifest.json is missing or damaged"}


def test_what_no_mark_names_and_is_not_there_whole_may_be_on_its_way(copied):
    for name in ("s1", "s2"):
        mark_for_another_run(copied, name)
    copied.forget()
    copied.replica.drop("tank/web@s1")
    verifier = copied.verifier()
    assert [e.snapshot for e in verifier.find() if e.domain == "web"] == ["s2"]
    assert verifier.lost == []


def test_an_original_that_looks_like_a_copy_is_a_record(copied):
    document = copied.config.model_dump()
    document["replica"]["tank"] = {"host": "nas", "dataset": "tank", "bundles": "/b"}
    copied.config = copied.world.context.config = Config.model_validate(document)
    uuid = copied.world.add_guest("db", disks={"vda": "tank/a:db"}).uuid
    domain = copied.world.hypervisor.domain("db")
    taken = take_snapshot(copied.world.context, domain, SnapshotRequest("s1"))
    own = [each for each in copied.records() if each.domain == "db"]
    replicate(copied.world.context, own, "nas", copied.replica)
    assert [e.is_here for e in copied.verifier().find() if e.domain == "db"] == [True]
    shutil.rmtree(copied.world.paths.bundles / uuid / taken.run)
    assert [e.is_here for e in copied.verifier().find() if e.domain == "db"] == [False]


def test_a_bundle_that_is_gone_here_and_there_is_missed(copied):
    """Also if the copies have no mark of it: this host's own snapshots have it."""
    for dataset in ("tank/web", "flash/web"):
        copies = copied.replica.snapshots([dataset])
        bare = [replace(e, properties={**e.properties, "bundle": ""}) for e in copies]
        copied.replica.put(bare)
    shutil.rmtree(copied.there("s1").parent)
    shutil.rmtree(copied.here("s1"))
    assert copied.faults() == {"s1": "its bundle is missing", "s2": ""}


def test_a_loss_that_cannot_be_recorded_is_reported_with_its_cause(copied):
    copied.flip("s1")
    copied.verify()
    drop_all(copied, "s1")
    copied.forget()
    path = copied.config.paths.schedule / "copies" / "nas" / f".{copied.uuid}.json"
    path.mkdir()
    verifier = copied.verifier()
    verifier.find()
    assert [each.thing for each in verifier.lost] == ["nas: web", str(path)]
