"""Find the dataset or volume that holds the data of a disk, from the disk's path.

Names prove nothing. A file belongs to the mount with its device number, and the kernel is asked for
the volume of a block device. Paths are followed by the list of mounts, without touching file
systems that a server or a program serves: these would block for ever if it is dead.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shlex
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from snaporch import default_paths
from snaporch.default_paths import HostPaths
from snaporch.errors import SnaporchError
from snaporch.model import Dataset, DatasetKind

_MAX_DATASET_NAME = 256
"""ZFS_MAX_DATASET_NAME_LEN of the OpenZFS headers."""

_BLKZNAME = (2 << 30) | (_MAX_DATASET_NAME << 16) | (0x12 << 8) | 125
"""_IOR(0x12, 125, char[256]): the request by which ``zvol_id`` of OpenZFS gets a volume's name."""

_NODE_SECONDS = 60.0
_NODE_POLL_SECONDS = 0.05

_FORGETFUL = ("tmpfs", "ramfs")
_MAX_LINKS = 40
"""The kernel's limit (path_resolution(7))."""
SERVED_FILE_SYSTEMS = "fuse(blk|[.].*)?|nfs4?|cifs|smb3|9p|virtiofs|ceph|afs|lustre|beegfs|orangefs"
"""File systems that block while the server or program behind them is blocked (also for awk)."""

_OCTAL = re.compile(r"\\([0-7]{3})")


class NotOnZfsError(SnaporchError):
    """The path exists, but its data is not in a dataset that can be snapshotted."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of /proc/self/mountinfo (proc(5))."""

    device: str
    mount_point: str
    filesystem: str
    source: str
    number: int = field(default=0, compare=False)
    """The mount's ID, which its children give as their parent."""
    parent: int = field(default=0, compare=False)
    root: str = field(default="/", compare=False)
    """The directory of the file system that is mounted; not ``/`` for some bind mounts."""
    follows: bool = field(default=False, compare=False)
    """Whether an unmount in another namespace also unmounts it here (mount_namespaces(7))."""


def read_mounts(mountinfo: Path = Path("/proc/self/mountinfo")) -> list[Mount]:
    """The mounts this process sees."""
    lines = mountinfo.read_bytes().decode("utf-8", "surrogateescape").split("\n")
    return [parse_mount(line) for line in lines if line]


def parse_mount(line: str) -> Mount:
    """Parse a line of mountinfo; octal escapes (space, tab, backslash) are decoded."""
    head, _, tail = line.partition(" - ")
    fields = head.split(" ")
    filesystem, source = tail.split(" ")[:2]
    return Mount(
        fields[2],
        _unescape(fields[4]),
        filesystem,
        _unescape(source),
        number=int(fields[0]),
        parent=int(fields[1]),
        root=_unescape(fields[3]),
        follows=any(each.startswith(("shared:", "master:")) for each in fields[6:]),
    )


def _unescape(text: str) -> str:
    """Decode the octal escapes of mountinfo."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def _on_top(over: Mapping[tuple[int, str], Mount], place: str, inside: int) -> Mount | None:
    """The visible mount at a place: the last one, which covers the others."""
    found = None
    while (mount := over.get((found.number if found else inside, place))) is not None:
        found = mount
    return found


def _reversed_names(path: str) -> list[str]:
    """The names in a path, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _link_target(path: str) -> str | None:
    """The target of a link; ``None`` if it is not a link or does not exist."""
    try:
        return os.readlink(path)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
            return None
        raise


def _mount_of(device: str, mounts: list[Mount]) -> Mount | None:
    return next((mount for mount in mounts if mount.device == device), None)


def _dataset_of(path: str, mount: Mount) -> Dataset:
    if mount.filesystem != "zfs":
        raise NotOnZfsError(path, f"not on ZFS but on {mount.filesystem}")
    if "@" in mount.source:
        raise NotOnZfsError(path, f"inside the read-only snapshot {mount.source}")
    return Dataset(mount.source, DatasetKind.FILESYSTEM)


def _ask_volume(node: str) -> str:
    """Ask the kernel for the name of a device's volume.

    Raises:
        OSError: it is not a device of ZFS.
    """
    descriptor = os.open(node, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        answer = fcntl.ioctl(descriptor, _BLKZNAME, bytes(_MAX_DATASET_NAME))
    finally:
        os.close(descriptor)
    return answer.split(b"\0", 1)[0].decode()


def _settle_udev(seconds: float) -> None:
    """Wait until udev has handled all events so far.

    A host without udev has nothing to wait for.
    """
    import subprocess  # slow to import, and most callers do not need it

    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            ["udevadm", "settle", f"--timeout={max(int(seconds), 1)}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            process_group=0,
        )


@dataclass(frozen=True)
class Resolver:
    """Finds datasets and volumes on one host, and where they are mounted or have their nodes."""

    host: HostPaths = default_paths.HOST
    stat: Callable[[str | Path], os.stat_result] = os.stat
    ask_volume: Callable[[str], str] = _ask_volume
    """Asks the device at a path for its volume; raises OSError if it is not one of ZFS."""
    settle_udev: Callable[[float], None] = _settle_udev
    """Waits until udev has handled all events so far, at most so many seconds."""
    sleep: Callable[[float], None] = time.sleep
    mounted: Mapping[str, Path] | None = None
    """The mount points of copies on their host, by dataset. ``None`` for this host's own."""

    def mounts(self) -> list[Mount]:
        """The mounts this process sees."""
        return read_mounts(self.host.proc / "self" / "mountinfo")

    def resolve(self, path: str, mounts: list[Mount] | None = None) -> Dataset:
        """The dataset of a disk image, or the volume of a block device.

        Args:
            mounts: a fresh result of :meth:`mounts`, to resolve many paths with one reading.

        Raises:
            NotOnZfsError: it is not on ZFS, or only in a snapshot. Or its path leads to a file
                system that a server or a program serves, which is not accessed.
            OSError: it cannot be read.
        """
        mounts = self.mounts() if mounts is None else mounts
        status = self.stat(self.real_path(path, mounts))
        if stat.S_ISBLK(status.st_mode):
            return Dataset(self._volume_name(path, status.st_rdev), DatasetKind.VOLUME)
        device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
        mount = _mount_of(device, mounts) or _mount_of(device, self.mounts())  # stat mounted it
        if mount is None:
            raise NotOnZfsError(path, f"no mount has its device number {device}")
        return _dataset_of(path, mount)

    def resolve_nearest(self, path: str, mounts: list[Mount] | None = None) -> Dataset:
        """The dataset of a path, or the dataset that it would be in if it existed.

        Raises:
            NotOnZfsError, OSError: as :meth:`resolve`.
        """
        for candidate in (Path(path), *Path(path).parents):
            with suppress(FileNotFoundError, NotADirectoryError):
                return self.resolve(str(candidate), mounts)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def real_path(self, path: str, mounts: list[Mount] | None = None) -> str:
        """Like :func:`os.path.realpath`, but refuses file systems of a server or a program.

        Args:
            mounts: a fresh result of :meth:`mounts`, to resolve many paths with one reading.

        Raises:
            NotOnZfsError: the path leads to such a file system. It was not touched.
            OSError: it cannot be followed.
        """
        mounts = self.mounts() if mounts is None else mounts
        over = {
            (each.parent, each.mount_point): each for each in mounts if each.number != each.parent
        }
        root = next((each.number for each in reversed(mounts) if each.mount_point == "/"), 0)
        at, inside, links = "/", root, 0
        left = _reversed_names(path if path.startswith("/") else os.path.join(os.getcwd(), path))
        while left:
            name = left.pop()
            if name == "..":
                left += _reversed_names(os.path.dirname(at))
                at, inside = "/", root
                continue
            step = os.path.join(at, name)
            mount = _on_top(over, step, inside)
            while mount is not None and re.fullmatch(SERVED_FILE_SYSTEMS, mount.filesystem):
                # names in it are not read: a mount below it decides
                if not left or left[-1] == "..":
                    raise NotOnZfsError(path, f"not on ZFS but on {mount.filesystem}")
                step = os.path.join(step, left.pop())
                mount = _on_top(over, step, mount.number) or mount
            below = mount.number if mount is not None else inside
            target = _link_target(step)
            if target is None:
                at, inside = step, below
                continue
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            left += _reversed_names(target)
            if target.startswith("/"):
                at, inside = "/", root
        return at

    def inside(self, path: str, dataset: Dataset) -> str | None:
        """The real path of an image below the mount point of its file system.

        ``None`` for a volume, and if the path cannot be determined.
        """
        if dataset.kind is DatasetKind.VOLUME:
            return None
        mounts = self.mounts()
        real = Path(self.real_path(path, mounts))
        own = [each for each in mounts if (each.filesystem, each.source) == ("zfs", dataset.name)]
        above = [each for each in own if real.is_relative_to(each.mount_point)]
        if above:
            mount = max(above, key=lambda each: len(each.mount_point))
            return str(Path(mount.root, real.relative_to(mount.mount_point)).relative_to("/"))
        with suppress(NotOnZfsError):
            root = self.mount_point_of(dataset.name)
            if real.is_relative_to(root):
                return str(real.relative_to(root))
        return None

    def mount_point_of(self, dataset: str) -> Path:
        """Where the root of a dataset is mounted.

        Raises:
            NotOnZfsError: it is not mounted.
        """
        if self.mounted is not None:
            if dataset not in self.mounted:
                reason = "it is not known where it was mounted on its host"
                raise NotOnZfsError(dataset, reason, "compare its checksums only")
            return self.mounted[dataset]
        for mount in self.mounts():
            if (mount.filesystem, mount.source, mount.root) == ("zfs", dataset, "/"):
                return Path(mount.mount_point)
        raise NotOnZfsError(dataset, "is not mounted", f"zfs mount {shlex.quote(dataset)}")

    def volume_link(self, volume: str) -> Path:
        """The link to the device of a volume, as ``zvol_id`` of OpenZFS names it."""
        return self.host.dev / "zvol" / volume.replace(" ", "+")

    def volume_node(self, volume: str, seconds: float = _NODE_SECONDS) -> Path:
        """Wait for the block device of a volume.

        A link appears some time after the volume was created, may be that of another volume for a
        moment (openzfs#8669, openzfs#15904), and may disappear and return while udev handles the
        volume again. So the device itself is asked for its name, and asked again after udev has
        handled everything.

        Args:
            seconds: the time limit.

        Returns: the link, which leads to the right device.

        Raises:
            NotOnZfsError: it did not appear in time.
        """
        link = self.volume_link(volume)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._is_node_of(link, volume):
                self.settle_udev(end - time.monotonic())
                if self._is_node_of(link, volume):
                    return link
            self.sleep(_NODE_POLL_SECONDS)
        raise NotOnZfsError(volume, f"no device node after {seconds:.0f} s", "see `udevadm settle`")

    def _is_node_of(self, link: Path, volume: str) -> bool:
        with suppress(OSError, NotOnZfsError):
            return self.resolve(str(link)) == Dataset(volume, DatasetKind.VOLUME)
        return False

    def _volume_name(self, path: str, rdev: int) -> str:
        """Ask the kernel for the volume of a device; for a partition, for that of its whole disk.

        Device mapper and similar devices pass the request on to the device below, where their data
        begins at another offset. They are refused.
        """
        if below := self.devices_below(rdev):
            raise NotOnZfsError(
                path, f"a device over {', '.join(below)}, not a ZFS volume or a partition of one"
            )
        node = self._whole_disk(rdev) or path
        try:
            name = self.ask_volume(node)
        except OSError as error:
            raise NotOnZfsError(path, "a block device, but not a ZFS volume") from error
        if "@" in name:
            raise NotOnZfsError(path, f"the read-only snapshot {name}")
        return name

    def _whole_disk(self, rdev: int) -> str | None:
        entry = self.sysfs_of(rdev)
        if not (entry / "partition").exists():
            return None
        return str(self.host.dev / entry.resolve().parent.name)

    def partition_number(self, path: str) -> int | None:
        """The number of the partition at a path; ``None`` if it is not a partition.

        Raises:
            OSError: the path cannot be read.
        """
        status = self.stat(path)
        if not stat.S_ISBLK(status.st_mode):
            return None
        with suppress(FileNotFoundError):
            return int((self.sysfs_of(status.st_rdev) / "partition").read_text())
        return None

    def devices_below(self, rdev: int) -> list[str]:
        """The names of the devices below a device (device mapper, RAID).

        A plain disk has none.
        """
        with suppress(FileNotFoundError):
            return sorted(os.listdir(self.sysfs_of(rdev) / "slaves"))
        return []

    def sysfs_of(self, rdev: int) -> Path:
        """The directory of a block device in sysfs."""
        return self.host.sys / "dev" / "block" / f"{os.major(rdev)}:{os.minor(rdev)}"

    def volatile_file_system(self, path: Path) -> str:
        """The type of a path's file system if its files are lost with the power; else empty."""
        device = self.stat(path).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        mount = _mount_of(number, self.mounts())
        return mount.filesystem if mount is not None and mount.filesystem in _FORGETFUL else ""


HOST = Resolver()
"""This host."""


def flush_volume(path: str) -> None:
    """Write the host's cache of a disk to its volume; a file needs nothing.

    Raises:
        OSError: it does not exist or cannot be synced.
    """
    if stat.S_ISBLK(os.stat(path).st_mode):
        flush_device(path)


def flush_device(path: str) -> None:
    """Write the host's page cache of a block device to its volume.

    If the emulator opened a volume without O_DIRECT, the host's cache has dirty pages that are not
    in the pool. QEMU's own flush may have gone to a file descriptor of another process; an fsync of
    the device writes all of them.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
