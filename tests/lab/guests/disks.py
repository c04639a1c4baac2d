"""Disks of a test guest: files in datasets, zvols, or files anywhere."""

import contextlib
import fcntl
import functools
import mmap
import os
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from guests import qcow2, sector

MIB = 1 << 20
# _IOR(0x12, 125, char[256]): the dataset name behind a zvol's device node.
_BLKZNAME = 0x8100127D
# How long udev may take for a device node and zfs may find a dataset busy.
_PATIENCE = 120.0

Format = Literal["raw", "qcow2"]


@dataclass(frozen=True)
class Disk:
    """A disk as a test asks for it.

    ``where`` is a dataset for kind "file", the volume for kind "zvol", and a
    directory, with no ZFS needed, for kind "plain". ``format`` and ``cache``
    default to the guest's. ``file_name`` overrides the image's name.
    """

    kind: Literal["file", "zvol", "plain"]
    where: str
    size_mib: int | None = None
    format: Format | None = None
    cache: str | None = None
    bus: Literal["virtio", "scsi", "sata", "ide"] = "virtio"
    file_name: str | None = None


@dataclass(frozen=True)
class Image:
    """A disk as it came to be: ``path`` is the image file or device node."""

    disk: Disk
    index: int
    format: Format
    cache: str | None
    path: Path

    @property
    def dataset(self) -> str | None:
        """The dataset or volume holding it, None for a plain file."""
        return None if self.disk.kind == "plain" else self.disk.where

    @property
    def is_block(self) -> bool:
        """Whether the definition names a device instead of a file."""
        return self.disk.kind == "zvol"

    def count(self, snapshot: str | None = None) -> int:
        """The last count in the image itself, 0 if none.

        What a running guest wrote to an overlay is not seen. ``snapshot`` is
        the part after the @ of a ZFS snapshot of the image's dataset.
        """
        return sector.last_count(self.read(sector.OFFSET, sector.LENGTH, snapshot), self.index)

    def assert_load_whole(self, count: int, snapshot: str | None = None) -> None:
        """Check the busy probe's load on this disk, which is at that count."""
        with self._at(snapshot) as path:
            sector.assert_load_whole(functools.partial(self._read, path), self.index, count)

    def read(self, offset: int, length: int, snapshot: str | None = None) -> bytes:
        """Guest bytes of the image, live or as of a ZFS snapshot."""
        with self._at(snapshot) as path:
            return self._read(path, offset, length)

    def _read(self, path: Path, offset: int, length: int) -> bytes:
        if self.format == "qcow2":
            return qcow2.read(path, offset, length)
        return _read(path, offset, length)

    @contextlib.contextmanager
    def _at(self, snapshot: str | None) -> Iterator[Path]:
        if snapshot is None:
            yield self.path
        elif self.disk.kind == "file":
            root = mountpoint(self.disk.where)
            inside = self.path.relative_to(root)
            yield root / ".zfs" / "snapshot" / snapshot / inside
        elif self.disk.kind == "zvol":
            clone = f"{self.disk.where}-read-{uuid.uuid4().hex[:8]}"
            zfs("clone", f"{self.disk.where}@{snapshot}", clone)
            try:
                yield zvol_node(clone)
            finally:
                destroy(clone)
        else:
            raise ValueError(f"{self.path} is on no dataset")


def zfs(*arguments: str) -> str:
    """Runs zfs and returns its output. Raises RuntimeError with zfs's message."""
    done = subprocess.run(["zfs", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        command = " ".join(arguments)
        raise RuntimeError(f"zfs {command}: {done.stderr.strip()}")
    return done.stdout


def mountpoint(dataset: str) -> Path:
    """Where a file system dataset is mounted."""
    return Path(zfs("get", "-H", "-o", "value", "mountpoint", dataset).strip())


def zvol_node(volume: str) -> Path:
    """Waits for the /dev/zvol node that is that very volume.

    Raises TimeoutError if udev does not make one.
    """
    node = Path("/dev/zvol") / volume.replace(" ", "+")
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if _volume_behind(node) == volume:
                return node
        time.sleep(0.01)
    raise TimeoutError(f"{node} did not appear, or is another volume")


def destroy(dataset: str) -> None:
    """Destroys a dataset with all below and cloned from it; gone is fine.

    Releases holds, and waits while udev still looks at a volume.
    """
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            zfs("destroy", "-R", "-f", dataset)
        except RuntimeError as error:
            if "does not exist" in str(error):
                return
            waits = any(word in str(error) for word in ("busy", "being held"))
            if not waits or time.monotonic() > end:
                raise
            _release_holds(dataset)
            time.sleep(0.02)
        else:
            return


def existing(index: int, path: Path, form: str) -> Image:
    """Take hold of an image or volume that exists."""
    if path.is_block_device():
        disk = Disk("zvol", _volume_behind(path))
    else:
        try:
            dataset = zfs("list", "-H", "-o", "name", str(path.parent)).strip()
            disk = Disk("file", dataset)
        except RuntimeError:
            disk = Disk("plain", str(path.parent))
    return Image(disk, index, "qcow2" if form == "qcow2" else "raw", None, path)


def create(
    disk: Disk,
    index: int,
    name: str,
    form: Format,
    cache: str | None,
    content: bytes | mmap.mmap,
) -> Image:
    """Makes the disk with ``content`` at its start, and what holds it.

    ``name`` is the stem of a file's name. Parent datasets are made as needed.
    Raises RuntimeError if the dataset of a zvol exists already.
    """
    form = disk.format or form
    size = max(disk.size_mib or 4, -(-len(content) // MIB)) * MIB
    if disk.kind == "zvol":
        # A qcow2 image on a volume needs room for its own tables.
        room = size + MIB if form == "qcow2" else size
        zfs("create", "-p", "-s", "-b", "16k", "-V", str(room), disk.where)
        path = zvol_node(disk.where)
    else:
        folder = Path(disk.where)
        if disk.kind == "file":
            zfs("create", "-p", disk.where)
            folder = mountpoint(disk.where)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / (disk.file_name or f"{name}-{index}.{form}")
    image = Image(disk, index, form, disk.cache or cache, path)
    _fill(image, content, size)
    return image


def _fill(image: Image, content: bytes | mmap.mmap, size: int) -> None:
    if image.format == "raw":
        mode = "r+b" if image.is_block else "xb"
        with image.path.open(mode) as target:
            target.write(content)
            if not image.is_block:
                target.truncate(size)
            target.flush()
            os.fsync(target.fileno())
        return
    with tempfile.NamedTemporaryFile(prefix="guest-disk-") as source:
        source.write(content)
        source.truncate(size)
        source.flush()
        subprocess.run(
            [
                "qemu-img",
                "convert",
                "-f",
                "raw",
                "-O",
                "qcow2",
                source.name,
                str(image.path),
            ],
            check=True,
            capture_output=True,
        )


def _volume_behind(node: Path) -> str:
    with node.open("rb", buffering=0) as device:
        name = fcntl.ioctl(device, _BLKZNAME, bytes(256))
    return name.rstrip(b"\0").decode()


def _release_holds(dataset: str) -> None:
    listed = zfs("list", "-H", "-r", "-t", "snapshot", "-o", "name", dataset)
    for snapshot in listed.splitlines():
        for line in zfs("holds", "-H", snapshot).splitlines():
            zfs("release", line.split("\t")[1], snapshot)


def _read(path: Path, offset: int, length: int) -> bytes:
    """Reads past the page cache of a device, which QEMU may bypass."""
    if not path.is_block_device():
        with path.open("rb") as source:
            source.seek(offset)
            return source.read(length)
    start = offset // 4096 * 4096
    size = -(-(offset + length) // 4096) * 4096 - start
    device = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, size) as buffer:
            os.preadv(device, [buffer], start)
            return buffer[offset - start : offset - start + length]
    finally:
        os.close(device)
