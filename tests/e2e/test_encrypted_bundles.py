"""Bundles that are encrypted for a key that is not on this host, on two replicas of two kinds."""

import shutil
from pathlib import Path

import pytest
from guests.disks import destroy
from lab_ssh import RECEIVING_HOST, permit_copies, receive_as_user
from other_machine import create, datasets, listed, other_machine, take, uuid_of
from support import (
    BUNDLES,
    accepting,
    assert_clean,
    assert_restored,
    must,
    one_line_error,
    run,
    snaporch,
)

from snaporch.bundle.manifest import MANIFEST_NAME
from snaporch.bundle.store import COPY_NAME

MARKER = b"SNAPORCH"
"""In the guest's RAM: each block that it writes begins with it."""
COPIES = "backup/vault"
OPTIONS = """
encrypt_to = ["{recipient}"]

[replica.vault]
host = "{host}"
dataset = "{copies}"
bundles = "{bundles}"
append_only = true
encrypt_to = ["{recipient}", "{other}"]
"""


def new_key(path):
    """A private key in a file; returns the public one."""
    must("age-keygen", "-o", str(path))
    return must("age-keygen", "-y", str(path)).strip()


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """The files of the private keys, which another machine keeps."""
    place = tmp_path_factory.mktemp("elsewhere")
    for name in ("right", "second", "wrong"):
        (place / f"{name}.pub").write_text(new_key(place / name))
    return place


@pytest.fixture(scope="module", autouse=True)
def bundles(tmp_path_factory, keys):
    """The directories of bundles on the other machine, by the replica."""
    place = tmp_path_factory.mktemp("there")
    with other_machine(place) as made:
        vault = tmp_path_factory.mktemp("vault") / "bundles"
        vault.mkdir()
        receive_as_user(COPIES, vault)
        permit_copies(COPIES)
        values = {
            "recipient": (keys / "right.pub").read_text(),
            "other": (keys / "second.pub").read_text(),
            "host": RECEIVING_HOST,
            "copies": COPIES,
            "bundles": vault,
        }
        plain = '[defaults]\ncompression = "none"\n'
        text = f"{plain}{made.config.read_text()}{OPTIONS.format(**values)}"
        made.config.write_text(text)
        yield {"offsite": made.bundles, "vault": vault}


@pytest.fixture(scope="module")
def guest(bundles):
    made = create("plain")
    yield made
    made.remove()


@pytest.fixture(scope="module")
def taken(guest):
    """A snapshot that both replicas have."""
    found = take(guest)
    for name in ("offsite", "vault"):
        outcome = snaporch("replicate", guest.name, "--to", name, "--json")
        assert outcome.status == 0, outcome.err
        assert outcome.json[0]["arrived"] == [found["snapshot"]]
    return found


def lose(guest):
    """Destroy all that this host has of a guest, with the records of what it sent."""
    guest.destroy()
    must("virsh", "undefine", "--nvram", guest.name)
    for dataset in datasets(guest):
        destroy(dataset)
    shutil.rmtree(BUNDLES / uuid_of(guest))
    shutil.rmtree(BUNDLES / ".encrypted")


def rebuild(guest, replica, *options):
    host = ("--host", "root@localhost") if replica == "vault" else ()
    words = ("rebuild", guest.name, "--from", replica, *host, "--yes", "--quiet")
    return snaporch(*words, *accepting(guest.name), *options)


def everything_here():
    datasets_here = must("zfs", "list", "-H", "-t", "all", "-o", "name", "-r", "tank", "flash")
    files = sorted(str(each) for each in BUNDLES.rglob("*") if each.is_file())
    return datasets_here, files, must("virsh", "list", "--all", "--name")


@pytest.mark.parametrize("replica", ["offsite", "vault"])
def test_nothing_of_the_ram_can_be_read_there(guest, taken, bundles, replica):
    own = BUNDLES / uuid_of(guest) / taken["run"]
    assert any(MARKER in path.read_bytes() for path in own.iterdir())
    copied = bundles[replica] / uuid_of(guest) / taken["run"]
    names = {path.name for path in own.iterdir()} - {MANIFEST_NAME}
    expected = {MANIFEST_NAME, COPY_NAME, *(f"{name}.age" for name in names)}
    assert {path.name for path in copied.iterdir()} == expected
    for path in bundles[replica].rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert MARKER not in content, path
        assert b"<domain" not in content, path
    left = [path.name for path in (BUNDLES / ".encrypted").rglob("*") if path.is_file()]
    assert set(left) == {MANIFEST_NAME}


@pytest.mark.parametrize("replica", ["offsite", "vault"])
def test_the_copy_is_checked_without_the_key(guest, taken, bundles, replica):
    outcome = snaporch("replicate", guest.name, "--to", replica, "--recheck", "--json")
    assert (outcome.status, outcome.json[0]["arrived"], outcome.json[0]["read"]) == (0, [], 1)
    verified = snaporch("verify", "--on", replica, guest.name, "--json")
    assert (verified.status, verified.json[0]["compared_with"]) == (0, "here"), verified.err


def changed(path):
    with path.open("r+b") as stream:
        stream.seek(-1000, 2)
        (byte,) = stream.read(1)
        stream.seek(-1000, 2)
        stream.write(bytes([byte ^ 1]))


def test_the_guest_comes_back_only_by_its_key(guest, taken, bundles, keys):
    expected, mark = guest.snapshot_count(taken["snapshot"]), guest.mark()
    lose(guest)
    before = everything_here()
    one_line_error(rebuild(guest, "offsite"), 5, "is encrypted for", "--identity")
    outcome = rebuild(guest, "offsite", "--identity", str(keys / "wrong"))
    one_line_error(outcome, 8, "no identity matched")
    one_line_error(rebuild(guest, "offsite", "--identity", "/nowhere"), 5, "No such file")
    assert everything_here() == before

    part = bundles["offsite"] / uuid_of(guest) / taken["run"] / "ram.save.age"
    changed(part)
    outcome = rebuild(guest, "offsite", "--identity", str(keys / "right"))
    one_line_error(outcome, 8, "is damaged on the replica", part.name)
    assert run("virsh", "domstate", guest.name).status != 0
    assert not (BUNDLES / uuid_of(guest) / taken["run"]).exists()
    changed(part)

    outcome = rebuild(guest, "offsite", "--identity", str(keys / "right"))
    assert outcome.status == 0, outcome.err
    assert_restored(guest, mark, expected)
    assert_clean(guest)
    assert listed(guest)[taken["snapshot"]]["level"] == "ram"
    verified = snaporch("verify", "--on", "offsite", guest.name, "--json")
    assert (verified.status, verified.json[0]["compared_with"]) == (0, "here"), verified.err
    sent = part.stat().st_ino
    again = take(guest)
    outcome = snaporch("replicate", guest.name, "--to", "offsite", "--json")
    assert (outcome.status, outcome.json[0]["damaged"]) == (0, []), outcome.err
    assert outcome.json[0]["arrived"][-1] == again["snapshot"]
    assert part.stat().st_ino == sent  # it was not copied again


def test_it_comes_back_from_an_append_only_replica_by_another_key(guest, taken, keys):
    must("snaporch", "replicate", guest.name, "--to", "vault")
    last = max(listed(guest).values(), key=lambda each: each["created"])["snapshot"]
    expected, mark = guest.snapshot_count(last), guest.mark()
    lose(guest)
    outcome = rebuild(guest, "vault", "--no-restore")
    assert outcome.status == 0, outcome.err
    assert run("virsh", "domstate", guest.name).status != 0
    assert listed(guest)[last]["bundle"] is None or not (BUNDLES / uuid_of(guest)).exists()
    outcome = rebuild(guest, "vault", "--identity", str(keys / "second"))
    assert outcome.status == 0, outcome.err
    assert_restored(guest, mark, expected)


def test_pages_of_ram_are_not_sent_in_clear(bundles):
    made = create("paged")
    try:
        last = take(made)
        outcome = snaporch("replicate", made.name, "--to", "offsite")
        one_line_error(outcome, 8, "pages of RAM would be there in clear", "ram_store")
        assert "offsite" not in listed(made)[last["snapshot"]]["replicated"]
        found = run("zfs", "list", "-H", "-o", "name", "-r", "backup").out
        assert f"ram:{uuid_of(made)}" not in found
    finally:
        made.remove()


def test_prune_forgets_what_was_encrypted_of_lost_bundles(guest, bundles):
    record = BUNDLES / ".encrypted" / "offsite" / uuid_of(guest) / "20200101T000000Z-0000"
    record.mkdir(parents=True)
    (record / "ram.save.age").write_bytes(b"x")
    must("snaporch", "prune")
    assert not record.exists()
    assert Path(BUNDLES / ".encrypted").is_dir()
