"""Bad input and a bad environment: one clear line, the documented code, the guest untouched."""

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import (
    OVERLAYS,
    assert_clean,
    config,
    must,
    one_line_error,
    run,
    snaporch,
    zfs_snapshots,
)


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("sturdy", disks=[Disk("file", "tank/sturdy")])
    yield made
    made.remove()


@pytest.fixture(autouse=True)
def untouched(guest):
    """Whatever a test of this module does, the guest does not notice."""
    mark = guest.mark()
    before = zfs_snapshots()
    yield
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert_clean(guest)
    assert zfs_snapshots() == before


def test_unknown_domain():
    one_line_error(snaporch("snapshot", "absent"), 4, "absent", "no such domain")
    one_line_error(snaporch("list", "absent"), 4, "absent", "no such domain")


def test_a_misspelt_domain_stops_the_others_too(guest):
    one_line_error(snaporch("snapshot", guest.name, "absent"), 4, "absent")


def test_unknown_snapshot(guest):
    one_line_error(snaporch("restore", f"{guest.name}@nothing", "--yes"), 4, "sturdy@nothing")


@pytest.mark.parametrize("text", ["sturdy", "@x", "sturdy@", "sturdy@a/b"])
def test_what_is_no_snapshot(text):
    one_line_error(snaporch("restore", text, "--yes"), 2)


def test_config_that_is_not_there(tmp_path):
    missing = str(tmp_path / "none.toml")
    one_line_error(snaporch("--config", missing, "list"), 3, missing, "no such file")
    one_line_error(snaporch("list", "--config", missing), 3, missing)


def test_config_that_is_a_directory(tmp_path):
    one_line_error(snaporch("--config", str(tmp_path), "list"), 3, str(tmp_path))


def test_config_with_a_wrong_type(tmp_path, guest):
    with config(tmp_path, '[defaults]\ncompression_level = "high"\n') as environment:
        outcome = snaporch("snapshot", guest.name, env=environment)
    one_line_error(outcome, 3, "snaporch.toml", "defaults.compression_level", "'high'")


def test_no_libvirtd(tmp_path, guest):
    text = 'libvirt_uri = "qemu+unix:///system?socket=/nowhere"\n'
    with config(tmp_path, text) as environment:
        one_line_error(snaporch("snapshot", guest.name, env=environment), 7, "libvirt")


def test_no_permission(guest):
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    outcome = run(*command, "snaporch", "snapshot", guest.name)
    one_line_error(outcome, 7)


def test_no_zfs(guest):
    """A host whose pools cannot be asked: ``/dev/zfs`` is not there."""
    outcome = run("unshare", "-m", "sh", "-c", "mount -t tmpfs none /dev && snaporch list")
    one_line_error(outcome, 7, "zfs")


def test_full_overlay_file_system(guest, tmp_path):
    OVERLAYS.mkdir(parents=True, exist_ok=True)
    must("mount", "-t", "tmpfs", "-o", "size=1M", "none", str(OVERLAYS))
    try:
        with config(tmp_path, '[defaults]\nram_strategy = "overlay"\n') as environment:
            outcome = snaporch("snapshot", guest.name, env=environment)
        one_line_error(outcome, 5, str(OVERLAYS), "MiB free")
    finally:
        must("umount", str(OVERLAYS))


def test_overlay_directory_in_the_guests_dataset(tmp_path, guest):
    text = '[paths]\noverlays = "/tank/sturdy/overlays"\n[defaults]\nram_strategy = "overlay"\n'
    with config(tmp_path, text) as environment:
        outcome = snaporch("snapshot", guest.name, env=environment)
    one_line_error(outcome, 5, "tank/sturdy", "overlay directory")


def test_read_only_bundle_store(tmp_path, guest):
    store = tmp_path / "store"
    store.mkdir()
    must("mount", "-t", "tmpfs", "-o", "ro", "none", str(store))
    try:
        with config(tmp_path, f'[paths]\nbundles = "{store}"\n') as environment:
            outcome = snaporch("snapshot", guest.name, env=environment)
        one_line_error(outcome, 7, str(store))
    finally:
        must("umount", str(store))


def test_full_bundle_store(tmp_path, guest):
    store = tmp_path / "small"
    store.mkdir()
    must("mount", "-t", "tmpfs", "-o", "size=64k", "none", str(store))
    try:
        with config(tmp_path, f'[paths]\nbundles = "{store}"\n') as environment:
            outcome = snaporch("snapshot", guest.name, env=environment)
        one_line_error(outcome, 5, str(store), "MiB free", "RAM needs")
    finally:
        must("umount", str(store))


def test_a_domain_with_no_disk_on_zfs():
    outside = Guest.create("outside", disks=[Disk("plain", "/var/lib/outside")], start=False)
    try:
        one_line_error(snaporch("snapshot", "outside"), 5, "no disk on ZFS", "/var/lib/outside")
    finally:
        outside.remove()


def test_restore_asks_and_takes_silence_for_a_no(guest):
    outcome = snaporch("restore", f"{guest.name}@nothing")
    assert outcome.status == 4
