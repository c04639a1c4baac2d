import errno
import hashlib
import json
import os
import shlex
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.age_command import recipient
from fakes.pool import FakePool
from fakes.world import Heard

from snaporch.bundle.store import COPY_NAME
from snaporch.config import Config, Replica
from snaporch.errors import InterruptedRunError
from snaporch.interrupt import Interrupt
from snaporch.model import PoolSnapshot
from snaporch.remote_host import CommandError, Host, ssh_words
from snaporch.replication import destination
from snaporch.replication.destination import (
    ReplicaDestination,
    has_encrypted_bundles,
    has_encrypted_copies,
    open_replica,
    unavailable_reason,
)
from snaporch.replication.interface import BundleCopy, ReplicaError
from snaporch.replication.replica_bundles import ReplicaBundles
from snaporch.replication.transfer import Transfers
from snaporch.zfs import PoolError
from snaporch.zfs.remote import RemoteZfs

ALL = 1 << 62
"""A txg after that of every snapshot."""

SYNC = """#!/bin/sh
printf 'sync %s' "$(basename "$2")" >>{log}
test ! -e {final} || printf ', final there' >>{log}
test ! -e {store}/.run-1.copying/copy.json || printf ', marked' >>{log}
echo >>{log}
"""
RSYNC = """#!/bin/sh
for place; do before=$last last=$place; done
mkdir "$last" && cp -r "$before." "$last"
"""
"""Neither a real disk nor a real rsync: what counts is the order."""


def test_a_copy_gets_its_name_when_it_is_on_stable_storage(tmp_path, monkeypatch):
    bundle, tools = tmp_path / "bundle", tmp_path / "tools"
    for directory in (bundle, tools):
        directory.mkdir()
    (bundle / "manifest.json").write_bytes(b"{}")
    store, log = tmp_path / "bundles" / "uuid", tmp_path / "log"
    final = store / "run-1"
    for name, text in (("sync", SYNC), ("rsync", RSYNC)):
        (tools / name).write_text(text.format(log=log, store=store, final=final))
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    to(tmp_path).store(bundle, "uuid/run-1", {})
    assert log.read_text().splitlines() == [
        "sync .run-1.copying, marked",
        "sync uuid, final there",
    ]
    assert sorted(path.name for path in final.iterdir()) == ["copy.json", "manifest.json"]


class Tools:
    """Commands that record their arguments, and do what the test defines."""

    def __init__(self, directory: Path, monkeypatch) -> None:
        self._directory, self._log = directory, directory / "log"
        monkeypatch.setenv("PATH", str(directory), prepend=":")

    def put(self, name, script=""):
        # One line, one write: several of them run at once in a pipe.
        note = f'call="$(printf {name}; printf "|%s" "$@")"; printf "%s\\n" "$call" >>{self._log}'
        path = self._directory / name
        path.write_text(f"#!/bin/sh\n{note}\n{script}\n")
        path.chmod(0o755)

    def called(self, name):
        """The words of each call."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [line.split("|")[1:] for line in lines if line.split("|")[0] == name]


@pytest.fixture
def tools(tmp_path, monkeypatch):
    directory = tmp_path / "tools"
    directory.mkdir()
    made = Tools(directory, monkeypatch)
    made.put("zfs")
    made.put("mbuffer", "cat")
    made.put("ssh", 'for last; do :; done; exec sh -c "$last"')  # the other machine is this one
    return made


@pytest.fixture
def transfers(monkeypatch):
    """The programs of each transfer that is ended when no data moves."""
    seen = []
    real = Transfers.run

    def run(self, *commands, **more):
        seen.append([words[0] for words in commands])
        return real(self, *commands, **more)

    monkeypatch.setattr(Transfers, "run", run)
    return seen


def without(command, monkeypatch):
    """It is not installed."""
    real = shutil.which
    monkeypatch.setattr(
        shutil, "which", lambda name, **more: real(name, **more) if name != command else None
    )


def to(tmp_path, *, pool=None, interrupt=None, heard=None, bundles=None, **more):
    if bundles is None:
        bundles = tmp_path / "bundles"
        bundles.mkdir(exist_ok=True)
    replica = Replica(**{"dataset": "backup/kvm", "bundles": bundles, **more})
    given = pool or FakePool(), interrupt or Interrupt(), heard or Heard()
    return ReplicaDestination("nas", replica, *given)


def test_datasets_have_the_same_names_as_here(tmp_path, monkeypatch):
    asked = []

    def copies(root, names):
        asked.extend([root, *names])
        return [PoolSnapshot(name, "s1", 7, 1, {}) for name in (root, *names)]

    monkeypatch.setattr(destination, "RemoteZfs", lambda _host: SimpleNamespace(copies=copies))
    (found,) = to(tmp_path).snapshots(["tank/web"])
    assert asked == ["backup/kvm", "backup/kvm/tank:web"]
    assert found == PoolSnapshot("tank/web", "s1", 7, 1, {})


CREATE = "zfs create -o mountpoint=none -o volmode=none backup/kvm"
NO_COPIES = """case "$*" in
  *"-o name,type"*) printf '%s' "$POOLS";;
  *) echo "cannot open 'backup/kvm': dataset does not exist" >&2; exit 1;;
esac"""


@pytest.mark.parametrize(
    ("dataset", "host", "command"),
    [
        ("backup/kvm", "root@nas", f"ssh root@nas '{CREATE}', and"),
        ("backup/kvm", "", f"if the copies are lost: {CREATE}, and all are sent again"),
        ("backup/vm/kvm", "", f"zfs create -o canmount=off backup/vm && {CREATE[:-4]}/vm/kvm, and"),
        ("backup/a/b", "", f"if the copies are lost: {CREATE[:-4]}/a/b, and all are sent again"),
    ],
)
def test_the_advice_for_lost_copies_mounts_nothing(
    tmp_path, tools, monkeypatch, dataset, host, command
):
    monkeypatch.setenv("POOLS", "backup\tfilesystem\nbackup/a\tfilesystem\n")
    tools.put("zfs", NO_COPIES)
    there = to(tmp_path, host=host, dataset=dataset)
    with pytest.raises(
        ReplicaError, match=r"the copies cannot be listed: .*does not exist"
    ) as caught:
        there.snapshots(["tank/web"])
    assert command in caught.value.step


@pytest.mark.parametrize("pools", ["", "backups\tfilesystem\nbackups/kvm\tfilesystem\n"])
def test_a_pool_that_is_not_imported_is_not_called_lost(tmp_path, tools, monkeypatch, pools):
    monkeypatch.setenv("POOLS", pools)
    tools.put("zfs", NO_COPIES)
    with pytest.raises(ReplicaError) as caught:
        to(tmp_path, host="root@nas").snapshots(["tank/web"])
    assert caught.value.line() == (
        "nas: backup/kvm: the copies cannot be listed: cannot open 'backup/kvm': dataset does not "
        "exist; is its pool imported? see: zpool import, on root@nas"
    )


@pytest.mark.parametrize(
    ("reason", "others"),
    [
        ("pool I/O is currently suspended", "printf 'backup\\tfilesystem\\n'"),
        ("dataset does not exist", "exit 1"),
    ],
    ids=["suspended", "no listing"],
)
def test_a_pool_of_which_little_is_known_is_not_called_lost(tmp_path, tools, reason, others):
    tools.put(
        "zfs",
        f"""case "$*" in
          *"-o name,type"*) {others} ;;
          *) echo "cannot open 'backup/kvm': {reason}" >&2; exit 1 ;;
        esac""",
    )
    with pytest.raises(ReplicaError, match=f"{reason}; see: zpool status, on this machine"):
        to(tmp_path).snapshots(["tank/web"])


def test_a_replica_that_cannot_be_reached_is_an_error(tmp_path, tools):
    tools.put("ssh", "echo no route to host >&2; exit 255")
    with pytest.raises(PoolError, match=r"cannot be reached: no route.*; see: ssh"):
        to(tmp_path, host="nas").snapshots(["tank/web"])


def test_an_unknown_host_key_is_shown_by_ssh_without_batch_mode(tmp_path, tools):
    tools.put("ssh", "echo Host key verification failed. >&2; exit 255")
    with pytest.raises(PoolError) as raised:
        to(tmp_path, host="nas").snapshots(["tank/web"])
    assert raised.value.line().endswith("reached: Host key verification failed; see: ssh nas")


def test_properties_are_set_on_the_copies(tmp_path, tools):
    to(tmp_path).mark({"tank/web@s1": {"level": "ram"}})
    assert tools.called("zfs") == [["set", "snaporch:level=ram", "backup/kvm/tank:web@s1"]]


def test_only_policies_that_differ_are_set(tmp_path, monkeypatch):
    marked = []
    there = {"backup/kvm/tank:a": "hourly", "backup/kvm/tank:b": "old", "backup/kvm/tank:c": "gone"}
    pool = SimpleNamespace(policies=lambda _names: there, mark=marked.append)
    monkeypatch.setattr(destination, "RemoteZfs", lambda _host: pool)
    to(tmp_path).set_policies({"tank/a": "hourly", "tank/b": "new", "tank/c": "", "tank/d": ""})
    assert marked == [
        {
            "backup/kvm/tank:b": {"snaporch:policy": "new"},
            "backup/kvm/tank:c": {"snaporch:policy": ""},
        }
    ]


def test_a_policy_is_set_or_removed_on_the_copy(tmp_path, tools):
    tools.put("zfs")
    pool = RemoteZfs(Host("", lambda: None))
    pool.mark({"b/x": {"snaporch:policy": "new"}, "b/y": {"snaporch:policy": ""}})
    assert tools.called("zfs") == [
        ["set", "snaporch:policy=new", "b/x"],
        ["inherit", "snaporch:policy", "b/y"],
    ]


def test_properties_that_cannot_be_set_on_one_copy_are_set_on_the_others(tmp_path, tools):
    tools.put("zfs", 'case "$*" in *@a) echo out of space >&2; exit 1 ;; esac')
    policy = "long " * 4000  # so that there are several scripts
    names = [f"b/x@{name}" for name in "abcdefgh"]
    with pytest.raises(PoolError, match="out of space"):
        RemoteZfs(Host("")).mark({name: {"snaporch:note": policy} for name in names})
    assert [words[-1] for words in tools.called("zfs")] == names


# -- sending ------------------------------------------------------------------------------------

ZFS = r"""case "$1 $2" in
    "list -Hp") printf 'backup/kvm\t{cipher}\n' ;;
    "list -H") printf 'backup/kvm\t0\t-\n'
        printf 'backup/kvm/tank:web\t%s\t%s\n' "$(cat {place}/written)" "$(cat {place}/token)" ;;
    get*)
        IFS=,
        for key in $9; do printf 'backup/kvm\t%s\t-\t-\n' "$key"; done
        test -e {place}/newest || exit 0
        for key in $9; do
            case "$key" in guid) value=$(cat {place}/newest) ;; c*) value=1 ;; *) value=- ;; esac
            printf 'backup/kvm/tank:web@s1\t%s\t-\t%s\n' "$key" "$value"
        done ;;
    "send -nvP") cat {place}/contents; test -s {place}/contents ;;
    "send -nP") printf 'full\ttank/web@s1\t7\nsize\t7\n' ;;
    send*)
        case "$*" in *-t*) cp {place}/resumed {place}/newest; echo - >{place}/token ;; esac
        printf '%s\n' "$*" ;;
    "receive -A") echo - >{place}/token ;;
    receive*) cat >>{place}/received ;;
esac"""
"""A replica that answers what is in the files: its token, the GUID of its newest snapshot."""
TOKEN = "1-ab-f0-789c"
CONTENTS = """resume token contents:
nvlist version: 0
\tobject = 0x2
\toffset = 0x860000
\tbytes = 0x885ce0
\ttoguid = {guid:#x}
\ttoname = tank/web@s1
\tcompressok = 1
{flags}full\t{name}\t12116112
size\t12116112
"""


class Sending:
    """A dataset with snapshots s1 to s3, and a replica."""

    def __init__(self, tmp_path, tools, cipher="off", **more):
        self.place = tmp_path
        self.pool, self.heard, self.tools = FakePool("tank/web"), Heard(), tools
        for name in ("s1", "s2", "s3"):
            self.pool.snapshot([f"tank/web@{name}"], {})
        tools.put("zfs", ZFS.format(place=tmp_path, cipher=cipher))
        self.token("-")
        (self.place / "written").write_text("0")
        self.there = to(tmp_path, pool=self.pool, heard=self.heard, **more)

    def token(self, text, contents=""):
        (self.place / "token").write_text(text)
        (self.place / "contents").write_text(contents)
        (self.place / "resumed").write_text(f"{self.guid('s1')}")

    def guid(self, name):
        return next(each.guid for each in self.pool.snapshots(["tank/web"]) if each.name == name)

    def arrived(self, name):
        """The newest snapshot of the replica."""
        (self.place / "newest").write_text(f"{self.guid(name)}")

    def sent(self, *, raw=False, until=ALL):
        """What the replica receives: the arguments of each ``zfs send``."""
        self.there.send("tank/web", raw=raw, until=until)
        received = self.place / "received"
        return received.read_text().splitlines() if received.exists() else []


@pytest.fixture
def sending(tmp_path, tools):
    return Sending(tmp_path, tools)


def test_the_dataset_of_copies_is_made_only_when_that_is_demanded(sending):
    sending.sent()
    assert not any(words[0] == "create" for words in sending.tools.called("zfs"))
    sending.there.create()
    assert ["list", "backup/kvm"] in sending.tools.called("zfs")


OF_ALL = ["-o", "mountpoint=none", "-o", "volmode=none"]


@pytest.mark.parametrize(
    ("dataset", "present", "made"),
    [
        ("backup/kvm", [], [["create", *OF_ALL, "backup/kvm"]]),
        ("backup/kvm", ["backup/kvm"], []),
        ("backup", ["backup"], []),
        (
            "backup/a/b/kvm",
            ["backup/a"],
            [["create", "-o", "canmount=off", "backup/a/b"], ["create", *OF_ALL, "backup/a/b/kvm"]],
        ),
    ],
)
def test_neither_the_dataset_of_copies_nor_a_parent_is_mounted(tools, dataset, present, made):
    """``zfs create -p`` mounts the parents; one that exists stays as it is."""
    tools.put(
        "zfs",
        f'case "$1" in list) case " {" ".join(present)} " in *" $2 "*) ;; *) false; esac; esac',
    )
    RemoteZfs(Host("")).make(dataset)
    assert [words for words in tools.called("zfs") if words[0] == "create"] == made


def test_a_dataset_of_copies_that_cannot_be_created_is_reported(tools):
    tools.put("zfs", "echo no such pool >&2; false")
    with pytest.raises(PoolError, match="zfs create: no such pool"):
        RemoteZfs(Host("")).make("backup/a/kvm")
    assert len([words for words in tools.called("zfs") if words[0] == "create"]) == 1


def test_a_new_copy_gets_the_oldest_snapshot_and_then_all_others(sending):
    assert sending.sent() == ["send -Lce tank/web@s1", "send -Lce -I tank/web@s1 tank/web@s3"]


def test_a_copy_is_never_rolled_back_and_can_be_continued(sending):
    sending.sent()
    for words in (each for each in sending.tools.called("zfs") if each[0] == "receive"):
        assert words[1:] == ["-s", "-u", "-o", "readonly=on", "backup/kvm/tank:web"]


def test_nothing_is_sent_beyond_the_wanted_snapshot(sending):
    """Also not by the stream that follows a resumed one."""
    middle = next(e for e in sending.pool.snapshots(["tank/web"]) if e.name == "s2")
    sent = sending.sent(until=middle.createtxg)
    assert sent == ["send -Lce tank/web@s1", "send -Lce -I tank/web@s1 tank/web@s2"]


def test_only_newer_snapshots_are_sent(sending):
    sending.arrived("s1")
    assert sending.sent() == ["send -Lce -I tank/web@s1 tank/web@s3"]


def test_a_stream_begins_at_a_bookmark_if_the_snapshot_is_gone(sending):
    sending.arrived("s1")
    sending.pool.bookmark("tank/web@s1", "place")
    sending.pool.destroy_snapshots(["tank/web@s1"])
    first, rest = sending.sent()
    assert first == "send -Lce -i tank/web#place tank/web@s2"
    assert rest == "send -Lce -I tank/web@s2 tank/web@s3"


def test_nothing_is_sent_to_a_copy_that_this_host_knows_no_snapshot_of(sending):
    (sending.place / "newest").write_text("1")
    with pytest.raises(ReplicaError, match="neither tank/web@s1 nor a bookmark of it; see"):
        sending.sent()


@pytest.mark.parametrize("host", ["", "root@nas"])
def test_a_name_that_was_used_again_is_reported_with_the_command_that_keeps_both(
    tmp_path, tools, host
):
    """ZFS receives no second snapshot of a name."""
    sending = Sending(tmp_path, tools, host=host)
    sending.arrived("s2")
    sending.pool.destroy_snapshots(["tank/web@s1"])
    sending.pool.snapshot(["tank/web@s1"], {})  # the copy's @s1 has another GUID
    with pytest.raises(ReplicaError, match=r"older snapshots of the same names.*\(@s1\)") as caught:
        sending.sent()
    kept = f"backup/kvm/tank:web@s1-kept-{sending.guid('s2')}"
    rename = f"zfs rename backup/kvm/tank:web@s1 {kept}"
    command = f"ssh root@nas '{rename}'" if host else rename
    assert f"keep them under other names: {command}, and" in caught.value.step
    assert not any(words[0] == "send" for words in tools.called("zfs"))


@pytest.mark.parametrize(
    ("cipher", "options"), [("aes-256-gcm", "-Lc"), ("off", "-Lce")], ids=["encrypted", "clear"]
)
def test_an_encrypted_replica_gets_no_embedded_blocks(tmp_path, tools, cipher, options):
    """``zfs receive`` refuses them there: incompatible embedded data stream feature."""
    sending = Sending(tmp_path, tools, cipher)
    assert {line.split()[1] for line in sending.sent()} == {options}
    assert len([words for words in tools.called("zfs") if words[:2] == ["list", "-Hp"]]) == 1


def test_encrypted_datasets_are_sent_raw(sending):
    assert {line.split()[1] for line in sending.sent(raw=True)} == {"-w"}


@pytest.mark.parametrize(("rate", "limit"), [(0, []), (5, ["-R", "5M"])])
def test_a_transfer_is_no_faster_than_its_rate(tmp_path, tools, transfers, rate, limit):
    assert Sending(tmp_path, tools, rate=rate, host="root@nas").sent()
    assert tools.called("mbuffer") == [["-q", "-s", "128k", "-m", "16M", *limit]] * 2
    assert transfers == [["zfs", "mbuffer", "ssh"]] * 2


@pytest.mark.parametrize(
    ("answer", "size"),
    [
        ("full\\ttank/web@s1\\t6\\nsize\\t7\\n", 7),
        ("", 0),
        ("size\\tx\\n", 0),
        ("resize\\t7\\n", 0),
    ],
)
def test_a_transfer_is_reported_with_the_size_that_zfs_expects(sending, monkeypatch, answer, size):
    script = f"""case "$1 $2" in "send -nP") printf '{answer}'; exit ;; esac"""
    zfs = ZFS.format(place=sending.place, cipher="off")
    sending.tools.put("zfs", f"{script}\n{zfs}")
    sizes = []
    real = Transfers.run
    monkeypatch.setattr(
        Transfers,
        "run",
        lambda *given, **more: (
            sizes.append((more["through"], more["size"])) or real(*given, **more)
        ),
    )
    sending.sent()
    assert sizes == [(1, size)] * 2


def test_without_mbuffer_a_transfer_has_no_limit(tmp_path, tools, transfers, monkeypatch):
    without("mbuffer", monkeypatch)
    assert Sending(tmp_path, tools, rate=5).sent()
    assert (tools.called("mbuffer"), transfers) == ([], [["zfs", "cat", "zfs"]] * 2)


def test_what_zfs_moves_on_this_machine_is_counted_without_mbuffer(sending, monkeypatch):
    without("mbuffer", monkeypatch)
    sending.tools.put("cat", 'exec /bin/cat "$@"')
    assert len(sending.sent()) == 2
    assert sending.tools.called("cat").count([""]) == 4, "one reads, one is the fake's receive"


def test_a_missing_program_is_reported_with_its_package(tmp_path, tools, monkeypatch):
    without("rsync", monkeypatch)
    assert "apt install rsync" in unavailable_reason(
        Replica(dataset="backup/kvm", bundles=tmp_path), Interrupt()
    )


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("a;cannot receive: c;d", "cannot receive: c"),
        ("a;;  ;d", "d"),
        ("ssh: the link broke;warning: cannot send a@s: Broken pipe", "ssh: the link broke"),
        ("", "zfs send failed without output"),
        ("the link broke;mbuffer: error: outputThread: broken pipe", "the link broke"),
        ("warning: cannot send a@s: signal", "warning: cannot send a@s: signal"),
    ],
)
@pytest.mark.parametrize("end", ["send", "receive"])
def test_why_a_transfer_failed(sending, end, said, reason):
    script = f'case "$1" in {end}) echo "{said}" | tr ";" "\\n" >&2; exit 2 ;; esac'
    sending.tools.put("zfs", f"{script}\n{ZFS.format(place=sending.place, cipher='off')}")
    with pytest.raises(ReplicaError) as caught:
        sending.sent()
    assert (caught.value.thing, caught.value.reason) == ("nas: tank/web", reason)
    assert "docs/how-to/replication.md" in caught.value.step


@pytest.mark.parametrize(
    ("written", "newest", "token", "step"),
    [
        ("0", "s1", "-", "see: docs/how-to/replication.md, 'When a transfer fails'"),
        ("9", "s1", TOKEN, "ssh root@nas 'zfs receive -A backup/kvm/tank:web'"),
        ("9", "s1", "-", "ssh root@nas 'zfs rollback backup/kvm/tank:web@s1'"),
        ("9", "", "-", "ssh root@nas 'zfs destroy backup/kvm/tank:web'"),
    ],
)
def test_the_command_by_which_a_changed_copy_receives_again(
    tmp_path, tools, written, newest, token, step
):
    """Its newest snapshot was destroyed over there, or all of them."""
    sending = Sending(tmp_path, tools, host="root@nas")
    (tmp_path / "written").write_text(written)
    if newest:
        sending.arrived(newest)
    script = f'case "$1 $2" in "receive -s") echo {token} >{tmp_path}/token; exit 1 ;; esac'
    tools.put("zfs", f"{script}\n{ZFS.format(place=tmp_path, cipher='off')}")
    with pytest.raises(ReplicaError) as caught:
        sending.sent()
    assert caught.value.step.endswith(step)


def test_of_a_changed_copy_only_what_follows_its_newest_snapshot_is_discarded(sending, monkeypatch):
    there = [PoolSnapshot("tank/web", name, sending.guid(name), 1, {}) for name in ("s1", "s2")]
    monkeypatch.setattr(sending.there, "snapshots", lambda _datasets: there)
    (sending.place / "written").write_text("9")
    script = 'case "$1 $2" in "receive -s") exit 1 ;; esac'
    sending.tools.put("zfs", f"{script}\n{ZFS.format(place=sending.place, cipher='off')}")
    with pytest.raises(ReplicaError) as caught:
        sending.sent()
    assert caught.value.step.endswith(": zfs rollback backup/kvm/tank:web@s2")


@pytest.mark.parametrize("listing", ["exit 1", "echo backup/kvm"], ids=["no answer", "no copy"])
def test_without_knowledge_of_the_copy_the_page_is_named(sending, listing):
    """The first listing, before the transfer, still works."""
    script = f"""case "$1 $2" in
        "receive -s") touch {sending.place}/failed; exit 1 ;;
        "list -H") if test -e {sending.place}/failed; then {listing}; exit; fi ;;
    esac"""
    sending.tools.put("zfs", f"{script}\n{ZFS.format(place=sending.place, cipher='off')}")
    with pytest.raises(ReplicaError) as caught:
        sending.sent()
    assert caught.value.step == "see: docs/how-to/replication.md, 'When a transfer fails'"


def test_a_dataset_without_snapshots_cannot_be_sent(sending):
    sending.pool.destroy_snapshots([f"tank/web@{name}" for name in ("s1", "s2", "s3")])
    with pytest.raises(ReplicaError, match=r"^nas: tank/web: has no snapshots$"):
        sending.sent()


def test_the_state_of_a_copy_is_listed_without_its_snapshots_and_children(sending):
    sending.sent()
    columns = "name,written,receive_resume_token"
    kinds = ["-H", "-p", "-d", "1", "-t", "filesystem,volume"]
    assert ["list", *kinds, "-o", columns, "backup/kvm"] in sending.tools.called("zfs")


def test_a_replica_is_opened_by_its_name(world):
    options = {"host": "", "dataset": "backup/kvm", "bundles": "/backup/nas"}
    document = world.context.config.model_dump() | {"replica": {"nas": options}}
    world.context.config = Config.model_validate(document)
    error = open_replica(world.context, "nas").diverged("tank/web", ["s1"])
    assert error.line().startswith(
        "nas: tank/web: backup/kvm/tank:web on this machine has diverged"
    )


@pytest.mark.parametrize(("count", "more"), [(5, ")"), (6, " and 1 more)")])
def test_a_message_names_five_snapshots(tmp_path, count, more):
    names = [f"s{number}" for number in range(count)]
    listed = ", ".join(f"@{name}" for name in names[:5])
    assert f"({listed}{more}" in to(tmp_path).diverged("tank/web", names).reason


def test_a_transfer_without_room_for_its_output_is_a_failure(sending, monkeypatch):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(ReplicaError, match="No space left on device"):
        sending.sent()


# -- continuing an interrupted transfer -----------------------------------------------------------


def contents(sending, name="s1", flags=""):
    return CONTENTS.format(guid=sending.guid(name), name=f"tank/web@{name}", flags=flags)


def test_an_interrupted_transfer_is_continued(sending):
    sending.token(TOKEN, contents(sending))
    assert sending.sent() == [f"send -t {TOKEN}", "send -Lce -I tank/web@s1 tank/web@s3"]
    assert not any(words[:2] == ["receive", "-A"] for words in sending.tools.called("zfs"))
    assert sending.heard.notes == []


def test_an_encrypted_dataset_is_continued_raw(sending):
    sending.token(TOKEN, contents(sending, flags="\trawok = 1\n"))
    assert sending.sent(raw=True)[0] == f"send -w -t {TOKEN}"


def refused(sending, reason, *, raw=False):
    """The token is discarded over there, which is reported, and the transfer begins again."""
    options = "-w" if raw else "-Lce"
    assert sending.sent(raw=raw)[0] == f"send {options} tank/web@s1"
    assert ["receive", "-A", "backup/kvm/tank:web"] in sending.tools.called("zfs")
    assert not any("-t" in words for words in sent_words(sending))
    (note,) = sending.heard.notes
    assert f"begins again: {reason}" in note


def sent_words(sending):
    calls = sending.tools.called("zfs")
    return [words for words in calls if words[0] == "send" and words[1] not in ("-nP", "-nvP")]


@pytest.mark.parametrize(
    "token", ["1-ab-f0-789c;touch {}", "1-ab-f0-789c$(touch {})", "-Rp", "1-ab-f0-789c\x1b[2J"]
)
@pytest.mark.parametrize("host", ["", "root@nas"])
def test_a_token_that_is_a_command_is_not_run(tmp_path, tools, token, host):
    sending = Sending(tmp_path, tools, host=host)
    planted = tmp_path / "planted"
    sending.token(token.format(planted), contents(sending))
    refused(sending, "its token has no valid form")
    assert not planted.exists()
    assert not any("-nvP" in words for words in tools.called("zfs"))


@pytest.mark.parametrize("words", [[], ["-w"]], ids=["plain", "raw"])
def test_a_token_is_checked_as_it_will_be_sent(sending, words):
    sending.token(TOKEN, contents(sending))
    with suppress(ReplicaError):
        sending.sent(raw=bool(words))
    assert ["send", "-nvP", *words, "-t", TOKEN] in sending.tools.called("zfs")


def test_a_token_of_a_stream_with_large_blocks_is_continued(sending):
    sending.token(TOKEN, contents(sending, flags="\tlargeblockok = 1\n"))
    sending.sent()
    assert ["send", "-t", TOKEN] in sending.tools.called("zfs")


def test_a_transfer_that_could_not_be_continued_for_another_reason_is_not_discarded(sending):
    """Of these words, none is of ``zfs receive``."""
    sending.token(TOKEN, contents(sending))
    script = """case "$1 $2" in
        "send -t") echo "rest of a stream"; exit ;;
        "receive -s") cat >/dev/null; echo "the link broke" >&2; exit 255 ;;
    esac"""
    sending.tools.put("zfs", f"{script}\n{ZFS.format(place=sending.place, cipher='off')}")
    with pytest.raises(ReplicaError, match="the link broke"):
        sending.sent()
    assert not any(words[:2] == ["receive", "-A"] for words in sending.tools.called("zfs"))


def test_a_token_of_a_snapshot_that_is_gone_is_discarded(sending):
    sending.token(TOKEN)
    refused(sending, "zfs send failed without output")


def test_a_token_of_another_dataset_is_discarded(sending):
    sending.token(TOKEN, contents(sending).replace("tank/web@s1", "tank/secret@s1"))
    refused(sending, "its token names another dataset")


def test_a_token_without_raw_of_an_encrypted_dataset_is_discarded(sending):
    sending.token(TOKEN, contents(sending))
    refused(sending, "its token is not for a raw stream", raw=True)


REFUSING = r"""case "$1 $2" in
    "send -t") echo "rest of a stream"; exit ;;
    "receive -A") ;;
    receive*) test "$(cat {place}/token)" = - || {{
        cat >{place}/refused; {then}
        echo "cannot receive resume stream: {reason}" >&2
        exit 1
    }} ;;
esac
"""


def refusing(sending, reason, then=":"):
    """The replica refuses to continue at its own token."""
    sending.token(TOKEN, contents(sending))
    script = REFUSING.format(place=sending.place, reason=reason, then=then)
    sending.tools.put("zfs", f"{script}\n{ZFS.format(place=sending.place, cipher='off')}")


@pytest.mark.parametrize("second", [TOKEN, f"{TOKEN}9d"])
def test_a_transfer_that_the_replica_twice_refuses_to_continue_begins_again_once(sending, second):
    """The first try may have moved its token."""
    move = f"echo {second} >{sending.place}/token"
    refusing(sending, "destination backup/kvm/tank:web has been modified", move)
    assert sending.sent() == ["send -Lce tank/web@s1", "send -Lce -I tank/web@s1 tank/web@s3"]
    (note,) = sending.heard.notes
    assert "begins again: the replica refuses to continue it: cannot receive resume stream" in note
    assert sent_words(sending)[:2] == [["send", "-t", TOKEN], ["send", "-t", second]]
    assert sending.tools.called("zfs").count(["receive", "-A", "backup/kvm/tank:web"]) == 1


@pytest.mark.parametrize(
    "reason",
    ["out of space", "destination is busy", "checksum mismatch or incomplete stream.", "I/O error"],
)
def test_a_transfer_that_may_still_be_continued_is_not_discarded(sending, reason):
    refusing(sending, reason)
    with pytest.raises(ReplicaError, match=reason) as caught:
        sending.sent()
    assert "if this error comes again, discard what arrived: zfs receive -A" in caught.value.step
    assert not any(words[:2] == ["receive", "-A"] for words in sending.tools.called("zfs"))


@pytest.mark.parametrize("guid", ["x", "", "9" * 5000])
def test_an_answer_that_cannot_be_read_is_a_failure(sending, guid):
    (sending.place / "newest").write_text(guid)
    with pytest.raises(ReplicaError, match="nas: its answer cannot be read"):
        sending.sent()


RENAME = "zfs rename backup/kvm/tank:web backup/kvm/tank:web-kept-s3"


@pytest.mark.parametrize(
    ("host", "command"), [("root@nas", f"ssh root@nas '{RENAME}',"), ("", f"{RENAME},")]
)
def test_the_advice_for_a_diverged_copy_keeps_what_only_it_has(tmp_path, host, command):
    error = to(tmp_path, host=host).diverged("tank/web", ["s2", "s3"])
    assert "backup/kvm/tank:web on" in error.reason
    assert "has diverged" in error.reason
    assert "(@s2, @s3)" in error.reason
    assert f"keep them: {command}" in error.step
    assert not any(word in error.step for word in ("rollback", "destroy"))
    assert "and 3 more" in to(tmp_path).diverged("tank/web", [*"12345678"]).reason


# -- bundles ------------------------------------------------------------------------------------


def test_only_complete_copies_are_listed_as_bundles(tmp_path):
    there = to(tmp_path)
    assert there.bundles("u") == {}
    store = tmp_path / "bundles" / "u"
    for name in ("run-1", "run-2", ".run-3.copying", "some thing"):
        (store / name).mkdir(parents=True)
        (store / name / "ram.save").write_bytes(b"ram")
    (store / "run-1" / "two words").write_bytes(b"")
    (store / "run-2" / COPY_NAME).write_bytes(b"{}")
    (store / "run-2" / "link").symlink_to("ram.save")
    os.utime(store / "run-2" / COPY_NAME, (time.time() - 1000,) * 2)
    found = there.bundles("u")
    assert found.keys() == {"run-1", "run-2"}
    assert found["run-1"] == BundleCopy({"ram.save": 3, "two words": 0}, inf)
    assert found["run-2"].sizes == {"ram.save": 3, COPY_NAME: 2}
    assert 1000 <= found["run-2"].unread < 1060
    os.utime(store / "run-2" / COPY_NAME, (time.time() + 1000,) * 2)
    assert there.bundles("u")["run-2"].unread == inf, "the replica's clock was set back"


def test_bundles_that_cannot_be_listed_are_an_error(tmp_path, tools):
    with pytest.raises(ReplicaError, match="does not exist on this machine") as raised:
        to(tmp_path, bundles=tmp_path / "away").bundles("u")
    assert raised.value.thing == f"nas: {tmp_path}/away"
    assert raised.value.step.endswith(f"mkdir -m 700 {tmp_path}/away")
    tools.put("ssh", "exit 0")
    with pytest.raises(ReplicaError, match="its bundles cannot be listed: no output"):
        to(tmp_path, host="nas").bundles("u")


def sums(**files):
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def test_files_of_a_bundle_that_are_missing_or_differ_are_found(tmp_path):
    there = to(tmp_path)
    store = tmp_path / "bundles" / "u" / "run-1"
    store.mkdir(parents=True)
    for name in ("a", "b", COPY_NAME):
        (store / name).write_bytes(name.encode())
    os.utime(store / COPY_NAME, (0, 0))
    assert there.damaged("u/run-1", sums(a=b"a", b=b"other", c=b"c")) == ["b", "c"]
    assert (store / COPY_NAME).stat().st_mtime == 0
    assert there.damaged("u/run-1", sums(a=b"a", b=b"b")) == []
    assert there.bundles("u")["run-1"].unread < 60


class LimitsSeen(Host):
    """A host that records how long each command may take."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self.seen: dict[str, float] = {}

    def script(self, script, *, what, limit=None):
        self.seen[what] = limit
        return super().script(script, what=what, limit=limit)


def test_a_large_bundle_may_be_read_and_synced_longer(tmp_path, tools):
    tools.put("rsync", 'eval src="\\${$(($# - 1))}"; for last; do :; done; cp -r "$src." "$last"')
    tools.put("sha256sum")
    tools.put("sync")
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    with (bundle / "ram").open("wb") as stream:
        stream.truncate(1000 << 20)
    host, store = LimitsSeen(""), tmp_path / "bundles"
    store.mkdir()
    replica = Replica(dataset="backup/kvm", bundles=store)
    transfers = Transfers("nas", host.label, Interrupt(), Heard())
    there = ReplicaBundles("nas", replica, host, transfers)
    assert there.store(bundle, "u/run-1", {}) == []
    assert (host.seen["sha256sum"], host.seen["sync"]) == (1600, 1600)
    assert there.damaged("u/run-1", {}) == []
    assert 1600 < host.seen["sha256sum"] < 1601
    others = {what: limit for what, limit in host.seen.items() if what.startswith(("touch", "du"))}
    assert [*others.values()] == [None] * 2
    tools.put("du", "echo much")
    with pytest.raises(ReplicaError, match="its answer cannot be read"):
        there.damaged("u/run-1", {})


def test_the_manifest_of_a_copy_is_read(tmp_path):
    store = tmp_path / "bundles" / "u" / "run-1"
    store.mkdir(parents=True)
    assert to(tmp_path).manifest("u/run-1") == ""
    (store / "manifest.json").write_bytes(b"{\xff}")
    assert to(tmp_path).manifest("u/run-1") == "{\udcff}"


def test_a_copy_that_differs_from_its_sums_is_discarded(tmp_path, tools):
    tools.put("rsync", 'for last; do :; done; mkdir -p "$last"; echo ram >"$last/ram"')
    (tmp_path / "bundle").mkdir()
    there = to(tmp_path)
    final = tmp_path / "bundles" / "u" / "run-1"
    final.mkdir(parents=True)
    (final / "ram").write_text("the former")
    assert there.store(tmp_path / "bundle", "u/run-1", sums(ram=b"other")) == ["ram"]
    assert os.listdir(final.parent) == ["run-1"]
    assert (final / "ram").read_text() == "the former"
    assert there.store(tmp_path / "bundle", "u/run-1", sums(ram=b"ram\n")) == []
    assert os.listdir(final.parent) == ["run-1"]
    assert (final / "ram").read_text() == "ram\n"


def test_the_bytes_of_a_bundle_that_rsync_has_sent_are_reported(tmp_path, tools):
    """rsync waits until it was asked for."""
    asked = tmp_path / "asked"
    wait = f'until test -e {asked}; do :; done; for last; do :; done; mkdir "$last"'
    tools.put("rsync", f'test "$1" = --version || {{ {wait}; }}')
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "ram").write_bytes(b"ram")
    heard = Heard()
    seen = []
    heard.amount = lambda subject, _done, total: (seen.append((subject, total)), asked.touch())
    to(tmp_path, heard=heard).store(tmp_path / "bundle", "u/run-1", {})
    assert set(seen) == {("nas", 3)}


@pytest.mark.parametrize(("rate", "limit"), [(0, []), (5, ["--bwlimit=5M"])])
def test_rsync_gets_the_rate_and_the_destination(tmp_path, tools, transfers, rate, limit):
    tools.put("rsync", 'for last; do :; done; last="${last#*:}"; mkdir "$last"')
    (tmp_path / "bundle").mkdir()
    to(tmp_path, rate=rate, host="root@nas").store(tmp_path / "bundle", "u/run-1", {})
    words = next(words for words in tools.called("rsync") if words)
    place = tmp_path / "bundles" / "u" / ".run-1.copying"
    options = ["-rlptgo", "--numeric-ids", "--inplace", "--delete", "-e", shlex.join(ssh_words())]
    assert words == [*options, *limit, f"{tmp_path}/bundle/", f"root@nas:{place}/"]
    assert transfers == [["rsync"]]
    copied = json.loads((place.parent / "run-1" / "copy.json").read_bytes())
    assert copied == {"dataset": "backup/kvm"}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("first;rsync: write failed;last", "rsync: write failed"),
        ("first;last", "first"),
        ("", "rsync ended with status 3"),
    ],
)
def test_a_bundle_that_does_not_arrive_gets_no_name(tmp_path, tools, said, reason):
    tools.put("rsync", f"echo '{said}' | tr ';' '\\n'; exit 3")
    (tmp_path / "bundle").mkdir()
    there = to(tmp_path)
    with pytest.raises(ReplicaError) as caught:
        there.store(tmp_path / "bundle", "u/run-1", {})
    assert (caught.value.thing, caught.value.reason) == ("nas: bundle u/run-1", reason)
    assert there.bundles("u") == {}


def test_a_directory_for_bundles_that_is_missing_is_not_made(tmp_path, tools):
    """Its file system may not be mounted, and the directory below may be unencrypted."""
    tools.put("rsync", 'for last; do :; done; mkdir -p "$last"')
    (tmp_path / "bundle").mkdir()
    there = to(tmp_path, bundles=tmp_path / "away" / "vm1")
    with pytest.raises(ReplicaError, match="away/vm1"):
        there.store(tmp_path / "bundle", "u/run-1", {})
    assert not (tmp_path / "away").exists()


def test_a_bundle_is_never_moved_into_a_directory_of_its_name(tmp_path, tools):
    tools.put("rsync", 'for last; do :; done; mkdir -p "$last"')
    (tmp_path / "bundle").mkdir()
    final = tmp_path / "bundles" / "u" / "run-1"
    there = to(tmp_path)
    for _ in range(2):
        final.mkdir(parents=True, exist_ok=True)
        there.store(tmp_path / "bundle", "u/run-1", {})
        assert os.listdir(final) == [COPY_NAME]


def test_an_abandoned_copy_is_removed_with_the_next_one_that_arrives(tmp_path, tools):
    tools.put("rsync", 'for last; do :; done; mkdir -p "$last"')
    (tmp_path / "bundle").mkdir()
    there = to(tmp_path)
    left = tmp_path / "bundles" / "u" / ".run-0.copying"
    left.mkdir(parents=True)
    there.store(tmp_path / "bundle", "u/run-1", {})
    assert os.listdir(left.parent) == ["run-1"]


CRASH = """echo {name} >>{log}
{real} "$@"
test "$(wc -l <{log})" -ne {crash} || kill -KILL "$PPID"
"""
"""The replica crashes after so many steps."""


@pytest.fixture
def crashing(tmp_path, tools, monkeypatch):
    """A replica that has an older bundle, and that crashes while it is replaced."""
    tools.put("rsync", 'eval src="\\${$(($# - 1))}"; for last; do :; done; cp -r "$src." "$last"')
    bundle, there = tmp_path / "bundle", to(tmp_path)
    bundle.mkdir()
    (bundle / "ram").write_text("former")
    assert there.store(bundle, "u/run-1", sums(ram=b"former")) == []
    (bundle / "ram").write_text("latter")

    def store(crash, reference="u/run-1"):
        log = tmp_path / "steps"
        log.write_text("")
        for name in ("mv", "rm", "sync"):
            real = shutil.which(name, path=os.defpath)
            tools.put(name, CRASH.format(name=name, log=log, real=real, crash=crash))
        there.store(bundle, reference, sums(ram=b"latter"))
        return log.read_text().split()

    return store


def test_a_bundle_that_is_replaced_is_whole_at_each_instant(tmp_path, crashing):
    above = tmp_path / "bundles" / "u"
    steps = crashing(0)
    assert steps == ["sync", "rm", "mv", "mv", "sync", "rm"]
    (above / "run-1" / "ram").write_text("former")
    for crash in range(1, len(steps) + 1):
        shutil.rmtree(above)
        (above / "run-1").mkdir(parents=True)
        (above / "run-1" / "ram").write_text("former")
        (above / "run-1" / COPY_NAME).write_text("{}")
        with pytest.raises(CommandError):
            crashing(crash)
        whole = [path.with_name("ram").read_text() for path in above.glob(f"*/{COPY_NAME}")]
        assert {"former", "latter"}.intersection(whole), f"after step {crash}"
        crashing(0, "u/run-2")
        assert sorted(os.listdir(above)) == ["run-1", "run-2"], f"after step {crash}"
        assert (above / "run-1" / "ram").read_text() == ("former" if crash < 3 else "latter")


def test_a_bundle_that_a_crash_left_without_its_name_is_listed(tmp_path, crashing):
    """It may be pruned on this host, and so never be copied again."""
    with pytest.raises(CommandError):
        crashing(3)
    above = tmp_path / "bundles" / "u"
    assert sorted(os.listdir(above)) == [".run-1.copying", ".run-1.former"]
    assert to(tmp_path).bundles("u")["run-1"].sizes["ram"] == len("latter")
    assert os.listdir(above) == ["run-1"]
    assert (above / "run-1" / "ram").read_text() == "latter"


def test_a_former_bundle_gets_its_name_back_if_no_other_is_whole(tmp_path):
    above = tmp_path / "bundles" / "u"
    for name in (".run-1.former", ".run-1.copying"):
        (above / name).mkdir(parents=True)
        (above / name / "ram").write_text(name)
    assert to(tmp_path).bundles("u").keys() == {"run-1"}
    assert (above / "run-1" / "ram").read_text() == ".run-1.former"


# -- whether anything could be copied -----------------------------------------------------------


def test_a_working_replica_has_no_problem(tmp_path, tools):
    tools.put("rsync")
    (tmp_path / "b").mkdir()
    assert (
        unavailable_reason(Replica(dataset="backup/kvm/x", bundles=tmp_path / "b"), Interrupt())
        == ""
    )
    assert tools.called("rsync") == [["--version"]]
    assert tools.called("zfs") == [["list", "-H", "-o", "name", "backup"]]


def test_without_rsync_the_package_is_named(tmp_path, tools, monkeypatch):
    without("rsync", monkeypatch)
    assert "apt install rsync" in unavailable_reason(
        Replica(dataset="backup/kvm", bundles=tmp_path), Interrupt()
    )


def test_looking_for_obstacles_takes_a_minute_for_each_command_at_most(tmp_path, tools):
    tools.put("rsync")
    hosts = []
    replica = Replica(dataset="backup/kvm", bundles=tmp_path)
    open_host = lambda name, _check: hosts.append(LimitsSeen(name)) or hosts[-1]  # noqa: E731
    assert unavailable_reason(replica, Interrupt(), open_host) == ""
    assert [*hosts[0].seen.values()] == [60, 60, 60]


def test_a_problem_is_reported_before_anything_is_copied(tmp_path, tools):
    tools.put("rsync")
    assert "away" in unavailable_reason(
        Replica(dataset="backup/kvm", bundles=tmp_path / "away"), Interrupt()
    )
    (tmp_path / "b").mkdir()
    there = Replica(dataset="backup/kvm", bundles=tmp_path / "b")
    tools.put("zfs", "echo no such pool >&2; exit 1")
    assert "no such pool" in unavailable_reason(there, Interrupt())
    tools.put("rsync", "exit 1")
    assert "rsync" in unavailable_reason(there, Interrupt())


def test_a_transfer_asks_no_questions_and_has_no_locale(tmp_path, tools):
    """Its output is searched for words, and may contain names of files with any bytes."""
    say = "printf 'failed: \\377 %s %s'"
    tools.put("rsync", f'{say} "$LC_ALL" "$(readlink /proc/$$/fd/0)"; exit 3')
    (tmp_path / "bundle").mkdir()
    reader, writer = os.pipe()
    kept = os.dup(0)
    os.dup2(reader, 0)  # as the caller's
    try:
        with pytest.raises(ReplicaError) as caught:
            to(tmp_path).store(tmp_path / "bundle", "u/run-1", {})
    finally:
        os.dup2(kept, 0)
        for descriptor in (kept, reader, writer):
            os.close(descriptor)
    assert caught.value.reason == "failed: \ufffd C /dev/null"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("aes-256-gcm\n", True), ("off\n", False), ("-\n", False), ("", False), (None, False)],
)
def test_bundles_on_an_encrypted_dataset(answer, expected):
    asked = []

    class Answers(Host):
        def run(self, *words, limit=None):
            if words == ("true",):
                return ""
            asked.append(words)
            if answer is None:
                raise CommandError("zfs get", "not a ZFS filesystem")
            return answer

    replica = Replica(host="nas", dataset="backup/kvm", bundles="/backup/bundles")
    assert has_encrypted_bundles(replica, Answers("nas")) is expected
    assert asked == [("zfs", "get", "-H", "-o", "value", "encryption", "/backup/bundles")]


def test_a_machine_that_is_away_is_not_one_with_bundles_in_clear():
    class Away(Host):
        def run(self, *words, limit=None):
            raise CommandError("nas", "cannot be reached: timed out")

    replica = Replica(host="nas", dataset="backup/kvm", bundles="/backup/bundles")
    with pytest.raises(CommandError, match="cannot be reached"):
        has_encrypted_bundles(replica, Away("nas"))


@pytest.mark.parametrize(
    ("encrypted", "expected"), [("backup/kvm", True), ("backup", True), ("other", False)]
)
def test_copies_in_an_encrypted_dataset(encrypted, expected):
    class Answers(Host):
        def run(self, *words, limit=None):
            if words == ("true",):
                return ""
            if words[-1] != encrypted:
                raise CommandError("zfs get", "dataset does not exist")
            return "aes-256-gcm\n"

    replica = Replica(host="nas", dataset="backup/kvm", bundles="/backup/bundles")
    assert has_encrypted_copies(replica, Answers("nas")) is expected


def test_a_signal_is_no_answer_about_encryption():
    signals = Interrupt(signum=signal.SIGTERM)
    replica = Replica(host="nas", dataset="backup/kvm", bundles="/backup/bundles")
    with pytest.raises(InterruptedRunError):
        has_encrypted_bundles(replica, Host("", lambda: signals.check("nas")))


def test_without_age_the_package_is_named(tmp_path, tools, monkeypatch):
    without("age", monkeypatch)
    replica = Replica(dataset="backup/kvm", bundles=tmp_path, encrypt_to=(recipient(1),))
    assert "apt install age" in unavailable_reason(replica, Interrupt())


def test_a_key_that_age_refuses_is_a_problem(tmp_path, tools, age):
    replica = Replica(
        dataset="b/k",
        bundles=tmp_path,
        encrypt_to=("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA" + "b" * 42,),
    )
    assert "malformed recipient" in unavailable_reason(replica, Interrupt())
