"""A guest with an emulated TPM: its state is of the snapshot, and a clone has its own."""

import hashlib
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import assert_clean, assert_restored, must, restore, snaporch, snapshot

STATES = Path("/var/lib/libvirt/swtpm")


def add_tpm(domain):
    tpm = ET.SubElement(domain.find("devices"), "tpm", model="tpm-tis")
    ET.SubElement(tpm, "backend", type="emulator", version="2.0")


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("trusted", disks=[Disk("zvol", "tank/trusted")], mutate=add_tpm)
    yield made
    made.remove()


@pytest.fixture(scope="module")
def taken(guest):
    made = snapshot(guest, "--name", "s1")
    guest.wait_count(beyond=guest.snapshot_count("s1") + 5)
    return made


def state_of(uuid):
    (path,) = (STATES / uuid).rglob("*.permall")
    return path


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def parts(taken):
    manifest = json.loads((Path(taken["bundle"]) / "manifest.json").read_text())
    return [part for part in manifest["parts"] if part["role"] == "tpm"]


def test_its_state_is_in_the_bundle(guest, taken):
    (part,) = parts(taken)
    assert part["source"] == str(state_of(taken["uuid"]))
    assert part["bytes"] > 0
    assert digest(Path(taken["bundle"]) / part["name"]) == part["sha256"]


def test_it_resumes_with_its_tpm(guest, taken):
    count, mark = guest.snapshot_count("s1"), guest.mark()
    restore(guest, "s1")
    assert_restored(guest, mark, count)
    assert_clean(guest)


def test_the_state_of_the_snapshot_is_put_back(guest, taken):
    """What is there instead is somebody else's TPM, as far as the guest can tell."""
    guest.destroy()
    path, (part,) = state_of(taken["uuid"]), parts(taken)
    owner = path.stat().st_uid, path.stat().st_gid
    path.write_bytes(bytes(path.stat().st_size))
    restore(guest, "s1", "--disks-only")
    assert digest(path) == part["sha256"]
    assert (path.stat().st_uid, path.stat().st_gid) == owner
    guest.start()
    guest.wait_count()


def test_a_running_clone_has_a_state_of_its_own(guest, taken):
    mark = guest.mark()
    outcome = snaporch("clone", "trusted@s1", "twin", "--running", "--json")
    assert outcome.status == 0, outcome.err
    twin = Guest.existing("twin")
    twin.assert_continues(0, guest.snapshot_count("s1"))
    own = state_of(outcome.json["uuid"])
    assert own != state_of(taken["uuid"])
    assert str(own.parent) in must("ps", "-ww", "-eo", "args")
    assert snaporch("clone", "--delete", "twin").status == 0
    assert not (STATES / outcome.json["uuid"]).exists()
    guest.wait_count()
    guest.assert_undisturbed(mark)


def test_it_verifies(guest, taken):
    before = digest(state_of(taken["uuid"]))
    outcome = snaporch("verify", "trusted@s1", "--json")
    assert outcome.status == 0, outcome.err
    assert outcome.json["reached"] == "resumed"
    assert digest(state_of(taken["uuid"])) == before
