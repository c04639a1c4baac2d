"""Files of a guest, by the real guestfish: ext4, XFS, NTFS and btrfs on LVM and partitions.

The guest was not shut down: its journals are to be replayed, and its disk must stay as it is.
"""

import hashlib
import os
import shutil
import stat
import struct
import subprocess
import tempfile
import uuid
from pathlib import Path

import pytest

from snaporch.errors import RefusedError
from snaporch.extract.appliance import (
    APPLIANCE_USER,
    ApplianceError,
    make_private,
    running_appliance,
)
from snaporch.extract.copy_guest_files import Copy, destination
from snaporch.extract.guest_files import GuestFiles, choose_places
from snaporch.extract.mount_point import DEVICE, mounted
from snaporch.extract.mounted_files import MountedFiles
from snaporch.extract.throw_away_disks import make_overlays
from snaporch.extract.tolerant_files import TolerantFiles
from snaporch.extract.unseen_parts import not_mounted
from snaporch.extract.windows_parts import WindowsParts, windows_parts
from snaporch.hypervisor.clone_xml import CloneDisk
from snaporch.interrupt import Interrupt

pytestmark = [
    pytest.mark.guestfish,
    pytest.mark.timeout(1200),  # without KVM each appliance takes a minute or more
]
OWNER = APPLIANCE_USER if os.geteuid() == 0 else None
GUEST = """
part-init /dev/sda gpt
part-add /dev/sda p 2048 800000
part-add /dev/sda p 802048 1500000
part-add /dev/sda p 1502048 1600000
part-add /dev/sda p 1602048 2090000
pvcreate /dev/sda1
vgcreate vg /dev/sda1
lvcreate root vg 300
mkfs ext4 /dev/vg/root
mkfs ntfs /dev/sda3
mkfs btrfs /dev/sda4
mkfs xfs /dev/sda2
mount /dev/vg/root /
mkdir /home
mount /dev/sda2 /home
mkdir /d
write /d/hello hello
write /home/hello xfs
ln-s /etc/shadow /d/abs
ln-s ../../../../../../etc /d/up
mknod 8576 1 3 /d/null
mkfifo 384 /d/fifo
fill 7 3000000 /big
chmod 2541 /d/hello
"""
ODD = [b"a\nb", b"esc\x1b[31m", b"it's", b'"q"', b"\xff\xfe", b"-rf", b"$(id)", b"b\\x41"]


@pytest.fixture(scope="module")
def place():
    """A directory that the appliance's user can pass through."""
    made = Path(tempfile.mkdtemp(dir="/var/tmp"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made)


def appliance(place, name, disk):
    directory = place / name
    make_private(directory, OWNER)
    overlays = make_overlays("web@s1", [CloneDisk(str(disk), "file", "qcow2")], directory, OWNER)
    return running_appliance(
        "web@s1", directory, overlays, Interrupt(), owner=OWNER, cache=place / "cache"
    )


@pytest.fixture(scope="module")
def disk(place):
    """The disk of a guest that lost its power while its file systems were in use."""
    directory = place / "make"
    make_private(directory, OWNER)
    image = directory / "disk.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", image, "1G"], check=True)
    if OWNER is not None:
        os.chown(image, OWNER.uid, OWNER.gid)
    with running_appliance(
        "web@s1", directory, [image], Interrupt(), owner=OWNER, cache=place / "cache"
    ) as made:
        for line in GUEST.strip().splitlines():
            made.ask(*line.split())
        for name in ODD:
            made.ask("write", b"/d/" + name, "odd")
        made.ask("sync")
    path = place / "disk.qcow2"
    image.rename(path)
    place.chmod(0o711)
    return path


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_a_guest_without_a_clean_shutdown_has(place, disk):
    before = digest(disk)
    to = place / "out"
    to.mkdir()
    with appliance(place, "read", disk) as running:
        files = GuestFiles(running, "web@s1")
        found = files.file_systems()
        kinds = {each.device: each.kind for each in found}
        assert kinds == {
            "/dev/sda2": "xfs",
            "/dev/sda3": "ntfs",
            "/dev/sda4": "btrfs",
            "/dev/vg/root": "ext4",
        }
        assert files.system_places() == []
        with pytest.raises(RefusedError, match="--device: /dev/sda2, /dev/sda3"):
            choose_places("web@s1", found, [], None)
        done = files.mount([("/", "/dev/vg/root"), ("/home", "/dev/sda2"), ("/none", "/dev/sda9")])
        assert done == [("/", "/dev/vg/root"), ("/home", "/dev/sda2")]
        assert files.names(b"/home") == [b"hello"]
        assert files.fstab() == ""
        (link,) = (each for each in files.listing(*files.find(b"/d")) if each.name == b"abs")
        assert link.link == b"/etc/shadow"
        copy = Copy("web@s1", files, lambda: None, keep_owner=False)
        real, entry = files.find(b"/d")
        copied = copy.run(real, entry, destination(b"/d", to))
        with pytest.raises(ApplianceError):
            running.ask("write", "/d/hello", "changed")
    assert digest(disk) == before
    names = set(os.listdir(os.fsencode(to / "d")))
    assert names == {*ODD, b"hello", b"abs", b"up"}
    assert sorted(copied.left_out) == ["/d/fifo", "/d/null"]
    assert (to / "d" / "hello").read_bytes() == b"hello"
    assert stat.S_IMODE((to / "d" / "hello").stat().st_mode) == 0o755  # it was setuid
    assert os.readlink(to / "d" / "abs") == "/etc/shadow"
    assert (to / "d" / os.fsdecode(ODD[0])).read_bytes() == b"odd"


LOOK = """
cd "$1" || exit
find . -mount ! -name lost+found -print0
echo; cat home/hello; echo; sha256sum <big; stat -c %a d/hello; readlink d/abs
cat d/abs 2>&1; ls none 2>&1; echo x >new
cd /; umount "$1"
"""


@pytest.mark.skipif(not os.access(DEVICE, os.W_OK), reason="only root mounts, by /dev/fuse")
def test_a_guest_is_shown_in_a_directory(place, disk):
    before = digest(disk)
    directory = place / "mnt"
    directory.mkdir()
    with appliance(place, "mount", disk) as running:
        files = GuestFiles(running, "web@s1")
        files.mount([("/", "/dev/vg/root"), ("/home", "/dev/sda2")])
        shown = MountedFiles(TolerantFiles(running), files.find(b"/")[1])
        with mounted("web@s1", directory, follow_links=False) as mount:
            words = ["sh", "-c", LOOK, "sh", directory]
            output = subprocess.PIPE
            look = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
            mount.serve(shown.answer, running.check)
            seen = look.communicate()[0]
        running.ask("ping-daemon")
    names, text = seen.rsplit(b"\0", 1)
    plain = [b"", b"/big", b"/d", b"/home", b"/home/hello"]
    inside = [b"/d/" + each for each in (*ODD, b"hello", b"abs", b"up", b"null", b"fifo")]
    assert set(names.split(b"\0")) == {b"." + each for each in (*plain, *inside)}
    _, home, big, mode, leads, followed, none, written = text.decode().splitlines()
    data = hashlib.sha256(bytes([7]) * 3_000_000).hexdigest()
    assert (home, big, mode) == ("xfs", f"{data}  -", "4755")
    assert leads == "/etc/shadow"
    assert "Too many levels of symbolic links" in followed
    assert "No such file or directory" in none
    assert "Read-only file system" in written
    assert not os.path.ismount(directory)
    assert digest(disk) == before


@pytest.mark.parametrize("device", ["/dev/sda3", "/dev/sda4"])
def test_a_file_system_alone(place, disk, device):
    with appliance(place, f"alone{device[-1]}", disk) as running:
        files = GuestFiles(running, "web@s1")
        files.mount([("/", device)])
        assert files.find(b"/")[1].kind == "directory"


def test_an_encrypted_disk_is_seen(place):
    """libguestfs lists none: beside it, /boot would be opened as the whole system."""
    directory = place / "encrypted"
    make_private(directory, OWNER)
    images = [directory / "boot.qcow2", directory / "root.qcow2"]
    for image in images:
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", image, "64M"], check=True)
        if OWNER is not None:
            os.chown(image, OWNER.uid, OWNER.gid)
    with running_appliance(
        "web@s1", directory, images, Interrupt(), owner=OWNER, cache=place / "cache"
    ) as running:
        files = GuestFiles(running, "web@s1")
        running.ask("mkfs", "ext4", "/dev/sda")
        # guestfish asks for the key on its standard input
        running.ask(
            "debug",
            "sh",
            "echo -n key | cryptsetup -q luksFormat --pbkdf pbkdf2 "
            "--pbkdf-force-iterations 1000 /dev/sdb -",
        )
        found = files.file_systems()
        kinds = {each.device: each.kind for each in found}
        assert kinds == {"/dev/sda": "ext4", "/dev/sdb": "crypto_LUKS"}
        with pytest.raises(RefusedError, match="/dev/sdb: is encrypted"):
            choose_places("web@s1", found, files.system_places(), None)


def test_garbage_has_no_file_system(place):
    image = place / "garbage.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", image, "1M"], check=True)
    if OWNER is not None:
        os.chown(image, OWNER.uid, OWNER.gid)
    with appliance(place, "garbage", image) as running:
        files = GuestFiles(running, "web@s1")
        with pytest.raises(RefusedError, match="no file system was found"):
            choose_places("web@s1", files.file_systems(), files.system_places(), None)


WINDOWS = """
part-init /dev/sda gpt
part-add /dev/sda p 2048 133119
part-add /dev/sda p 133120 165887
part-add /dev/sda p 165888 600000
part-add /dev/sda p 600064 800000
part-add /dev/sda p 800768 1000000
part-set-gpt-type /dev/sda 1 C12A7328-F81F-11D2-BA4B-00A0C93EC93B
part-set-gpt-type /dev/sda 2 E3C9E316-0B5C-4DB8-817D-F92DF00215AE
part-set-gpt-type /dev/sda 3 EBD0A0A2-B9E5-4433-87C0-68B6B72699C7
part-set-gpt-type /dev/sda 4 EBD0A0A2-B9E5-4433-87C0-68B6B72699C7
part-set-gpt-type /dev/sda 5 DE94BBA4-06D1-4D40-A16A-BFD50179D6AC
mkfs vfat /dev/sda1
mkfs ntfs /dev/sda3
mkfs ntfs /dev/sda4
mkfs ntfs /dev/sda5
mount /dev/sda3 /
mkdir-p /Windows/System32/config
mkdir-p /Windows/System32/drivers
write /hiberfil.sys HIBRandmore
"""
GUID_OF_D = bytes(range(1, 17))
"""As the registry has it; of a GUID's text its first three numbers are little-endian."""


def empty_hive():
    """A registry with a root key alone."""
    head = bytearray(4096)
    struct.pack_into("<4sIIQIIIIII", head, 0, b"regf", 1, 1, 0, 1, 3, 0, 1, 0x20, 0x1000)
    struct.pack_into("<I", head, 44, 1)
    for (word,) in struct.iter_unpack("<I", bytes(head[:0x1FC])):
        struct.pack_into("<I", head, 0x1FC, struct.unpack_from("<I", head, 0x1FC)[0] ^ word)
    page = bytearray(4096)
    struct.pack_into("<4sII", page, 0, b"hbin", 0, len(page))
    none, name = 0xFFFFFFFF, b"root"
    struct.pack_into("<i2sHQI", page, 0x20, -0x58, b"nk", 0x2C, 0, 0)
    security = 0x78
    struct.pack_into("<IIIIIIIII", page, 0x34, none, 0, 0, none, none, 0, none, security, none)
    struct.pack_into("<HH", page, 0x6C, len(name), 0)
    page[0x70 : 0x70 + len(name)] = name
    struct.pack_into("<i2sHIIII", page, security, -0x28, b"sk", 0, security, security, 1, 0)
    struct.pack_into("<i", page, 0xA0, len(page) - 0xA0)
    return bytes(head + page)


def program():
    """The head of a program for x86-64, by which libguestfs knows the system's architecture."""
    head = bytearray(1024)
    struct.pack_into("<2s22xH34xI", head, 0, b"MZ", 0x40, 0x80)
    struct.pack_into("<4sHHIIIHH", head, 0x80, b"PE", 0x8664, 1, 0, 0, 0, 240, 0x22)
    struct.pack_into("<H66xH", head, 0x98, 0x20B, 3)
    return bytes(head)


def test_the_drives_of_a_windows_guest(place):
    directory = place / "windows"
    make_private(directory, OWNER)
    image = directory / "windows.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", image, "600M"], check=True)
    if OWNER is not None:
        os.chown(image, OWNER.uid, OWNER.gid)
    with running_appliance(
        "web@s1", directory, [image], Interrupt(), owner=OWNER, cache=place / "cache"
    ) as made:
        for line in WINDOWS.strip().splitlines():
            made.ask(*line.split())
        guid = uuid.UUID(bytes_le=GUID_OF_D)
        made.ask("part-set-gpt-guid", "/dev/sda", "4", str(guid))
        contents = {"config/SYSTEM": empty_hive(), "config/SOFTWARE": empty_hive()}
        for name, content in {**contents, "cmd.exe": program()}.items():
            upload = place / "upload"
            upload.write_bytes(content)
            upload.chmod(0o644)
            made.ask("upload", str(upload), f"/Windows/System32/{name}")
        made.ask("hivex-open", "/Windows/System32/config/SYSTEM", "write:true")
        root = made.ask("hivex-root").strip()
        devices = made.ask("hivex-node-add-child", root, "MountedDevices").strip()
        value = b"DMIO:ID:" + GUID_OF_D
        made.ask("hivex-node-set-value", devices, "\\DosDevices\\D:", "3", value)
        made.ask("hivex-commit", "/Windows/System32/config/SYSTEM")
        made.ask("hivex-close")
        made.ask("umount-all")
        files = GuestFiles(made, "web@s1")
        found = files.file_systems()
        wanted = choose_places("web@s1", found, files.system_places(), None)
        files.mount(wanted)
        windows = windows_parts(made, wanted[0][1], [each.device for each in found])
    assert wanted == [("/", "/dev/sda3")]
    own = {"/dev/sda1", "/dev/sda5"}
    assert windows == WindowsParts({"/dev/sda4": "D"}, own, hibernated=True)
    assert not_mounted(found, wanted, windows) == [
        "its drive D: is not shown: open it with --device /dev/sda4"
    ]
