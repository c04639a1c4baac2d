"""What comes from a replica is checked before ZFS gets it; ``zfs send`` is a script here."""

import hashlib
import json
import os
import struct
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fakes import zfs_get
from fakes.world import Heard

from snaporch.config import Replica
from snaporch.errors import InterruptedRunError, NotFoundError, RefusedError
from snaporch.interrupt import Interrupt
from snaporch.model import PoolSnapshot
from snaporch.rebuild.replica_source import ReplicaSource
from snaporch.remote_host import CommandError
from snaporch.replication.interface import ReplicaError
from snaporch.replication.received_bundles import ReceivedBundles
from snaporch.replication.resume_transfer import NO_TOKEN
from snaporch.replication.unsent_files import unsent_files
from snaporch.zfs import PoolError

ZFS = """#!/bin/sh
echo "$@" >>{place}/words
case " $* " in *" -nP "*) printf 'size\\t500\\n'; exit 0;; esac
cat {place}/stream
cat {place}/errors >&2
exit $(cat {place}/status)
"""
UUID = "4b1d2f0e-0000-4000-8000-000000000001"
SNAPSHOT = PoolSnapshot("tank:web", "s1", 7, 1, datetime(2026, 1, 1, tzinfo=UTC), {})
REST = b"the rest of the stream" * 1000


def header(name=b"tank/web@s1", *, guid=7, version=1):
    given = 0, 0, 0x2F5BACBAC, version, 0, 2, 0, guid, 0, name
    return struct.pack("<IIQQQIIQQ256s", *given)


class Machine:
    """This machine, whose pool is the replica."""

    def __init__(self, place):
        self.place = place
        self.interrupt = Interrupt()
        section = Replica(dataset="backup/kvm", bundles=place / "bundles")
        self.source = ReplicaSource("nas", section, self.interrupt, Heard())
        self.sends(header() + REST)

    def sends(self, stream, status=0, errors=""):
        (self.place / "stream").write_bytes(stream)
        (self.place / "status").write_text(str(status))
        (self.place / "errors").write_text(errors)

    def receive(self, base="", token=NO_TOKEN, *, raw=False, receiver="cat >got"):
        words = ["sh", "-c", f"cd {self.place} && {receiver}"]
        self.source.receive(SNAPSHOT, base, token, words, raw=raw)

    @property
    def got(self):
        path = self.place / "got"
        return path.read_bytes() if path.exists() else None

    @property
    def words(self):
        return (self.place / "words").read_text().splitlines()[-1]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "zfs"
    program.parent.mkdir()
    program.write_text(ZFS.format(place=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return Machine(tmp_path)


def test_the_newest_manifest_of_each_guest_is_read_at_once(machine):
    bundles = machine.place / "bundles"
    other = UUID.replace("1", "2")
    for reference, text in (
        (f"{UUID}/20260101T000000Z-a", b"old"),
        (f"{UUID}/20260102T000000Z-a", b"new\n\xff"),
        (f"{UUID}/.20260103T000000Z-a.partial", b"being written"),
        (f"{other}/20260101T000000Z-b", None),
        ("no-uuid/20260101T000000Z-c", b"x"),
    ):
        (bundles / reference).mkdir(parents=True)
        if text is not None:
            (bundles / reference / "manifest.json").write_bytes(text)
    (bundles / "empty").mkdir()
    (bundles / "file").write_text("x")
    assert machine.source.newest_manifests() == {
        f"{UUID}/20260102T000000Z-a": "new\n\udcff",
        f"{other}/20260101T000000Z-b": "",
    }


def test_large_manifests_keep_no_other_from_being_read(machine):
    """A host that was taken over may store many of them, under UUIDs that it has made up."""
    bundles, run = machine.place / "bundles", "20260101T000000Z-a"
    honest, huge = UUID.replace("1", "f"), UUID.replace("1", "0")
    made_up = [f"{number:08}{UUID[8:]}" for number in range(40)]
    texts = dict.fromkeys(made_up, b"x" * (1 << 20))
    for uuid, text in {**texts, huge: b"x" * (1 << 20) + b"x", honest: b"true"}.items():
        (bundles / uuid / run).mkdir(parents=True)
        (bundles / uuid / run / "manifest.json").write_bytes(text)
    (bundles / honest / "not a run").mkdir()
    found = machine.source.newest_manifests()
    assert (found[f"{honest}/{run}"], found[f"{huge}/{run}"]) == ("true", "")
    sizes = [len(found[f"{uuid}/{run}"]) for uuid in made_up]
    assert sizes == [1 << 20] * 31 + [0] * 9


def test_a_snapshot_is_received_byte_by_byte(machine):
    machine.receive()
    assert machine.got == header() + REST
    assert machine.words == "send -Lc backup/kvm/tank:web@s1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base": "s0"}, "send -Lc -i @s0 backup/kvm/tank:web@s1"),
        ({"raw": True}, "send -w backup/kvm/tank:web@s1"),
        ({"token": "1-ab-cd-789c"}, "send -t 1-ab-cd-789c"),
        ({"token": "1-ab-cd-789c", "raw": True}, "send -w -t 1-ab-cd-789c"),
    ],
)
def test_what_is_asked_for(machine, options, words):
    machine.receive(**options)
    assert machine.words == words


@pytest.mark.parametrize("token", ["x; rm -rf /", "-R", "1-zz-ab-78"])
def test_a_token_without_its_form_is_not_used(machine, token):
    with pytest.raises(RefusedError, match="no valid form"):
        machine.receive(token=token)
    assert machine.got is None


@pytest.mark.parametrize(
    "stream", [header(b"tank/web@s2"), header(guid=8), header(version=2), b"x" * 400]
)
def test_another_stream_reaches_zfs_never(machine, stream):
    machine.sends(stream + REST)
    with pytest.raises(RefusedError):
        machine.receive()
    assert machine.got is None


def test_why_the_replica_cannot_send_is_reported(machine):
    machine.sends(b"", 1, "cannot open 'backup/kvm/tank:web': dataset does not exist\n")
    with pytest.raises(ReplicaError, match="dataset does not exist") as raised:
        machine.receive()
    assert raised.value.step == "try again; it continues where it stopped"
    machine.sends(header() + REST, 1, "warning: the line was cut\n")
    with pytest.raises(ReplicaError, match="the line was cut"):
        machine.receive()


def test_why_zfs_here_cannot_receive_is_reported(machine):
    failing = "head -c 400 >/dev/null; echo 'cannot receive: out of space'; exit 1"
    with pytest.raises(ReplicaError, match="cannot receive: out of space"):
        machine.receive(receiver=failing)


def test_a_signal_ends_a_transfer(machine):
    machine.interrupt.signum = 15
    with pytest.raises(InterruptedRunError):
        machine.receive()


def test_an_append_only_replica_cannot_be_read(tmp_path):
    section = Replica(host="nas", dataset="b", bundles=tmp_path, append_only=True)
    with pytest.raises(RefusedError, match="may not read from it"):
        ReplicaSource("nas", section, Interrupt(), Heard())


def test_a_bundle_that_cannot_be_read_there_is_reported(machine, tmp_path):
    (tmp_path / "here").mkdir()
    received = ReceivedBundles(tmp_path / "here", "")
    content = b"{}"
    sums = {"manifest.json": hashlib.sha256(content).hexdigest()}
    unsent = unsent_files({"manifest.json": 2}, sums, {})
    reference = "4b1d2f0e-0000-4000-8000-000000000001/r-1"
    with pytest.raises(ReplicaError, match="can't cd to"):
        machine.source.fetch(reference, unsent, received)
    there = tmp_path / "bundles" / reference
    there.mkdir(parents=True)
    (there / "manifest.json").write_bytes(content)
    assert machine.source.fetch(reference, unsent, received) == []


BORN = {"guid": "7", "createtxg": "1", "creation": "1"}
TABLE = {
    "backup/kvm": {},
    "backup/kvm/tank:web@s1": {
        **BORN,
        "snaporch:uuid": "..",
        "snaporch:domain": "web",
        "snaporch:run": "a/../b",
        "snaporch:verified": "text of any form",
    },
    "backup/kvm/tank:web/below@s1": BORN,
}
LISTS = """#!{python}
import json, sys
sys.path.insert(0, {tests!r})
from fakes import zfs_get
*words, root = sys.argv[1:]
assert (words[4:6], root) == (["-d", "2"], "backup/kvm"), sys.argv
print(zfs_get.answer(words, json.loads({table!r})), end="")
"""


def test_all_copies_are_listed_by_one_name_and_impossible_marks_are_dropped(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "zfs"
    program.parent.mkdir()
    tests = str(Path(zfs_get.__file__).parents[1])
    table = json.dumps(TABLE)
    program.write_text(LISTS.format(python=sys.executable, tests=tests, table=table))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    section = Replica(dataset="backup/kvm", bundles=tmp_path / "bundles")
    (found,) = ReplicaSource("nas", section, Interrupt(), Heard()).snapshots()
    assert (found.full_name, found.guid) == ("tank:web@s1", 7)
    assert found.properties == {"domain": "web", "verified": "text of any form"}


ABSENT = """#!/bin/sh
case "$1" in
    get) echo "cannot open 'backup/kvm': dataset does not exist" >&2; exit 1;;
    list) printf '{name}\tfilesystem\n';;
esac
"""


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("backup", NotFoundError, "has no dataset backup/kvm; is its pool imported.*replicate"),
        ("backup/kvm", PoolError, "cannot open"),
    ],
)
def test_a_replica_without_its_dataset_was_never_copied_to(machine, tmp_path, name, error, match):
    (tmp_path / "bin" / "zfs").write_text(ABSENT.format(name=name))
    with pytest.raises(error, match=match):
        machine.source.snapshots()


def test_a_command_line_that_is_too_long_is_an_error(machine):
    name = "a" * 200_000
    with pytest.raises(ReplicaError, match="Argument list too long"):
        machine.source.fetch(
            f"{UUID}/r1",
            unsent_files({name: 1}, {name: "0" * 64}, {}),
            ReceivedBundles(machine.place, ""),
        )
    (machine.place / "bundles" / UUID / "r1").mkdir(parents=True)
    with pytest.raises(CommandError, match="Argument list too long"):
        machine.source.damaged(f"{UUID}/r1", {name: "0" * 64})
