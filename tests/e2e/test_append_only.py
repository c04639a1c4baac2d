"""Append-only copies on another machine (the lab itself): a good run, and attacks with its key.

The host that replicates is taken over here. It has the key, and root on this side. Whatever it
tries, each snapshot and each byte of a bundle on the replica stays as it was.
"""

import base64
import hashlib
import json
import os
import struct
import subprocess
from pathlib import Path

import pytest
from forced_key import ForcedKey, backup_machine, block
from guests.disks import Disk
from guests.guest import Guest
from support import must, run, snaporch, wait_for
from vault import same_bytes

from snaporch.replication.receive_limits import MAX_REQUESTS

pytestmark = pytest.mark.daily(6, "attack")

PAGE = "docs/how-to/replication.md"
USER, ROOT = "snaporch-vm1", "backup/vm1"
HOST = f"{USER}@localhost"
KEY = ForcedKey(HOST, "snaporch-replica 1")
ask = KEY.ask
BUNDLES = Path("/srv/snaporch-vm1/bundles")
DISKS = {
    "web": [Disk("file", "tank/web"), Disk("zvol", "flash/web")],
    "db": [Disk("file", "tank/db")],
}
POLICIES = """
[group.shop]
domains = ["web", "db"]

[policy.hourly]
every = "1h"
domains = ["web", "db"]
replicate = ["nas"]
keep = { last = 9 }
"""


@pytest.fixture(scope="module", autouse=True)
def replica(tmp_path_factory):
    """The machine is set up by the commands of the page."""
    place = tmp_path_factory.mktemp("there")
    config = place / "snaporch.toml"
    with backup_machine(place), pytest.MonkeyPatch.context() as patch:
        key = Path("/root/.ssh/id_ed25519.pub").read_text().strip()
        setup = block(PAGE, "user=snaporch-vm1").replace("ssh-ed25519 AAAA…", key)
        must("bash", "-euc", setup)
        config.write_text(POLICIES + block(PAGE, "[replica.nas]").replace("@nas", "@localhost"))
        patch.setenv("SNAPORCH_CONFIG", str(config))
        yield
    must("userdel", "--remove", USER)


@pytest.fixture(scope="module")
def guests(replica):
    made = [Guest.create(name, disks=disks) for name, disks in DISKS.items()]
    yield made
    for guest in made:
        guest.remove()


@pytest.fixture(scope="module")
def taken(guests):
    """Two snapshots of a group on the replica; the names and bundles of the guest ``web``."""
    for number in range(2):
        if number:
            Path(guests[0].sources()["vda"]).with_name("more").write_bytes(os.urandom(1 << 20))
        outcome = snaporch("snapshot", "--group", "shop", "--policy", "hourly", "--json")
        assert outcome.status == 0, outcome.err
    outcome = snaporch("replicate", "--all", "--json")
    assert outcome.status == 0, outcome.err
    assert {each["domain"]: len(each["arrived"]) for each in outcome.json} == {"web": 2, "db": 2}
    return listed("web")


def listed(domain):
    return {each["snapshot"]: each for each in snaporch("list", domain, "--json").json}


def copies():
    """Everything of the copies that an attacker might want to change."""
    columns = "name,guid,createtxg,readonly,mountpoint,snaporch:run,snaporch:level,snaporch:copy"
    kinds = "filesystem,volume,snapshot"
    return must("zfs", "list", "-Hp", "-r", "-t", kinds, "-o", columns, ROOT).splitlines()


def files():
    """The SHA-256 of each file of a bundle that was stored, with its owner and mode."""
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mode)
        for path in BUNDLES.rglob("*")
        if path.is_file() and not path.is_symlink() and ".copying" not in str(path)
    }


@pytest.fixture
def unharmed(taken):
    """Whatever the test does: all that was there is there afterwards, and no more is elsewhere."""
    before = copies(), files()
    outside = must("zfs", "list", "-H", "-o", "name,guid", "-t", "all", "-r", "tank")
    yield
    assert set(before[0]) <= set(copies())
    assert before[1].items() <= files().items()
    assert must("zfs", "list", "-H", "-o", "name,guid", "-t", "all", "-r", "tank") == outside


def refused(outcome, *words, status=5):
    assert outcome.status == status, f"{outcome.status}: {outcome.out}{outcome.err}"
    assert outcome.out == ""
    (line,) = [each for each in outcome.err.splitlines() if not each.startswith("Pseudo-terminal")]
    assert line.startswith("snaporch: ")
    for word in words:
        assert word in line


def copy(dataset):
    return f"{ROOT}/{dataset.replace('/', ':')}"


def guids(*datasets):
    words = ("zfs", "list", "-Hp", "-d", "1", "-t", "snapshot", "-o", "name,guid", *datasets)
    return dict(line.split("\t") for line in must(*words).splitlines())


def value(key, name):
    return must("zfs", "get", "-Hp", "-o", "value", key, name).strip()


def test_all_of_a_group_arrives_and_is_called_replicated(taken):
    for disk in (disk for disks in DISKS.values() for disk in disks):
        ours = guids(disk.where)
        assert guids(copy(disk.where)) == {
            name.replace(disk.where, copy(disk.where)): guid for name, guid in ours.items()
        }
        assert value("readonly", copy(disk.where)) == "on"
        assert value("mounted", copy(disk.where)) in ("no", "-")
        for name in ours:
            there = name.replace(disk.where, copy(disk.where))
            for key in ("run", "uuid", "domain", "level", "bundle", "retention", "group"):
                assert value(f"snaporch:{key}", there) == value(f"snaporch:{key}", name) != "-"
            assert value("snaporch:copy", there) == "nas"
    for domain in DISKS:
        for each in listed(domain).values():
            assert each["replicated"] == ["nas"]
            bundle = Path(each["bundle"])
            assert same_bytes(bundle, BUNDLES / bundle.parent.name / bundle.name)


def test_a_replica_that_is_set_up_like_this_is_no_finding(taken):
    findings = snaporch("check", "--json").json
    assert [each for each in findings if each["code"].startswith("replica-")] == []
    must("zfs", "allow", "-u", USER, "rollback", ROOT)
    try:
        codes = {each["code"]: each["what"] for each in snaporch("check", "--json").json}
        assert "rollback" in codes["replica-weak"]
    finally:
        must("zfs", "unallow", "-u", USER, "rollback", ROOT)


def test_all_bundles_are_read_again(taken):
    outcome = snaporch("replicate", "--all", "--recheck", "--json")
    assert outcome.status == 0, outcome.err
    assert {each["domain"]: each["read"] for each in outcome.json} == {"web": 2, "db": 2}


COMMANDS = [
    "",
    "sh",
    "sh -c 'zfs destroy -r backup/vm1'",
    "zfs destroy -r backup/vm1",
    "zfs rollback -r backup/vm1/tank:web@a",
    "zfs rename backup/vm1/tank:web backup/vm1/gone",
    "zfs receive -F backup/vm1/tank:web",
    "rm -rf /srv/snaporch-vm1",
    "snaporch receive --dataset backup --bundles /",
    "snaporch delete web@a",
    "/usr/lib/openssh/sftp-server",
    "internal-sftp",
    "scp -f /etc/shadow",
    "scp -t /srv/snaporch-vm1",
    "rsync --server --sender -logDtpr . /etc",
    "snaporch-replica 1 check; id",
    "snaporch-replica 1 check\nid",
    "snaporch-replica 1 check $(id)",
    "snaporch-replica 1 destroy",
    "snaporch-replica 2 check",
    "snaporch-replica 1 check " + "A" * 100_000,
]


def test_the_key_runs_nothing_but_requests(unharmed):
    for command in COMMANDS:
        refused(KEY.use(command), "snaporch receive: ", "no request")


def test_the_key_gives_no_files_no_terminal_and_no_network(unharmed, tmp_path):
    options = ("-o", "BatchMode=yes", "-P", "2222")
    planted = tmp_path / "planted"
    planted.write_text("planted")
    for words in (
        ["scp", *options, str(planted), f"{HOST}:/srv/snaporch-vm1/bundles/planted"],
        ["scp", "-O", *options, str(planted), f"{HOST}:/srv/snaporch-vm1/bundles/planted"],
        ["scp", *options, f"{HOST}:/etc/hostname", str(tmp_path / "stolen")],
        ["sftp", *options, "-b", "/dev/null", HOST],
        ["rsync", "-a", f"{tmp_path}/", f"{HOST}:/srv/snaporch-vm1/bundles/"],
        ["ssh", "-o", "BatchMode=yes", "-W", "localhost:2222", HOST],
        ["ssh", "-o", "BatchMode=yes", "-o", "ExitOnForwardFailure=yes", "-N",
         "-R", "2223:localhost:2222", HOST],
        ["ssh", "-o", "BatchMode=yes", "-tt", HOST, "sh"],
    ):  # fmt: skip
        assert run(*words).status != 0, words
    assert not (tmp_path / "stolen").exists()
    assert not (BUNDLES / "planted").exists()


def test_names_lead_nowhere_else(unharmed, taken):
    uuid, run_name = next(iter(taken.values()))["bundle"].split("/")[-2:]
    for name in ("..", ".", "a/b", "../vm1-bundles", "/tank", "a@b", "-F ../x", "a\0b", "a\n"):
        refused(ask("receive", {"copy": name}), "no name of a copy")
        refused(ask("snapshots", {"copies": [name]}), "no name of a copy")
    for uuid_there, run_there in ((f"../{uuid}"[:36], "x"), (uuid, ".."), (uuid, "../../x")):
        refused(ask("manifest", {"uuid": uuid_there, "run": run_there}), "is no")
    for name in ("../manifest.json", "copy.json", "/etc/passwd", ".x", "a\nb"):
        file = {"name": name, "bytes": 1, "sha256": "0" * 64, "offset": 0}
        given = {"uuid": uuid, "run": run_name, "files": [file]}
        refused(ask("store", given, b"x"))
    refused(ask("state", {"copy": "a", "token": "1-ab-f0-789c"}), "exactly these values")
    refused(ask("receive", {"copy": "-t 1-ab-f0-789c /"}), "no name of a copy")


def sent(*words):
    return subprocess.run(["zfs", "send", *words], check=True, capture_output=True).stdout


@pytest.fixture
def forged(taken):
    """Another dataset of the attacker's, whose snapshots have the names of the guest's."""
    names = [name.partition("@")[2] for name in guids("tank/web")]
    must("zfs", "create", "tank/forged")
    for number, name in enumerate([*names, "more"]):
        Path("/tank/forged/file").write_text(f"{number}")
        must("zfs", "snapshot", f"tank/forged@{name}")
    yield names
    must("zfs", "destroy", "-r", "tank/forged")


def test_no_stream_changes_what_is_there(forged, unharmed):
    first, last = forged[0], forged[-1]
    receive = {"copy": "tank:web"}
    must("zfs", "clone", f"tank/forged@{first}", "tank/clone")
    try:
        must("zfs", "snapshot", "tank/clone@new")
        clone = sent("-i", f"tank/forged@{first}", "tank/clone@new")
    finally:
        must("zfs", "destroy", "-r", "tank/clone")
    for stream, reason in (
        (sent("-R", "tank/forged@more"), "a package"),
        (sent("-p", "tank/forged@more"), "a package"),
        (sent("-I", f"tank/forged@{first}", "tank/forged@more"), "a package"),
        (clone, "a clone"),
        (b"x" * 1000, "no stream"),
        (b"", "too short"),
    ):
        refused(ask("receive", receive, stream), reason)
    for stream, reason in (
        (sent(f"tank/forged@{first}"), "cannot receive"),
        (sent("tank/forged@more"), "cannot receive"),
        (sent("-i", f"tank/forged@{first}", "tank/forged@more"), "cannot receive"),
    ):
        refused(ask("receive", receive, stream), reason, status=8)
    again = sent("-i", f"tank/web@{first}", f"tank/web@{last}")
    refused(ask("receive", receive, again), "which is there already")
    refused(ask("discard", receive), "does not have any resumable", status=8)
    assert guids(copy("tank/web")).keys() == {f"{copy('tank/web')}@{name}" for name in forged}


def test_a_cut_stream_is_a_part_that_cannot_take_snapshots_along(unharmed, taken):
    Path("/tank/web/noise").write_bytes(os.urandom(4 << 20))
    last = list(guids("tank/web"))[-1]
    must("zfs", "snapshot", "tank/web@cut")
    try:
        outcome = ask("receive", {"copy": "tank:web"}, sent("-i", last, "tank/web@cut")[: 2 << 20])
        refused(outcome, "incomplete", status=8)
        refused(ask("discard", {"copy": "tank:web"}), "permission denied", status=8)
    finally:
        must("zfs", "destroy", "tank/web@cut")
        Path("/tank/web/noise").unlink()
        run("zfs", "receive", "-A", copy("tank/web"))


GUID, CREATED = slice(40, 48), slice(24, 32)
"""In the first record of a stream; see stream_header.py."""


def test_no_stream_has_the_guid_or_the_key_of_what_is_there(unharmed, taken, tmp_path):
    """A restore by GUID would find the forged snapshot, and a raw stream replaces the key."""
    last = list(guids("tank/web"))[-1]
    must("zfs", "snapshot", "tank/web@forged")
    key = tmp_path / "key"
    key.write_text("open sesame, please\n")
    words = ("-o", "encryption=on", "-o", "keyformat=passphrase", "-o", f"keylocation=file://{key}")
    must("zfs", "create", *words, "tank/secret")
    must("zfs", "snapshot", "tank/secret@raw")
    try:
        stream = bytearray(sent("-i", last, "tank/web@forged"))
        raw = sent("-w", "tank/secret@raw")
        for place, number, reason in (
            (GUID, int(guids("tank/web")[last]), "which is there already"),
            (GUID, 0, "has no GUID"),
            (CREATED, 1 << 62, "in the future"),
        ):
            forged = bytearray(stream)
            forged[place] = struct.pack("<Q", number)
            refused(ask("receive", {"copy": "tank:web"}, bytes(forged)), reason)
        refused(ask("receive", {"copy": "tank:secret"}, raw), "the key of the whole copy")
    finally:
        must("zfs", "destroy", "tank/web@forged")
        must("zfs", "destroy", "-r", "tank/secret")


def test_requests_are_limited(unharmed):
    request = base64.urlsafe_b64encode(b'{"copy":"idle"}').decode()
    words = ["ssh", "-o", "BatchMode=yes", HOST, f"snaporch-replica 1 receive {request}"]
    silent = []
    try:
        while (outcome := ask("check")).status == 0 and len(silent) < 2 * MAX_REQUESTS:
            pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            silent.append(subprocess.Popen(words, **pipes))
        refused(outcome, f"{MAX_REQUESTS} requests are carried out already", status=6)
        assert len(silent) >= MAX_REQUESTS
    finally:
        for process in silent:
            process.communicate()
    wait_for(lambda: ask("check").status == 0, "none of them is carried out any more")


def described(content):
    return [
        {"name": n, "bytes": len(c), "sha256": hashlib.sha256(c).hexdigest(), "offset": 0}
        for n, c in content.items()
    ]


def test_no_bundle_is_replaced(unharmed, taken):
    uuid, run_name = next(iter(taken.values()))["bundle"].split("/")[-2:]
    stored = BUNDLES / uuid / run_name
    names = {"uuid": uuid, "run": run_name}
    for content in (
        {"manifest.json": b"{}"},
        {"manifest.json": (stored / "manifest.json").read_bytes()},
        {"ram.save": b"hostile", "manifest.json": b"{}"},
    ):
        given = {**names, "files": described(content)}
        refused(ask("store", given, b"".join(content.values())), "is never replaced")
    outcome = ask("damaged", {**names, "sums": {"manifest.json": "0" * 64}})
    assert json.loads(outcome.out)["damaged"] == ["manifest.json"]
    files_given = described({"manifest.json": b"{}"})
    given = {**names, "files": files_given}
    refused(ask("store", given, b"{}"), "is never replaced")
    other = {"uuid": uuid, "run": "other", "files": [files_given[0] | {"bytes": 1 << 51}]}
    refused(ask("store", other, b"{}"), "no number of bytes")
    other["files"] = [files_given[0] | {"bytes": 1 << 40}]
    refused(ask("store", other, b"{}"), "ended early", status=8)
    assert not (BUNDLES / ".replaced").exists()


def test_no_mark_is_changed(unharmed, taken):
    last = list(guids("tank/web"))[-1].partition("@")[2]
    name = f"tank:web@{last}"
    uuid = next(iter(taken.values()))["bundle"].split("/")[-2]
    refused(ask("mark", {"marks": {name: {"bundle": f"{uuid}/other"}}}), "that of the domain's run")
    for key, wanted in {
        "run": "other", "uuid": uuid[:-1] + "0", "level": "crash", "domain": "other",
        "retention": "none", "group": "x", "copy": "x", "verified": "x",
    }.items():  # fmt: skip
        before = value(f"snaporch:{key}", f"{ROOT}/{name}")
        assert ask("mark", {"marks": {name: {key: wanted}}}).status == 0
        assert value(f"snaporch:{key}", f"{ROOT}/{name}") == before
    for key, wanted in {"copy": "", "kept": "x", "mountpoint": "/", "torn": "no"}.items():
        refused(ask("mark", {"marks": {name: {key: wanted}}}))
    for full_name in ("tank:web", "tank:web@a@b", "../vm1-bundles@a", "@a"):
        refused(ask("mark", {"marks": {full_name: {"note": "x"}}}), "no name of a copy's snapshot")


def test_an_old_copy_of_another_program_never_becomes_one_with_ram(guests, taken):
    must("zfs", "snapshot", "tank/db@by-hand")
    outcome = snaporch("snapshot", "db", "--policy", "hourly", "--json")
    assert outcome.status == 0, outcome.err
    assert snaporch("replicate", "db").status == 0
    outcome = ask("mark", {"marks": {"tank:db@by-hand": {"run": "r", "level": "ram"}}})
    assert json.loads(outcome.out) == {"late": ["tank:db@by-hand"]}
    assert value("snaporch:level", f"{ROOT}/tank:db@by-hand") == "-"


AS_USER = [
    "destroy -r {root}",
    "destroy -r {copy}",
    "destroy {copy}@{last}",
    "rollback -r {copy}@{first}",
    "rename {copy} {root}/gone",
    "rename {copy}@{last} gone",
    "receive -F {copy} <{stream}",
    "clone {copy}@{first} {root}/clone",
    "set readonly=off {copy}",
    "set mountpoint=/tmp/x {copy}",
    "set canmount=on {copy}",
    "set quota=none {root}",
    "set snapshot_limit=none {root}",
    "allow -u snaporch-vm1 destroy {root}",
    "promote {copy}",
]


def test_zfs_itself_refuses_the_user(unharmed, forged, tmp_path):
    """Also if there were an error in ``snaporch receive``."""
    stream = tmp_path / "stream"
    stream.write_bytes(sent(f"tank/forged@{forged[0]}"))
    for path in (stream, *stream.parents):
        path.chmod(path.stat().st_mode | 0o555)
    names = {"root": ROOT, "copy": copy("tank/web"), "stream": stream}
    for command in AS_USER:
        words = command.format(first=forged[0], last=forged[-1], **names)
        outcome = run("su", USER, "-c", f"/usr/sbin/zfs {words}")
        assert outcome.status != 0, words
        assert "sh:" not in outcome.err, outcome.err


def test_a_flood_is_stopped_by_the_limits(unharmed, taken):
    must("zfs", "set", f"snapshot_limit={len(copies())}", f"filesystem_limit={20}", ROOT)
    must("zfs", "create", "tank/flood")
    must("zfs", "snapshot", "tank/flood@a")
    stream = sent("tank/flood@a")
    try:
        outcomes = [ask("receive", {"copy": f"flood{n}"}, stream) for n in range(20)]
        assert outcomes[0].status == 0
        refused(outcomes[-1], "cannot receive", status=8)
    finally:
        must("zfs", "destroy", "-r", "tank/flood")
        for n in range(20):
            run("zfs", "destroy", "-r", f"{ROOT}/flood{n}")
        must("zfs", "set", "snapshot_limit=20000", "filesystem_limit=200", ROOT)


def test_a_damaged_bundle_is_replaced_and_the_former_one_is_kept(taken):
    bundle = Path(list(taken.values())[-1]["bundle"])
    stored = BUNDLES / bundle.parent.name / bundle.name
    (stored / "manifest.json").write_bytes(b"damaged")
    outcome = snaporch("replicate", "web", "--recheck", "--json")
    assert outcome.status == 0, outcome.err
    assert outcome.json[0]["damaged"] == [list(taken)[-1]]
    assert same_bytes(bundle, stored)
    (kept,) = (BUNDLES / ".replaced").iterdir()
    assert (kept / "manifest.json").read_bytes() == b"damaged"


def test_a_guest_keeps_replicating_after_the_attacks(guests, taken):
    before = listed("web")
    assert snaporch("snapshot", "--group", "shop", "--policy", "hourly").status == 0
    new = [name for name in listed("web") if name not in before]
    assert snaporch("replicate", "web", "--json").json[0]["arrived"][-1:] == new
    assert "replica-failed" not in snaporch("status").out


def test_old_copies_are_pruned_there_by_their_age(guests, taken, tmp_path):
    script, before = block(PAGE, "dataset=backup/vm1 limit="), copies()
    must("bash", "-euc", script)
    assert copies() == before
    must("bash", "-euc", script.replace("90 days ago", "tomorrow"))
    assert len(guids(copy("tank/web"))) == len(guids(copy("flash/web"))) == 1
    for disk in DISKS["web"]:  # the lab is its own replica: prune would find the originals
        must("zfs", "destroy", f"{disk.where}@%")
    config = tmp_path / "there.toml"
    config.write_text(f'[paths]\nbundles = "{BUNDLES}"\n')
    outcome = snaporch("--config", str(config), "prune", "--json")
    assert outcome.status == 0, outcome.err
    uuid = Path(next(iter(taken.values()))["bundle"]).parent.name
    assert len([path for path in (BUNDLES / uuid).iterdir() if path.name[0] != "."]) == 1
