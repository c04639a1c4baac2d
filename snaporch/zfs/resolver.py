"""From a disk's path to the dataset or volume that holds its bytes.

Nothing is guessed from names: a file belongs to the mount its device number belongs to, and a
block device is asked which volume it is. A path is followed by the list of mounts, and what a
server or a program answers for is not touched: a dead one would never answer.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from snaporch.errors import SnaporchError
from snaporch.model import Dataset, DatasetKind

_MAX_DATASET_NAME = 256
"""ZFS_MAX_DATASET_NAME_LEN of the OpenZFS headers."""

_BLKZNAME = (2 << 30) | (_MAX_DATASET_NAME << 16) | (0x12 << 8) | 125
"""_IOR(0x12, 125, char[256]): the question ``zvol_id`` of OpenZFS asks a volume's node."""

_LINKS = Path("/dev/zvol")
_SYS = Path("/sys/dev/block")
_NODE_SECONDS = 60.0
_NODE_POLL_SECONDS = 0.05

_FORGETFUL = ("tmpfs", "ramfs")
_MAX_LINKS = 40
"""As the kernel (path_resolution(7))."""
ANSWERED_FOR = "fuse(blk|[.].*)?|nfs4?|cifs|smb3|9p|virtiofs|ceph|afs|lustre|beegfs|orangefs"
"""File systems that stand still with the server or the program behind them (also for awk)."""

_OCTAL = re.compile(r"\\([0-7]{3})")


class NotOnZfsError(SnaporchError):
    """The path is readable but its bytes are not in a dataset that can be snapshotted."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of /proc/self/mountinfo (proc(5))."""

    device: str
    mount_point: str
    filesystem: str
    source: str
    number: int = field(default=0, compare=False)
    """By which others name it as their parent."""
    parent: int = field(default=0, compare=False)
    root: str = field(default="/", compare=False)
    """The directory of the file system that is mounted; a bind mount may have another."""
    follows: bool = field(default=False, compare=False)
    """Whether it is unmounted with its like in other namespaces (mount_namespaces(7))."""


def read_mounts(mountinfo: Path = Path("/proc/self/mountinfo")) -> list[Mount]:
    """The mounts this process sees."""
    lines = mountinfo.read_bytes().decode("utf-8", "surrogateescape").split("\n")
    return [parse_mount(line) for line in lines if line]


def parse_mount(line: str) -> Mount:
    """One mountinfo line; octal escapes (space, tab, backslash) are undone."""
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
    """mountinfo writes the bytes of a name; those it escapes come as octal."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def resolve(path: str, mounts: list[Mount] | None = None) -> Dataset:
    """The dataset of a disk image or the volume of a block device.

    Args:
        mounts: as :func:`read_mounts` has just given them, for many paths at once.

    Raises:
        NotOnZfsError: it exists but not on ZFS, or only in a snapshot; or it would be on a file
            system that a server or a program answers for, which is not asked.
        OSError: it cannot be read.
    """
    mounts = read_mounts() if mounts is None else mounts
    status = os.stat(real_path(path, mounts))
    if stat.S_ISBLK(status.st_mode):
        return Dataset(_volume_name(path, status.st_rdev), DatasetKind.VOLUME)
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    mount = _mount_of(device, mounts) or _mount_of(device, read_mounts())  # mounted by the look
    if mount is None:
        raise NotOnZfsError(path, f"no mount has its device number {device}")
    return _dataset_of(path, mount)


def _mount_of(device: str, mounts: list[Mount]) -> Mount | None:
    return next((mount for mount in mounts if mount.device == device), None)


def forgetful(path: Path) -> str:
    """The kind of file system of ``path`` if a power loss empties it, else nothing."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mount = _mount_of(number, read_mounts())
    return mount.filesystem if mount is not None and mount.filesystem in _FORGETFUL else ""


def resolve_nearest(path: str, mounts: list[Mount] | None = None) -> Dataset:
    """The dataset of a path, or the one it would be in if it existed.

    Raises:
        NotOnZfsError, OSError: as :func:`resolve`.
    """
    for candidate in (Path(path), *Path(path).parents):
        with suppress(FileNotFoundError, NotADirectoryError):
            return resolve(str(candidate), mounts)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def real_path(path: str, mounts: list[Mount] | None = None) -> str:
    """As :func:`os.path.realpath`, without touching what a server or a program answers for.

    Args:
        mounts: as :func:`read_mounts` has just given them, for many paths at once.

    Raises:
        NotOnZfsError: the way leads onto such a file system.
        OSError: it cannot be followed.
    """
    mounts = read_mounts() if mounts is None else mounts
    over = {(each.parent, each.mount_point): each for each in mounts if each.number != each.parent}
    root = next((each.number for each in reversed(mounts) if each.mount_point == "/"), 0)
    at, inside, links = "/", root, 0
    left = _names(path if path.startswith("/") else os.path.join(os.getcwd(), path))
    while left:
        name = left.pop()
        if name == "..":
            left += _names(os.path.dirname(at))
            at, inside = "/", root
            continue
        step = os.path.join(at, name)
        mount = _on_top(over, step, inside)
        while mount is not None and re.fullmatch(ANSWERED_FOR, mount.filesystem):
            # nothing on the way through it is looked at: what is mounted below it decides
            if not left or left[-1] == "..":
                raise NotOnZfsError(path, f"not on ZFS but on {mount.filesystem}")
            step = os.path.join(step, left.pop())
            mount = _on_top(over, step, mount.number) or mount
        below = mount.number if mount is not None else inside
        target = _link(step)
        if target is None:
            at, inside = step, below
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        left += _names(target)
        if target.startswith("/"):
            at, inside = "/", root
    return at


def _on_top(over: Mapping[tuple[int, str], Mount], place: str, inside: int) -> Mount | None:
    """What is seen at a place: the last mount there, on top of those it covers."""
    found = None
    while (mount := over.get((found.number if found else inside, place))) is not None:
        found = mount
    return found


def _names(path: str) -> list[str]:
    """The names in a path, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _link(path: str) -> str | None:
    """Where a link leads; ``None`` for what is none, or is not there."""
    try:
        return os.readlink(path)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
            return None
        raise


def mount_point_of(dataset: str) -> Path:
    """Where a dataset is mounted, all of it.

    Raises:
        NotOnZfsError: nowhere.
    """
    for mount in read_mounts():
        if (mount.filesystem, mount.source, mount.root) == ("zfs", dataset, "/"):
            return Path(mount.mount_point)
    raise NotOnZfsError(dataset, "is not mounted", f"zfs mount {dataset}")


def volume_link(volume: str) -> Path:
    """The link to the device of a volume, as ``zvol_id`` of OpenZFS writes it."""
    return _LINKS / volume.replace(" ", "+")


def volume_node(volume: str, seconds: float = _NODE_SECONDS) -> Path:
    """The block device of a volume, once its link is there and is the right one.

    Links appear some time after a volume was made, may be another's for a moment (openzfs#8669,
    openzfs#15904), and may go and come again while udev looks at the volume for a second time. So
    the node itself is asked, and asked again when udev has nothing left to do.

    Raises:
        NotOnZfsError: it did not appear in time.
    """
    link = volume_link(volume)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if _is_node_of(link, volume):
            _settle_udev(end - time.monotonic())
            if _is_node_of(link, volume):
                return link
        time.sleep(_NODE_POLL_SECONDS)
    raise NotOnZfsError(volume, f"no device node after {seconds:.0f} s", "see `udevadm settle`")


def _is_node_of(link: Path, volume: str) -> bool:
    with suppress(OSError, NotOnZfsError):
        return link.is_block_device() and resolve(str(link)).name == volume
    return False


def _settle_udev(seconds: float) -> None:
    """Wait until udev has handled what has happened so far; a host without it has nothing to do."""
    import subprocess  # a hook that has nothing to do is not to pay for it

    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            ["udevadm", "settle", f"--timeout={max(int(seconds), 1)}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            process_group=0,
        )


def _dataset_of(path: str, mount: Mount) -> Dataset:
    if mount.filesystem != "zfs":
        raise NotOnZfsError(path, f"not on ZFS but on {mount.filesystem}")
    if "@" in mount.source:
        raise NotOnZfsError(path, f"inside the read-only snapshot {mount.source}")
    return Dataset(mount.source, DatasetKind.FILESYSTEM)


def _volume_name(path: str, rdev: int) -> str:
    """Ask the node; a partition's answer is that of its whole disk.

    Device mapper and the like pass the question on to what they lie over, which starts elsewhere.
    """
    if below := lies_over(rdev):
        raise NotOnZfsError(
            path, f"a device over {', '.join(below)}, not a ZFS volume or a partition of one"
        )
    node = _whole_disk(rdev) or path
    descriptor = os.open(node, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        answer = fcntl.ioctl(descriptor, _BLKZNAME, bytes(_MAX_DATASET_NAME))
    except OSError as error:
        raise NotOnZfsError(path, "a block device, but not a ZFS volume") from error
    finally:
        os.close(descriptor)
    name = answer.split(b"\0", 1)[0].decode()
    if "@" in name:
        raise NotOnZfsError(path, f"the read-only snapshot {name}")
    return name


def inside(path: str, dataset: Dataset) -> str | None:
    """The real path of an image below the mount point of its file system; ``None`` for a volume.

    Also ``None`` where it cannot be told.
    """
    if dataset.kind is DatasetKind.VOLUME:
        return None
    mounts = read_mounts()
    real = Path(real_path(path, mounts))
    own = [each for each in mounts if (each.filesystem, each.source) == ("zfs", dataset.name)]
    above = [each for each in own if real.is_relative_to(each.mount_point)]
    if above:
        mount = max(above, key=lambda each: len(each.mount_point))
        return str(Path(mount.root, real.relative_to(mount.mount_point)).relative_to("/"))
    with suppress(NotOnZfsError):
        root = mount_point_of(dataset.name)
        if real.is_relative_to(root):
            return str(real.relative_to(root))
    return None


def partition(path: str) -> int | None:
    """The number of the partition that a path is; ``None`` for anything else.

    Raises:
        OSError: it cannot be looked at.
    """
    status = os.stat(path)
    if not stat.S_ISBLK(status.st_mode):
        return None
    device = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    with suppress(FileNotFoundError):
        return int(Path(f"/sys/dev/block/{device}/partition").read_text())
    return None


def lies_over(rdev: int) -> list[str]:
    """The devices that a block device is made of, by their names; none for a disk or partition."""
    with suppress(FileNotFoundError):
        return sorted(os.listdir(_SYS / f"{os.major(rdev)}:{os.minor(rdev)}" / "slaves"))
    return []


def _whole_disk(rdev: int) -> str | None:
    entry = Path(f"/sys/dev/block/{os.major(rdev)}:{os.minor(rdev)}")
    if not (entry / "partition").exists():
        return None
    return f"/dev/{entry.resolve().parent.name}"


def flush_device(path: str) -> None:
    """Write the host's page cache of a block device to its volume.

    A volume that the emulator opened without O_DIRECT has dirty pages in the host's cache which
    are not yet in the pool when QEMU's own flush was to a file descriptor of another process;
    fsync of the node reaches them all.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
