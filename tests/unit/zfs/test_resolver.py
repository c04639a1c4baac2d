import fcntl
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaporch.default_paths import HostPaths
from snaporch.model import Dataset, DatasetKind
from snaporch.zfs import resolver
from snaporch.zfs.resolver import (
    HOST,
    Mount,
    NotOnZfsError,
    Resolver,
    parse_mount,
    read_mounts,
)

LINE = "42 28 0:37 / /tank/web rw,relatime shared:1 - zfs tank/web rw,xattr,posixacl"


@dataclass(frozen=True)
class WithMounts(Resolver):
    """A resolver of a host with these mounts."""

    table: list[Mount] = field(default_factory=list)

    def mounts(self):
        return self.table


def escaped(name):
    """As the kernel's mangle() writes a name: some bytes in octal, the others as they are."""
    return b"".join(b"\\%03o" % byte if byte in b" \t\n\\#" else bytes([byte]) for byte in name)


def test_a_line_is_device_place_type_and_source():
    assert parse_mount(LINE) == Mount("0:37", "/tank/web", "zfs", "tank/web")


@pytest.mark.parametrize("optional", ["", "shared:1 ", "shared:1 master:2 propagate_from:3 "])
def test_any_number_of_optional_fields(optional):
    line = f"42 28 0:37 / /tank rw {optional}- zfs tank rw"
    assert parse_mount(line).source == "tank"
    assert parse_mount(line).follows == bool(optional)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (r"tank/vm\040one", "tank/vm one"),
        (r"a\011b\012c\134d", "a\tb\nc\\d"),
        (r"hash\043", "hash#"),
        (r"\134040", r"\040"),
        ("tank/Bär", "tank/Bär"),
    ],
)
def test_escapes_are_undone(written, name):
    found = parse_mount(f"42 28 0:37 / /{written} rw - zfs {written} rw")
    assert (found.mount_point, found.source) == (f"/{name}", name)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
def test_any_name_arrives_as_it_is(tmp_path_factory, name):
    table = tmp_path_factory.mktemp("proc") / "mountinfo"
    raw = escaped(name.encode())
    table.write_bytes(b"42 28 0:37 / /" + raw + b" rw - zfs " + raw + b" rw\n")
    (found,) = read_mounts(table)
    assert (found.mount_point, found.source) == (f"/{name}", name)


def test_names_that_are_not_utf8_keep_their_bytes(tmp_path):
    table = tmp_path / "mountinfo"
    table.write_bytes(
        b"42 28 0:37 / /b\xe4r rw - zfs tank rw\n43 28 0:38 / /x rw - ext4 /dev/x rw\n"
    )
    first, second = read_mounts(table)
    assert os.fsencode(first.mount_point) == b"/b\xe4r"
    assert second == Mount("0:38", "/x", "ext4", "/dev/x")


def test_this_machines_own_mounts_can_be_read():
    assert any(mount.mount_point == "/" for mount in read_mounts())


# -- files --------------------------------------------------------------------------------------


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "disk.img"
    path.touch()
    return path


@pytest.fixture
def mounted(image):
    """Makes a resolver of a host with this file system where the image is."""

    def make(filesystem, source):
        number = image.stat().st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        mounts = [Mount("0:1", "/", "ext4", "/dev/x"), Mount(device, "/m", filesystem, source)]
        return WithMounts(table=mounts)

    return make


def test_a_file_is_on_the_dataset_its_device_number_is_mounted_from(image, mounted):
    found = mounted("zfs", "tank/vm one").resolve(str(image))
    assert found == Dataset("tank/vm one", DatasetKind.FILESYSTEM)


def test_a_link_is_followed_to_where_the_bytes_are(image, mounted, tmp_path):
    (tmp_path / "link").symlink_to(image)
    assert mounted("zfs", "tank/web").resolve(str(tmp_path / "link")).name == "tank/web"


def test_a_file_elsewhere_is_reported_with_its_file_system(image, mounted):
    with pytest.raises(NotOnZfsError, match="not on ZFS but on btrfs"):
        mounted("btrfs", "/dev/sda1").resolve(str(image))


def test_a_file_in_a_snapshot_cannot_be_snapshotted(image, mounted):
    with pytest.raises(NotOnZfsError, match="read-only snapshot tank/web@yesterday"):
        mounted("zfs", "tank/web@yesterday").resolve(str(image))


def test_a_file_system_that_is_mounted_by_the_access(image, mounted):
    before = [Mount("0:1", "/", "ext4", "/dev/x")]
    assert mounted("zfs", "tank/web").resolve(str(image), before).name == "tank/web"


def test_a_file_whose_mount_is_not_seen(image):
    with pytest.raises(NotOnZfsError, match="no mount has its device number"):
        WithMounts().resolve(str(image))


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        HOST.resolve(str(tmp_path / "absent"))


# -- paths that may hang ------------------------------------------------------------------------


def mount(number, parent, place, filesystem="zfs", source="tank/x", root="/"):
    return Mount(f"0:{number}", str(place), filesystem, source, number, parent, root)


@pytest.fixture
def touched(monkeypatch, tmp_path):
    """Every system call on a path at or below ``dead``."""
    seen = []

    def watch(name):
        real = getattr(os, name)

        def call(path, *more, **options):
            if str(path).startswith(str(tmp_path / "dead")):
                seen.append(str(path))
            return real(path, *more, **options)

        monkeypatch.setattr(os, name, call)

    for name in ("stat", "lstat", "readlink", "open"):
        watch(name)
    return seen


KINDS = ["nfs4", "fuse", "fuse.sshfs", "fuseblk", "cifs", "9p"]


@pytest.mark.parametrize("filesystem", KINDS)
@pytest.mark.parametrize("function", ["resolve", "resolve_nearest"])
def test_file_systems_of_servers_are_not_accessed(tmp_path, touched, filesystem, function):
    find = getattr(Resolver(stat=os.stat), function)
    (tmp_path / "dead").mkdir()
    (tmp_path / "dead" / "disk.img").touch()
    (tmp_path / "link").symlink_to("dead/disk.img")
    touched.clear()
    table = [mount(1, 0, "/", "ext4"), mount(2, 1, tmp_path / "dead", filesystem)]
    for path in (tmp_path / "dead" / "disk.img", tmp_path / "link", tmp_path / "dead" / "gone"):
        with pytest.raises(NotOnZfsError, match=f"not on ZFS but on {re.escape(filesystem)}"):
            find(str(path), table)
    assert touched == []


def test_a_mount_over_the_path_counts(image, tmp_path):
    """The last mount on a place is visible, and covered mounts are not."""
    device = f"{os.major(image.stat().st_dev)}:{os.minor(image.stat().st_dev)}"
    zfs = Mount(device, str(tmp_path), "zfs", "tank/web", 3, 2)
    over = [mount(1, 0, "/", "ext4"), mount(2, 1, tmp_path, "nfs"), zfs]
    assert HOST.resolve(str(image), over).name == "tank/web"
    hidden = [
        mount(1, 0, "/", "ext4"),
        mount(2, 1, tmp_path / "disk.img", "nfs"),
        Mount(device, str(tmp_path), "zfs", "tank/web", 3, 1),
    ]
    assert HOST.resolve(str(image), hidden).name == "tank/web"


@pytest.mark.parametrize("filesystem", ["nfs4", "fuse"])
def test_a_mount_below_a_servers_file_system_decides(tmp_path, touched, filesystem):
    image = tmp_path / "dead" / "some" / "vm" / "disk.img"
    image.parent.mkdir(parents=True)
    image.touch()
    device = f"{os.major(image.stat().st_dev)}:{os.minor(image.stat().st_dev)}"
    zfs = Mount(device, str(image.parent), "zfs", "tank/web", 3, 2)
    table = [mount(1, 0, "/", "ext4"), mount(2, 1, tmp_path / "dead", filesystem), zfs]
    assert Resolver(stat=os.stat).resolve(str(image), table).name == "tank/web"
    assert HOST.real_path(str(image), table) == str(image)
    touched.clear()
    for other in ("dead/some", "dead/some/other/disk.img", "dead/some/../some/vm/disk.img"):
        with pytest.raises(NotOnZfsError, match=f"not on ZFS but on {filesystem}"):
            HOST.real_path(str(tmp_path / other), table)
    deeper = Mount("9:9", str(image.parent / "more"), filesystem, "server:/", 4, 3)
    with pytest.raises(NotOnZfsError, match=f"not on ZFS but on {filesystem}"):
        HOST.real_path(str(image.parent / "more" / "x"), [*table, deeper])
    assert not [path for path in touched if not Path(path).is_relative_to(image.parent)]


def test_a_real_path_is_the_kernels(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "up").symlink_to("../a/./b/..")
    (tmp_path / "round").symlink_to(tmp_path / "a" / "up" / "b")
    for name in ("round", "a/up/b/../up", "round/../../a", "none/at/all", "round/none/../x"):
        path = str(tmp_path / name)
        assert HOST.real_path(path) == os.path.realpath(path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        HOST.real_path(str(tmp_path / "loop"))


def test_a_missing_image_would_be_in_its_directorys_dataset(image, mounted, tmp_path):
    nearest = mounted("zfs", "tank/web").resolve_nearest(str(tmp_path / "none" / "disk.img"))
    assert nearest.name == "tank/web"


# -- block devices ------------------------------------------------------------------------------


@pytest.fixture
def sysfs(tmp_path):
    """A sysfs with the volume 230:16 and its partition 230:17, and the device mapper 254:0."""
    devices, blocks = tmp_path / "sys/devices", tmp_path / "sys/dev/block"
    disk = devices / "zd16"
    (disk / "zd16p1").mkdir(parents=True)
    (disk / "zd16p1" / "partition").write_text("1\n")
    (disk / "slaves").mkdir()
    (devices / "dm-0" / "slaves" / "zd16").mkdir(parents=True)
    blocks.mkdir(parents=True)
    (blocks / "230:16").symlink_to(disk)
    (blocks / "230:17").symlink_to(disk / "zd16p1")
    (blocks / "254:0").symlink_to(devices / "dm-0")
    return tmp_path / "sys"


@pytest.fixture
def device(sysfs, tmp_path):
    """Makes a resolver to which all files are this block device, and which asks devices so."""

    def make(number, ask_volume):
        status = SimpleNamespace(st_mode=stat.S_IFBLK | 0o660, st_rdev=os.makedev(*number))
        host = HostPaths(sys=sysfs, dev=tmp_path / "dev")
        return Resolver(host, stat=lambda _path: status, ask_volume=ask_volume)

    return make


def test_a_device_is_asked_for_its_volume(image, device):
    asked = device((230, 16), {str(image): "tank/vm one"}.__getitem__)
    assert asked.resolve(str(image)) == Dataset("tank/vm one", DatasetKind.VOLUME)
    assert asked.partition_number(str(image)) is None


@pytest.mark.parametrize("name", ["tank/vm one", "x" * 255])
def test_the_kernel_is_asked_by_the_request_of_zvol_id(image, monkeypatch, name):
    def ioctl(descriptor, request, buffer):
        assert os.readlink(f"/proc/self/fd/{descriptor}") == str(image)
        assert (request, len(buffer)) == (0x8100127D, 256)
        return name.encode().ljust(256, b"\0")

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    assert Resolver().ask_volume(str(image)) == name


def test_a_device_that_does_not_understand_the_question_is_no_volume(image, device):
    """As any file, whose file system does not know the request."""
    with pytest.raises(NotOnZfsError, match="not a ZFS volume"):
        device((230, 16), Resolver().ask_volume).resolve(str(image))


def test_the_device_of_a_snapshot_cannot_be_snapshotted(image, device):
    with pytest.raises(NotOnZfsError, match="read-only snapshot tank/vol@old"):
        device((230, 16), lambda _node: "tank/vol@old").resolve(str(image))


def test_the_whole_disk_of_a_partition_is_asked_for_its_volume(image, device, tmp_path):
    """A partition's node does not know the request."""
    asked = device((230, 17), {str(tmp_path / "dev" / "zd16"): "tank/whole"}.__getitem__)
    assert asked.resolve(str(image)) == Dataset("tank/whole", DatasetKind.VOLUME)
    assert asked.partition_number(str(image)) == 1


def test_a_device_over_a_volume_is_not_the_volume(image, device):
    """Device mapper passes on the request for the volume."""
    over = device((254, 0), lambda _node: pytest.fail("was asked, and would answer"))
    with pytest.raises(NotOnZfsError, match="a device over zd16, not a ZFS volume or a partition"):
        over.resolve(str(image))


def test_flushing_reaches_the_device(image, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.readlink(f"/proc/self/fd/{fd}")))
    resolver.flush_device(str(image))
    assert flushed == [str(image)]


@pytest.mark.parametrize("device", [True, False])
def test_only_devices_need_a_flush(image, monkeypatch, device):
    flushed = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    monkeypatch.setattr(stat, "S_ISBLK", lambda _mode: device)
    resolver.flush_volume(str(image))
    assert len(flushed) == device


# -- mount points and nodes ---------------------------------------------------------------------


def test_a_mount_point_is_that_of_the_dataset_itself():
    mounts = [
        Mount("0:1", "/tank", "zfs", "tank"),
        Mount("0:2", "/srv/my images", "zfs", "tank/web"),
        Mount("0:3", "/elsewhere", "tmpfs", "tank/other"),
    ]
    host = WithMounts(table=mounts)
    assert str(host.mount_point_of("tank/web")) == "/srv/my images"
    for name in ("tank/other", "tank/w"):
        with pytest.raises(NotOnZfsError, match="is not mounted; zfs mount"):
            host.mount_point_of(name)


def test_a_bind_mount_of_a_part_is_not_where_a_dataset_is_mounted():
    mounts = [
        mount(2, 1, "/srv/part", source="tank/web", root="/images"),
        mount(3, 1, "/tank/web", source="tank/web"),
    ]
    host = WithMounts(table=mounts)
    assert str(host.mount_point_of("tank/web")) == "/tank/web"
    for path in ("/tank/web/images/disk.img", "/srv/part/disk.img"):
        dataset = Dataset("tank/web", DatasetKind.FILESYSTEM)
        assert host.inside(path, dataset) == "images/disk.img"
    mounts.pop()
    with pytest.raises(NotOnZfsError, match="is not mounted"):
        host.mount_point_of("tank/web")


def test_of_two_mounts_above_an_image_the_nearer_counts():
    mounts = [
        mount(2, 1, "/tank/web", source="tank/web"),
        mount(3, 2, "/tank/web/old", source="tank/web", root="/archive/2020"),
    ]
    dataset = Dataset("tank/web", DatasetKind.FILESYSTEM)
    for table in (mounts, mounts[::-1]):
        host = WithMounts(table=table)
        assert host.inside("/tank/web/old/disk.img", dataset) == "archive/2020/disk.img"
        assert host.inside("/tank/web/disk.img", dataset) == "disk.img"


class Nodes:
    """Links to nodes of volumes; each is a block device that reports the volume it is set to."""

    def __init__(self, root):
        self._links = root / "zvol"
        self._volumes = {}
        self.settled = 0
        self.at_settling = self.at_waiting = lambda: None
        self.resolver = Resolver(
            HostPaths(dev=root),
            stat=self._stat,
            ask_volume=self._volumes.__getitem__,
            settle_udev=self._settle,
            sleep=lambda _seconds: self.at_waiting(),
        )

    def add(self, name, volume):
        """Adds the link NAME to the node of VOLUME."""
        link = self._links / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.touch()
        self._volumes[str(link)] = volume
        return link

    def _stat(self, path):
        os.stat(path)
        return SimpleNamespace(st_mode=stat.S_IFBLK, st_rdev=os.makedev(230, 16))

    def _settle(self, _seconds):
        self.settled += 1
        self.at_settling()


@pytest.fixture
def nodes(tmp_path):
    return Nodes(tmp_path)


def test_the_node_of_a_volume(nodes):
    nodes.add("tank/vm+one", "tank/vm one")
    assert nodes.resolver.volume_node("tank/vm one", seconds=5).name == "vm+one"


def test_a_node_of_another_volume_is_not_used(nodes):
    nodes.add("tank/vol", "tank/old")
    with pytest.raises(NotOnZfsError, match="no device node after 0 s"):
        nodes.resolver.volume_node("tank/vol", seconds=0.05)


def test_a_file_in_the_place_of_a_node_is_not_used(tmp_path):
    (tmp_path / "zvol/tank").mkdir(parents=True)
    (tmp_path / "zvol/tank/vol").touch()
    number = os.stat(tmp_path).st_dev
    mounts = [Mount(f"{os.major(number)}:{os.minor(number)}", "/", "zfs", "tank/vol")]
    host = WithMounts(HostPaths(dev=tmp_path), table=mounts)
    with pytest.raises(NotOnZfsError, match="no device node after 0 s"):
        host.volume_node("tank/vol", seconds=0.05)


def test_a_node_that_comes_late_is_waited_for(nodes):
    waited = []

    def wait():
        waited.append(1)
        if len(waited) == 3:
            nodes.add("tank/vol", "tank/vol")

    nodes.at_waiting = wait
    assert nodes.resolver.volume_node("tank/vol", seconds=60).name == "vol"
    assert len(waited) == 3


def test_a_link_that_disappears_and_returns_is_awaited(nodes):
    link = nodes.add("tank/vol", "tank/vol")
    nodes.at_settling = lambda: nodes.settled == 1 and link.unlink()
    nodes.at_waiting = link.touch
    assert nodes.resolver.volume_node("tank/vol", seconds=60) == link
    assert nodes.settled == 2


@pytest.mark.parametrize(
    ("kind", "expected"), [("tmpfs", "tmpfs"), ("ramfs", "ramfs"), ("ext4", "")]
)
def test_file_systems_that_a_power_loss_empties(tmp_path, kind, expected):
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = [Mount("0:9", "/else", "tmpfs", "x"), Mount(number, "/", kind, "y")]
    assert WithMounts(table=mounts).volatile_file_system(tmp_path) == expected
