"""Test restores: passing, failing as they must, and interrupted."""

import hashlib
import shutil
import signal
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from fakes import manifests
from guests.disks import Disk
from guests.guest import Guest
from support import must, one_line_error, run, snaporch, snapshot, started, wait_for

CLONES = Path("/var/lib/snaporch/clones")
THREE = [Disk("file", "tank/ok"), Disk("zvol", "flash/ok"), Disk("file", "flash/more/ok")]


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("ok", disks=THREE)
    yield made
    made.remove()


@pytest.fixture(scope="module")
def taken(guest):
    return snapshot(guest, "--name", "s1")


@pytest.fixture(autouse=True)
def nothing_is_left(guest):
    """After every test: no clone, no domain, and a guest that never noticed."""
    mark = guest.mark()
    yield
    assert "verify" not in must("zfs", "list", "-H", "-o", "name")
    assert "verify" not in must("virsh", "list", "--all", "--name")
    assert not CLONES.exists() or list(CLONES.iterdir()) == []
    if guest.state() == "running":
        guest.wait_count()
        guest.assert_undisturbed(mark)


def verify(*arguments):
    return snaporch("verify", *arguments, "--json", "--quiet")


def passed(outcome, reached):
    assert outcome.status == 0, outcome.err
    assert (outcome.json["passed"], outcome.json["reached"]) == (True, reached)
    return outcome.json


def failed(outcome, *words):
    """Exit status 8, one line, and a verdict on the snapshot if there is one left."""
    assert outcome.status == 8, outcome.err
    assert not outcome.json["passed"]
    (line,) = outcome.err.splitlines()
    for word in words:
        assert word in line
    return outcome.json


def listed(name):
    (entry,) = [e for e in snaporch("list", "--json").json if e["snapshot"] == name]
    return entry


def test_a_snapshot_passes(taken):
    document = passed(verify("ok@s1"), "resumed")
    assert document["proof"]
    assert listed("s1")["verified"]["passed"]
    assert listed("s1")["verified"]["reached"] == "resumed"
    (text,) = set(
        must(
            "zfs", "get", "-H", "-o", "value", "snaporch:verified",
            "tank/ok@s1", "flash/ok@s1", "flash/more/ok@s1",
        ).splitlines()
    )  # fmt: skip
    assert text.endswith(" passed resumed")
    assert "VERIFIED" in snaporch("list").out


def test_checksums_do_not_replace_that_it_was_resumed(taken):
    passed(verify("ok@s1"), "resumed")
    resumed = listed("s1")["verified"]
    lesser = passed(verify("ok@s1", "--checksums"), "checked")
    found = listed("s1")["verified"]
    assert (found["at"], found["reached"]) == (lesser["at"], "resumed")
    assert found["reached_at"] == resumed["at"]
    assert f"passed, resumed on {resumed['at']}" in snaporch("show", "ok@s1").out


def test_a_script_sees_the_clone_run_without_a_network(guest, taken, tmp_path):
    count = guest.snapshot_count("s1")
    script = tmp_path / "script"
    script.write_text(
        "#!/bin/sh\nset -e\n"
        'test "$(virsh domstate "$SNAPORCH_CLONE_UUID")" = running\n'
        f'virsh dumpxml "$SNAPORCH_CLONE" > {tmp_path}/xml\n'
        f'until grep -q "^N" {CLONES}/$SNAPORCH_CLONE_UUID/log-ok.serial; do sleep 0.1; done\n'
        f"cp {CLONES}/$SNAPORCH_CLONE_UUID/log-ok.serial {tmp_path}/serial\n"
        f"pwd; env > {tmp_path}/env\n"
    )
    script.chmod(0o755)
    document = passed(verify("ok@s1", "--script", str(script)), "resumed")
    assert any("script" in line for line in document["proof"])
    numbers = [int(line[2:10], 16) for line in (tmp_path / "serial").read_text().split("\n")[:-1]
               if line.startswith("N ")]  # fmt: skip
    assert numbers[0] in (count, count + 1)
    assert "SNAPORCH_DOMAIN=ok\n" in (tmp_path / "env").read_text()
    for path in guest.sources().values():
        assert f"'{path}'" not in (tmp_path / "xml").read_text()


def test_a_script_that_fails(taken):
    failed(verify("ok@s1", "--script", "/bin/false"), "/bin/false", "exited with status 1")
    assert not listed("s1")["verified"]["passed"]
    assert "failed" in snaporch("list").out
    failed(verify("ok@s1", "--checksums"), "failed before in: script", "snaporch verify --script")
    assert listed("s1")["verified"]["failed_steps"] == ["script"]
    passed(verify("ok@s1", "--script", "/bin/true"), "resumed")
    assert listed("s1")["verified"]["passed"]


def test_a_flipped_byte_in_ram(taken):
    image = Path(taken["bundle"]) / "ram.save"
    kept = image.read_bytes()
    flipped = bytearray(kept)
    flipped[len(flipped) // 2] ^= 1
    try:
        image.write_bytes(flipped)
        failed(verify("ok@s1"), "ram.save", "SHA-256")
        failed(verify("ok@s1", "--checksums"), "ram.save")
        assert (listed("s1")["level"], listed("s1")["state"]) == ("crash", "damaged")
    finally:
        image.write_bytes(kept)
    passed(verify("ok@s1", "--checksums"), "checked")


def test_a_missing_part(taken):
    part = Path(taken["bundle"]) / "domain.xml"
    kept = part.read_bytes()
    part.unlink()
    try:
        failed(verify("ok@s1"), "domain.xml")
    finally:
        part.write_bytes(kept)


def test_a_disk_snapshot_destroyed(guest):
    snapshot(guest, "--name", "half")
    must("zfs", "destroy", "flash/ok@half")
    failed(verify("ok@half"), "flash/ok@half", "missing")


def test_a_wrong_guid(guest):
    snapshot(guest, "--name", "again")
    must("zfs", "destroy", "flash/ok@again")
    must("zfs", "snapshot", "flash/ok@again")
    failed(verify("ok@again"), "flash/ok@again")


def test_ram_that_checksums_do_not_know_to_be_bad(guest, tmp_path):
    """Bad from the beginning: the sums are right, and libvirt cannot resume from it."""
    taken = snapshot(guest, "--name", "bad")
    bundle = Path(taken["bundle"])
    image = bundle / "ram.save"
    data = bytearray(image.read_bytes())
    start = 92 + int.from_bytes(data[20:24], "little")
    data[start:] = subprocess.run(
        ["zstd", "-q", "-c"], input=b"QEVM nonsense", capture_output=True, check=True
    ).stdout
    image.write_bytes(data)
    manifest = bundle / "manifest.json"
    document = manifests.load(manifest)
    (part,) = [p for p in document["parts"] if p["role"] == "ram"]
    part |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifests.store(manifest, document)
    passed(verify("ok@bad", "--checksums"), "checked")
    document = failed(verify("ok@bad"), "could not be resumed")
    assert document["reached"] == "checked"


def test_a_sample_takes_those_verified_longest_ago(guest):
    for name in ("n1", "n2"):
        snapshot(guest, "--name", name, "--level", "crash")
    outcome = verify("--all", "--sample", "2")
    assert [d["snapshot"] for d in outcome.json] == ["n1", "n2"]
    assert {d["reached"] for d in outcome.json} == {"booted"}
    assert outcome.status == 0, outcome.err


def test_names_and_all_exclude_each_other(taken):
    assert snaporch("verify").status == 2
    assert snaporch("verify", "ok@s1", "--all").status == 2
    one_line_error(snaporch("verify", "ok@never"), 4, "ok@never")


@pytest.mark.daily(1)
@pytest.mark.parametrize("where", ["cloning", "resuming", "looking"])
def test_killed_and_recovered(guest, taken, where):
    with started("verify", "ok@s1", env={}) as process:
        for line in process.stderr:
            if where in line:
                break
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: list(CLONES.glob("*/making")), "its traces")
    outcome = snaporch("recover")
    assert outcome.status == 0, outcome.err
    assert "ok-verify-" in outcome.out


def test_a_signal_removes_everything(guest, taken):
    with started("verify", "ok@s1", env={}) as process:
        for line in process.stderr:
            if "cloning" in line:
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=300) == 128 + signal.SIGTERM


def test_a_domain_that_is_undefined():
    """What is verified is the snapshot; the original need not be there."""
    guest = Guest.create("gone", [Disk("zvol", "tank/gone")])
    try:
        snapshot(guest, "--name", "last")
        guest.destroy()
        must("virsh", "undefine", guest.name)
        passed(verify("gone@last"), "resumed")
        assert "gone" not in must("virsh", "list", "--all", "--name")
    finally:
        guest.remove()


@pytest.mark.daily(1, "guests of their own")
def test_a_guest_with_an_agent_answers():
    guest = Guest.create("talks", [Disk("file", "tank/talks")], kind="linux")
    try:
        guest.wait_agent()
        snapshot(guest, "--name", "s")
        document = passed(verify("talks@s"), "resumed")
        assert "the guest's agent answers" in document["proof"]
    finally:
        guest.remove()


@pytest.mark.daily(1, "guests of their own")
def test_a_picture_of_the_screen(tmp_path):
    guest = Guest.create("sees", [Disk("file", "tank/sees")], mutate=add_screen)
    try:
        snapshot(guest, "--name", "s")
        shots = tmp_path / "shots"
        shots.mkdir()
        document = passed(verify("sees@s", "--screenshots", str(shots)), "resumed")
        assert Path(document["screenshot"]).read_bytes()[1:4] == b"PNG"
    finally:
        guest.remove()
        shutil.rmtree(tmp_path, ignore_errors=True)


def add_screen(domain):
    import xml.etree.ElementTree as ET

    video = ET.SubElement(domain.find("devices"), "video")
    ET.SubElement(video, "model", type="vga")


@pytest.mark.daily(1, "guests of their own")
def test_uefi():
    guest = Guest.create("efi", firmware="uefi", disks=[Disk("zvol", "tank/efi")])
    try:
        snapshot(guest, "--name", "s")
        passed(verify("efi@s"), "resumed")
        assert run("ls", str(guest.nvram())).status == 0
    finally:
        guest.remove()


@pytest.mark.daily(1, "guests of their own")
@pytest.mark.timeout(120)
def test_a_guest_on_a_user_network_is_resumed_without_it():
    """QEMU's image of its RAM has the state of that network, and cannot be loaded without it."""
    made = Guest.create("slirp", disks=[Disk("file", "tank/slirp")], mutate=add_user_network)
    try:
        snapshot(made, "--name", "s1")
        passed(verify("slirp@s1"), "resumed")
    finally:
        made.remove()


def add_user_network(domain):
    for _ in range(2):
        card = ET.SubElement(domain.find("devices"), "interface", type="user")
        ET.SubElement(card, "model", type="virtio")
