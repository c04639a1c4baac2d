"""Bundles that are encrypted for a replica, and those that would be there in clear."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from fakes.hooks import failing_once
from fakes.replica import FakeReplica

from snaporch.bundle.age import AgeError, Identity
from snaporch.bundle.encrypted_bundles import EncryptedBundles
from snaporch.bundle.manifest import MANIFEST_NAME, read_manifest
from snaporch.bundle.store import COPY_NAME
from snaporch.catalog.records import all_records
from snaporch.config import Config
from snaporch.errors import RefusedError, UnavailableError
from snaporch.replication.interface import ReplicaError
from snaporch.replication.replicate import replicate
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot


class Vault:
    """A guest, and a replica with encrypted bundles."""

    def __init__(self, world, recipients):
        self.world = world
        world.add_guest(disks={"vda": "tank/web"})
        self.there = FakeReplica(world.pool, world.root / "there")
        self.configure(encrypt_to=recipients)

    @property
    def context(self):
        return self.world.context

    def configure(self, **more):
        nas = {"host": "nas", "dataset": "backup/kvm", "bundles": "/backup/nas", **more}
        document = self.context.config.model_dump() | {"replica": {"nas": nas}}
        self.context.config = Config.model_validate(document)

    def take(self, name="s1", level=None):
        domain = self.context.hypervisor.domain("web")
        return take_snapshot(self.context, domain, SnapshotRequest(name, level))

    def ship(self, **more):
        records = all_records(self.context.store, self.world.pool.snapshots())
        return replicate(self.context, records, "nas", self.there, **more)

    def copy(self, record):
        return self.there.root / record.uuid / record.run

    def spool(self, record):
        bundles = EncryptedBundles(self.context.store, "nas")
        return bundles.path(f"{record.uuid}/{record.run}")

    def replicated(self):
        records = all_records(self.context.store, self.world.pool.snapshots())
        return {record.snapshot: record.replicated for record in records}


@pytest.fixture
def vault(world, age):
    return Vault(world, [age.keys[0]])


def files(directory):
    return {path.name for path in directory.iterdir()}


def test_each_part_arrives_encrypted(vault, age):
    record = vault.take()
    shipped = vault.ship()
    assert [each.snapshot for each in shipped.arrived] == ["s1"]
    own = files(Path(record.bundle)) - {MANIFEST_NAME}
    assert files(vault.copy(record)) == {f"{name}.age" for name in own} | {MANIFEST_NAME, COPY_NAME}
    sent = read_manifest(vault.copy(record))
    assert sent.recipients == (age.keys[0],)
    assert {part.plain.sha256 for part in sent.parts} == {
        part.sha256 for part in read_manifest(Path(record.bundle)).parts
    }
    for part in sent.parts:
        assert (vault.copy(record) / part.name).read_bytes().startswith(b"fake age\n")
    assert files(vault.spool(record)) == {MANIFEST_NAME}  # the record
    assert vault.replicated() == {"s1": ("nas",)}


def test_it_is_encrypted_once(vault):
    record = vault.take()
    vault.ship()
    before = {path: path.read_bytes() for path in vault.copy(record).iterdir()}
    again = vault.ship(recheck=True)
    assert (again.arrived, again.damaged, again.read) == ((), (), 1)
    assert {path: path.read_bytes() for path in vault.copy(record).iterdir()} == before
    assert vault.there.hooks.log.count(f"replica.store {record.uuid}/{record.run}") == 1


def test_a_transfer_that_failed_goes_on_with_the_same_files(vault):
    record = vault.take()
    vault.there.hooks.at["replica.stored"] = failing_once(ReplicaError("nas", "is away"))
    with pytest.raises(ReplicaError, match="is away"):
        vault.ship()
    sums = {path.name: path.read_bytes() for path in vault.spool(record).iterdir()}
    assert "ram.save.age" in sums
    vault.ship()
    there = {path.name: path.read_bytes() for path in vault.copy(record).iterdir()}
    assert sums.items() <= there.items()


def test_other_recipients_count_from_the_next_bundle_on(vault, age):
    first = vault.take()
    vault.ship()
    before = (vault.copy(first) / MANIFEST_NAME).read_bytes()
    vault.configure(encrypt_to=[age.keys[1]])
    second = vault.take("s2")
    vault.ship()
    assert (vault.copy(first) / MANIFEST_NAME).read_bytes() == before
    assert read_manifest(vault.copy(second)).recipients == (age.keys[1],)


def test_what_waits_for_a_replica_is_encrypted_again_for_other_recipients(vault, age):
    record = vault.take()
    vault.there.hooks.at["replica.stored"] = failing_once(ReplicaError("nas", "is away"))
    with pytest.raises(ReplicaError):
        vault.ship()
    vault.configure(encrypt_to=[age.keys[1]])
    vault.ship()
    assert read_manifest(vault.copy(record)).recipients == (age.keys[1],)


def test_a_bundle_that_is_there_in_clear_is_replaced_and_not_called_damaged(vault, age):
    vault.configure()
    record = vault.take()
    vault.ship()
    assert "ram.save" in files(vault.copy(record))
    vault.configure(encrypt_to=[age.keys[0]])
    vault.world.heard.notes.clear()
    shipped = vault.ship()
    assert ([each.snapshot for each in shipped.encrypted], shipped.damaged) == (["s1"], ())
    assert {"ram.save", "ram.save.age"} & files(vault.copy(record)) == {"ram.save.age"}
    notes = [each for each in vault.world.heard.notes if "in clear" in each]
    assert len(notes) == 1
    assert "from before encrypt_to are there in clear, and are copied again" in notes[0]
    assert "@s1" in notes[0]
    assert vault.ship().encrypted == ()


def test_what_is_in_clear_stays_replicated_while_it_cannot_be_replaced(vault, age):
    vault.configure()
    record = vault.take()
    vault.ship()
    vault.configure(encrypt_to=[age.keys[0]])
    vault.there.hooks.at["replica.stored"] = failing_once(ReplicaError("nas", "is away"))
    with pytest.raises(ReplicaError, match="is away"):
        vault.ship()
    assert vault.replicated() == {"s1": ("nas",)}
    (Path(record.bundle) / "ram.save").unlink()
    vault.world.heard.notes.clear()
    shipped = vault.ship()
    assert (shipped.damaged, shipped.encrypted, shipped.missing) == ((), (), ())
    (note,) = (each for each in vault.world.heard.notes if "remove them there" in each)
    assert record.run in note


def in_clear_and_lost_here(vault, age, *, damaged):
    """A bundle that is there in clear, and cannot be replaced since it is not whole here."""
    vault.configure()
    record = vault.take()
    vault.ship()
    vault.configure(encrypt_to=[age.keys[0]])
    (Path(record.bundle) / "ram.save").unlink()
    if damaged:
        path = vault.copy(record) / "ram.save"
        path.write_bytes(bytes(path.stat().st_size))
    return record


def test_what_is_in_clear_is_read_when_it_is_due(vault, age):
    record = in_clear_and_lost_here(vault, age, damaged=False)
    vault.world.heard.notes.clear()
    shipped = vault.ship(recheck=True)
    assert (shipped.damaged, shipped.read) == ((), 1)
    assert vault.replicated() == {"s1": ("nas",)}
    (note,) = (each for each in vault.world.heard.notes if "remove them there" in each)
    assert record.run in note


def test_damage_of_what_is_in_clear_is_found_when_it_is_due(vault, age):
    in_clear_and_lost_here(vault, age, damaged=True)
    assert vault.ship().damaged == ()
    with pytest.raises(ReplicaError, match="there is damaged, and the one on this host is not"):
        vault.ship(recheck=True)
    assert vault.replicated() == {"s1": ()}


def test_what_is_in_clear_is_not_marked_by_its_sizes_alone(vault, age):
    in_clear_and_lost_here(vault, age, damaged=True)
    vault.world.pool.set_properties(["tank/web@s1"], {"snaporch:replicated": ""})
    with pytest.raises(ReplicaError, match="its bundle here is not whole"):
        vault.ship()
    assert vault.replicated() == {"s1": ()}


def test_a_damaged_bundle_in_clear_is_damaged(vault, age):
    vault.configure()
    record = vault.take()
    vault.ship()
    vault.configure(encrypt_to=[age.keys[0]])
    (vault.copy(record) / "ram.save").write_bytes(b"")
    shipped = vault.ship()
    assert ([each.snapshot for each in shipped.damaged], shipped.encrypted) == (["s1"], ())


def test_a_damaged_copy_is_replaced(vault):
    record = vault.take()
    vault.ship()
    path = vault.copy(record) / "ram.save.age"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    shipped = vault.ship(recheck=True)
    assert [each.snapshot for each in shipped.damaged] == ["s1"]
    assert vault.ship(recheck=True).damaged == ()


def test_a_bundle_that_is_damaged_here_is_not_encrypted(vault):
    record = vault.take()
    path = Path(record.bundle) / "ram.save"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        ReplicaError, match=r"is damaged on this host, and was not copied.*ram.save"
    ):
        vault.ship()
    assert not vault.copy(record).exists()
    assert not vault.spool(record).exists()


def test_without_age_nothing_is_copied(vault, age):
    vault.take()
    (age.place / "age").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(age.place))
        with pytest.raises(UnavailableError, match="apt install age"):
            vault.ship()
    assert vault.there.names() == []


def test_a_key_that_age_refuses_keeps_bundles_here(vault, age):
    vault.configure(encrypt_to=["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA" + "b" * 42])
    record = vault.take()
    with pytest.raises(ReplicaError, match=r"was not encrypted.*encrypt_to of \[replica.nas\]"):
        vault.ship()
    assert not vault.copy(record).exists()
    assert vault.there.names() == ["tank/web@s1"]  # the disks are


def test_pages_in_clear_are_not_sent_to_a_replica_with_encrypted_bundles(vault, age):
    vault.world.with_pages()
    vault.configure(encrypt_to=[age.keys[0]])
    vault.take()
    with pytest.raises(ReplicaError, match=r"pages of RAM would be there in clear.*ram_store"):
        vault.ship()
    assert vault.there.names() == ["tank/web@s1"]
    assert vault.replicated() == {"s1": ()}


@pytest.fixture
def locked(vault):
    """Its disk is encrypted; the replica has its bundles in clear."""
    vault.configure()
    vault.world.pool.create("tank/web", encrypted=True)
    return vault


def test_ram_in_clear_of_a_guest_with_encrypted_disks_is_not_sent(locked):
    record = locked.take()
    with pytest.raises(ReplicaError) as caught:
        locked.ship()
    assert "nas: web: tank/web is encrypted, and its RAM would be there in clear" in str(
        caught.value
    )
    assert "encrypt_to" in str(caught.value)
    assert locked.there.names() == ["tank/web@s1"]
    assert not locked.copy(record).exists()
    assert locked.replicated() == {"s1": ()}


@pytest.mark.parametrize(
    ("firmware", "named"),
    [
        ({"nvram": True}, "UEFI variables"),
        ({"tpm": True}, "TPM state"),
        ({"nvram": True, "tpm": True}, "TPM state and UEFI variables"),
    ],
)
def test_the_firmware_of_a_guest_is_as_secret_as_its_ram(locked, tmp_path, firmware, named):
    """Also of a bundle without RAM."""
    places = {each: tmp_path / each for each in firmware}
    for each, path in places.items():
        path.mkdir() if each == "tpm" else path.write_bytes(b"keys")
    if "tpm" in places:
        (places["tpm"] / "tpm2-00.permall").write_bytes(b"keys")
    given = {each: str(path) for each, path in places.items()}
    locked.world.add_guest(disks={"vda": "tank/web"}, **given)
    record = locked.take(level="crash")
    with pytest.raises(ReplicaError, match=f"and its {named} would be there in clear"):
        locked.ship()
    assert not locked.copy(record).exists()


def test_a_bundle_without_secrets_is_sent_in_clear(locked):
    record = locked.take(level="crash")
    locked.ship()
    assert locked.copy(record).exists()


class Mixed:
    """A guest with a second, encrypted disk; the replica has its bundles in clear."""

    def __init__(self, vault, **settings):
        vault.configure()
        document = vault.context.config.model_dump() | {"domain": {"db": settings}}
        vault.context.config = Config.model_validate(document)
        self.vault, self.pool = vault, vault.world.pool
        vault.world.add_guest(name="db", disks={"vda": "tank/db", "vdb": "tank/secret"})
        self.pool.create("tank/secret", encrypted=True)

    def take(self):
        domain = self.vault.context.hypervisor.domain("db")
        return take_snapshot(self.vault.context, domain, SnapshotRequest("s1"))

    def refused(self, record, reason):
        with pytest.raises(ReplicaError, match=f"{reason}, and its RAM would be there in clear"):
            self.vault.ship()
        assert not self.vault.copy(record).exists()


def test_it_is_not_sent_either_once_the_snapshot_of_the_encrypted_disk_is_gone(vault):
    mixed = Mixed(vault)
    record = mixed.take()
    mixed.refused(record, "tank/secret is encrypted")
    mixed.pool.destroy_snapshots(["tank/secret@s1"])
    mixed.refused(record, "tank/secret is encrypted")


@pytest.mark.parametrize("gone", [False, True])
def test_ram_has_what_was_read_of_an_encrypted_disk_that_is_left_out(vault, gone):
    mixed = Mixed(vault, exclude_disks=["vdb"])
    record = mixed.take()
    reason = "tank/secret is encrypted"
    if gone:
        path = next(d.source for d in read_manifest(Path(record.bundle)).disks if d.left_out)
        Path(path).unlink()
        reason = r"vdb \(.*\) cannot be read, and may be encrypted"
    mixed.refused(record, reason)


def test_it_is_sent_to_an_encrypted_dataset(locked):
    locked.there.has_vault = True
    asked = []
    locked.there.hooks.at["replica.has_encrypted_bundles"] = lambda: asked.append(1)
    locked.take(), locked.take("s2")
    locked.ship()
    assert locked.replicated() == {"s1": ("nas",), "s2": ("nas",)}
    assert asked == [1]


def test_it_is_sent_encrypted(locked, age):
    locked.configure(encrypt_to=[age.keys[0]])
    record = locked.take()
    locked.ship()
    assert "ram.save.age" in files(locked.copy(record))


def test_the_record_is_the_manifest_that_was_sent(vault, age):
    record = vault.take()
    vault.ship()
    assert (vault.spool(record) / MANIFEST_NAME).read_bytes() == (
        vault.copy(record) / MANIFEST_NAME
    ).read_bytes()
    document = json.loads((Path(record.bundle) / MANIFEST_NAME).read_text())
    assert "recipients" not in document
    with pytest.raises(AgeError):
        Identity(age.wrong).decrypt_small(
            (vault.copy(record) / "ram.save.age").read_bytes(), "ram.save.age", (1, "")
        )


def test_without_room_it_is_refused(vault, monkeypatch):
    record = vault.take()
    usage = type("Usage", (), {"free": 0})
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    with pytest.raises(RefusedError, match=r"needed to encrypt it, .* and 0 are free; make room"):
        vault.ship()
    assert not vault.spool(record).exists()


def test_one_bundle_at_most_waits_encrypted(vault):
    def full():
        raise ReplicaError("nas", "No space left on device")

    vault.there.hooks.at["replica.stored"] = full
    for name in ("s1", "s2", "s3"):
        vault.take(name)
        with pytest.raises(ReplicaError, match="No space"):
            vault.ship()
    root = EncryptedBundles(vault.context.store, "nas").root
    assert len({path.parent for path in root.rglob("*.age")}) == 1
    del vault.there.hooks.at["replica.stored"]
    assert len(vault.ship().arrived) == 3


def test_what_has_arrived_does_not_wait_after_a_crash(vault):
    record = vault.take()
    store = vault.there.store

    def crash(*args):
        store(*args)
        raise ReplicaError("nas", "power loss")

    vault.there.store = crash
    with pytest.raises(ReplicaError, match="power loss"):
        vault.ship()
    vault.there.store = store
    assert "ram.save.age" in files(vault.spool(record))
    assert len(vault.ship().arrived) == 1
    assert files(vault.spool(record)) == {MANIFEST_NAME}


def test_room_for_the_next_snapshot_is_left(vault, monkeypatch):
    record = vault.take()
    size = sum(part.bytes for part in read_manifest(Path(record.bundle)).parts)
    usage = type("Usage", (), {"free": size + (1 << 20) + size // 10})
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage)
    with pytest.raises(RefusedError, match="half is for the next snapshot"):
        vault.ship()


def test_what_an_append_only_replica_has_in_clear_is_not_encrypted(vault, age):
    vault.configure(append_only=True)
    vault.take(), vault.take("s2")
    vault.ship()
    vault.configure(append_only=True, encrypt_to=[age.keys[0]])
    with pytest.raises(ReplicaError, match=r"there in clear \(.*\), and an append-only"):
        vault.ship()
    assert not EncryptedBundles(vault.context.store, "nas").root.exists()
    later = vault.take("s3")
    with pytest.raises(ReplicaError, match="move these away there"):
        vault.ship()
    assert "ram.save.age" in files(vault.copy(later))


def test_without_recipients_what_is_there_encrypted_stays(vault):
    record = vault.take()
    vault.ship()
    before = files(vault.copy(record))
    vault.configure()
    later = vault.take("s2")
    assert [each.snapshot for each in vault.ship(recheck=True).arrived] == ["s2"]
    assert files(vault.copy(record)) == before
    assert "ram.save" in files(vault.copy(later))


@pytest.mark.parametrize("damage", ["lost", "changed"])
def test_without_recipients_what_is_damaged_is_replaced_in_clear(vault, damage):
    record = vault.take()
    vault.ship()
    vault.configure()
    path = vault.copy(record) / "ram.save.age"
    if damage == "lost":
        path.unlink()
    else:
        path.write_bytes(bytes(path.stat().st_size))
    assert [each.snapshot for each in vault.ship(recheck=True).damaged] == ["s1"]
    assert "ram.save" in files(vault.copy(record))
    assert not vault.spool(record).exists()
    assert vault.ship(recheck=True).damaged == ()


def test_a_bundle_that_is_pruned_while_it_is_encrypted_is_missing(vault, age):
    record = vault.take()
    vault.take("s2")
    command = age.place / "age"
    text = command.read_text()
    prune = f"import shutil; shutil.rmtree({record.bundle!r}, ignore_errors=True)\nmain("
    command.write_text(text.replace("\nmain(", f"\n{prune}"))
    shipped = vault.ship()
    assert [each.snapshot for each in shipped.missing] == ["s1"]
    assert [each.snapshot for each in shipped.arrived] == ["s2"]


def test_an_age_that_writes_less_is_not_believed(vault, age):
    record = vault.take()
    command = age.place / "age"
    command.write_text(f"#!{sys.executable} -I\nimport sys\nsys.stdin.buffer.read()\nprint('x')")
    with pytest.raises(ReplicaError, match="is not whole when it is encrypted"):
        vault.ship()
    assert not vault.copy(record).exists()
    assert not vault.spool(record).exists()


@pytest.mark.parametrize("lost", ["bundle", "snapshot"])
def test_what_is_there_in_clear_and_not_here_is_said(vault, age, lost):
    vault.configure()
    record = vault.take()
    vault.take("s2")
    vault.ship()
    shutil.rmtree(record.bundle)
    if lost == "snapshot":
        vault.world.pool.destroy_snapshots(["tank/web@s1"])
    vault.world.heard.notes.clear()
    vault.configure(encrypt_to=[age.keys[0]])
    vault.ship()
    (note,) = (each for each in vault.world.heard.notes if "remove them there" in each)
    assert record.run in note
    assert "remove them there" in note


def forget(vault, record):
    """As after a rebuild from another replica."""
    shutil.rmtree(vault.spool(record))


def test_without_a_record_it_is_sent_again(vault):
    record = vault.take()
    vault.ship()
    before = (vault.copy(record) / "ram.save.age").read_bytes()
    forget(vault, record)
    assert [each.snapshot for each in vault.ship().damaged] == ["s1"]
    assert (vault.copy(record) / "ram.save.age").read_bytes() != before


def test_without_a_record_that_of_an_append_only_replica_is_taken_over(vault, age):
    vault.configure(append_only=True, encrypt_to=[age.keys[0]])
    record = vault.take()
    vault.ship()
    sent = (vault.copy(record) / MANIFEST_NAME).read_bytes()
    forget(vault, record)
    shipped = vault.ship(recheck=True)
    assert (shipped.damaged, shipped.read) == ((), 1)
    assert (vault.spool(record) / MANIFEST_NAME).read_bytes() == sent
    assert any("takes over the replica's" in each for each in vault.world.heard.notes)


@pytest.mark.parametrize("text", [b"", b"{}", None])
def test_nothing_else_is_taken_over(vault, age, text):
    vault.configure(append_only=True, encrypt_to=[age.keys[0]])
    record = vault.take()
    vault.ship()
    forget(vault, record)
    own = (Path(record.bundle) / MANIFEST_NAME).read_bytes()
    (vault.copy(record) / MANIFEST_NAME).write_bytes(own if text is None else text)
    assert [each.snapshot for each in vault.ship().damaged] == ["s1"]
