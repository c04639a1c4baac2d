"""The host's side of append-only copies; the other machine is a fake ssh that answers requests."""

import hashlib
import json
import shutil
import sys
from math import inf

import pytest
from fakes.pool import FakePool
from fakes.world import Heard

from snaporch.config import Replica
from snaporch.errors import SnaporchError
from snaporch.interrupt import Interrupt
from snaporch.replication.append_only import AppendOnlyDestination
from snaporch.replication.destination import open_replica, unavailable_reason, weakness_of
from snaporch.replication.interface import BundleCopy, ReplicaError
from snaporch.replication.receive_request import Verb, parse_request
from snaporch.replication.request_command import MAX_ARGUMENT_BYTES

UUID = "4b1d2f0e-0000-4000-8000-000000000001"
ALL = 1 << 62
CHECK = {"dataset": "backup/vm1", "release": "2.3.9", "permissions": [], "root": False}
SSH = """#!{python}
import json, os, pathlib, sys
place = pathlib.Path({place!r})
with (place / "asked").open("a") as asked:
    asked.write(json.dumps(sys.argv[1:]) + "\\n")
verb = sys.argv[-1].split(" ")[2]
if verb in ("receive", "store"):
    data = sys.stdin.buffer.read()
    (place / f"{{verb}}.sent").open("ab").write(data)
answer = place / f"{{verb}}.answer"
print(answer.read_text() if answer.exists() else "{{}}")
failure = place / f"{{verb}}.failure"
if failure.exists():
    print(failure.read_text(), file=sys.stderr)
    sys.exit(5)
"""
ZFS = """#!/bin/sh
case "$1 $2" in
    "send -nP") printf 'size\\t7\\n' ;;
    send*) printf '%s\\n' "$*" ;;
esac
"""


class Machine:
    """The replica's machine."""

    def __init__(self, place, monkeypatch):
        self.place = place
        tools = place / "tools"
        tools.mkdir()
        (tools / "ssh").write_text(SSH.format(python=sys.executable, place=str(place)))
        (tools / "zfs").write_text(ZFS)
        for each in tools.iterdir():
            each.chmod(0o755)
        monkeypatch.setenv("PATH", str(tools), prepend=":")
        real = shutil.which
        monkeypatch.setattr(
            shutil, "which", lambda name, **more: None if name == "mbuffer" else real(name, **more)
        )
        self.pool, self.heard = FakePool("tank/web"), Heard()
        given = self.replica(), self.pool, Interrupt(), self.heard
        self.there = AppendOnlyDestination("nas", *given)
        self.answer("check", CHECK | {"encrypted": False})
        self.answer("snapshots", {"snapshots": []})
        self.answer("state", {"written": "0", "token": "-"})

    @staticmethod
    def replica(**more):
        options = {"host": "vm1@nas", "dataset": "backup/vm1", "bundles": "/b", "append_only": True}
        return Replica(**{**options, **more})

    def answer(self, verb, document):
        (self.place / f"{verb}.answer").write_text(json.dumps(document))

    def fail(self, verb, text):
        (self.place / f"{verb}.failure").write_text(text)

    def asked(self):
        """Each request, as the other machine would understand it."""
        words = [json.loads(line) for line in (self.place / "asked").read_text().splitlines()]
        assert all(each[-2] == "vm1@nas" and "BatchMode=yes" in each for each in words)
        return [parse_request(each[-1]) for each in words]

    def sent(self, verb):
        return (self.place / f"{verb}.sent").read_bytes()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def take(machine, *names):
    for name in names:
        machine.pool.snapshot([f"tank/web@{name}"], {})


def listed(machine, name, **more):
    (found,) = [s for s in machine.pool.snapshots(["tank/web"]) if s.name == name]
    document = {"copy": "tank:web", "name": name, "guid": found.guid, "createtxg": 5, "created": 1}
    return {**document, "properties": {}, **more}


def test_an_answer_that_would_take_all_memory_is_refused(machine):
    (machine.place / "bundles.answer").write_text('{"bundles":[' + "[]," * (6 << 20) + "[]]}")
    with pytest.raises(ReplicaError, match="prints over 16 MiB"):
        machine.there.bundles(UUID)


def test_snapshots_have_the_names_of_this_host(machine):
    take(machine, "s1")
    machine.answer("snapshots", {"snapshots": [listed(machine, "s1", properties={"run": "r"})]})
    (found,) = machine.there.snapshots(["tank/web", "tank/other"])
    assert (found.full_name, found.properties) == ("tank/web@s1", {"run": "r"})
    assert machine.asked()[0].copies == ("tank:web", "tank:other")


@pytest.mark.parametrize(
    "answer",
    [
        "", "x", "[]", "{}", '{"snapshots": 1}', '{"snapshots": [1]}', "[" * 50_000,
        ('{"snapshots": [{"copy": "other", "name": "s", "guid": 1, "createtxg": 1, "created": 1,'
        ' "properties": {}}]}'),
        ('{"snapshots": [{"copy": "tank:web", "name": 7, "guid": 1, "createtxg": 1, "created": 1,'
        ' "properties": {}}]}'),
        ('{"snapshots": [{"copy": "tank:web", "name": "s", "guid": 1, "createtxg": 1, "created": 1,'
        ' "properties": {"run": 7}}]}'),
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_read_is_an_error(machine, answer):
    (machine.place / "snapshots.answer").write_text(answer)
    with pytest.raises(ReplicaError, match="its answer cannot be read"):
        machine.there.snapshots(["tank/web"])


def test_each_snapshot_is_sent_in_a_stream_of_its_own(machine):
    take(machine, "s1", "s2", "s3")
    machine.there.send("tank/web", raw=False, until=ALL)
    assert machine.sent("receive").decode().splitlines() == [
        "send -Lce tank/web@s1",
        "send -Lce -i tank/web@s1 tank/web@s2",
        "send -Lce -i tank/web@s2 tank/web@s3",
    ]
    received = [each for each in machine.asked() if each.verb is Verb.RECEIVE]
    assert [each.copy for each in received] == ["tank:web"] * 3


def test_an_encrypted_replica_gets_no_embedded_blocks(machine):
    take(machine, "s1")
    machine.answer("check", CHECK | {"encrypted": True})
    machine.there.send("tank/web", raw=False, until=ALL)
    assert machine.sent("receive") == b"send -Lc tank/web@s1\n"


def test_a_failed_transfer_is_one_line_with_a_command_for_the_admin(machine):
    take(machine, "s1")
    machine.fail("receive", "snaporch: zfs receive b/a@s: cannot receive new: out of space")
    machine.answer("state", {"written": "0", "token": "1-ab-f0-789c"})
    (machine.place / "tools" / "zfs").write_text(
        ZFS.replace("send*", '"send -nvP") exit 1 ;;\nsend*')
    )
    machine.answer("discard", {})
    with pytest.raises(ReplicaError) as caught:
        machine.there.send("tank/web", raw=False, until=ALL)
    assert caught.value.line() == (
        "nas: tank/web: cannot receive new: out of space; try again; if "
        "this error comes again, discard what arrived: zfs receive -A backup/vm1/tank:web "
        "(as root on vm1@nas)"
    )
    assert "begins again" in machine.heard.notes[0]
    assert any(each.verb is Verb.DISCARD for each in machine.asked())


def test_a_stream_that_the_replica_refuses_is_named(machine):
    take(machine, "s1")
    machine.fail("receive", "snaporch: zfs receive: refused: it is a clone\nmbuffer: x")
    with pytest.raises(ReplicaError) as caught:
        machine.there.send("tank/web", raw=False, until=ALL)
    assert caught.value.reason == "zfs receive: refused: it is a clone"


def test_the_error_of_the_replica_is_the_error_here(machine):
    machine.fail("bundles", "Warning: of ssh\nsnaporch: /b: No such file; it must exist\nmore")
    with pytest.raises(ReplicaError) as caught:
        machine.there.bundles(UUID)
    assert caught.value.line() == "nas: vm1@nas: /b: No such file; it must exist"
    machine.fail("bundles", "bash: line 1: snaporch: command not found")
    with pytest.raises(ReplicaError, match="vm1@nas: bash: line 1: snaporch: command not found"):
        machine.there.bundles(UUID)


def test_a_machine_that_cannot_be_reached_is_an_error(machine):
    (machine.place / "tools" / "ssh").write_text("#!/bin/sh\necho no route >&2; exit 255\n")
    with pytest.raises(SnaporchError, match="cannot be reached: no route; see: ssh"):
        machine.there.snapshots(["tank/web"])


def test_marks_are_asked_for_in_requests_of_bounded_size_in_their_order(machine):
    marks = {f"tank/web@s{n}": {"note": "x" * 1000} for n in range(200)}
    machine.answer("mark", {"late": ["tank:web@s3"]})
    assert machine.there.mark(marks) == ["tank/web@s3"]
    asked = machine.asked()
    assert 3 < len(asked) < 10
    assert [name for each in asked for name in each.marks] == [f"tank:web@s{n}" for n in range(200)]
    words = (machine.place / "asked").read_text().splitlines()
    assert max(len(json.loads(line)[-1]) for line in words) < MAX_ARGUMENT_BYTES * 4 / 3 + 100
    (note,) = machine.heard.notes
    assert "a newer snapshot has its own: zfs set snaporch:note=xx" in note
    assert "tank:web@s3 (as root on " in note


def test_a_snapshot_that_was_not_asked_for_is_no_part_of_a_command(machine):
    machine.answer("mark", {"late": ["tank:web@s2", "x; reboot"]})
    assert machine.there.mark({"tank/web@s1": {"level": "ram"}}) == []
    assert machine.heard.notes == []


def test_an_impossible_mark_is_not_sent(machine):
    machine.answer("mark", {"late": []})
    machine.there.mark({"tank/web@s1": {"domain": "a\nb", "level": "ram"}})
    assert [each.marks for each in machine.asked()] == [{"tank:web@s1": {"level": "ram"}}]


def test_an_encrypted_dataset_is_not_sent(machine):
    take(machine, "s1")
    with pytest.raises(ReplicaError, match="cannot protect the key"):
        machine.there.send("tank/web", raw=True, until=ALL)
    assert not (machine.place / "asked").exists()


def test_policies_are_asked_for_all_at_once(machine):
    machine.there.set_policies({"tank/a": "hourly", "tank/b": ""})
    assert [each.policies for each in machine.asked()] == [{"tank:a": "hourly", "tank:b": ""}]


def test_bundles_and_manifest_and_damage(machine):
    machine.answer("bundles", {"bundles": {
        "r-1": {"sizes": {"ram.save": 9}, "unread": 3.5}, "r-2": {"sizes": {}, "unread": None},
    }})  # fmt: skip
    found = {"r-1": BundleCopy({"ram.save": 9}, 3.5), "r-2": BundleCopy({}, inf)}
    assert machine.there.bundles(UUID) == found
    machine.answer("manifest", {"text": "\udcff{"})
    assert machine.there.manifest(f"{UUID}/r-1") == "\udcff{"
    machine.answer("damaged", {"damaged": ["ram.save"]})
    sums = {"ram.save": "0" * 64}
    assert machine.there.damaged(f"{UUID}/r-1", sums) == ["ram.save"]
    assert machine.asked()[-1].sums == sums


@pytest.fixture
def bundle(tmp_path):
    directory = tmp_path / "bundle"
    directory.mkdir()
    for name, data in (("domain.xml", b"<x/>"), ("manifest.json", b"{}"), ("ram.save", b"RAM" * 9)):
        (directory / name).write_bytes(data)
    (directory / "manifest.json.new").write_bytes(b"a leftover")
    return directory


def sums(bundle):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in bundle.iterdir()
        if path.suffix != ".new"
    }


@pytest.mark.parametrize(
    ("there", "offsets", "sent"),
    [
        ({}, [0, 0, 0], b"<x/>{}" + b"RAM" * 9),
        ({"domain.xml": 4}, [4, 0, 0], b"{}" + b"RAM" * 9),
        ({"domain.xml": 4, "manifest.json": 2, "ram.save": 3}, [4, 2, 3], b"RAM" * 8),
        ({"domain.xml": 4, "manifest.json": 2, "ram.save": 27}, [4, 2, 27], b""),
        ({"domain.xml": 2, "ram.save": 3}, [2, 0, 0], b"/>{}" + b"RAM" * 9),
        ({"ram.save": 3}, [0, 0, 0], b"<x/>{}" + b"RAM" * 9),
        ({"domain.xml": 99, "other": 3}, [0, 0, 0], b"<x/>{}" + b"RAM" * 9),
        ({"domain.xml": 1, "manifest.json": 1}, [1, 0, 0], b"x/>{}" + b"RAM" * 9),
    ],
)
def test_a_bundle_is_sent_from_where_it_stopped(machine, bundle, there, offsets, sent):
    machine.answer("begun", {"sizes": there})
    machine.answer("store", {"damaged": []})
    assert machine.there.store(bundle, f"{UUID}/r-1", sums(bundle)) == []
    files = machine.asked()[-1].files
    assert [each.offset for each in files] == offsets
    assert {each.name: each.sha256 for each in files} == sums(bundle)
    assert machine.sent("store") == sent


def test_damage_and_refusal_of_a_bundle(machine, bundle):
    machine.answer("begun", {"sizes": {}})
    machine.answer("store", {"damaged": ["ram.save"]})
    assert machine.there.store(bundle, f"{UUID}/r-1", sums(bundle)) == ["ram.save"]
    machine.fail("store", "snaporch: u/r-1: the replica has a bundle of this run")
    with pytest.raises(ReplicaError) as caught:
        machine.there.store(bundle, f"{UUID}/r-1", sums(bundle))
    assert caught.value.line() == (
        f"nas: bundle {UUID}/r-1: u/r-1: the replica has a bundle of this run"
    )


def test_a_file_that_is_missing_here_is_damage_here(machine, bundle):
    wanted = sums(bundle)
    (bundle / "ram.save").unlink()
    assert machine.there.store(bundle, f"{UUID}/r-1", wanted) == ["ram.save"]
    assert not (machine.place / "asked").exists()


def test_a_bundle_that_is_gone_here_is_an_error(machine, tmp_path):
    with pytest.raises(ReplicaError, match="No such file"):
        machine.there.store(tmp_path / "gone", f"{UUID}/r-1", {})


def test_the_dataset_of_copies_is_never_created_from_here(machine):
    machine.there.create()
    assert [each.verb for each in machine.asked()] == [Verb.CHECK]


@pytest.mark.parametrize("act", [lambda m: m.there.create(), lambda m: m.there.is_encrypted()])
def test_another_dataset_than_the_configured_one_is_refused(machine, act):
    machine.answer("check", CHECK | {"dataset": "backup/vm2"})
    with pytest.raises(ReplicaError, match="receives below backup/vm2, as authorized_keys says"):
        act(machine)


def test_why_it_is_unavailable_and_how_it_is_protected(machine):
    replica = machine.replica()
    assert (unavailable_reason(replica, Interrupt()), weakness_of(replica, Interrupt())) == ("", "")
    machine.answer("check", CHECK | {"release": "2.2.7", "permissions": ["receive"]})
    assert unavailable_reason(replica, Interrupt()) == ""
    assert "2.2.7 there is older than 2.3.2" in weakness_of(replica, Interrupt())
    machine.fail("check", "snaporch: backup/vm1: dataset does not exist")
    assert unavailable_reason(replica, Interrupt()) == "vm1@nas: backup/vm1: dataset does not exist"
    assert weakness_of(replica, Interrupt()) == ""
    assert weakness_of(Replica(dataset="backup/vm1", bundles="/b"), Interrupt()) == ""


def test_a_replica_is_opened_as_configured(world):
    options = {"dataset": "backup/kvm", "bundles": "/backup/nas", "host": "vm1@nas"}
    for append_only in (True, False):
        replica = Replica(**options, append_only=append_only)
        config = world.context.config.model_copy(update={"replica": {"nas": replica}})
        world.context.config = config
        opened = open_replica(world.context, "nas")
        assert isinstance(opened, AppendOnlyDestination) is append_only


def test_an_append_only_replica_is_on_another_host():
    with pytest.raises(ValueError, match="append_only needs host"):
        Replica(dataset="backup/kvm", bundles="/b", append_only=True)


@pytest.mark.parametrize("size", [10**400, (1 << 50) + 1, -1])
def test_a_size_that_cannot_be_is_an_error(machine, size):
    machine.answer("bundles", {"bundles": {"r": {"unread": None, "sizes": {"ram.save": size}}}})
    for ask in (
        lambda: machine.there.bundles(UUID),
        lambda: machine.there.damaged(f"{UUID}/r", {"ram.save": "0" * 64}),
    ):
        with pytest.raises(ReplicaError, match="its answer cannot be read"):
            ask()
    machine.answer("begun", {"sizes": {"ram.save": size}})
    with pytest.raises(ReplicaError, match="its answer cannot be read"):
        machine.there.store(machine.place / "tools", f"{UUID}/r", {})


@pytest.mark.parametrize("text", ["\ud800", "a\udcff\ud83d"])
def test_a_text_that_no_bytes_have_is_an_error(machine, text):
    machine.answer("manifest", {"text": text})
    with pytest.raises(ReplicaError, match="its answer cannot be read"):
        machine.there.manifest(f"{UUID}/r")


def test_a_text_may_have_bytes_that_are_not_utf_8(machine):
    machine.answer("manifest", {"text": "\udc80\udcff"})
    assert machine.there.manifest(f"{UUID}/r") == "\udc80\udcff"
