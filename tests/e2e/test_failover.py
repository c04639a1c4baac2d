"""A guest goes to the host of its replica and comes back, and never runs on both."""

import json
import os
import shlex
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from cut_line import begins, cut
from guests.disks import Disk
from guests.guest import Guest
from support import (
    JOURNAL,
    accepting,
    assert_clean,
    must,
    one_line_error,
    run,
    snaporch,
    started,
    wait_for,
    zfs_snapshots,
)
from two_hosts import STATE, two_hosts

TPM_STATES = Path("/var/lib/libvirt/swtpm")
DISKS = [Disk("file", "tank/plain"), Disk("zvol", "flash/plain")]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with two_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


def add_tpm(domain):
    tpm = ET.SubElement(domain.find("devices"), "tpm", model="tpm-tis")
    ET.SubElement(tpm, "backend", type="emulator", version="2.0")


AWAY = (
    "zfs set canmount=noauto tank/plain; zfs unmount tank/plain; "
    "zfs rename tank/plain tank/plain-before"
)
UEFI = {"firmware": "uefi", "mutate": add_tpm}


@pytest.fixture
def guest(hosts, request):
    made = Guest.create("plain", disks=DISKS, **getattr(request, "param", {}))
    made.uuid = must("virsh", "domuuid", "plain").strip()
    yield made
    hosts.reset()
    run("snaporch", "fence", "--remove", "--yes", "plain")
    made.remove()
    for copy in ("offsite", "home", "vault", "cellar"):
        run("zfs", "destroy", "-r", f"backup/{copy}")


ACCEPTED = accepting("plain")


def fail_over(replica):
    outcome = snaporch("failover", "plain", "--to", replica, "--yes", "--json", *ACCEPTED)
    assert outcome.status == 0, outcome.err
    return outcome.json


def rebuild(guest, replica, expected, *options):
    """It goes on at the count that all its disks had when it was ended."""
    mark = guest.mark()
    words = ("rebuild", "plain", "--from", replica, "--yes", "--json")
    outcome = snaporch(*words, *ACCEPTED, *options)
    assert outcome.status == 0, outcome.err
    first = guest.first_count_since(mark)
    assert first in (expected, expected + 1), f"went on at {first:#x}, not at {expected:#x}"
    guest.wait_count()
    assert not guest.cold_boots_since(mark)
    assert not guest.bad_since(mark)
    assert_clean(guest)
    return outcome.json[0]


def guids():
    return [guid(disk.where) for disk in DISKS]


def seed(snapshot):
    """What the page has for increments from the first replication on; the copies' GUIDs."""
    must("zfs", "create", "-p", "-o", "mountpoint=none", "backup/home")
    found = {}
    for disk in DISKS:
        copy = f"backup/home/{disk.where.replace('/', ':')}"
        send = f"zfs send -Lce {disk.where}@{snapshot} | zfs receive -u -o readonly=on {copy}"
        must("sh", "-ec", send)
        found[copy] = guid(copy)
    return found


def guid(dataset):
    return must("zfs", "get", "-H", "-o", "value", "guid", dataset)


def assert_fenced(guest):
    assert guest.state() == "shut off"
    refused = run("virsh", "start", "plain")
    assert refused.status != 0
    assert "is fenced" in refused.err
    assert guest.state() == "shut off"
    assert (STATE / "fences" / guest.uuid).exists()


@pytest.mark.parametrize(
    "guest", [{"firmware": "uefi", "mutate": add_tpm}], indirect=True, ids=[""]
)
def test_it_goes_there_and_back_and_no_write_is_lost(hosts, guest):
    words = ("failover", "plain", "--to", "offsite", "--yes", "--quiet")
    one_line_error(snaporch(*words), 5, "goes to another host", shlex.join(ACCEPTED))
    assert guest.state() == "running"
    done = fail_over("offsite")
    assert shlex.join(ACCEPTED) in done["command"]
    expected, datasets = guest.snapshot_count(done["snapshot"]), guids()
    assert_fenced(guest)
    must("virsh", "autostart", "plain")
    status = snaporch("status")
    assert status.status == 10
    assert "is fenced: it was failed over" in status.out + status.err
    one_line_error(snaporch("snapshot", "plain"), 5, "is fenced")
    words = ("--from", "offsite", "--yes", "--quiet")
    one_line_error(snaporch("rebuild", "plain", *words), 5, "is older than its fence")
    assert snaporch("rebuild", "--all", *words).status == 5
    assert_fenced(guest)

    hosts.change()
    assert guest.state() == "undefined"
    rebuild(guest, "offsite", expected)
    assert list(TPM_STATES.glob(f"{guest.uuid}/tpm2/*.permall"))
    back = fail_over("home")
    assert_fenced(guest)
    expected = guest.snapshot_count(back["snapshot"])

    hosts.change()
    assert_fenced(guest)
    os.chown("/tank/plain/plain-0.raw", 1, 1)  # no data: it prevents no increment
    must("zpool", "sync")
    document = rebuild(guest, "home", expected)
    assert document["snapshot"] == back["snapshot"]
    assert guids() == datasets  # the same datasets, which got an increment
    no_programs = must("zfs", "get", "-Ho", "value", "setuid,exec,devices", "tank/plain")
    assert no_programs.split() == ["off"] * 3
    assert zfs_snapshots(f"tank/plain@{done['snapshot']}")
    assert not (STATE / "fences" / guest.uuid).exists()
    assert snaporch("snapshot", "plain").status == 0

    # once more, off: without RAM, and what is there already is not sent again
    must("virsh", "destroy", "plain")
    third = fail_over("offsite")
    hosts.change()
    outcome = snaporch("rebuild", "plain", "--from", "offsite", "--yes", "--json", *ACCEPTED)
    assert (outcome.status, guest.state()) == (0, "shut off"), outcome.err
    assert outcome.json[0]["snapshot"] == third["snapshot"]
    guest.start()


@pytest.mark.daily(2, "long")
def test_what_was_written_to_the_fenced_datasets_is_not_lost(hosts, guest):
    done = fail_over("offsite")
    expected = guest.snapshot_count(done["snapshot"])
    copies = seed(done["snapshot"])
    hosts.change()
    rebuild(guest, "offsite", expected)
    fail_over("home")
    assert {copy: guid(copy) for copy in copies} == copies  # they got increments
    expected = guest.snapshot_count(
        must("zfs", "list", "-H", "-o", "name", "-t", "snapshot", "-s", "createtxg", "tank/plain")
        .split()[-1]
        .partition("@")[2]
    )
    guest.undefine()
    hosts.change()
    Path("/tank/plain/new").write_text("a write of another program")
    must("zpool", "sync")
    words = ("rebuild", "plain", "--from", "home", "--yes", "--quiet", *ACCEPTED)
    one_line_error(snaporch(*words), 5, "has been modified", "zfs rollback -r tank/plain@", AWAY)
    assert Path("/tank/plain/new").exists()
    assert_fenced(guest)
    # as the error says: all of this dataset comes, and an increment into the other one
    must("sh", "-ec", AWAY)
    rebuild(guest, "home", expected)
    assert not (STATE / "fences" / guest.uuid).exists()
    must("zfs", "destroy", "-r", "tank/plain-before")


@pytest.mark.daily(2, "long")
def test_it_goes_by_append_only_replicas_that_cannot_read_its_ram_and_back(hosts, guest, tmp_path):
    must("age-keygen", "-o", str(tmp_path / "key"))
    recipient = must("age-keygen", "-y", str(tmp_path / "key")).strip()
    options = ("--host", "root@localhost", "--identity", str(tmp_path / "key"))
    datasets = guids()
    for replica in ("vault", "cellar"):
        hosts.add_closed(replica, recipient)
        done = fail_over(replica)
        assert done["command"].endswith(" --identity FILE")
        expected = guest.snapshot_count(done["snapshot"])
        assert_fenced(guest)
        hosts.change()
        words = ("rebuild", "plain", "--from", replica, *options[:2], "--yes", "--quiet")
        one_line_error(snaporch(*words), 5, "is encrypted for", "--identity")
        rebuild(guest, replica, expected, *options)
    assert guids() == datasets  # they got increments
    assert not (STATE / "fences" / guest.uuid).exists()


def fill(receiver, words):
    """Run a command while the receiving dataset has no room."""
    must("zpool", "sync")
    used = must("zfs", "get", "-Hpo", "value", "used", receiver).strip()
    must("zfs", "set", f"quota={used}", receiver)
    one_line_error(snaporch(*words), 8, "quota")
    must("zfs", "set", "quota=none", receiver)


QUIET = ("--yes", "--quiet", *ACCEPTED)
HANDSHAKE, TRANSFER = 2_000, 300_000
"""Bytes of a line: within its first connection; more than all that is asked before a transfer."""


@pytest.mark.daily(2, "long")
def test_a_cut_line_and_a_full_receiver_in_any_phase_leave_one_guest(hosts, guest):
    words = ("failover", "plain", "--to", "offsite", *QUIET)
    line, fence = hosts.line, STATE / "fences" / guest.uuid
    marks = ("zfs", "get", "-H", "-o", "value", "-r", "snaporch:ended", "backup/offsite")

    def asks_for_room():
        return "no" in run(*marks).out.split()

    for count, when in ((HANDSHAKE, begins), (TRANSFER, begins), (0, asks_for_room)):
        cut(line, words, count, when)
        assert not fence.exists()
        assert guest.state() == "running"
        guest.wait_count()
    cut(line, words, 0, fence.exists)
    assert_fenced(guest)
    fill("backup/offsite", words)
    cut(line, words, TRANSFER)
    assert_fenced(guest)
    expected, datasets = guest.snapshot_count(fail_over("offsite")["snapshot"]), guids()

    hosts.change()
    for count in (HANDSHAKE, TRANSFER):
        cut(line, ("rebuild", "plain", "--from", "offsite", *QUIET), count)
        assert guest.state() == "undefined"
    rebuild(guest, "offsite", expected)
    expected = guest.snapshot_count(fail_over("home")["snapshot"])

    hosts.change()
    for count in (HANDSHAKE, TRANSFER):
        cut(line, ("rebuild", "plain", "--from", "home", *QUIET), count)
        assert_fenced(guest)
    rebuild(guest, "home", expected)
    assert guids() == datasets


def assert_late_writes_stop_it(words, last):
    """Each kind of disk is looked at, and one that is unchanged does not count as written."""
    places = {"flash/plain": "/dev/zvol/flash/plain", "tank/plain": "/tank/plain/plain-0.raw"}
    for dataset, place in places.items():
        must("dd", "if=/dev/urandom", f"of={place}", "bs=512", "count=1", "conv=notrunc,fsync")
        back = f"zfs rollback {dataset}@{last}"
        one_line_error(snaporch(*words), 9, f"{dataset} (", "got nothing", back)
        must(*back.split())
    # ZFS counts an import as a write to a volume, which is none
    must("zpool", "export", "flash")
    must("zpool", "import", "-d", "/dev/lab", "flash")
    must("udevadm", "settle")
    assert int(must("zfs", "get", "-Hpo", "value", f"written@{last}", "flash/plain"))


def test_what_is_killed_before_the_fence_runs_on_and_afterwards_has_ended(hosts, guest):
    words = ("failover", "plain", "--to", "offsite", "--yes", "--quiet", *ACCEPTED)
    fence = STATE / "fences" / guest.uuid

    def seals():
        lines = [path.read_text() for path in JOURNAL.glob("*.jsonl")]
        return any('"manual"' in text and '"seal"' in text for text in lines)

    with started(*words, env={}) as process:
        wait_for(seals, "the last bundle is sealed")
        process.kill()
        process.wait()
    if not fence.exists():
        wait_for(lambda: guest.state() == "running", "the guardian resumes it")
        guest.wait_count()
        with started(*words, env={}) as process:
            while not fence.exists() and process.poll() is None:
                pass
            process.kill()
            process.wait()
    wait_for(lambda: guest.state() == "shut off", "it ends")
    wait_for(lambda: not list(JOURNAL.glob("*.jsonl")), "the guardian recovers the run")
    assert_fenced(guest)
    found = json.loads(fence.read_text())
    assert_late_writes_stop_it(words, found["snapshot"])
    done = fail_over("offsite")
    assert guest.snapshot_count(done["snapshot"])
    copies = must("zfs", "get", "-H", "-o", "value", "-r", "snaporch:ended", "backup/offsite")
    assert copies.split().count("yes") == len(DISKS)
    must("snaporch", "fence", "--remove", "--yes", "plain")
    guest.start()
