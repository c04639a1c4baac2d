"""A guest with an emulated TPM: its state is of the snapshot, and a clone has its own.

Wherever it is: libvirt deletes what the XML of a transient domain names when the domain ends.
"""

import hashlib
import json
import shutil
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
    """The state that replaced it is another TPM's, as far as the guest can see."""
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


# -- state in a place that its XML names --------------------------------------------------------

OWN_PLACE = Path("/srv/tpm")
RULES = Path("/etc/apparmor.d/abstractions/libvirt-qemu.d/tpm")


def add_placed_tpm(kind, path):
    def mutate(domain):
        add_tpm(domain)
        ET.SubElement(domain.find("devices/tpm/backend"), "source", type=kind, path=str(path))

    return mutate


@pytest.fixture(scope="module", params=["file", "dir"])
def placed(request):
    """A guest whose TPM state is at a path that an administrator chose and allowed."""
    directory = OWN_PLACE / request.param
    directory.mkdir(parents=True)
    shutil.chown(directory, "tss", "tss")
    RULES.write_text(f"  {OWN_PLACE}/** rwk,\n")
    kind, path = request.param, directory / "state"
    made = Guest.create(
        f"placed-{kind}",
        disks=[Disk("zvol", f"tank/placed-{kind}")],
        mutate=add_placed_tpm(kind, path),
    )
    made.state_file = path if kind == "file" else path / "tpm2-00.permall"
    made.taken = snapshot(made, "--name", "s1")
    made.wait_count(beyond=made.snapshot_count("s1") + 5)
    yield made
    made.remove()
    RULES.unlink()


def seen(path):
    return digest(path), path.stat().st_ino, path.stat().st_uid, path.stat().st_gid


@pytest.mark.daily(1)
def test_the_state_in_its_own_place_is_in_the_bundle(placed):
    (part,) = parts(placed.taken)
    assert part["source"] == str(placed.state_file)
    assert digest(Path(placed.taken["bundle"]) / part["name"]) == part["sha256"]


@pytest.mark.daily(1)
def test_a_verification_leaves_the_state_of_the_original(placed):
    before = seen(placed.state_file)
    outcome = snaporch("verify", f"{placed.name}@s1", "--json")
    assert outcome.status == 0, outcome.err
    assert outcome.json["reached"] == "resumed"
    assert seen(placed.state_file) == before


@pytest.mark.daily(1)
def test_clones_leave_the_state_of_the_original(placed):
    before, mark = seen(placed.state_file), placed.mark()
    for options in (["--running"], []):
        outcome = snaporch("clone", f"{placed.name}@s1", "twin", "--json", *options)
        assert outcome.status == 0, outcome.err
        own = STATES / outcome.json["uuid"]
        if not options:
            (copy,) = [path for path in own.rglob("*") if path.is_file()]
            assert digest(copy) == parts(placed.taken)[0]["sha256"]
            must("virsh", "start", "twin")
        assert str(own) in must("ps", "-ww", "-eo", "args")
        assert snaporch("clone", "--delete", "twin").status == 0
        assert not own.exists()
        assert seen(placed.state_file) == before
    placed.wait_count()
    placed.assert_undisturbed(mark)


@pytest.mark.daily(1)
def test_the_state_in_its_own_place_is_put_back_and_that_can_be_undone(placed):
    placed.destroy()
    path, (part,) = placed.state_file, parts(placed.taken)
    _, _, *owner = seen(path)
    path.write_bytes(bytes(path.stat().st_size))
    later = digest(path)
    undo = restore(placed, "s1", "--disks-only")["undo"]
    assert digest(path) == part["sha256"]
    assert list(seen(path)[2:]) == owner
    must("sh", undo)
    assert digest(path) == later
    assert list(seen(path)[2:]) == owner
    mark = placed.mark()
    restore(placed, "s1")
    placed.assert_continues(mark, placed.snapshot_count("s1"))


def test_a_tpm_of_an_external_swtpm_is_refused():
    def external(domain):
        backend = ET.SubElement(
            ET.SubElement(domain.find("devices"), "tpm", model="tpm-tis"), "backend"
        )
        backend.set("type", "external")
        ET.SubElement(backend, "source", type="unix", path="/run/tpm", mode="connect")

    guest = Guest.create(
        "external", disks=[Disk("zvol", "tank/external")], mutate=external, start=False
    )
    outcome = snaporch("snapshot", "external", "--name", "s1")
    assert outcome.status == 5
    assert "the state of its TPM cannot be captured (<backend type='external'>)" in outcome.err
    assert "give it <backend type='emulator'>" in outcome.err
    assert must("zfs", "list", "-Ht", "snapshot", "tank/external") == ""
    guest.remove()
