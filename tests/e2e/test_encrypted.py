"""Guests on encrypted datasets: a snapshot comes back, and no clear text leaves the pool."""

import os
import subprocess
from pathlib import Path

import pytest
from guests.disks import Disk, zvol_node
from guests.guest import Guest
from support import (
    assert_clean,
    assert_restored,
    must,
    restore,
    run,
    snaporch,
    snapshot,
    wait_for,
)

pytestmark = pytest.mark.usefixtures("by_overlay")

DISKS = [
    Disk("file", "tank/locked/web"),
    Disk("zvol", "tank/locked/vol"),
    Disk("zvol", "flash/locked/vol"),
]
ROOTS = ("tank/locked", "flash/locked")


@pytest.fixture(scope="module")
def guest(tmp_path_factory):
    key = tmp_path_factory.mktemp("key") / "passphrase"
    key.write_text("open sesame, please\n")
    for root in ROOTS:
        must(
            "zfs", "create", "-o", "encryption=on", "-o", "keyformat=passphrase",
            "-o", f"keylocation=file://{key}", root,
        )  # fmt: skip
    made = Guest.create("vault", disks=DISKS)
    yield made
    made.remove()
    for root in ROOTS:
        must("zfs", "destroy", "-r", root)


@pytest.fixture(scope="module")
def taken(guest):
    made = snapshot(guest, "--name", "s1")
    guest.wait_count(beyond=guest.snapshot_count("s1") + 5)
    return made


def encryption(dataset):
    values = must("zfs", "get", "-H", "-o", "value", "encryption,encryptionroot", dataset)
    return values.split()


def test_it_is_encrypted_and_of_one_instant(guest, taken):
    assert taken["level"] == "ram"
    for disk in DISKS:
        cipher, root = encryption(disk.where)
        assert (cipher, root) == ("aes-256-gcm", disk.where.rpartition("/")[0])
    assert_clean(guest)


def test_a_clone_resumes_beside_it_under_the_same_key(guest, taken):
    mark = guest.mark()
    outcome = snaporch("clone", "vault@s1", "twin", "--running", "--json")
    assert outcome.status == 0, outcome.err
    clone = Guest.existing("twin")
    clone.assert_continues(0, guest.snapshot_count("s1"))
    for origin, made in outcome.json["datasets"].items():
        assert encryption(made) == encryption(origin)
    assert snaporch("clone", "--delete", "twin").status == 0
    guest.wait_count()
    guest.assert_undisturbed(mark)


def test_it_verifies(taken):
    outcome = snaporch("verify", "vault@s1", "--json")
    assert outcome.status == 0, outcome.err
    assert outcome.json["reached"] == "resumed"


def test_going_back_and_undoing_that(guest, taken):
    count, mark = guest.snapshot_count("s1"), guest.mark()
    snapshot(guest, "--name", "s2")
    newer = guest.snapshot_count("s2")
    restored = restore(guest, "s1", "--discard-newer")
    assert_restored(guest, mark, count)
    assert_clean(guest)
    guest.destroy()
    outcome = run("sh", restored["undo"])
    assert outcome.status == 0, outcome.err
    assert guest.snapshot_count("s2") == newer
    assert min(guest.disk_counts()) >= newer
    guest.start()


def test_the_safety_copy_holds_no_clear_text(guest, taken):
    """What cannot be compressed is found again in a stream, unless that is encrypted."""
    secret = os.urandom(4096)
    place = must("zfs", "get", "-H", "-o", "value", "mountpoint", "tank/locked/web").strip()
    (Path(place) / "secret").write_bytes(secret)
    must("zfs", "snapshot", "tank/locked/web@control")
    clear = subprocess.run(
        ["zfs", "send", "tank/locked/web@control"], check=True, stdout=subprocess.PIPE
    ).stdout
    assert secret in clear
    restored = restore(guest, "s2", "--discard-newer", "--also-roll-back")
    streams = list(Path(restored["undo"]).parent.glob("*.zfs"))
    assert len(streams) >= len(DISKS)
    assert sum(path.stat().st_size for path in streams) > len(secret)
    for path in streams:
        assert secret not in path.read_bytes()


def test_without_the_key_it_is_refused_before_anything_is_touched(guest, taken):
    guest.destroy()
    try:
        for root in ROOTS:
            run("zfs", "unmount", "-f", f"{root}/web")
            run("zfs", "unmount", "-f", root)
            # udev reads a volume after a process has closed it, and keeps it busy meanwhile
            forget = ("zfs", "unload-key", "-r", root)
            wait_for(lambda words=forget: run(*words).status == 0, f"{root} without its key")
        before = must("zfs", "list", "-H", "-t", "all", "-o", "name")
        for words in (
            ("snapshot", "vault"),
            ("restore", "vault@s2", "--yes"),
            ("restore", "vault@s2", "--yes", "--cold"),
            ("verify", "vault@s2"),
        ):
            outcome = snaporch(*words)
            assert outcome.status == 5, (words, outcome.err)
            assert "Traceback" not in outcome.err
        assert must("zfs", "list", "-H", "-t", "all", "-o", "name") == before
    finally:
        for root in ROOTS:
            if must("zfs", "get", "-H", "-o", "value", "keystatus", root).strip() != "available":
                must("zfs", "load-key", "-r", root)
        must("zfs", "mount", "-a")
        for disk in DISKS:
            if disk.kind == "zvol":
                zvol_node(disk.where)  # it comes some time after its key
    guest.start()
    assert_clean(guest)
