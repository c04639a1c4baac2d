"""Guests that are rebuilt from a replica, by one command, after everything here is lost."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from guests.disks import destroy
from other_machine import DISKS, copy, create, datasets, listed, other_machine, take, uuid_of
from support import (
    BUNDLES,
    accepting,
    assert_clean,
    assert_restored,
    must,
    one_line_error,
    run,
    snaporch,
    started,
    wait_for,
    zfs_snapshots,
)

from snaporch.bundle.manifest import (
    MANIFEST_NAME,
    DatasetEntry,
    HostObjectEntry,
    SurroundingsEntry,
    manifest_bytes,
    read_manifest,
)
from snaporch.bundle.save_image_copy import copy_with_xml, read_preface


@pytest.fixture(scope="module", autouse=True)
def other(tmp_path_factory):
    with other_machine(tmp_path_factory.mktemp("there")) as made:
        yield made


@pytest.fixture(scope="module")
def there(other):
    """The other machine's directory of bundles."""
    return other.bundles


@pytest.fixture(scope="module")
def configuration(other):
    return other.config


def guest_of_a_replica(name, there):
    made = create(name)
    yield made
    made.remove()
    for dataset in datasets(made):
        run("zfs", "destroy", "-r", copy(dataset))
    shutil.rmtree(there / uuid_of(made), ignore_errors=True)


@pytest.fixture(params=list(DISKS))
def guest(request, there):
    yield from guest_of_a_replica(request.param, there)


@pytest.fixture
def plain(there):
    yield from guest_of_a_replica("plain", there)


def lose(guest):
    """Destroy all that this host has of a guest; return its datasets."""
    lost, uuid = datasets(guest), uuid_of(guest)
    guest.destroy()
    must("virsh", "undefine", "--nvram", guest.name)
    for dataset in lost:
        destroy(dataset)
    shutil.rmtree(BUNDLES / uuid)
    return lost


ACCEPTED = accepting(*DISKS)
WORDS = ("--from", "offsite", "--yes", "--quiet", *ACCEPTED)


def rebuild(guest, *options):
    return snaporch("rebuild", guest.name, *WORDS, "--json", *options)


def assert_refused(guest, code, *words):
    one_line_error(snaporch("rebuild", guest.name, *WORDS), code, *words)


@pytest.mark.daily(1)
def test_a_lost_guest_goes_on_where_it_was(guest):
    first, last = take(guest), take(guest)
    must("snaporch", "replicate", guest.name)
    expected, mark = guest.snapshot_count(last["snapshot"]), guest.mark()
    lost = lose(guest)
    shown = snaporch("rebuild", guest.name, "--from", "offsite", "--dry-run", *ACCEPTED)
    assert shown.status == 0, shown.err
    assert all(dataset in shown.out for dataset in lost)
    assert not any(run("zfs", "list", dataset).status == 0 for dataset in lost)
    outcome = rebuild(guest)
    assert outcome.status == 0, outcome.err
    (document,) = outcome.json
    assert (document["snapshot"], document["resumed"]) == (last["snapshot"], True)
    assert_restored(guest, mark, expected)
    assert_clean(guest)
    assert listed(guest)[last["snapshot"]]["level"] == "ram"
    here = [run("zfs", "list", f"{dataset}@{first['snapshot']}").status for dataset in lost]
    assert 0 not in here  # it stays there
    assert_refused(guest, 5, "runs on this host")
    again = take(guest)
    outcome = snaporch("replicate", guest.name, "--json")
    assert (outcome.status, outcome.json[0]["arrived"][-1:]) == (0, [again["snapshot"]])
    copies = [zfs_snapshots(f"{copy(each)}@{first['snapshot']}") for each in lost]
    assert all(copies)


@pytest.mark.daily(3, "long")
def test_the_history_comes_back_too(guest):
    taken = [take(guest)["snapshot"] for _ in range(3)]
    must("snaporch", "replicate", guest.name)
    expected, mark = guest.snapshot_count(taken[1]), guest.mark()
    lose(guest)
    where = f"{guest.name}@{taken[1]}"
    outcome = snaporch("rebuild", where, *WORDS, "--history", "--json")
    assert outcome.status == 0, outcome.err
    assert_restored(guest, mark, expected)
    back = listed(guest)
    assert [back[name]["level"] for name in taken[:2]] == ["ram", "ram"]
    assert snaporch("verify", f"{guest.name}@{taken[0]}").status == 0


@pytest.mark.daily(3, "long")
def test_what_is_killed_goes_on(guest, there, configuration):
    image = Path(guest.sources()["vda"])
    (image.parent / "noise").write_bytes(os.urandom(24 << 20))
    last = take(guest)["snapshot"]
    must("snaporch", "replicate", guest.name)
    expected, mark = guest.snapshot_count(last), guest.mark()
    lost = lose(guest)
    text = configuration.read_text()
    configuration.write_text(f"{text}rate = 4\n")
    words = ("rebuild", guest.name, "--from", "offsite", "--yes", *ACCEPTED)
    with started(*words, env={}) as process:
        receiving = ("-f", f"zfs receive.*tank/{guest.name}@")
        wait_for(lambda: run("pgrep", *receiving).status == 0, "something is received")
        assert process.poll() is None
        process.kill()
        process.wait()
    # What it started goes on by itself, and would bring all of the dataset.
    wait_for(lambda: run("pkill", "-KILL", "-f", "zfs (send|receive)").status == 1, "their end")
    configuration.write_text(text)
    here = [run("zfs", "list", f"{dataset}@{last}").status for dataset in lost]
    assert here != [0] * len(lost), must("zfs", "list", "-t", "all", "-r", "tank", "flash")
    outcome = rebuild(guest)
    assert outcome.status == 0, outcome.err
    assert_restored(guest, mark, expected)
    assert_clean(guest)


@pytest.mark.daily(3, "long")
def test_what_exists_here_is_not_touched(guest):
    last = take(guest)["snapshot"]
    must("snaporch", "replicate", guest.name)
    lost = lose(guest)
    must("zfs", "create", "-p", lost[0])
    must("zfs", "snapshot", f"{lost[0]}@own")
    assert_refused(guest, 5, "exists on this host", "zfs rename")
    assert zfs_snapshots(f"{lost[0]}@own")
    assert not any(run("zfs", "list", dataset).status == 0 for dataset in lost[1:])
    must("zfs", "destroy", "-r", lost[0])
    assert rebuild(guest, "--no-restore").status == 0
    assert run("virsh", "domstate", guest.name).status != 0
    assert snaporch("restore", f"{guest.name}@{last}", "--yes", *ACCEPTED).status == 0


@pytest.mark.daily(3, "long")
def test_a_damaged_copy_is_found_before_the_guest_is_defined(guest, there):
    older, last = take(guest)["snapshot"], take(guest)
    must("snaporch", "replicate", guest.name)
    expected, mark = guest.snapshot_count(older), guest.mark()
    bundle = there / uuid_of(guest) / last["run"]
    part = max(bundle.iterdir(), key=lambda path: path.stat().st_size)
    with part.open("r+b") as stream:
        stream.seek(100)
        stream.write(b"damage")
    lose(guest)
    assert_refused(guest, 8, "is damaged on the replica", part.name)
    assert run("virsh", "domstate", guest.name).status != 0
    part.unlink()
    for dataset in datasets(guest):
        must("zfs", "destroy", "-r", dataset)
    shutil.rmtree(BUNDLES / uuid_of(guest))
    outcome = rebuild(guest)
    assert outcome.status == 0, outcome.err
    assert json.loads(outcome.out)[0]["snapshot"] == older
    assert_restored(guest, mark, expected)


SETTINGS = {"recordsize": "16384", "compression": "zstd", "atime": "off", "quota": "1073741824"}
POOL = "snaporch-pool"
DVD = f"""<disk type='volume' device='cdrom'><source pool='{POOL}' volume='x.iso'/>
<target dev='sda' bus='sata'/><readonly/></disk>"""


def settings(dataset, *names):
    listing = must(
        "zfs", "get", "-Hp", "-s", "local", "-o", "property,value", ",".join(names), dataset
    )
    return dict(line.split("\t") for line in listing.splitlines())


@pytest.fixture
def pool():
    """A storage pool of libvirt, in the guest's dataset."""
    must("virsh", "pool-define-as", POOL, "dir", "--target", "/tank/plain")
    must("virsh", "pool-start", POOL)
    must("virsh", "pool-autostart", POOL)
    yield POOL
    run("virsh", "pool-destroy", POOL)
    run("virsh", "pool-undefine", POOL)


@pytest.mark.daily(3, "long")
def test_what_surrounds_it_comes_back(plain, pool, tmp_path):
    must("zfs", "set", *(f"{key}={value}" for key, value in SETTINGS.items()), "tank/plain")
    must("zfs", "set", "refreservation=auto", "copies=2", "flash/plain")
    volume = settings("flash/plain", "refreservation", "copies")
    must("virsh", "autostart", plain.name)
    definition = tmp_path / "definition.xml"
    text = must("virsh", "dumpxml", "--inactive", "--security-info", plain.name)
    definition.write_text(text.replace("</devices>", f"{DVD}</devices>"))
    must("virsh", "define", str(definition))
    last = take(plain)
    must("snaporch", "replicate", plain.name)
    expected, mark = plain.snapshot_count(last["snapshot"]), plain.mark()
    must("virsh", "pool-destroy", POOL)
    must("virsh", "pool-undefine", POOL)
    lose(plain)
    outcome = rebuild(plain)
    assert (outcome.status, outcome.json[0]["notes"]) == (0, []), outcome.err
    assert_restored(plain, mark, expected)
    assert_clean(plain)
    assert settings("tank/plain", *SETTINGS, "snaporch:rebuild") == SETTINGS
    assert settings("flash/plain", *volume) == volume
    assert "Autostart:      enable" in must("virsh", "dominfo", plain.name)
    information = must("virsh", "pool-info", POOL)
    assert information.count("yes") == 2, information  # persistent, autostart
    again = snaporch("rebuild", "--all", *WORDS)
    assert (again.status, again.out) == (0, ""), again.err


def forge(bundle, **changes):
    """Make the manifest of a bundle one of its files as they are now."""
    manifest = read_manifest(bundle)
    parts = [
        part.model_copy(update={"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        for part in manifest.parts
        for data in [(bundle / part.name).read_bytes()]
    ]
    changes["parts"] = tuple(parts)
    (bundle / MANIFEST_NAME).write_bytes(manifest_bytes(manifest.model_copy(update=changes)))


VICTIM = "11111111-2222-4333-8444-555555555555"
OF_VICTIM = f"""<domain type='qemu'><name>victim</name><uuid>{VICTIM}</uuid>
<memory unit='MiB'>16</memory><description>the true definition</description>
<os><type arch='x86_64' machine='pc'>hvm</type></os></domain>"""


@pytest.fixture
def victim(tmp_path):
    """Another guest of this host."""
    definition = tmp_path / "victim.xml"
    definition.write_text(OF_VICTIM)
    must("virsh", "define", str(definition))
    yield "victim"
    must("virsh", "undefine", "victim")


@pytest.mark.daily(3, "long")
def test_a_hostile_definition_replaces_no_other_guest(plain, victim, there):
    last = take(plain)
    must("snaporch", "replicate", plain.name)
    bundle = there / uuid_of(plain) / last["run"]
    for path in bundle.glob("domain*.xml"):
        text = path.read_text().replace(uuid_of(plain), VICTIM)
        path.write_text(text.replace(f"<name>{plain.name}</name>", f"<name>{victim}</name>"))
    forge(bundle)
    before, lost = must("virsh", "dumpxml", "--inactive", victim), lose(plain)
    assert_refused(plain, 5, "is of another guest", VICTIM)
    assert must("virsh", "dumpxml", "--inactive", victim) == before
    assert not any(run("zfs", "list", dataset).status == 0 for dataset in lost)


@pytest.mark.daily(3, "long")
def test_no_guest_is_resumed_with_a_definition_that_was_not_shown(plain, there):
    last = take(plain)
    must("snaporch", "replicate", plain.name)
    bundle = there / uuid_of(plain) / last["run"]
    image, changed = bundle / "ram.save", bundle / "changed"
    disk = "<disk type='file' device='cdrom'><source file='/etc/shadow'/><target dev='sdz'/></disk>"
    xml = read_preface(image).xml
    copy_with_xml(image, changed, xml.replace("</devices>", f"{disk}</devices>"))
    changed.rename(image)
    forge(bundle)
    lose(plain)
    assert_refused(plain, 5, "the definition in its RAM", "/etc/shadow", "--cold")
    assert run("virsh", "domstate", plain.name).status != 0
    cold = snaporch("restore", f"{plain.name}@{last['snapshot']}", "--cold", "--yes", *ACCEPTED)
    assert cold.status == 0, cold.err


EVIL = """<disk type='file' device='disk'><driver name='qemu' type='qcow2'/>
<source file='/tank/plain/evil.qcow2'/><target dev='vdx' bus='virtio'/></disk>"""


@pytest.mark.daily(3, "long")
def test_an_image_and_a_definition_of_a_hostile_replica_reach_no_file_of_this_host(plain, there):
    """What they would reach is accepted only by its name."""
    evil = "/tank/plain/evil.qcow2"
    backing = ("-u", "-b", "/etc/shadow", "-F", "raw")
    must("qemu-img", "create", "-q", "-f", "qcow2", *backing, evil, "1M")
    last = take(plain)
    must("snaporch", "replicate", plain.name)
    bundle = there / uuid_of(plain) / last["run"]
    label = "<seclabel type='static' model='dac' relabel='no'><label>+0:+0</label></seclabel>"
    for path in bundle.glob("domain*.xml"):
        text = path.read_text().replace("</devices>", f"{EVIL}</devices>")
        path.write_text(text.replace("</domain>", f"{label}</domain>"))
    forge(bundle)
    lost = lose(plain)
    assert_refused(plain, 5, "and has <seclabel>", "--accept seclabel")
    assert not any(run("zfs", "list", dataset).status == 0 for dataset in lost)
    words = ("rebuild", plain.name, *WORDS, "--cold", "--accept", "seclabel")
    one_line_error(snaporch(*words), 5, "evil.qcow2 names '/etc/shadow'", "--accept /etc/shadow")
    assert run("virsh", "domstate", plain.name).status != 0
    for path in (BUNDLES / uuid_of(plain) / last["run"]).glob("domain*.xml"):
        path.write_text(path.read_text().replace(label, ""))
    forge(BUNDLES / uuid_of(plain) / last["run"])
    again = ("restore", f"{plain.name}@{last['snapshot']}", "--disks-only", "--yes", *ACCEPTED)
    one_line_error(snaporch(*again), 5, "evil.qcow2 names '/etc/shadow'")
    outcome = snaporch(*again, "--accept", "/etc/shadow")
    assert outcome.status == 0, outcome.err
    assert run("virsh", "domstate", plain.name).status == 0


HOSTILE = {
    "lan": "<network><name>lan</name><ip address='169.254.9.1' prefix='24'/></network>",
    "dns": "<network><name>dns</name><dns><forwarder addr='8.8.8.8'/></dns></network>",
}


@pytest.mark.daily(3, "long")
def test_a_hostile_replica_chooses_nothing_of_this_host(plain, there):
    last = take(plain)
    must("snaporch", "replicate", plain.name)
    bundle = there / uuid_of(plain) / last["run"]
    definition = bundle / "domain.live.xml"
    cards = "".join(
        f"<interface type='network'><source network='{n}'/></interface>" for n in HOSTILE
    )
    disk = "<disk type='volume'><source pool='etc' volume='shadow'/><target dev='vdx'/></disk>"
    evil = "<emulator>/tank/plain/evil</emulator>"
    text = definition.read_text().replace("</devices>", f"{cards}{disk}{evil}</devices>")
    definition.write_text(text)
    etc = "<pool type='dir'><name>etc</name><target><path>/etc</path></target></pool>"
    bad = {"mountpoint": "/etc/cron.d", "setuid": "on", "recordsize": "16384", "sync": "x"}
    surroundings = SurroundingsEntry(
        datasets=(DatasetEntry(dataset="tank/plain", properties=bad),),
        networks=tuple(
            HostObjectEntry(name=name, xml=xml, starts_at_boot=True)
            for name, xml in HOSTILE.items()
        ),
        storage_pools=(HostObjectEntry(name="etc", xml=etc, starts_at_boot=True),),
    )
    forge(bundle, surroundings=surroundings)
    lose(plain)
    words = ("rebuild", plain.name, "--from", "offsite", "--json", *ACCEPTED)
    shown = snaporch(*words, "--dry-run")
    assert shown.status == 5, shown.err
    (document,) = shown.json
    assert any("no emulator '/tank/plain/evil'" in each for each in document["missing"])
    for name in ("network 'lan'", "network 'dns'", "storage pool 'etc'", "'mountpoint'", "'sync'"):
        assert any(name in each for each in document["notes"]), document["notes"]
    outcome = snaporch(*words, "--yes", "--no-restore")
    assert outcome.status == 0, outcome.err
    assert "'mountpoint'" in outcome.err
    assert settings("tank/plain", *bad) == {"recordsize": "16384", "setuid": "off"}
    assert settings("tank/plain", "exec", "devices") == {"exec": "off", "devices": "off"}
    assert not {*HOSTILE} & {*must("virsh", "net-list", "--all", "--name").split()}
    assert "etc" not in must("virsh", "pool-list", "--all", "--name").split()
