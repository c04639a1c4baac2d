"""Clones beside their originals: resumed from RAM, booted cold, removed again."""

import re
import signal
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import must, one_line_error, run, snaporch, snapshot, started, wait_for, zfs_snapshots

CLONES = Path("/var/lib/snaporch/clones")
PLACES = ["flash/more", "flash", "tank"]
THREE = [Disk("file", "tank/web"), Disk("zvol", "flash/web"), Disk("file", "flash/more/web")]


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("web", disks=THREE)
    yield made
    snaporch("clone", "--delete", "test")  # if the test that deletes it was not asked for
    made.remove()


@pytest.fixture(scope="module")
def taken(guest):
    made = snapshot(guest, "--name", "s1")
    guest.wait_count(beyond=guest.snapshot_count("s1") + 5)
    return made


def cloned(*arguments):
    outcome = snaporch("clone", *arguments, "--json")
    assert outcome.status == 0, outcome.err
    return outcome.json, Guest.existing(arguments[1])


def delete(name):
    outcome = snaporch("clone", "--delete", name)
    assert outcome.status == 0, outcome.err


def clone_datasets(name):
    """The datasets that carry the mark of this clone."""
    marked = must("zfs", "get", "-H", "-s", "local", "-o", "name,value", "snaporch:clone-name")
    return [line.split("\t")[0] for line in marked.splitlines() if line.split("\t")[1] == name]


def files():
    """Of all clones."""
    return sorted(path.name for path in CLONES.iterdir()) if CLONES.exists() else []


def test_a_running_clone_goes_on_beside_its_original(guest, taken):
    count = guest.snapshot_count("s1")
    mark = guest.mark()
    document, clone = cloned("web@s1", "test", "--running")
    assert document["resumed"]
    clone.assert_continues(0, count)
    assert clone.counts_since(0)[0] != guest.wait_count()
    guest.assert_undisturbed(mark)
    for inactive in (False, True):
        assert not set(clone.sources(inactive).values()) & set(guest.sources(inactive).values())
    assert clone.machine.serial_log != guest.machine.serial_log
    assert clone.domain().UUIDString() == document["uuid"] != guest.domain().UUIDString()
    assert not list(CLONES.glob("*/ram.save"))
    assert not list(CLONES.glob("*/making"))
    writes = max(guest.disk_counts()), max(clone.disk_counts())
    assert writes[0] != writes[1]


def test_the_datasets_are_named_after_their_origins(taken):
    assert clone_datasets("test") == [f"{place}/web-test" for place in PLACES]
    assert must("zfs", "get", "-H", "-o", "value", "origin", "flash/web-test") == "flash/web@s1\n"


def test_what_makes_the_original_fast_and_safe_makes_its_clone_so(guest, taken):
    must("zfs", "set", "sync=disabled", "primarycache=metadata", "tank/web")
    must("zfs", "set", "logbias=throughput", "flash/web")
    must("zfs", "set", "org.example:replicate=yes", "quota=9G", "tank/web")
    cloned("web@s1", "alike")
    local = must(
        "zfs", "get", "-H", "-s", "local", "-o", "name,property,value",
        "sync,primarycache,logbias,quota,org.example:replicate",
    )  # fmt: skip
    own = [line.split("\t")[1:] for line in local.splitlines() if "-alike" in line.split("\t")[0]]
    assert sorted(own) == [
        ["logbias", "throughput"], ["primarycache", "metadata"], ["sync", "disabled"],
    ]  # fmt: skip
    delete("alike")
    for name in ("sync", "primarycache", "org.example:replicate"):
        must("zfs", "inherit", name, "tank/web")
    must("zfs", "set", "quota=none", "tank/web")
    must("zfs", "inherit", "logbias", "flash/web")


def test_a_name_in_use_is_refused(guest, taken):
    one_line_error(snaporch("clone", "web@s1", "test"), 5, "test", "name")
    one_line_error(snaporch("clone", "web@s1", "web"), 5, "web")


def test_a_clone_keeps_its_snapshot(taken):
    outcome = run("zfs", "destroy", "tank/web@s1")
    assert outcome.status != 0
    assert "tank/web-test" in snaporch("show", "web@s1").out


def test_what_is_no_clone_is_not_deleted(guest, taken):
    mark = guest.mark()
    one_line_error(snaporch("clone", "--delete", "web"), 5, "web", "not a clone")
    one_line_error(snaporch("clone", "--delete", "absent"), 4, "absent")
    guest.wait_count()
    guest.assert_undisturbed(mark)


def test_a_domain_with_a_copied_mark_is_not_deleted(guest, taken, tmp_path):
    """virt-clone and people copy metadata along; the mark names another UUID then."""
    xml = must("virsh", "dumpxml", "--inactive", "test")
    copy = re.sub(r"<uuid>.*</uuid>|<nvram.*</nvram>", "", xml).replace(">test<", ">copy<")
    (tmp_path / "copy.xml").write_text(copy)
    must("virsh", "define", str(tmp_path / "copy.xml"))
    try:
        one_line_error(snaporch("clone", "--delete", "copy"), 5, "not a clone")
    finally:
        must("virsh", "undefine", "copy")


def test_a_clone_with_snapshots_of_its_own_is_not_deleted(taken):
    must("zfs", "snapshot", "tank/web-test@own")
    one_line_error(snaporch("clone", "--delete", "test"), 5, "tank/web-test@own")
    assert Guest.existing("test").state() == "running"
    must("zfs", "destroy", "tank/web-test@own")


def test_deleting_leaves_nothing_of_it(guest, taken):
    mark = guest.mark()
    delete("test")
    assert run("virsh", "dominfo", "test").status != 0
    assert clone_datasets("test") == []
    assert files() == []
    guest.wait_count()
    guest.assert_undisturbed(mark)


def test_a_clone_whose_domain_was_undefined_can_still_be_deleted(taken):
    cloned("web@s1", "orphan")
    must("virsh", "undefine", "orphan")
    delete("orphan")
    assert clone_datasets("orphan") == []


def test_several_clones_of_one_snapshot_are_made_at_once(guest, taken):
    mark, names = guest.mark(), ["twin1", "twin2"]
    with started("clone", "web@s1", "twin1", "--running", env={}) as first:
        wait_for(lambda: list(CLONES.glob("*/making")), "the first one to be made")
        second = snaporch("clone", "web@s1", "twin2", "--running")
        assert second.status == 0, second.err
        assert first.wait(timeout=600) == 0, first.stderr.read()
    for name in names:
        Guest.existing(name).assert_continues(0, guest.snapshot_count("s1"))
        assert clone_datasets(name) == [f"{place}/web-{name}" for place in PLACES]
    guest.assert_undisturbed(mark)
    for name in names:
        delete(name)
    assert files() == []


def test_a_cold_clone_boots_with_addresses_of_its_own(taken):
    with_card = Guest.create("card", [Disk("file", "tank/card")], mutate=add_card)
    try:
        snapshot(with_card, "--name", "s")
        document, clone = cloned("card@s", "cold", "--network", "isolated")
        assert not document["resumed"]
        clone.start()
        assert clone.cold_boots_since(0)
        (own,) = re.findall("mac address='(.*?)'", clone.xml())
        assert own != "52:54:00:11:22:33"
        delete("cold")
        document, clone = cloned("card@s", "warm", "--running")
        clone.assert_continues(0, with_card.snapshot_count("s"))
        assert re.findall("mac address='(.*?)'", clone.xml()) == ["52:54:00:11:22:33"]
        assert "<link state='down'/>" in clone.xml()
        delete("warm")
    finally:
        with_card.remove()


def add_card(domain):
    import xml.etree.ElementTree as ET

    card = ET.SubElement(domain.find("devices"), "interface", type="ethernet")
    ET.SubElement(card, "mac", address="52:54:00:11:22:33")
    ET.SubElement(card, "model", type="virtio")


def test_a_running_clone_may_not_be_on_a_network_that_leads_out(taken):
    """libvirt's own network "default" is there, with a <forward mode='nat'>."""
    outcome = snaporch("clone", "web@s1", "out", "--running", "--network", "default")
    one_line_error(outcome, 5, "default", "isolated")
    one_line_error(snaporch("clone", "web@s1", "out", "--network", "absent"), 4, "absent")


@pytest.mark.daily(1)
@pytest.mark.parametrize("where", ["cloning", "resuming"])
def test_a_killed_clone_leaves_what_recover_removes(guest, taken, where):
    mark, before = guest.mark(), files()
    with started("clone", "web@s1", "killed", "--running", env={}) as process:
        for line in process.stderr:
            if where in line:
                break
        if where == "resuming":
            wait_for(lambda: list(CLONES.glob("*/ram.save")), "a copy of the RAM image")
        process.send_signal(signal.SIGKILL)
    assert files() != before
    outcome = snaporch("recover")
    assert outcome.status == 0, outcome.err
    assert "killed" in outcome.out
    assert run("virsh", "dominfo", "killed").status != 0
    assert clone_datasets("killed") == []
    assert files() == before
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert len(zfs_snapshots("@s1")) == 3


def test_a_clone_that_cannot_be_resumed_leaves_nothing(taken):
    image = Path(taken["bundle"]) / "ram.save"
    kept, before = image.read_bytes(), files()
    try:
        image.write_bytes(kept[:-1000] + bytes(1000))
        one_line_error(snaporch("clone", "web@s1", "bad", "--running", "--quiet"), 5, "ram.save")
        cloned("web@s1", "bad")  # disks and definition are well
        delete("bad")
    finally:
        image.write_bytes(kept)
    assert files() == before


RANDOM_FROM_A_PORT = (
    "<rng model='virtio'><backend model='egd' type='udp'>"
    "<source mode='bind' host='127.0.0.1' service='7708'/>"
    "<source mode='connect' host='127.0.0.1' service='7709'/></backend></rng>"
)


@pytest.mark.daily(1, "guests of their own")
def test_a_running_clone_has_random_numbers_without_the_port_of_its_original():
    guest = Guest.create(
        "odd",
        [Disk("file", "tank/odd")],
        mutate=lambda domain: domain.find("devices").append(ET.fromstring(RANDOM_FROM_A_PORT)),
    )
    try:
        snapshot(guest, "--name", "s")
        mark, count = guest.mark(), guest.snapshot_count("s")
        _, clone = cloned("odd@s", "odd two", "--running")
        clone.assert_continues(0, count)
        assert "7708" in guest.xml()
        assert "7708" not in clone.xml()
        assert "<backend model='builtin'/>" in clone.xml()
        delete("odd two")
        outcome = snaporch("verify", "odd@s", "--json", "--quiet")
        assert (outcome.json["passed"], outcome.json["reached"]) == (True, "resumed")
        guest.assert_undisturbed(mark)
    finally:
        guest.remove()


@pytest.mark.daily(1, "guests of their own")
def test_uefi_variables_are_copied():
    guest = Guest.create("uefi", firmware="uefi", disks=[Disk("zvol", "tank/uefi")])
    try:
        snapshot(guest, "--name", "s")
        count = guest.snapshot_count("s")
        document, clone = cloned("uefi@s", "efi two", "--running")
        clone.assert_continues(0, count)
        assert clone.nvram() == CLONES / document["uuid"] / "nvram.fd"
        assert clone.nvram() != guest.nvram()
        clone.destroy()
        clone.start()
        assert clone.cold_boots_since(0)
        delete("efi two")
        assert guest.nvram().exists()
    finally:
        guest.remove()
