import json
import os
import shutil
from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.archives import in_snapshot
from fakes.hooks import KilledError, failing
from fakes.images import qcow2
from fakes.pool import FakePool
from fakes.rebuild_source import FakeLocal, FakeSource
from fakes.replica import FakeReplica
from fakes.world import Heard

from snaporch import default_paths
from snaporch.bundle.age import encrypt
from snaporch.bundle.manifest import MANIFEST_NAME, manifest_bytes, parse_manifest
from snaporch.catalog.records import ENDED, all_records
from snaporch.config import Config
from snaporch.errors import ExitCode, RefusedError, UsageError
from snaporch.fence import Fence
from snaporch.hypervisor import HostObject, HypervisorError
from snaporch.interrupt import Interrupt
from snaporch.locks import lock_holder
from snaporch.model import DomainState
from snaporch.private_files import sha256_of
from snaporch.rebuild.open_source import open_source
from snaporch.replication.replicate import replicate
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import PREFIX, PoolError

REPLICA = '[replica.nas]\nhost = "nas"\ndataset = "backup/kvm"\nbundles = "/backup/nas"\n'


CARD = "<interface type='network'><source network='lan'/></interface>"
DISK = "<disk type='volume'><source pool='vms' volume='x'/><target dev='vdx'/></disk>"
NETWORK = "<network><name>lan</name><ip address='10.77.0.1' prefix='24'/></network>"


def lose(host, command_host, prepare=lambda _host: None, **more):
    """A guest that this host has lost, and a replica has."""
    host.pool.create("tank")
    uuid = host.add_guest().uuid
    prepare(host)
    with host.config_file.open("a") as stream:
        stream.write(REPLICA)
    nas = {"host": "nas", "dataset": "backup/kvm", "bundles": "/backup/nas", **more}
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
    host.local = local = FakeLocal(host.pool, host.hooks)
    command_host.open_source = lambda *_given: (source, local)
    host.hooks.log.clear()
    host.lost_uuid, host.source, host.there = uuid, source, there
    return host


@pytest.fixture
def lost(host, command_host):
    return lose(host, command_host)


def surround(host):
    """Have the guest name a network and a pool, set properties, and start it at boot."""
    guest, hypervisor = host.guest(), host.hypervisor
    guest.inactive = guest.inactive.replace("</devices>", f"{CARD}{DISK}</devices>")
    guest.live = guest.live.replace("</devices>", f"{CARD}</devices>")
    guest.autostart = True
    place = host.root / "zfs" / "tank" / "web"
    pool = f"<pool type='dir'><name>vms</name><target><path>{place}</path></target></pool>"
    hypervisor.network_objects["lan"] = HostObject("lan", NETWORK, True)
    hypervisor.pool_objects["vms"] = HostObject("vms", pool, False)
    host.pool.set_properties(["tank/web"], {"recordsize": "16384", "snaporch:policy": "hourly"})


@pytest.fixture
def surrounded(host, command_host):
    """A guest that this host has lost with all that surrounds it."""
    lose(host, command_host, surround)
    host.hypervisor.network_objects.clear()
    host.hypervisor.pool_objects.clear()
    host.there.policies["tank/web"] = "hourly"
    return host


def local(host, *names):
    return host.pool.local_properties(names).get("tank/web", {})


def test_what_surrounds_a_guest_comes_back(surrounded, snaporch):
    answer = rebuild(snaporch, "web", "--yes", "--json")
    assert (answer.code, answer.err) == (0, "")
    (document,) = answer.json
    assert document["notes"] == []
    assert document["networks"] == {"lan": "isolated, 10.77.0.1/24"}
    assert document["properties"] == {"tank/web": {"recordsize": "16384"}}
    (network,) = surrounded.hypervisor.network_objects.values()
    assert (network.name, network.starts_at_boot) == ("lan", True)
    assert surrounded.hypervisor.pool_objects.keys() == {"vms"}
    assert surrounded.guest().autostart
    wanted = {"recordsize": "16384", "snaporch:policy": "hourly"}
    assert local(surrounded, *wanted, "snaporch:rebuild") == wanted


def test_the_question_shows_what_is_defined_and_set(surrounded, snaporch):
    shown = rebuild(snaporch, "web", "--dry-run").out
    assert "  properties of tank/web: recordsize=16384\n" in shown
    assert "  policy of tank/web: hourly\n" in shown
    assert "  network lan: isolated, 10.77.0.1/24, starts at boot\n" in shown
    assert f"  storage pool vms: dir {surrounded.root}/zfs/tank/web\n" in shown
    assert "  starts at boot\n" in shown
    asked = rebuild(snaporch, "web").err
    assert all(f"snaporch: {line.strip()}\n" in asked for line in shown.splitlines())
    assert surrounded.hooks.log == []


def test_the_policy_that_is_set_is_the_one_that_was_shown(surrounded, snaporch):
    def change():
        surrounded.there.policies["tank/web"] = "none"

    surrounded.hooks.at["source.receive"] = change
    answer = rebuild(snaporch, "web", "--yes", "--json")
    assert answer.json[0]["policies"] == {"tank/web": "hourly"}
    assert local(surrounded, "snaporch:policy") == {"snaporch:policy": "hourly"}


@pytest.mark.parametrize("options", [("--yes", "--quiet"), ("--yes", "--json")])
def test_what_is_refused_is_named_and_the_guest_waits_for_its_network(
    surrounded, snaporch, options
):
    route = ("the host's", ip_network("10.77.0.0/16"))
    surrounded.local.host_networks = surrounded.local.host_networks._replace(reached=[route])

    def refuse():
        if any("recordsize" in each for each in surrounded.hooks.log[-1:]):
            raise PoolError("zfs set", "property 'recordsize' is too large")

    surrounded.hooks.at["pool.set_properties"] = refuse
    answer = rebuild(snaporch, "web", *options)
    assert answer.code == ExitCode.REFUSED
    assert "network 'lan': has 10.77.0.0/24, which overlaps the host's 10.77.0.0/16" in answer.err
    assert "by hand: see docs/how-to/replication.md" in answer.err
    assert "recordsize=16384: property 'recordsize' is too large" in answer.err
    assert "needs the libvirt network 'lan', which this host does not have" in answer.err
    assert surrounded.hypervisor.network_objects == {}
    assert surrounded.hypervisor.find(surrounded.lost_uuid) is None  # nothing is half done
    if "--json" in options:
        assert len(answer.json[0]["notes"]) == 2
    surrounded.hypervisor.network_objects["lan"] = HostObject("lan", NETWORK, True)  # by the admin
    assert rebuild(snaporch, "web", "--yes", "--quiet").code == 0
    assert surrounded.guest().autostart


def test_a_network_that_is_not_active_is_named_before_and_the_refusal_says_how_to_go_on(
    surrounded, snaporch
):
    lan = HostObject("lan", NETWORK, True, active=False)
    surrounded.hypervisor.network_objects["lan"] = lan
    answer = rebuild(snaporch, "web", "--dry-run", "--json")
    assert answer.code == ExitCode.REFUSED
    assert answer.json[0]["missing"] == ["the network 'lan' is not active: virsh net-start lan"]
    answer = rebuild(snaporch, "web", "--yes", "--quiet")
    assert answer.code == ExitCode.REFUSED
    step = "start it: virsh net-start lan; then run the same rebuild again"
    assert f"needs the libvirt network 'lan', which is not active; {step}" in answer.err
    surrounded.hypervisor.network_objects["lan"] = replace(lan, active=True)
    assert rebuild(snaporch, "web", "--yes", "--quiet").code == 0
    assert surrounded.guest().autostart


def test_a_dry_run_names_networks_and_pools_that_do_not_come(surrounded, snaporch):
    route = ("the host's", ip_network("10.77.0.0/16"))
    surrounded.local.host_networks = surrounded.local.host_networks._replace(reached=[route])
    answer = rebuild(snaporch, "web", "--dry-run", "--json")
    assert answer.code == ExitCode.REFUSED
    (line,) = answer.json[0]["missing"]
    assert line.startswith("network 'lan': has 10.77.0.0/24, which overlaps")
    assert rebuild(snaporch, "web", "--dry-run").out.count("network 'lan'") == 1
    assert rebuild(snaporch, "web", "--dry-run", "--no-restore").code == 0
    answer = rebuild(snaporch, "web", "--yes", "--quiet")
    assert answer.err.count("network 'lan': has") == 1


def test_notes_of_a_restore_that_fails_are_in_json(surrounded, snaporch):
    route = ("the host's", ip_network("10.77.0.0/16"))
    surrounded.local.host_networks = surrounded.local.host_networks._replace(reached=[route])
    answer = rebuild(snaporch, "web", "--yes", "--json")
    assert answer.code == ExitCode.REFUSED
    (document,) = answer.json
    assert (document["state"], document["resumed"]) == (None, False)
    assert document["notes"][0].startswith("network 'lan': has 10.77.0.0/24")


def test_what_fails_after_the_restore_is_finished_by_the_next_call(surrounded, snaporch):
    error = HypervisorError("web", "autostart: no room")
    surrounded.hooks.at["hypervisor.start_at_boot"] = failing(error)
    answer = rebuild(snaporch, "--all", "--yes", "--quiet")
    assert (answer.code, answer.out) == (
        ExitCode.FAILED,
        "web@s1  rebuilt, running, resumed from RAM\n",
    )
    assert "autostart: no room" in answer.err
    assert local(surrounded, "snaporch:rebuild") == {"snaporch:rebuild": "finish"}
    assert rebuild(snaporch, "--all", "--yes", "--quiet").code == ExitCode.FAILED
    del surrounded.hooks.at["hypervisor.start_at_boot"]
    assert rebuild(snaporch, "--all", "--dry-run").code == 0
    assert not surrounded.guest().autostart
    answer = rebuild(snaporch, "--all", "--yes", "--quiet")
    assert (answer.code, answer.out) == (0, "web  is here; its policies and autostart are set\n")
    assert surrounded.guest().autostart
    surrounded.guest().autostart = False  # by the admin, later
    answer = rebuild(snaporch, "--all", "--yes", "--quiet")
    assert (answer.code, answer.out) == (0, "")
    assert not surrounded.guest().autostart


def test_a_guest_with_snapshots_of_its_own_is_finished(surrounded, snaporch):
    error = HypervisorError("web", "autostart: no room")
    surrounded.hooks.at["hypervisor.start_at_boot"] = failing(error)
    assert rebuild(snaporch, "web", "--yes", "--quiet").code == ExitCode.FAILED
    del surrounded.hooks.at["hypervisor.start_at_boot"]
    domain = surrounded.hypervisor.domain("web")
    take_snapshot(surrounded.context, domain, SnapshotRequest("s2"))
    surrounded.hypervisor.destroy(surrounded.lost_uuid)
    answer = rebuild(snaporch, "web", "--yes", "--quiet")
    assert (answer.code, answer.out) == (0, "web  is here; its policies and autostart are set\n")
    assert surrounded.guest().autostart
    assert local(surrounded, "snaporch:rebuild") == {}


@pytest.mark.parametrize("is_defined", [True, False])
def test_what_is_interrupted_in_its_transfer_is_known_and_goes_on(lost, snaporch, is_defined):
    lost.hooks.at["source.fetch"] = failing(HypervisorError("nas", "is gone"))
    assert rebuild(snaporch, "web", "--yes", "--quiet").code == ExitCode.FAILED
    assert local(lost, "snaporch:rebuild") == {"snaporch:rebuild": "transfer"}
    del lost.hooks.at["source.fetch"]
    if is_defined:
        lost.add_guest(state=DomainState.OFF)
    answer = rebuild(snaporch, "web", "--yes", "--quiet")
    assert (answer.code, answer.out) == (0, "web@s1  rebuilt, running, resumed from RAM\n")
    assert local(lost, "snaporch:rebuild") == {}


def test_a_guest_whose_restore_failed_is_no_success_of_all(surrounded, snaporch):
    surrounded.hooks.at["hypervisor.restore"] = failing(HypervisorError("web", "no such CPU"))
    answer = rebuild(snaporch, "--all", "--yes", "--quiet")
    assert (answer.code != 0, answer.out) == (True, "")
    del surrounded.hooks.at["hypervisor.restore"]
    answer = rebuild(snaporch, "--all", "--yes", "--quiet")
    assert (answer.code, answer.out) == (0, "web@s1  rebuilt, running, resumed from RAM\n")


def test_a_guest_that_was_not_restored_and_is_defined_is_named(surrounded, snaporch):
    assert rebuild(snaporch, "web", "--yes", "--quiet").code == 0
    surrounded.hypervisor.destroy(surrounded.lost_uuid)
    surrounded.guest().autostart = False
    surrounded.pool.set_properties(["tank/web"], {"snaporch:rebuild": "restore"})
    answer = rebuild(snaporch, "--all", "--yes", "--quiet")
    assert answer.code == ExitCode.REFUSED
    assert "came back by a rebuild, and was not restored; snaporch restore web@s1" in answer.err
    assert "zfs inherit snaporch:rebuild tank/web" in answer.err
    assert not surrounded.guest().autostart
    assert snaporch("restore", "web@s1", "--yes", "--quiet").code == 0
    answer = rebuild(snaporch, "--all", "--yes", "--quiet")
    said = "web  is here, and runs, but not by this command; its policies and autostart are set\n"
    assert (answer.code, answer.out) == (0, said)
    assert surrounded.guest().autostart


@pytest.mark.parametrize("kind", ["network", "storage_pool"])
def test_what_cannot_be_defined_is_part_of_the_exit_code(surrounded, snaporch, kind):
    error = HypervisorError(kind, "is refused by libvirt")
    surrounded.hooks.at[f"hypervisor.define_{kind}"] = failing(error)
    words = ("--accept", "disk.type=volume")  # of a pool that is not here then
    answer = rebuild(snaporch, "web", "--yes", "--quiet", *words)
    assert answer.code == ExitCode.FAILED
    assert "is refused by libvirt" in answer.err
    comes = kind == "storage_pool"  # only the definition for its next start names the pool
    assert ("web@s1  rebuilt, running" in answer.out) == comes


def test_a_volume_of_a_pool_outside_of_the_guests_datasets_is_refused(surrounded, snaporch):
    place = "<pool type='dir'><name>vms</name><target><path>/srv/vms</path></target></pool>"
    surrounded.hypervisor.pool_objects["vms"] = HostObject("vms", place, False)
    answer = rebuild(snaporch, "web", "--yes")
    assert answer.code == ExitCode.REFUSED
    assert "--accept /srv/vms/x\n" in answer.err
    assert surrounded.hooks.log == []
    answer = rebuild(snaporch, "web", "--yes", "--accept", "/srv/vms/x")
    assert answer.code == 0, answer.err


def with_a_script(host):
    guest = host.guest()
    script = "<interface type='ethernet'><script path='python3'/><target dev='tank'/></interface>"
    guest.inactive = guest.inactive.replace("</devices>", f"{script}</devices>")
    guest.live = guest.live.replace("</devices>", f"{script}</devices>")


def test_a_definition_with_a_script_moves_nothing(host, command_host, snaporch):
    lose(host, command_host, with_a_script)
    answer = rebuild(snaporch, "web", "--yes")
    assert answer.code == ExitCode.REFUSED
    assert "--accept interface.script.path=python3\n" in answer.err
    assert host.hooks.log == []
    answer = rebuild(snaporch, "web", "--yes", "--accept", "interface.script.path=python3")
    assert (answer.code, answer.out) == (0, "web@s1  rebuilt, running, resumed from RAM\n")


def test_without_a_restore_nothing_is_defined_and_that_is_noted(surrounded, snaporch):
    answer = rebuild(snaporch, "web", "--yes", "--no-restore", "--quiet")
    assert answer.code == 0
    hypervisor = surrounded.hypervisor
    assert (hypervisor.network_objects, hypervisor.pool_objects) == ({}, {})
    for each in ("network lan", "storage pool vms", "virsh autostart"):
        assert each in answer.err
    found = local(surrounded, "recordsize", "snaporch:rebuild", "snaporch:policy")
    assert found == {"recordsize": "16384", "snaporch:policy": "hourly"}


def test_what_the_host_has_already_stays_as_it_is(surrounded, snaporch):
    objects = surrounded.hypervisor.network_objects
    objects["lan"] = own = HostObject("lan", "<network><name>lan</name></network>", False)
    answer = rebuild(snaporch, "web", "--yes", "--quiet")
    assert (answer.code, answer.err) == (0, "")
    assert objects == {"lan": own}


def rebuild(snaporch, *words):
    return snaporch("rebuild", *words, "--from", "nas")


def test_a_guest_is_rebuilt_and_runs(lost, snaporch):
    answer = rebuild(snaporch, "web", "--yes", "--quiet")
    assert (answer.code, answer.out) == (0, "web@s1  rebuilt, running, resumed from RAM\n")
    assert lost.hypervisor.domain("web").state is DomainState.RUNNING


def test_a_newer_snapshot_that_is_not_whole_there_is_noted(lost, snaporch):
    run = "20990101T000000Z-0badcafe"
    newer = lost.there.root / lost.lost_uuid / run
    newer.mkdir()
    (newer / "manifest.json").write_text("{}")
    note = f"web@s1  note: a newer snapshot is not taken: the manifest of {run} is damaged"
    assert note in rebuild(snaporch, "web", "--dry-run").err
    answer = rebuild(snaporch, "web", "--yes", "--json")
    assert note in answer.err
    assert answer.json[0]["notes"][0].endswith(f"the manifest of {run} is damaged")


def test_guests_whose_bundles_are_all_damaged_are_named(lost, snaporch):
    """They may share a dataset with the guest that comes back."""
    others = [f"0000000{number}{lost.lost_uuid[8:]}" for number in range(4)]
    for uuid in others:
        (lost.there.root / uuid / "20990101T000000Z-0badcafe").mkdir(parents=True)
    answer = rebuild(snaporch, "web", "--dry-run")
    assert answer.code == 0
    known = f"the newest bundles of {', '.join(others[:3])} and 1 more are damaged: which datasets"
    assert f"nas  note: {known} they share is not known" in answer.err


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
    assert "its definition, which comes from the replica, names these here:" in answer.err
    assert "no terminal to ask on; use --yes" in answer.err
    assert lost.hooks.log == []


@pytest.mark.parametrize("is_off", [True, False])
def test_a_guest_that_came_back_while_a_question_was_open_is_not_rolled_back(
    lost, snaporch, monkeypatch, is_off
):
    def answer_late(_thing):
        assert rebuild(snaporch, "web", "--yes", "--quiet").code == 0
        if is_off:
            lost.hypervisor.destroy(lost.lost_uuid)
        lost.hooks.log.clear()

    monkeypatch.setattr("snaporch.cli.confirm.confirm", answer_late)
    answer = rebuild(snaporch, "web", "--quiet")
    assert answer.code == ExitCode.REFUSED
    assert "snaporch restore web@s1" in answer.err
    assert lost.hooks.log == []


def test_what_changes_while_a_question_is_open_is_refused(lost, snaporch, monkeypatch):
    (run,) = lost.there.bundles(lost.lost_uuid)
    path = lost.there.root / lost.lost_uuid / run / MANIFEST_NAME

    def change(_thing):
        manifest = parse_manifest(path.read_bytes(), "s1")
        path.write_bytes(manifest_bytes(manifest.model_copy(update={"pause_ms": 9.5})))

    monkeypatch.setattr("snaporch.cli.confirm.confirm", change)
    answer = rebuild(snaporch, "web", "--quiet")
    assert answer.code == ExitCode.REFUSED
    assert "web@s1: is no longer as it was shown; run this command again" in answer.err
    assert lost.hooks.log == []


def test_a_dry_run_refuses_a_store_that_may_not_be_mounted(lost, snaporch):
    lost.pool.create("tank/mail")
    uuid = lost.add_guest("mail", {"vda": "tank/mail"}).uuid
    lost.pool.snapshot(["tank/mail@s"], {f"{PREFIX}uuid": uuid, f"{PREFIX}bundle": f"{uuid}/r"})
    answer = rebuild(snaporch, "web", "--dry-run")
    assert answer.code == ExitCode.REFUSED
    assert "is no bundle store, and snapshots have their bundles in one" in answer.err


def test_a_dry_run_prints_what_would_come(lost, snaporch, monkeypatch):
    monkeypatch.setattr(lost.hypervisor, "incompatibility", lambda *_words: "no such CPU")
    answer = rebuild(snaporch, "web", "--dry-run")
    assert answer.code == ExitCode.REFUSED
    assert "  dataset tank/web: @s1\n  its definition, which comes" in answer.out
    assert "\n  this host: it cannot run here: no such CPU" in answer.out
    assert "web@s1: this host lacks what it needs; it cannot run here: no such CPU" in answer.err
    answer = rebuild(snaporch, "--all", "--dry-run", "--json")
    assert answer.code == ExitCode.REFUSED
    (document,) = answer.json
    assert document["datasets"] == ["tank/web"]
    assert document["missing"] == ["it cannot run here: no such CPU; see --cold and --no-restore"]
    assert all(path.startswith("/") for path in document["paths"])
    assert lost.hooks.log == []
    assert "this host: it cannot run here" in rebuild(snaporch, "web", "--yes", "--quiet").err


def test_all_guests_of_a_replica_without_any_are_an_error(lost, snaporch):
    (only,) = lost.there.names()
    lost.there.drop(only)
    answer = rebuild(snaporch, "--all", "--dry-run")
    assert answer.code == ExitCode.NOT_FOUND
    assert "--all: replica nas has no snapshot of a guest; check host and dataset" in answer.err


def test_the_data_alone_of_a_fenced_guest_is_started_by_the_rebuild(lost, snaporch):
    at = "2000-01-01T00:00:00+00:00"
    lost.context.fences.put(Fence(lost.lost_uuid, "web", at, "an earlier run", "s0"))
    (last,) = lost.there.snapshots(["tank/web"])
    lost.there.put([replace(last, properties={**last.properties, ENDED: "yes"})])
    answer = rebuild(snaporch, "web", "--yes", "--no-restore", "--quiet")
    assert answer.out == "web@s1  came back; snaporch rebuild --from nas web@s1 starts it\n"


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


def test_restore_brings_a_lost_guest_from_a_replica(surrounded, snaporch):
    shown = snaporch("restore", "web@s1", "--from", "nas", "--dry-run")
    assert (shown.code, surrounded.hooks.log) == (0, [])
    assert "web@s1 comes back (ram):\n  dataset tank/web: @s1\n" in shown.out
    answer = snaporch("restore", "web@s1", "--from", "nas", "--yes", "--quiet")
    assert (answer.code, answer.out) == (0, "web@s1  rebuilt, running, resumed from RAM\n")
    assert surrounded.guest().autostart
    surrounded.hypervisor.destroy(surrounded.lost_uuid)
    answer = snaporch("restore", "web@s1", "--from", "nas", "--yes")
    assert answer.code == ExitCode.REFUSED
    assert "is on this host, with all its datasets; snaporch restore web@s1" in answer.err


@pytest.mark.parametrize(
    "words",
    [
        ("web", "--from", "nas"),
        ("web@s1", "--from", "nas", "--disks-only"),
        ("web@s1", "--from", "nas", "--no-safety"),
        ("web", "--from", "nas", "--to-time", "2026-01-01T00:00"),
        ("web@s1", "--from", "nas", "--wait", "3s"),
        ("web@s1", "--host", "nas"),
    ],
    ids=" ".join,
)
def test_what_concerns_a_guest_that_is_here_does_not_go_with_a_replica(lost, snaporch, words):
    answer = snaporch("restore", *words, "--yes")
    assert answer.code == ExitCode.USAGE
    assert answer.err.count("\n") == 1
    assert lost.hooks.log == []


# -- encrypted bundles ---------------------------------------------------------------------------


@pytest.fixture
def closed(host, command_host, age):
    """A lost guest whose bundles are encrypted on the replica."""
    return lose(host, command_host, encrypt_to=[age.keys[0]])


def acts(host):
    return [line for line in host.hooks.log if not line.startswith("source.sizes")]


def files_there(host):
    return {path.name: path for path in host.there.root.glob("*/*/*")}


def test_an_encrypted_guest_is_rebuilt_by_its_key(closed, snaporch, age):
    answer = rebuild(snaporch, "web", "--yes", "--quiet", "--identity", str(age.right), "--json")
    assert (answer.code, answer.json[0]["resumed"]) == (0, True), answer.err
    (record,) = all_records(closed.context.store, closed.pool.snapshots())
    assert str(record.state) == "complete"
    assert closed.context.store.verify(record.bundle.split("/bundles/")[-1]) is not None
    kept = [path.name for path in (closed.paths.bundles / ".encrypted").rglob("*.*")]
    assert kept == [MANIFEST_NAME]


@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--cold",)])
def test_without_its_key_nothing_moves(closed, snaporch, age, options):
    answer = rebuild(snaporch, "web", "--yes", "--quiet", *options)
    assert answer.code == ExitCode.REFUSED
    assert f"its bundle is encrypted for {age.keys[0]};" in answer.err
    assert "--identity FILE" in answer.err
    assert "the disks alone: snaporch rebuild --from nas web@s1 --no-restore" in answer.err
    assert acts(closed) == []


def test_with_a_wrong_key_nothing_moves(closed, snaporch, age):
    answer = rebuild(snaporch, "web", "--yes", "--quiet", "--identity", str(age.wrong))
    assert answer.code == ExitCode.FAILED
    assert "no identity matched any of the recipients" in answer.err
    assert len(answer.err.splitlines()) == 1
    assert acts(closed) == []


def test_the_disks_come_back_without_it_and_the_rest_later(closed, snaporch, age):
    answer = rebuild(snaporch, "web", "--yes", "--quiet", "--no-restore")
    assert answer.code == 0, answer.err
    assert "its bundle is encrypted, and does not come back without --identity" in answer.err
    assert closed.pool.names() == ["tank/web@s1"]
    assert not closed.hypervisor.find(closed.lost_uuid)
    next_step = "with the key: snaporch rebuild --from nas web@s1 --identity FILE"
    assert (next_step in answer.out, "restore" in answer.out) == (True, False)
    answer = rebuild(snaporch, "web@s1", "--yes", "--quiet", "--identity", str(age.right), "--json")
    assert (answer.code, answer.json[0]["resumed"]) == (0, True), answer.err


def test_the_data_alone_of_a_fenced_guest_is_started_with_the_key(closed, snaporch, age):
    at = "2000-01-01T00:00:00+00:00"
    closed.context.fences.put(Fence(closed.lost_uuid, "web", at, "an earlier run", "s0"))
    (last,) = closed.there.snapshots(["tank/web"])
    closed.there.put([replace(last, properties={**last.properties, ENDED: "yes"})])
    words = ("web", "--yes", "--no-restore", "--quiet", "--identity", str(age.right))
    answer = rebuild(snaporch, *words)
    started = "snaporch rebuild --from nas web@s1 --identity FILE starts it"
    assert answer.out == f"web@s1  came back; {started}\n"


def test_a_changed_byte_is_found_before_the_guest_is_defined(closed, snaporch, age):
    path = files_there(closed)["ram.save.age"]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    answer = rebuild(snaporch, "web", "--yes", "--quiet", "--identity", str(age.right))
    assert answer.code == ExitCode.FAILED
    assert "is damaged on the replica: ram.save.age" in answer.err
    assert not closed.hypervisor.find(closed.lost_uuid)


def forge(host, change):
    """Change what the replica has, and have its manifest agree."""
    files = files_there(host)
    path = files["ram.save.age"]
    path.write_bytes(change(path.read_bytes()))
    manifest = parse_manifest(files[MANIFEST_NAME].read_bytes(), "x")
    digest = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    parts = tuple(
        each.model_copy(update=digest) if each.name == path.name else each
        for each in manifest.parts
    )
    files[MANIFEST_NAME].write_bytes(manifest_bytes(manifest.model_copy(update={"parts": parts})))


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[:40]]
)
def test_a_replica_that_agrees_with_its_own_change_is_refused(closed, snaporch, age, change):
    forge(closed, change)
    answer = rebuild(snaporch, "web", "--yes", "--quiet", "--identity", str(age.right))
    assert answer.code == ExitCode.FAILED
    assert "ram.save.age cannot be decrypted" in answer.err
    assert not closed.hypervisor.find(closed.lost_uuid)
    assert [*closed.paths.bundles.glob(f"{closed.lost_uuid}/*")] == []
    assert [*closed.paths.bundles.glob(".encrypted/nas/*/*")] == []


def test_other_ram_for_the_same_key_is_refused(closed, snaporch, age, tmp_path):
    """A replica that knows the public key can encrypt; the manifest has what the parts are."""
    (tmp_path / "other").write_bytes(b"other RAM")
    encrypt(tmp_path / "other", tmp_path / "x", [age.keys[0]], lambda _done: None)
    forge(closed, lambda _data: (tmp_path / "x").read_bytes())
    answer = rebuild(snaporch, "web", "--yes", "--quiet", "--identity", str(age.right))
    assert answer.code == ExitCode.FAILED
    assert "ram.save.age is not what the manifest says, when it is decrypted" in answer.err
    assert not closed.hypervisor.find(closed.lost_uuid)


def test_an_interrupted_decryption_goes_on_without_another_transfer(closed, snaporch, age):
    assert rebuild(snaporch, "web", "--yes", "--quiet", "--no-restore").code == 0
    source = closed.source.fetch
    fetched = []

    def fetch(reference, unsent, received):
        fetched.append(reference)
        assert source(reference, unsent, received) == []
        raise KilledError

    closed.source.fetch = fetch
    with pytest.raises(KilledError):
        rebuild(snaporch, "web", "--yes", "--quiet", "--identity", str(age.right))
    answer = rebuild(snaporch, "web", "--yes", "--quiet", "--identity", str(age.right), "--json")
    assert (answer.code, answer.json[0]["resumed"]) == (0, True), answer.err
    assert len(fetched) == 1


LABEL = "<seclabel type='static' model='dac'><label>+0:+0</label></seclabel>"


def with_a_label(host):
    guest = host.guest()
    guest.inactive = guest.inactive.replace("</domain>", f"{LABEL}</domain>")
    guest.live = guest.live.replace("</domain>", f"{LABEL}</domain>")


def test_a_definition_with_a_label_of_its_own_moves_nothing(host, command_host, snaporch):
    lose(host, command_host, with_a_label)
    for option in ("--yes", "--dry-run"):
        answer = rebuild(snaporch, "web", option)
        assert answer.code == ExitCode.REFUSED
        assert "and has <seclabel>; read it first" in answer.err
    assert host.hooks.log == []
    answer = rebuild(snaporch, "web", "--yes", "--accept", "seclabel")
    assert (answer.code, answer.out) == (0, "web@s1  rebuilt, running, resumed from RAM\n")


def with_a_qcow2_image(host):
    guest = host.guest()
    Path(host.hypervisor.domain("web").disks[0].source).write_bytes(qcow2())
    guest.inactive = guest.inactive.replace('type="raw"', 'type="qcow2"')
    guest.live = guest.live.replace('type="raw"', 'type="qcow2"')


def test_an_image_that_names_a_file_of_this_host_is_not_defined(host, command_host, snaporch):
    lose(host, command_host, with_a_qcow2_image)
    in_snapshot(host, "tank/web", "web-vda.img", qcow2("/etc/shadow", "raw"))
    answer = rebuild(snaporch, "web", "--yes")
    assert answer.code == ExitCode.REFUSED
    assert "names '/etc/shadow', which is not in the snapshot" in answer.err
    assert host.hypervisor.find(host.lost_uuid) is None
    assert rebuild(snaporch, "web", "--yes").code == ExitCode.REFUSED
    words = ("restore", "web@s1", "--yes")
    assert snaporch(*words).code == ExitCode.REFUSED
    assert host.hypervisor.find(host.lost_uuid) is None
    assert snaporch(*words, "--accept", "/etc/shadow").code == 0
    assert host.hypervisor.domain("web").state is DomainState.RUNNING


@pytest.mark.parametrize("act", ["hypervisor.restore", "hypervisor.define"])
def test_a_rebuild_that_was_killed_before_the_ram_was_loaded_resumes_it(lost, snaporch, act):
    """It never boots from its disks instead."""
    lost.hooks.at[act] = failing(KilledError())
    with pytest.raises(KilledError):
        rebuild(snaporch, "web", "--yes", "--quiet")
    del lost.hooks.at[act]
    assert rebuild(snaporch, "web", "--yes", "--quiet").code == 0
    assert snaporch("recover").code == 0
    guest = lost.guest()
    assert (guest.state, guest.running_reason) == (DomainState.RUNNING, "restored")
    assert guest.inactive is not None


def test_all_fails_for_a_guest_that_no_snapshot_is_marked_with(lost, snaporch):
    """Two guests share a dataset, and sanoid's snapshot has the marks of one."""
    (run,) = (lost.there.root / lost.lost_uuid).iterdir()
    uuid = "4b1d2f0e-0000-4000-8000-00000000000f"
    shutil.copytree(run, lost.there.root / uuid / run.name)
    path = lost.there.root / uuid / run.name / MANIFEST_NAME
    manifest = parse_manifest(path.read_bytes(), "x")
    path.write_bytes(manifest_bytes(manifest.model_copy(update={"uuid": uuid, "domain": "db"})))
    answer = snaporch("rebuild", "--all", "--from", "nas", "--no-restore", "--yes")
    assert answer.code == ExitCode.REFUSED
    assert "has snapshots of other guests, too (db)" in answer.err
    assert "has snapshots of other guests, too (web)" in answer.err
    assert lost.pool.names() == []
