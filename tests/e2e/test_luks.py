"""A guest with a disk that is encrypted by LUKS, and a secret of libvirt's for it."""

import base64
import os
import xml.etree.ElementTree as ET

import pytest
from faults.process import Run
from guests.disks import Disk
from guests.guest import Guest
from luks import make_container
from support import (
    JOURNAL,
    assert_clean,
    assert_went_on,
    must,
    one_line_error,
    restore,
    snaporch,
    snapshot,
    system_config,
)

SECRET = "5a1d5a1d-0000-4000-8000-00000000005a"
PASSPHRASE = "open sesame"


def encrypt(domain):
    source = domain.find("devices/disk/target[@dev='vdb']/../source")
    encryption = ET.SubElement(source, "encryption", format="luks")
    ET.SubElement(encryption, "secret", type="passphrase", uuid=SECRET)


def encrypted(image, zeros):
    """An empty disk in a container, in the place of an empty disk."""
    size = image.stat().st_size
    make_container(image, PASSPHRASE.encode(), size)
    zeros.touch()
    os.truncate(zeros, size)
    must(
        "qemu-img", "convert", "-n", "-f", "raw", "--object", f"secret,id=s,data={PASSPHRASE}",
        "--target-image-opts", str(zeros),
        f"driver=luks,key-secret=s,file.driver=file,file.filename={image}",
    )  # fmt: skip


@pytest.fixture(scope="module")
def guest(tmp_path_factory):
    """Its disks are on two pools, so that a run would take overlays for them."""
    definition = tmp_path_factory.mktemp("secret") / "secret.xml"
    definition.write_text(f"<secret ephemeral='no' private='yes'><uuid>{SECRET}</uuid></secret>")
    must("virsh", "secret-define", str(definition))
    value = base64.b64encode(PASSPHRASE.encode()).decode()
    must("virsh", "secret-set-value", SECRET, "--base64", value)
    disks = [Disk("file", "tank/luks"), Disk("file", "flash/luks")]
    made = Guest.create("sealed", disks=disks, mutate=encrypt, start=False)
    encrypted(made.images[1].path, tmp_path_factory.mktemp("zeros") / "zeros")
    made.start()
    yield made
    made.remove()
    must("virsh", "secret-undefine", SECRET)


@pytest.fixture(scope="module")
def taken(guest):
    made = snapshot(guest, "--name", "s1")
    guest.wait_count()
    return made


def secrets_of(guest):
    """The secret in the live and in the inactive definition."""
    path = "devices/disk/source/encryption/secret"
    roots = (ET.fromstring(guest.xml(inactive=inactive)) for inactive in (False, True))
    return [root.find(path).get("uuid") for root in roots]


def test_it_is_saved_without_overlays(guest, taken):
    assert taken["level"] == "ram"
    assert taken["datasets"] == ["flash/luks", "tank/luks"]
    assert snaporch("show", "sealed@s1").status == 0
    with system_config('[defaults]\nram_strategy = "overlay"\n'):
        refused = snaporch("snapshot", guest.name)
    one_line_error(refused, 5, "vdb is encrypted", "only libvirt could commit")
    assert_clean(guest)
    assert secrets_of(guest) == [SECRET, SECRET]


def test_it_goes_back(guest, taken):
    mark = guest.mark()
    restore(guest, "s1")
    assert_went_on(guest, mark)
    assert secrets_of(guest) == [SECRET, SECRET]
    assert_clean(guest)


@pytest.mark.daily(1)
@pytest.mark.parametrize("point", ["after:freeze", "after:pool-snapshot"])
def test_a_run_that_is_killed_leaves_it_as_it_was(guest, point):
    mark = guest.mark()
    under_way = Run("snapshot", guest.name, "--name", "cut", point=point, guarded=False)
    try:
        under_way.wait_stopped()
    finally:
        under_way.kill()
        under_way.close()
    assert list(JOURNAL.iterdir())
    assert snaporch("recover").status == 0
    assert not list(JOURNAL.iterdir())
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert secrets_of(guest) == [SECRET, SECRET]
    assert_clean(guest)
    guest.destroy()
    guest.start()
    mark = guest.mark()
    guest.wait_count()
    assert not guest.bad_since(mark)


@pytest.mark.daily(1)
@pytest.mark.parametrize("resumed", [True, False])
def test_a_clone_reads_it_by_the_same_secret(guest, taken, resumed):
    options = ("--running",) if resumed else ()
    outcome = snaporch("clone", "sealed@s1", "twin", *options, "--json")
    assert outcome.status == 0, outcome.err
    twin = Guest.existing("twin")
    if not resumed:
        twin.start()
    twin.wait_count()
    twin.wait_count()
    assert not twin.bad_since(0)
    assert secrets_of(twin) == [SECRET, SECRET]
    assert twin.sources()["vdb"] == outcome.json["disks"]["vdb"] != guest.sources()["vdb"]
    assert snaporch("clone", "--delete", "twin").status == 0


def test_it_verifies(taken):
    outcome = snaporch("verify", "sealed@s1", "--json")
    assert outcome.status == 0, outcome.err
    assert outcome.json["reached"] == "resumed"
