import json
import os
import shutil
from types import SimpleNamespace

import pytest
from fakes.pool import FakePool
from fakes.rebuild_source import FakeLocal, FakeSource
from fakes.replica import FakeReplica
from fakes.world import Heard

from snaporch import default_paths
from snaporch.catalog.records import all_records
from snaporch.config import Config
from snaporch.errors import ExitCode, RefusedError, UsageError
from snaporch.interrupt import Interrupt
from snaporch.locks import lock_holder
from snaporch.model import DomainState
from snaporch.rebuild.open_source import open_source
from snaporch.replication.replicate import replicate
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot

REPLICA = '[replica.nas]\nhost = "nas"\ndataset = "backup/kvm"\nbundles = "/backup/nas"\n'


@pytest.fixture
def lost(host, monkeypatch):
    """A guest that this host has lost, and a replica has."""
    monkeypatch.setattr("snaporch.replication.replicate.lower_priority", lambda _work: None)
    host.pool.create("tank")
    uuid = host.add_guest().uuid
    with host.config_file.open("a") as stream:
        stream.write(REPLICA)
    nas = {"host": "nas", "dataset": "backup/kvm", "bundles": "/backup/nas"}
    document = host.context.config.model_dump() | {"replica": {"nas": nas}}
    host.context.config = Config.model_validate(document)
    there = FakeReplica(host.pool, host.root / "there")
    there.create()
    take_snapshot(host.context, host.hypervisor.domain("web"), SnapshotRequest("s1"))
    replicate(host.context, all_records(host.context.store, host.pool.snapshots()), "nas", there)
    source = FakeSource(host.pool, there, host.hooks)
    host.hypervisor.destroy(uuid)
    host.hypervisor.undefine(uuid)
    source.lose("tank/web")
    shutil.rmtree(host.paths.bundles)
    local = FakeLocal(host.pool, host.hooks)
    monkeypatch.setattr("snaporch.rebuild.open_source.open_source", lambda *_given: (source, local))
    host.hooks.log.clear()
    host.lost_uuid = uuid
    return host


def rebuild(snaporch, *words):
    return snaporch("rebuild", *words, "--from", "nas")


def test_a_guest_is_rebuilt_and_runs(lost, snaporch):
    answer = rebuild(snaporch, "web", "--yes", "--quiet")
    assert (answer.code, answer.out) == (0, "web@s1  rebuilt, running, resumed from RAM\n")
    assert lost.hypervisor.domain("web").state is DomainState.RUNNING


def test_the_guest_is_locked_until_it_runs(lost, snaporch):
    uuid, seen = lost.lost_uuid, {}

    def look(act):
        seen[act] = lock_holder(default_paths.LOCKS, uuid)

    for act in ("source.receive", "local.mount", "hypervisor.restore"):
        lost.hooks.at[act] = lambda act=act: seen.update(
            {act: lock_holder(default_paths.LOCKS, uuid)}
        )
    assert rebuild(snaporch, "web", "--yes", "--quiet").code == 0
    assert set(seen.values()) == {f"rebuild (pid {os.getpid()})"}
    assert len(seen) == 3
    assert lock_holder(default_paths.LOCKS, uuid) is None


def test_without_a_yes_nothing_moves(lost, snaporch):
    answer = rebuild(snaporch, "web")
    assert answer.code == ExitCode.REFUSED
    assert "web@s1 comes back (ram):\nsnaporch: dataset tank/web: @s1\n" in answer.err
    assert "its definition, which comes from the replica, names these paths here:" in answer.err
    assert "no terminal to ask on; use --yes" in answer.err
    assert lost.hooks.log == []


def test_a_dry_run_prints_what_would_come(lost, snaporch, monkeypatch):
    monkeypatch.setattr(lost.hypervisor, "incompatibility", lambda *_words: "no such CPU")
    answer = rebuild(snaporch, "web", "--dry-run")
    assert answer.code == 0
    assert "  dataset tank/web: @s1\n  its definition, which comes" in answer.out
    assert "\n  this host cannot run it: no such CPU" in answer.out
    (document,) = rebuild(snaporch, "--all", "--dry-run", "--json").json
    assert (document["datasets"], document["obstacle"]) == (["tank/web"], "no such CPU")
    assert all(path.startswith("/") for path in document["paths"])
    assert lost.hooks.log == []


def test_the_data_alone_comes_back(lost, snaporch):
    answer = rebuild(snaporch, "web", "--yes", "--no-restore", "--quiet")
    assert answer.out == "web@s1  came back; snaporch restore web@s1 starts it\n"
    assert lost.hypervisor.domains() == []
    assert json.loads(snaporch("list", "--json").out)[0]["level"] == "ram"


def test_a_guest_that_cannot_come_does_not_keep_the_others_away(lost, snaporch):
    answer = rebuild(snaporch, "mail", "web", "--yes", "--quiet")
    assert answer.code == ExitCode.NOT_FOUND
    assert "mail: replica nas has no snapshot of it, but of: web" in answer.err
    assert "web@s1  rebuilt" in answer.out


@pytest.mark.parametrize(
    "words", [(), ("web", "--all"), ("web", "--cold", "--no-restore")], ids=" ".join
)
def test_a_call_that_makes_no_sense_is_refused(lost, snaporch, words):
    assert rebuild(snaporch, *words).code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("name", "more", "code", "reason"),
    [
        ("tape", "", ExitCode.NOT_FOUND, "no such replica (nas)"),
        ("nas", "append_only = true\n", ExitCode.REFUSED, "this host's key may not read from it"),
    ],
)
def test_a_replica_that_cannot_be_read_is_named(host, snaporch, name, more, code, reason):
    with host.config_file.open("a") as stream:
        stream.write(REPLICA + more)
    answer = snaporch("rebuild", "web", "--from", name)
    assert answer.code == code
    assert reason in answer.err


def test_guests_that_are_here_are_no_failure_of_all(lost, snaporch):
    assert rebuild(snaporch, "--all", "--yes", "--quiet").code == 0
    answer = rebuild(snaporch, "--all", "--yes", "--quiet")
    assert (answer.code, answer.out) == (0, "")
    assert "runs on this host" in answer.err
    lost.hypervisor.destroy(lost.hypervisor.domain("web").uuid)
    answer = rebuild(snaporch, "--all", "--yes", "--quiet")
    assert (answer.code, answer.out) == (0, "")
    assert "is on this host, with all its datasets" in answer.err
    answer = rebuild(snaporch, "web", "--yes", "--quiet")
    assert answer.code == ExitCode.REFUSED
    assert "snaporch restore web@s1" in answer.err


@pytest.mark.parametrize("given", ["root@nas", "backup"])
def test_another_host_may_be_read_from(tmp_path, given):
    section = {"host": "u@nas", "dataset": "b", "bundles": "/b", "append_only": True}
    config = Config.model_validate({"replica": {"nas": section}})
    context = SimpleNamespace(
        config=config, interrupt=Interrupt(), progress=Heard(), pool=FakePool()
    )
    source, _ = open_source(context, "nas", given)
    assert source._host.name == given
    with pytest.raises(UsageError):
        open_source(context, "nas", "-oProxyCommand=x")
    with pytest.raises(RefusedError, match="--host root@HOST"):
        open_source(context, "nas")
