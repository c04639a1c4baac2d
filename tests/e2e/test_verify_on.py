"""Copies on a replica are verified where they are: by ssh as root, and by an append-only key."""

import json
import os
import shutil
from pathlib import Path

import pytest
from forced_key import backup_machine, block
from guests.disks import Disk
from guests.guest import Guest
from support import BUNDLES, must, one_line_error, run, snaporch

DISKS = [Disk("file", "tank/web"), Disk("zvol", "flash/web")]
USER, ROOT = "snaporch-vm1", "backup/vm1"
COPIES = Path("/srv/snaporch-vm1/bundles")
CONFIG = """
libvirt_uri = "{uri}"

[ram_pages]
dataset = "tank/ram"

[domain.web]
ram_store = "pages"

[replica.offsite]
host = "{host}"
dataset = "backup/kvm"
bundles = "{bundles}"

[replica.nas]
host = "snaporch-vm1@localhost"
dataset = "backup/vm1"
bundles = "/srv/snaporch-vm1/bundles"
append_only = true
"""
REPLICAS = ("offsite", "nas")


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """The other machine, which is the lab itself; the directory of bundles of each replica."""
    place = tmp_path_factory.mktemp("there")
    (place / "bundles").mkdir()
    setup = block("docs/how-to/replication.md", "user=snaporch-vm1")
    with backup_machine(place) as host, pytest.MonkeyPatch.context() as patch:
        key = Path("/root/.ssh/id_ed25519.pub").read_text().strip()
        must("bash", "-euc", setup.replace("ssh-ed25519 AAAA…", key))
        for name, uri in (("config", "qemu:///system"), ("away", "qemu+unix:///system?socket=/no")):
            text = CONFIG.format(host=host, bundles=place / "bundles", uri=uri)
            (place / f"{name}.toml").write_text(text)
        patch.setenv("SNAPORCH_CONFIG", str(place / "config.toml"))
        yield {"offsite": place / "bundles", "nas": COPIES, "away": place / "away.toml"}
    must("userdel", "--remove", USER)


@pytest.fixture(scope="module")
def guest(there):
    made = Guest.create("web", disks=DISKS)
    yield made
    made.remove()


@pytest.fixture(scope="module")
def taken(guest):
    """Two snapshots, the older first, which both replicas have."""
    found = []
    for name in ("one", "two"):
        outcome = snaporch("snapshot", guest.name, "--name", name, "--json")
        assert outcome.status == 0, outcome.err
        found.append(outcome.json)
    replicate()
    return found


def replicate(*words):
    for name in REPLICAS:
        outcome = snaporch("replicate", "web", "--to", name, *words)
        assert outcome.status == 0, outcome.err


def verify(replica, *words):
    return snaporch("verify", "--on", replica, *(words or ("--all",)), "--json", "--quiet")


def passed(outcome):
    return {each["snapshot"]: each["passed"] for each in outcome.json}


def problems():
    found = snaporch("status", "--json").json["problems"]
    return [each for each in found if each["code"] == "copy-failed"]


def part(there, replica, snapshot):
    """The largest file of a bundle there."""
    directory = there[replica] / snapshot["uuid"] / snapshot["run"]
    return max(directory.iterdir(), key=lambda path: path.stat().st_size)


def flip(path):
    """Change a byte, and not the size or the time."""
    before = path.stat()
    with path.open("r+b") as stream:
        stream.seek(before.st_size // 2)
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.daily(1)
@pytest.mark.parametrize("replica", REPLICAS)
def test_copies_pass_without_libvirt(there, taken, replica):
    outcome = verify(replica, "--all", "--config", str(there["away"]))
    assert outcome.status == 0, outcome.err
    assert passed(outcome) == {"one": True, "two": True}
    assert {each["compared_with"] for each in outcome.json} == {"here"}
    one_line_error(snaporch("--config", str(there["away"]), "status"), 7)  # it is away, indeed
    assert problems() == []
    copies = snaporch("status", "--json").json["copies"]
    assert {"one", "two"} == {e["snapshot"] for e in copies if e["replica"] == replica}


@pytest.mark.daily(1)
@pytest.mark.parametrize("replica", REPLICAS)
def test_damage_there_fails_and_status_shows_it(there, taken, replica):
    damaged = part(there, replica, taken[0])
    flip(damaged)
    outcome = verify(replica)
    assert (outcome.status, passed(outcome)) == (8, {"one": False, "two": True})
    assert f"{damaged.name} is damaged" in outcome.err
    (problem,) = problems()
    assert problem["text"].endswith(f"snaporch verify --on {replica} web@one")
    again = snaporch("replicate", "web", "--to", replica, "--recheck")
    assert again.status == 0, again.err
    outcome = verify(replica, "web@one")
    assert (outcome.status, passed(outcome)) == (0, {"one": True})
    assert problems() == []


@pytest.mark.daily(1)
@pytest.mark.parametrize("replica", REPLICAS)
def test_a_truncated_and_a_missing_file_are_named(there, taken, replica):
    path = part(there, replica, taken[1])
    content = path.read_bytes()
    os.truncate(path, 1)
    outcome = verify(replica, "web@two")
    assert outcome.status == 8
    assert f"{path.name} has 1 bytes instead of {len(content)}" in outcome.err
    owner = path.stat()
    path.unlink()
    assert f"{path.name} is missing" in verify(replica, "web@two").err
    path.symlink_to("/etc/hostname")
    assert f"{path.name} is missing" in verify(replica, "web@two").err
    path.unlink()
    path.write_bytes(content)
    os.chown(path, owner.st_uid, owner.st_gid)
    assert verify(replica, "web@two").status == 0


def test_a_replica_that_cannot_be_reached_is_no_success(there, taken, tmp_path):
    config = Path(os.environ["SNAPORCH_CONFIG"]).read_text()
    path = tmp_path / "snaporch.toml"
    path.write_text(config.replace("snaporch-vm1@localhost", "snaporch-vm1@no.invalid"))
    outcome = verify("nas", "--all", "--config", str(path))
    assert (outcome.status, outcome.out) == (8, "")
    assert "cannot be reached" in outcome.err


@pytest.mark.daily(1)
@pytest.mark.parametrize("replica", REPLICAS)
def test_a_destroyed_snapshot_there_fails(there, taken, replica):
    above = {"offsite": "backup/kvm", "nas": ROOT}[replica]
    must("zfs", "destroy", f"{above}/flash:web@one")
    outcome = verify(replica)
    assert (outcome.status, passed(outcome)) == (8, {"one": False, "two": True})
    assert "the ZFS snapshot flash:web@one is missing" in outcome.err
    (problem,) = [each for each in problems() if replica in each["text"]]
    assert problem["grade"] == "critical"
    assert snaporch("replicate", "web", "--to", replica).status == 0  # it cannot be sent again
    outcome = verify(replica)
    assert (outcome.status, passed(outcome)) == (8, {"one": False, "two": True})


def test_copies_of_a_guest_that_was_lost_are_verified(there, taken, guest):
    """The last test: the host loses the guest, and its store."""
    guest.destroy()
    must("virsh", "undefine", "--nvram", "web")
    for dataset in ("tank/web", "flash/web", f"tank/ram/{taken[0]['uuid']}"):
        run("zfs", "destroy", "-r", dataset)
    shutil.rmtree(BUNDLES / taken[0]["uuid"])
    outcome = verify("offsite", "web@two")
    assert outcome.status == 0, outcome.err
    assert [each["compared_with"] for each in outcome.json] == ["last-verification"]
    flip(part(there, "offsite", taken[1]))
    outcome = verify("offsite", "web@two")
    assert outcome.status == 8
    assert "this host has no record of it" in outcome.err
    assert json.loads(outcome.out)[0]["failure"].endswith("is damaged")
