"""Which file systems of a guest are mounted, and how its names are printed."""

import pytest

from snaporch.errors import NotFoundError, RefusedError
from snaporch.extract.guest_files import beneath, choose_places, shown
from snaporch.extract.guestfish_text import FileSystem

ROOT, DATA = FileSystem("/dev/vg/root", "ext4"), FileSystem("/dev/sdb1", "xfs")
SWAP, SECRET = FileSystem("/dev/sda2", "swap"), FileSystem("/dev/sda3", "crypto_LUKS")


def test_what_the_guest_mounts_is_mounted():
    system = [("/", "/dev/vg/root"), ("/srv", "/dev/sdb1")]
    assert choose_places("web@s1", [ROOT, DATA], system, None) == system


def test_the_only_file_system_needs_no_choice():
    assert choose_places("web@s1", [SWAP, DATA], [], None) == [("/", "/dev/sdb1")]


def test_one_of_several_has_to_be_chosen():
    with pytest.raises(RefusedError, match="--device: /dev/vg/root, /dev/sdb1"):
        choose_places("web@s1", [ROOT, DATA, SWAP], [], None)
    assert choose_places("web@s1", [ROOT, DATA], [], "/dev/sdb1") == [("/", "/dev/sdb1")]


def test_a_device_that_does_not_exist():
    with pytest.raises(NotFoundError, match="there are: /dev/vg/root"):
        choose_places("web@s1", [ROOT], [], "/dev/sdz")


@pytest.mark.parametrize("device", [None, "/dev/sda3"])
def test_an_encrypted_file_system_is_refused(device):
    with pytest.raises(RefusedError, match=r"/dev/sda3: is encrypted \(crypto_LUKS\)"):
        choose_places("web@s1", [SWAP, SECRET], [], device)


def test_what_is_beside_an_encrypted_system_is_not_taken_for_it():
    boot = FileSystem("/dev/sda1", "ext4")
    with pytest.raises(RefusedError, match=r"sda3: is encrypted .* --device: /dev/sda1"):
        choose_places("web@s1", [boot, SECRET], [], None)
    assert choose_places("web@s1", [boot, SECRET], [], "/dev/sda1") == [("/", "/dev/sda1")]


def test_a_guest_without_file_systems():
    with pytest.raises(RefusedError, match="no file system"):
        choose_places("web@s1", [SWAP], [], None)


def test_names_are_printed_without_control_characters():
    assert shown(b"a\x1b[31m\n\\\xff") == r"a\x1b[31m\x0a\\\xff"
    assert shown("Käse".encode()) == "Käse"
    assert shown("\u202e".encode()) == r"\xe2\x80\xae"


def test_paths():
    assert beneath(b"/", b"a") == b"/a"
    assert beneath(b"/a", b"b") == b"/a/b"
