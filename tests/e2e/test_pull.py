"""Guests are pulled from a host (the lab itself) by a key that can only read; attacks with it.

The lab is the source and the backup machine at once: its sshd runs the forced command of a second
key. The commands and the configuration are those of the page.
"""

import hashlib
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from cut_line import cut, line_to_sshd
from forced_key import ForcedKey, backup_machine, block
from guests.disks import Disk, destroy
from guests.guest import Guest
from support import (
    BUNDLES,
    PATIENCE_SECONDS,
    accepting,
    assert_clean,
    assert_restored,
    must,
    one_line_error,
    run,
    snaporch,
    snapshot,
    started,
    wait_for,
)

PAGE = "docs/how-to/pull.md"
KEY = ForcedKey("vm1", "snaporch-source 1")
ask = KEY.ask
ROOT = "backup/pulled/vm1"
PULLED = Path("/srv/pulled-vm1/bundles")
DISKS = {
    "web": [Disk("file", "tank/web"), Disk("zvol", "flash/web")],
    "db": [Disk("file", "tank/db")],
    "secret": [Disk("file", "tank/secret")],
}
FORCED = 'restrict,command="snaporch send --as nas --domain web --domain db" ssh-ed25519 AAAA…'


@pytest.fixture(scope="module", autouse=True)
def machine(tmp_path_factory):
    """The configuration of the backup machine, which is set up by the commands of the page."""
    place = tmp_path_factory.mktemp("there")
    config, home = place / "snaporch.toml", Path("/root/.ssh")
    with backup_machine(place), pytest.MonkeyPatch.context() as patch:
        key = must("bash", "-euc", block(PAGE, "zfs create -o canmount=off")).splitlines()[-1]
        line = block(PAGE, "restrict,").replace("ssh-ed25519 AAAA…", key)
        with (home / "authorized_keys").open("a") as stream:
            stream.write(line)
        port = "    HostName localhost\n    Port 2222\n"
        with (home / "config").open("a") as stream:
            stream.write(block(PAGE, "Host vm1") + port)
        config.write_text(block(PAGE, "[source.vm1]"))
        patch.setenv("SNAPORCH_CONFIG", str(config))
        yield config
    (home / "snaporch-vm1").unlink()


@pytest.fixture(scope="module")
def guests(machine):
    made = {name: Guest.create(name, disks=disks) for name, disks in DISKS.items()}
    yield made
    for guest in made.values():
        guest.remove()


@pytest.fixture(scope="module")
def pulled(guests):
    """Each guest has a snapshot, and those of two guests were pulled."""
    names = {name: snapshot(guest)["snapshot"] for name, guest in guests.items()}
    outcome = snaporch("pull", "vm1", "--json")
    assert outcome.status == 0, outcome.err
    arrived = {each["domain"]: each["arrived"] for each in outcome.json}
    assert arrived == {name: [names[name]] for name in ("web", "db")}
    return names


def copy(dataset):
    return f"{ROOT}/{dataset.replace('/', ':')}"


def guids(dataset):
    words = ("zfs", "list", "-Hp", "-d", "1", "-t", "snapshot", "-o", "name,guid", dataset)
    lines = (line.split("\t") for line in must(*words).splitlines())
    return {name.partition("@")[2]: guid for name, guid in lines}


def value(key, name):
    return must("zfs", "get", "-Hp", "-o", "value", key, name).strip()


def uuid_of(name):
    return must("virsh", "domuuid", name).strip()


def sums(directory):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.iterdir()
        if path.name != "copy.json"
    }


def bundle_of(store, domain):
    (found,) = [p for p in (store / uuid_of(domain)).iterdir() if not p.name.startswith(".")]
    return found


def status_problems():
    outcome = snaporch("status", "--json")
    return {each["code"]: each["text"] for each in outcome.json["problems"]}, outcome


def test_all_of_a_guest_on_two_pools_comes_ram_included(pulled):
    for disk in (*DISKS["web"], *DISKS["db"]):
        assert guids(copy(disk.where)) == guids(disk.where)
        assert value("readonly", copy(disk.where)) == "on"
        assert value("mounted", copy(disk.where)) in ("no", "-")
        assert value("mountpoint", copy(disk.where)) in ("none", "-")
    assert value("canmount", copy("tank/web")) == "noauto"
    assert value("snaporch:copy", f"{copy('tank/web')}@{pulled['web']}") == "vm1"
    source, here = bundle_of(BUNDLES, "web"), bundle_of(PULLED, "web")
    assert "ram.save" in sums(here)
    assert sums(here) == sums(source)
    assert json.loads((here / "copy.json").read_text())["dataset"] == ROOT


def test_a_guest_that_the_key_may_not_have_did_not_come(pulled):
    assert run("zfs", "list", copy("tank/secret")).status != 0
    assert not (PULLED / uuid_of("secret")).exists()


def test_status_and_metrics_have_the_pull(pulled):
    problems, outcome = status_problems()
    assert problems == {}, outcome.out
    (source,) = outcome.json["sources"]
    assert {each["domain"] for each in source["guests"]} == {"web", "db"}
    assert source["failed"] is None
    assert "source    vm1: pulled " in snaporch("status").out
    metrics = snaporch("status", "--prometheus", "-").out
    labels = f'domain="web",source="vm1",uuid="{uuid_of("web")}"'
    assert f"snaporch_source_last_try_failed{{{labels}}} 0.0" in metrics


def test_pulled_copies_are_restored_in_clones(pulled):
    """One guest with RAM on two pools. Its host's own verification says nothing of the copy."""
    outcome = snaporch("verify", "--on", "vm1", "--test-restore", "web", "--json")
    assert outcome.status == 0, outcome.err + outcome.out
    (document,) = outcome.json
    assert (document["passed"], document["reached"]) == (True, "resumed")
    for disk in DISKS["web"]:
        full = f"{copy(disk.where)}@{pulled['web']}"
        assert " passed resumed" in value("snaporch:verified-here", full)
        assert value("clones", full) in ("", "-")
        assert value("snaporch:verified-here", f"{disk.where}@{pulled['web']}") == "-"
    assert "verify" not in must("virsh", "list", "--all", "--name")
    assert "1 of 1 test restores passed" in snaporch("status").out


@pytest.fixture(scope="module")
def away(machine, tmp_path_factory):
    """The environment of a machine whose libvirt cannot be reached."""
    path = tmp_path_factory.mktemp("away") / "away.toml"
    path.write_text('libvirt_uri = "qemu+unix:///system?socket=/no"\n' + machine.read_text())
    return {"SNAPORCH_CONFIG": str(path)}


def test_a_backup_machine_needs_no_libvirt(pulled, away):
    for words in (("pull", "vm1"), ("pull", "--due"), ("prune",)):
        outcome = snaporch(*words, env=away)
        assert (outcome.status, outcome.err) == (0, "")
    assert snaporch("status", env=away).status == 7  # libvirt is installed here


@pytest.mark.daily(3)
def test_check_finds_what_would_disappoint(pulled, machine, tmp_path):
    def codes(text):
        path = tmp_path / "check.toml"
        path.write_text(text)
        found = snaporch("check", "--json", env={"SNAPORCH_CONFIG": str(path)}).json
        return {e["code"]: e["what"] for e in found if e["code"].startswith("source-")}

    assert codes(machine.read_text()) == {}
    assert "'wbe'" in codes(machine.read_text().replace('"web"', '"wbe"'))["source-guests"]
    away = machine.read_text().replace('host = "vm1"', 'host = "root@nowhere.invalid"')
    assert [*codes(away)] == ["source-unreachable"]
    quota = must("zfs", "get", "-Hp", "-o", "value", "quota", ROOT).strip()
    try:
        must("zfs", "set", "quota=500M", ROOT)
        must("zfs", "set", "readonly=off", ROOT)
        assert "readonly=on" in snaporch("check").out
        must("zfs", "set", "readonly=on", ROOT)
        assert " MiB are free" in codes(machine.read_text())["source-room"]
    finally:
        must("zfs", "set", "readonly=on", ROOT)
        must("zfs", "set", f"quota={quota}", ROOT)
    keys = Path("/root/.ssh/authorized_keys")
    lines = keys.read_text()
    try:
        keys.write_text(re.sub(r'restrict,command="snaporch send[^"]*" ', "", lines))
        assert [*codes(machine.read_text())] == ["source-unreachable"]
    finally:
        keys.write_text(lines)


@pytest.mark.daily(3)
def test_the_checksums_of_pulled_bundles_need_no_libvirt(pulled, away):
    env = away
    outcome = snaporch("verify", "--on", "vm1", "web", "db", "--json", env=env)
    assert outcome.status == 0, outcome.err
    assert {(each["domain"], each["passed"]) for each in outcome.json} == {
        ("web", True),
        ("db", True),
    }
    ram = bundle_of(PULLED, "db") / "ram.save"
    whole = ram.read_bytes()
    try:
        ram.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        outcome = snaporch("verify", "--on", "vm1", "db", env=env)
        assert outcome.status == 8
        assert "ram.save is damaged" in outcome.err
    finally:
        ram.write_bytes(whole)
    assert snaporch("verify", "--on", "vm1", "db", env=env).status == 0


@pytest.fixture(scope="module")
def newer(pulled, guests):
    """The source has destroyed the snapshot of ``db`` that was pulled; a newer one was pulled."""
    must("zfs", "destroy", f"{DISKS['db'][0].where}@{pulled['db']}")
    new = snapshot(guests["db"])["snapshot"]
    outcome = snaporch("pull", "vm1", "--json")
    assert outcome.status == 0, outcome.err
    return new, {each["domain"]: each["arrived"] for each in outcome.json}


@pytest.mark.daily(2, "long")
def test_what_is_new_comes_by_a_bookmark_when_the_last_one_is_gone(newer):
    new, arrived = newer
    disk = DISKS["db"][0].where
    assert arrived == {"web": [], "db": [new]}
    assert guids(copy(disk)).items() > guids(disk).items()


@pytest.mark.daily(2, "long")
def test_a_cut_line_is_continued(pulled, guests, machine, tmp_path):
    Path(guests["web"].sources()["vda"]).with_name("more").write_bytes(os.urandom(24 << 20))
    new = snapshot(guests["web"])["snapshot"]
    slow = tmp_path / "slow.toml"
    slow.write_text(machine.read_text() + "rate = 2\n")

    def token():
        found = value("receive_resume_token", copy("tank/web"))
        return found if found != "-" else None

    with started("pull", "vm1", env={"SNAPORCH_CONFIG": str(slow)}) as process:
        wait_for(lambda: value("receive_resume_token", copy("tank/web")) != "-" or None, "a part")
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    assert new not in guids(copy("tank/web"))
    assert wait_for(token, "the position of the transfer")
    outcome = snaporch("--verbose", "pull", "vm1", "--json")
    assert outcome.status == 0, outcome.err
    assert "begins again" not in outcome.err
    assert {each["domain"]: each["arrived"] for each in outcome.json}["web"] == [new]
    assert guids(copy("tank/web")) == guids("tank/web")


@pytest.mark.daily(2, "long")
def test_a_line_that_is_cut_in_any_phase_and_a_full_machine_lose_nothing(pulled, guests):
    Path(guests["web"].sources()["vda"]).with_name("noise").write_bytes(os.urandom(4 << 20))
    new, bundles = snapshot(guests["web"])["snapshot"], PULLED / uuid_of("web")
    before, quota = {*bundles.iterdir()}, value("quota", ROOT)
    words = ("pull", "vm1", "--quiet")
    with line_to_sshd() as line:
        for count in (2_000, 1 << 20):  # the first handshake, a stream
            cut(line, words, count)
            assert new not in guids(copy("tank/web"))
        part = value("receive_resume_token", copy("tank/web"))
        assert part != "-"
        must("zpool", "sync")
        must("zfs", "set", f"quota={value('used', ROOT)}", ROOT)
        outcome = snaporch(*words)
        must("zfs", "set", f"quota={quota}", ROOT)
        assert outcome.status == 8, outcome.err
        assert "quota exceeded" in outcome.err
        assert value("receive_resume_token", copy("tank/web")) == part
        cut(line, words, 20_000, lambda: new in guids(copy("tank/web")))  # the bundle
        assert {*bundles.glob("[!.]*")} == before
    outcome = snaporch("pull", "vm1", "--json")
    assert outcome.status == 0, outcome.err
    assert {each["domain"]: each["arrived"] for each in outcome.json}["web"] == [new]
    assert guids(copy("tank/web")) == guids("tank/web")


@pytest.mark.daily(2, "long")
def test_a_name_that_matches_nothing_is_seen_and_the_others_come(pulled, machine, tmp_path):
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(machine.read_text().replace('"web"', '"wbe"'))
    env = {"SNAPORCH_CONFIG": str(wrong)}
    outcome = snaporch("pull", "vm1", env=env)
    assert outcome.status == 4
    assert "vm1: wbe: the source sends no such guest" in outcome.err
    assert "db  vm1  up to date" in outcome.out
    problems, _ = status_problems()
    assert "wbe" in problems["pull-failed"]
    assert snaporch("pull", "vm1").status == 0
    assert status_problems()[0] == {}


@pytest.fixture
def unharmed(pulled):
    """Whatever the test does: the source's datasets, snapshots and bundles stay as they are."""
    words = ("zfs", "list", "-H", "-o", "name,guid,snaporch:level", "-t", "all", "-r", "tank")
    before = must(*words), sums(bundle_of(BUNDLES, "secret"))
    yield
    now = {line for line in must(*words).splitlines() if "#" not in line}
    assert now == {line for line in before[0].splitlines() if "#" not in line}
    assert sums(bundle_of(BUNDLES, "secret")) == before[1]


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    "command",
    [
        "",
        "sh",
        "zfs destroy -r tank/web",
        "snaporch-source 1 guests; zfs destroy -r tank/web",
        "snaporch-source 1 guests $(touch /tmp/hacked)",
        "snaporch send --as x --all",
        "scp -f /etc/shadow",
        "/usr/lib/openssh/sftp-server",
        "snaporch-replica 1 check",
        "snaporch-source 1 destroy",
    ],
)
def test_the_key_runs_nothing_else(unharmed, command):
    outcome = KEY.use(command)
    assert (outcome.status, outcome.out) == (5, "")
    assert "no request" in outcome.err
    assert not Path("/tmp/hacked").exists()


@pytest.mark.parametrize("option", ["-tt", "-W127.0.0.1:2222"])
def test_the_key_forwards_nothing_and_has_no_terminal(unharmed, option):
    outcome = KEY.use("", option)
    assert outcome.status != 0
    assert outcome.out.replace("\r", "") in ("", outcome.err) or "no request" in outcome.out


@pytest.mark.daily(2, "long")
def test_the_key_reads_no_other_guest_and_no_other_file(unharmed, guests):
    secret, web = uuid_of("secret"), uuid_of("web")
    guid = int(next(iter(guids("tank/secret").values())))
    run_of = bundle_of(BUNDLES, "secret").name
    stream = {"uuid": web, "dataset": "tank/secret", "guid": guid, "base": 0, "token": "-"}
    file = {"name": "ram.save", "offset": 0}
    for verb, values in (
        ("snapshots", {"uuid": secret}),
        ("stream", stream),
        ("stream", stream | {"uuid": secret}),
        ("stream", stream | {"dataset": "tank/web"}),
        ("stream", stream | {"dataset": "tank/web/../secret"}),
        ("manifest", {"uuid": secret, "run": run_of}),
        ("bundle", {"uuid": secret, "run": run_of, "files": [file]}),
        ("bundle", {"uuid": web, "run": run_of, "files": [file]}),
        ("bundle", {"uuid": web, "run": f"../{secret}/{run_of}", "files": [file]}),
        ("bundle", {"uuid": web, "run": run_of, "files": [{"name": "/etc/shadow", "offset": 0}]}),
    ):
        outcome = ask(verb, values)
        assert outcome.status in (4, 5), (verb, values, outcome)
        assert outcome.out == ""
    known = json.loads(ask("guests").out)["guests"]
    assert {each["domain"] for each in known} == {"web", "db"}


def test_a_token_for_another_dataset_sends_nothing(unharmed):
    """The token that ZFS makes for an interrupted copy of the secret, by an admin elsewhere."""
    (name,) = guids("tank/secret")
    send = f"zfs send tank/secret@{name}"
    half = int(must("sh", "-c", f"{send} | wc -c")) // 2
    run("sh", "-c", f"{send} | head -c {half} | zfs receive -s -u backup/cut")
    token = value("receive_resume_token", "backup/cut")
    must("zfs", "receive", "-A", "backup/cut")
    assert token != "-"
    (guid, *_) = map(int, guids("tank/web").values())
    values = {"uuid": uuid_of("web"), "dataset": "tank/web", "guid": guid, "base": 0}
    outcome = ask("stream", values | {"token": token})
    assert json.loads(outcome.out) == {"bytes": 0, "refused": "its token names another dataset"}


@pytest.mark.daily(2, "long")
def test_bundles_of_destroyed_copies_are_pruned_and_no_others(pulled, newer, tmp_path):
    own = tmp_path / "pulled-vm1.toml"
    own.write_text(f'[paths]\nbundles = "{PULLED}"\n')
    here = [each for each in PULLED.glob("*/*") if not each.name.startswith(".")]
    (gone,) = [e for e in guids(copy("tank/db")) if e == pulled["db"]]
    run_of = value("snaporch:run", f"{copy('tank/db')}@{gone}")
    must("zfs", "destroy", f"{copy('tank/db')}@{gone}")
    outcome = snaporch("prune", env={"SNAPORCH_CONFIG": str(own)})
    assert outcome.status == 0, outcome.err
    assert [each.name for each in here if not each.exists()] == [run_of]
    outcome = snaporch("pull", "vm1", "--json")
    assert outcome.status == 0, outcome.err
    assert {each["domain"]: each["arrived"] for each in outcome.json} == {"web": [], "db": []}


@pytest.mark.daily(2, "long")
def test_a_hostile_source_is_one_error_and_harms_nothing(pulled, machine, tmp_path, guests):
    """Another program answers for the source: everything that it sends is a lie."""
    oldest = int(next(iter(guids("tank/web").values())))
    lies = tmp_path / "lies"
    lies.write_text(
        f"""#!/usr/bin/env python3
import base64, json, os, sys
_, _, verb, *rest = os.environ["SSH_ORIGINAL_COMMAND"].split()
values = json.loads(base64.urlsafe_b64decode(rest[0])) if rest else {{}}
web = {uuid_of("web")!r}
snapshot = {{"name": "lie", "guid": {oldest}, "createtxg": 1 << 60, "created": 1.0,
            "properties": {{"uuid": web, "run": "lie", "bundle": web + "/lie"}}}}
if verb == "guests":
    print(json.dumps({{"guests": [{{"uuid": web, "domain": "web"}}]}}))
elif verb == "snapshots":
    base = os.environ.get("BASE")
    print(json.dumps({{"waiting": [], "shared": [], "unmarked": [], "datasets": [{{
        "name": "tank/web", "kind": "filesystem", "raw": False, "policy": "x",
        "snapshots": [snapshot],
        "bookmarks": [[{int(list(guids(copy("tank/web")).values())[-1])}, 5]]}}]}}))
elif verb == "stream":
    sys.stdout.buffer.write(b'{{"bytes": 1, "refused": ""}}\\n' + os.urandom(5000))
""",
    )
    lies.chmod(0o755)
    before = guids(copy("tank/web"))
    keys = Path("/root/.ssh/authorized_keys")
    honest = keys.read_text()
    keys.write_text(honest.replace("snaporch send --as nas --domain web --domain db", str(lies)))
    only_web = tmp_path / "web.toml"
    only_web.write_text(machine.read_text().replace('["web", "db"]', '["web"]'))
    try:
        outcome = snaporch("pull", "vm1", env={"SNAPORCH_CONFIG": str(only_web)})
    finally:
        keys.write_text(honest)
    assert outcome.status in (5, 8), outcome
    assert "Traceback" not in outcome.err
    assert guids(copy("tank/web")) == before
    assert snaporch("pull", "vm1").status == 0


EVIL = {
    "mountpoint": "/etc/snaporch-evil",
    "canmount": "on",
    "readonly": "off",
    "exec": "on",
    "setuid": "on",
    "devices": "on",
    "quota": "none",
    "snaporch:verified-here": "2026-11-21T14:00:00Z passed booted",
    "snaporch:rebuild": "transfer",
}
"""What a hostile source sets on a dataset of its own."""


@pytest.fixture
def evil(machine, tmp_path, pulled):
    """Pull from a source that sends a real stream of a dataset with hostile properties."""
    options = [word for key, text in EVIL.items() for word in ("-o", f"{key}={text}")]
    must("zfs", "create", "-u", *options, "tank/evil")
    must("zfs", "snapshot", "tank/evil@lie")
    stream, lies = tmp_path / "stream", tmp_path / "lies"
    lies.write_text(
        f"""#!/usr/bin/env python3
import json, os, sys
verb, web = os.environ["SSH_ORIGINAL_COMMAND"].split()[2], {uuid_of("web")!r}
if verb == "guests":
    print(json.dumps({{"guests": [{{"uuid": web, "domain": "web"}},
        {{"uuid": {uuid_of("db")!r}, "domain": "db"}}]}}))
elif verb == "snapshots":
    print(json.dumps({{"waiting": [], "shared": [], "unmarked": [], "datasets": [{{
        "name": "tank/evil", "kind": "filesystem", "raw": False, "policy": "",
        "bookmarks": [], "snapshots": [{{"name": "lie", "guid": {guids("tank/evil")["lie"]},
            "createtxg": 9, "created": 1.0, "properties": {{"uuid": web, "run": "lie"}}}}]}}]}}))
elif verb == "stream":
    data = open({str(stream)!r}, "rb").read()
    sys.stdout.write(json.dumps({{"bytes": len(data), "refused": ""}}) + chr(10))
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
""",
    )
    lies.chmod(0o755)
    keys = Path("/root/.ssh/authorized_keys")
    honest = keys.read_text()
    keys.write_text(honest.replace("snaporch send --as nas --domain web --domain db", str(lies)))
    only_web = tmp_path / "web.toml"
    only_web.write_text(machine.read_text().replace('["web", "db"]', '["web"]'))

    def pull(*options):
        must("sh", "-c", f"zfs send {' '.join(options)} tank/evil@lie >{stream}")
        return snaporch("pull", "vm1", env={"SNAPORCH_CONFIG": str(only_web)})

    yield pull
    keys.write_text(honest)
    run("zfs", "destroy", "-r", copy("tank/evil"))
    must("zfs", "destroy", "-r", "tank/evil")
    assert snaporch("pull", "vm1").status == 0


@pytest.mark.daily(2, "attack")
@pytest.mark.parametrize("option", ["-p", "-R", "-b"])
def test_a_stream_with_properties_is_refused(evil, option):
    outcome = evil(option)
    assert outcome.status == 5, outcome
    assert "it is a package, which could contain properties" in outcome.err
    assert run("zfs", "list", copy("tank/evil")).status != 0


@pytest.mark.daily(2, "attack")
def test_no_property_of_a_hostile_dataset_arrives(evil):
    outcome = evil()
    name = copy("tank/evil")
    assert list(guids(name)) == ["lie"], outcome
    wanted = {"mountpoint": "none", "canmount": "noauto", "readonly": "on", "mounted": "no"}
    assert {key: value(key, name) for key in wanted} == wanted
    received = must("zfs", "get", "-Hp", "-s", "received", "-o", "property,value", "all", name)
    assert received == ""
    for place in name, f"{name}@lie":
        assert value("snaporch:verified-here", place) == value("snaporch:rebuild", place) == "-"
    assert not Path("/etc/snaporch-evil").exists()


def new_key(phrase):
    options = "-o keyformat=passphrase -o keylocation=prompt"
    must("sh", "-c", f"printf {phrase} | zfs change-key {options} tank/sealed")


def opens_copy(phrase):
    """Whether a passphrase opens the copy; the key is not loaded."""
    return run("sh", "-c", f"printf {phrase} | zfs load-key -n {copy('tank/sealed')}").status == 0


def mark(name):
    """A snapshot of the encrypted dataset, as a run of ``web`` without a bundle."""
    marks = {"uuid": uuid_of("web"), "run": name, "domain": "web", "level": "crash"}
    options = [word for key, text in marks.items() for word in ("-o", f"snaporch:{key}={text}")]
    must("zfs", "snapshot", *options, f"tank/sealed@{name}")


@pytest.fixture
def sealed(pulled):
    """The guest ``web`` has an encrypted dataset, too, of which a snapshot was pulled."""
    options = "-u -o encryption=on -o keyformat=passphrase -o keylocation=prompt"
    must("sh", "-c", f"printf first-key | zfs create {options} tank/sealed")
    mark("one")
    assert snaporch("pull", "vm1").status == 0
    yield
    for dataset in (copy("tank/sealed"), "tank/sealed"):
        must("zfs", "destroy", "-r", dataset)
    assert snaporch("pull", "vm1").status == 0


@pytest.mark.daily(2, "attack")
def test_a_stream_with_another_key_comes_only_if_the_admin_accepts_the_key(sealed):
    new_key("second-key")
    mark("two")
    outcome = snaporch("pull", "vm1")
    assert outcome.status == 5, outcome
    assert list(guids(copy("tank/sealed"))) == ["one"]
    assert opens_copy("first-key")
    step = re.search(r"zfs set snaporch:new-key=\S+ [^;]+", outcome.err)
    must("sh", "-c", step[0])
    assert snaporch("pull", "vm1").status == 0
    assert list(guids(copy("tank/sealed"))) == ["one", "two"]
    assert opens_copy("second-key")
    assert not opens_copy("first-key")
    mark("three")
    assert snaporch("pull", "vm1").status == 0
    new_key("third-key")
    mark("four")
    assert snaporch("pull", "vm1").status == 5


@pytest.mark.daily(2, "attack")
def test_ram_of_an_encrypted_guest_is_not_stored_in_clear(sealed, guests):
    found = {each["code"]: each for each in snaporch("check", "--json").json}
    assert copy("tank/sealed") in found["source-in-clear"]["what"]
    taken = snapshot(guests["web"])
    outcome = snaporch("pull", "vm1")
    assert outcome.status != 0
    assert "tank/sealed is encrypted, and its RAM" in outcome.err
    assert taken["snapshot"] in guids(copy("tank/web"))
    assert not (PULLED / uuid_of("web") / taken["run"]).exists()


@pytest.mark.daily(2, "long")
def test_a_lost_guest_is_rebuilt_from_what_was_pulled(pulled, guests):
    guest = guests["web"]
    uuid = uuid_of("web")
    newest = list(guids("tank/web"))[-1]
    expected = guest.snapshot_count(newest)
    guest.destroy()
    must("virsh", "undefine", "--nvram", "web")
    for disk in DISKS["web"]:
        destroy(disk.where)
    shutil.rmtree(BUNDLES / uuid)
    one_line_error(snaporch("rebuild", "web", "--from", "vm9", "--yes"), 4, "no such replica")
    mark = guest.mark()
    words = ("rebuild", "web", "--from", "vm1", "--yes")
    one_line_error(snaporch(*words), 5, "comes from another host", "--accept")
    outcome = snaporch(*words, *accepting("web"))
    assert outcome.status == 0, outcome.err
    assert_restored(guest, mark, expected)
    assert_clean(guest)
