"""A guest whose image lies on one in another dataset: never put back over a base that went on."""

import json

import pytest
from guests.disks import Disk, destroy, mountpoint
from guests.guest import Guest
from support import assert_clean, assert_went_on, must, one_line_error, restore, snaporch, snapshot


@pytest.fixture(scope="module")
def guest():
    """On ``flash/top``, over ``tank/base``; nothing beneath it is written to."""
    must("zfs", "create", "flash/top")
    made = Guest.create("layered", disks=[Disk("file", "tank/base")])
    top = mountpoint("flash/top") / "top.qcow2"
    must(
        "virsh", "snapshot-create-as", made.name, "--disk-only", "--no-metadata", "--atomic",
        "--diskspec", f"vda,file={top}",
    )  # fmt: skip
    yield made
    made.remove()
    destroy("flash/top")


@pytest.fixture(scope="module")
def taken(guest):
    return snapshot(guest, "--name", "s1")


def test_the_base_is_known_and_not_snapshotted(guest, taken):
    assert taken["level"] == "ram"
    assert taken["datasets"] == ["flash/top"]
    with open(f"{taken['bundle']}/manifest.json", encoding="utf-8") as manifest:
        (disk,) = json.load(manifest)["disks"]
    (base,) = disk["beneath"]
    status = guest.images[0].path.stat()
    assert (base["path"], base.get("dataset")) == (str(guest.images[0].path), None)
    assert (base["inode"], base["mtime_ns"]) == (status.st_ino, status.st_mtime_ns)
    assert f"over {base['path']}  not in the snapshot" in snaporch("show", "layered@s1").out


def test_it_verifies_and_goes_back_as_long_as_the_base_is_the_same(guest, taken):
    assert snaporch("verify", "layered@s1", "--json").json["reached"] == "resumed"
    guest.wait_count()
    mark = guest.mark()
    restore(guest, "s1")
    assert_went_on(guest, mark)
    assert_clean(guest)


def test_it_is_the_same_after_a_start(guest, taken):
    """libvirt changes the owner of the base, and remembers the former owner in an attribute."""
    guest.destroy()
    guest.start()
    mark = guest.mark()
    restore(guest, "s1")
    assert_went_on(guest, mark)


def test_a_base_that_went_on_is_not_put_under_an_old_image(guest, taken):
    guest.destroy()
    must("qemu-img", "commit", "-q", guest.sources(inactive=True)["vda"])
    guest.start()
    mark = guest.mark()
    words = ("lies beneath vda", "was changed since")
    one_line_error(snaporch("restore", "layered@s1", "--yes"), 5, *words)
    one_line_error(snaporch("restore", "layered@s1", "--yes", "--cold"), 5, *words)
    one_line_error(snaporch("clone", "layered@s1", "twin"), 5, *words)
    failed = snaporch("verify", "layered@s1", "--json").json
    assert (failed["passed"], failed["reached"]) == (False, "checked")
    guest.wait_count()
    guest.assert_undisturbed(mark)


def test_data_in_another_dataset_is_refused():
    must("zfs", "create", "flash/data")
    data = mountpoint("flash/data") / "data.raw"
    guest = Guest.create(
        "outside", disks=[Disk("file", "tank/outside", format="qcow2")], start=False
    )
    try:
        image = str(guest.images[0].path)
        must("qemu-img", "create", "-q", "-f", "qcow2", "-o", f"data_file={data}", image, "1M")
        refused = snaporch("snapshot", guest.name)
        one_line_error(refused, 5, str(data), "in flash/data and would not be snapshotted with it")
    finally:
        guest.remove()
        must("zfs", "destroy", "-r", "flash/data")
