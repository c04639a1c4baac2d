"""Hostile overlays, UEFI variables and TPM states: whatever is planted, nothing else is touched.

After each command: everything outside the guest is as it was, nothing of root's is in what is the
guest's, no command hung or ended in a traceback, and its exit code is a documented one.
"""

import os
import shutil
import xml.etree.ElementTree as ET
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes import hostile
from faults.process import Run
from guests.disks import Disk, mountpoint
from guests.guest import Guest
from support import BUNDLES, JOURNAL, OVERLAYS, assert_clean, must, run, snapshot

NAME = "hostile"
UEFI = "variables"
TPM = Path("/var/lib/libvirt/swtpm")
NVRAM = Path("/var/lib/libvirt/qemu/nvram")
SECONDS = "240"
"""For any command, in a lab that is some twenty times slower than a host."""
DOCUMENTED = {0, 4, 5, 7, 8, 9}
EMULATOR, SWTPM = "libvirt-qemu", "tss"


def add_tpm(domain):
    tpm = ET.SubElement(domain.find("devices"), "tpm", model="tpm-tis")
    ET.SubElement(tpm, "backend", type="emulator", version="2.0")


class Scene:
    """The guest, good copies of its files, and the host's files that must not change."""

    def __init__(self):
        self.guest = Guest.create(NAME, disks=[Disk("file", "tank/hostile")], mutate=add_tpm)
        self.uuid = must("virsh", "domuuid", NAME).strip()
        self.other = mountpoint("tank/other-guest")
        self.canaries = [self._canary(Path("/root/hostile-canary/canary"))]
        self.canaries += [self._canary(Path("/root/hostile-canary", f"{n}")) for n in self.names()]
        self.canaries += [self._canary(NVRAM.parent / "canary"), self._canary(TPM / "canary")]
        self.canaries += [self._canary(self.other / "disk.img")]
        self.near = TPM / "canary"
        self.watched = [Path("/"), Path("/root"), Path("/etc"), Path("/var/lib"), self.other]
        self.watched += [Path("/root/hostile-canary"), Path("/var/lib/libvirt"), TPM]
        self.taken = snapshot(self.guest, "--name", "s1")
        self.interrupt()

    @staticmethod
    def names():
        return [f"{UEFI}_VARS.fd", "tpm2-00.permall"]

    @staticmethod
    def _canary(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(hostile.MARKER + bytes(path) + os.urandom(64).hex().encode())
        path.chmod(0o600)
        os.chown(path, 0, 0)
        return path

    def interrupt(self):
        """Kill a run on its overlays, and then the guest: what is left is all that recovery has."""
        path = Path("/root/hostile.toml")
        path.write_text('[defaults]\nram_strategy = "overlay"\n')
        options = ("--config", str(path), "snapshot", NAME, "--name", "cut")
        process = Run(*options, point="before:release", guarded=False)
        process.wait_stopped()
        process.kill()
        process.close()
        path.unlink()
        self.guest.destroy()
        (self.journal,) = JOURNAL.glob("*.jsonl")
        (self.overlay,) = OVERLAYS.glob("*/*.qcow2")
        self.kept = Path("/root/hostile-kept")
        self.kept.mkdir()
        shutil.copy2(self.journal, self.kept / "journal")
        self.good = self.overlay.read_bytes()
        (self.kept / "definition").write_text(self.guest.xml(inactive=True))
        self.image = self.guest.images[0].path
        self.before = hostile.look([self.image], [])

    def set_up_recovery(self):
        """Put everything back as it was when the run had been killed."""
        self.overlay.parent.mkdir(mode=0o711, exist_ok=True)
        self.overlay.write_bytes(self.good)
        shutil.chown(self.overlay, EMULATOR, EMULATOR)
        self.overlay.chmod(0o600)
        shutil.copy2(self.kept / "journal", self.journal)
        must("virsh", "define", str(self.kept / "definition"))

    def look(self):
        return hostile.look(self.canaries, self.watched)

    def command(self, *words):
        """Run a command: it ends in time, without a traceback, with a documented exit code."""
        outcome = run("timeout", "-k", "5", SECONDS, *words)
        assert "Traceback" not in outcome.err + outcome.out, outcome.err
        assert outcome.status in DOCUMENTED, (words, outcome.status, outcome.err)
        return outcome

    def assert_nothing_leaked(self):
        own = [NVRAM, TPM / self.uuid, mountpoint("tank/hostile"), OVERLAYS, BUNDLES]
        found = [p for p in hostile.leaks(own) if p not in self.canaries]
        assert found == []

    def remove(self):
        self.guest.remove()
        must("zfs", "destroy", "-r", "tank/other-guest")
        for path in [*self.canaries, self.kept, Path("/root/hostile-canary")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def scene():
    must("zfs", "create", "-p", "tank/other-guest")
    made = Scene()
    yield made
    made.remove()


# -- overlays: recovery -------------------------------------------------------------------------


def recovers(scene):
    """The good overlay again, in which the guest's last writes are."""
    scene.set_up_recovery()
    assert scene.command("snaporch", "recover", NAME).status == 0
    assert_clean(scene.guest, "shut off")


@pytest.mark.daily(4)
@pytest.mark.parametrize("name", hostile.HEADERS)
def test_a_forged_header(scene, name):
    """The emulator's user can write into its overlay, and nowhere beside it."""
    scene.set_up_recovery()
    before = scene.look()
    image = hostile.look([scene.image], [])
    bad = hostile.forged(name, scene.good, scene.canaries[0])
    with scene.overlay.open("r+b") as stream:  # as the emulator has it open
        stream.truncate()
        stream.write(bad)
    outcome = scene.command("snaporch", "recover", NAME)
    assert scene.look() == before
    scene.assert_nothing_leaked()
    assert outcome.status == 9, outcome
    assert hostile.look([scene.image], []) == image
    assert scene.overlay.read_bytes() == bad
    assert scene.journal.exists(), outcome


@pytest.mark.daily(2)
@pytest.mark.parametrize("name", hostile.FILES)
def test_nothing_can_be_put_in_an_overlays_place(scene, name):
    scene.set_up_recovery()

    def plant():
        scene.overlay.unlink()
        hostile.FILES[name](scene.overlay, scene.canaries[0])

    assert not hostile.as_user(EMULATOR, plant)
    assert scene.overlay.read_bytes() == scene.good


def test_the_last_writes_are_there_after_all(scene):
    """Nothing of what was planted before was committed, or is in the way."""
    recovers(scene)
    scene.guest.start()
    scene.guest.wait_count()
    scene.guest.destroy()


# -- UEFI variables and TPM state: snapshot, restore, undo, clone, verify -----------------------


class Emulated:
    """A guest that is off, and a file of it that is not root's."""

    def __init__(self, scene, name, uuid, place, user):
        self.scene, self.name, self.uuid, self.place, self.user = scene, name, uuid, place, user
        self.undo = ""

    def snaporch(self, *words):
        return self.scene.command("snaporch", *words)


def restore(guest):
    options = ("--yes", "--disks-only", "--discard-newer")
    return guest.snaporch("restore", f"{guest.name}@s1", *options)


def clone(guest):
    if guest.snaporch("clone", f"{guest.name}@s1", "twin").status == 0:
        assert guest.snaporch("clone", "--delete", "twin").status == 0


COMMANDS = {
    "snapshot": lambda guest: guest.snaporch("snapshot", guest.name),
    "restore": restore,
    "undo": lambda guest: guest.scene.command("sh", guest.undo),
    "clone": clone,
    "verify": lambda guest: guest.snaporch("verify", f"{guest.name}@s1"),
}


@contextmanager
def kept(scene, place):
    """The directory of a file as it is now, there again afterwards."""
    good = scene.kept / "good"
    must("cp", "-a", "-T", str(place.parent), str(good))
    yield
    must("rm", "-rf", str(place.parent.with_name("moved-away")), str(place.parent))
    must("mv", "-T", str(good), str(place.parent))


@pytest.fixture
def tpm(scene):
    if any(JOURNAL.glob("*.jsonl")):
        recovers(scene)
    (place,) = (TPM / scene.uuid).rglob("*.permall")
    with kept(scene, place):
        yield Emulated(scene, NAME, scene.uuid, place, SWTPM)


@pytest.fixture(scope="module")
def uefi(scene):
    """Off: its variables are as a guest left them."""
    place = NVRAM / f"{UEFI}_VARS.fd"

    def name_it(domain):
        domain.find("os/nvram").text = str(place)

    disks = [Disk("file", "tank/uefi")]
    guest = Guest.create(UEFI, firmware="uefi", disks=disks, mutate=name_it, start=False)
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(b"variables" * 1000)
    for each in (place.parent, place):
        shutil.chown(each, EMULATOR, EMULATOR)
    assert f">{place}<" in guest.xml()
    must("snaporch", "snapshot", UEFI, "--name", "s1")
    yield guest, place
    guest.remove()


@pytest.fixture
def variables(scene, uefi):
    guest, place = uefi
    with kept(scene, place):
        uuid = must("virsh", "domuuid", guest.name).strip()
        yield Emulated(scene, guest.name, uuid, place, EMULATOR)


def suffer(guest, name, command):
    """Plant the file, run the command, and check everything."""
    scene = guest.scene
    if command == "undo":
        assert restore(guest).status == 0
        guest.undo = str(max(BUNDLES.glob(f"{guest.uuid}/safety-*/undo.sh")))
    before = scene.look()

    def plant():
        if name == "names":
            hostile.odd_names(guest.place)
            return
        if name == "parent-link":
            hostile.WHOLE[name](guest.place, scene.canaries[0])
            return
        fresh = guest.place.with_name("fresh")
        hostile.FILES[name](fresh, scene.near if name == "hard-link" else scene.canaries[0])
        guest.place.unlink()
        fresh.rename(guest.place)

    hostile.as_user(guest.user, plant)
    outcome = COMMANDS[command](guest)
    assert scene.look() == before, outcome
    scene.assert_nothing_leaked()


CASES = [*hostile.WHOLE, "names"]


@pytest.mark.daily(4)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", CASES)
def test_a_tpm_state(tpm, name, command):
    suffer(tpm, name, command)


@pytest.mark.daily(4)
@pytest.mark.parametrize("command", [each for each in COMMANDS if each != "verify"])
@pytest.mark.parametrize("name", CASES)
def test_uefi_variables(variables, name, command):
    suffer(variables, name, command)
