"""Find the images of a clone, each with its whole backing chain.

An image may name other images, by the paths of the day it was made. Each path is looked up inside
the clone. A path that would lead the clone to a file that another guest writes to is refused. The
whole chain is written into the clone's definition, so that the emulator opens only files that were
checked.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from snaporch.bundle.manifest import DiskEntry
from snaporch.context import Context
from snaporch.disks.backing_chain import FileState, is_same, written_by
from snaporch.hypervisor.clone_xml import CloneDisk
from snaporch.hypervisor.qcow2 import (
    MAX_CHAIN,
    PROTOCOL,
    SELF_CONTAINED,
    HeaderError,
    Qcow2Header,
    is_qcow2,
    read_qcow2,
)
from snaporch.model import DatasetKind
from snaporch.restore.foreign_definition import came_from_elsewhere
from snaporch.restore.safe_path import LeadsOutError, open_beneath
from snaporch.restore.source import IncompleteError, Source, image_path_in_dataset
from snaporch.zfs.resolver import NotOnZfsError


@dataclass(frozen=True, slots=True)
class ClonedDataset:
    """The clone of one dataset of the snapshot."""

    name: str
    kind: DatasetKind
    root: Path
    """Its mount point, or its device node."""


@dataclass(frozen=True, slots=True)
class _Image:
    """An image that was found, and its path in the original guest."""

    place: CloneDisk
    original_path: PurePosixPath
    dataset: str | None
    """The original dataset whose clone holds the image; None for a file outside the snapshot."""


class Images:
    """Finds the images of a clone whose datasets were cloned before."""

    def __init__(self, context: Context, source: Source, made: Mapping[str, ClonedDataset]) -> None:
        self._context, self._source, self._made = context, source, made
        self._mount_points = {
            origin: PurePosixPath(context.resolver.mount_point_of(origin))
            for origin, cloned in made.items()
            if cloned.kind is DatasetKind.FILESYSTEM
        }

    def place_of(self, disk: DiskEntry) -> CloneDisk:
        """The path of a disk in the clone, with its backing chain.

        Raises:
            IncompleteError: an image is missing, or has changed.
            LeadsOutError: the image, or a file that its header names, is not in the snapshot.
        """
        thing = f"{disk.target} ({disk.source})"
        try:
            with ExitStack() as stack:
                return self._follow(stack, thing, disk)
        except HeaderError as error:
            raise IncompleteError(thing, str(error)) from error
        except FileNotFoundError as error:
            raise IncompleteError(thing, f"{error.filename} is not in the snapshot") from error
        except LeadsOutError as error:
            raise LeadsOutError(thing, f"{error.thing}: {error.reason}", error.step) from error

    def _follow(self, stack: ExitStack, thing: str, disk: DiskEntry) -> CloneDisk:
        image, descriptor = self._top_image(stack, disk)
        found = [image]
        while image.place.format not in SELF_CONTAINED:
            names = _header(image, descriptor)
            if names.data_file is not None:
                data = self._data_file(stack, image, names.data_file)
                found[-1] = replace(image, place=replace(image.place, data=data))
            below = self._backing_image(stack, image, names)
            if below is None:
                break
            image, descriptor = below
            found.append(image)
            if len(found) > MAX_CHAIN:
                raise LeadsOutError(thing, f"its backing chain has more than {MAX_CHAIN} images")
        place = None
        for each in reversed(found):
            place = replace(each.place, below=place)
        assert place is not None
        return place

    def _top_image(self, stack: ExitStack, disk: DiskEntry) -> tuple[_Image, int]:
        cloned = self._made[disk.dataset or ""]
        original_path = PurePosixPath(disk.source or "")
        if cloned.kind is DatasetKind.VOLUME:
            return self._volume(stack, disk.dataset or "", original_path, disk.format)
        path = PurePosixPath(image_path_in_dataset(self._context.resolver, disk))
        return self._in_clone(stack, disk.dataset or "", path, original_path, disk.format)

    def _volume(
        self, stack: ExitStack, dataset: str, original_path: PurePosixPath, form: str
    ) -> tuple[_Image, int]:
        root = self._made[dataset].root
        descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        stack.callback(os.close, descriptor)
        return _Image(CloneDisk(str(root), "block", form), original_path, dataset), descriptor

    def _in_clone(
        self, stack: ExitStack, dataset: str, path: PurePosixPath, known: PurePosixPath, form: str
    ) -> tuple[_Image, int]:
        root = self._made[dataset].root
        beneath = stack.enter_context(open_beneath(root, path, self._mount_points[dataset]))
        place = CloneDisk(str(root / beneath.path), "file", form)
        return _Image(place, known, dataset), beneath.descriptor

    def _backing_image(
        self, stack: ExitStack, image: _Image, names: Qcow2Header
    ) -> tuple[_Image, int] | None:
        """The backing file of an image, opened; None if it has none."""
        path = image.place.path
        if names.backing is None:
            return None
        if PROTOCOL.match(names.backing):
            raise LeadsOutError(path, f"its backing file is {names.backing}, which is not a path")
        original_path = image.original_path.parent / names.backing
        form = names.backing_format or "raw"
        below = self._locate(stack, original_path, form)
        if names.backing_format is None and is_qcow2(below[1]):
            raise LeadsOutError(
                path, "it does not name the format of its backing file", "see `qemu-img rebase`"
            )
        return below

    def _locate(
        self, stack: ExitStack, original_path: PurePosixPath, form: str
    ) -> tuple[_Image, int]:
        """Open a path inside the clone; outside the snapshot, only if no domain writes to it."""
        for path in (original_path, PurePosixPath(self._real(original_path))):
            for dataset in self._datasets_above(path):
                inside = path.relative_to(self._mount_points[dataset])
                return self._in_clone(stack, dataset, inside, original_path, form)
        return self._outside(stack, original_path, form)

    def _datasets_above(self, path: PurePosixPath) -> Iterator[str]:
        """The datasets of the snapshot whose mount points are above a path, the nearest first."""
        nearest = sorted(self._mount_points.items(), key=lambda pair: -len(pair[1].parts))
        return (dataset for dataset, home in nearest if path.is_relative_to(home))

    def _outside(
        self, stack: ExitStack, original_path: PurePosixPath, form: str
    ) -> tuple[_Image, int]:
        path, resolver = self._real(original_path), self._context.resolver
        status = os.stat(path)
        if stat.S_ISBLK(status.st_mode):
            dataset = resolver.resolve(path).name
            if dataset in self._made and not resolver.partition_number(path):
                return self._volume(stack, dataset, original_path, form)
        if not stat.S_ISREG(status.st_mode):
            raise LeadsOutError(
                path, "is a backing file, but neither in the snapshot nor a regular file"
            )
        for domain in self._context.hypervisor.domains():
            if path in written_by(resolver, domain):
                raise LeadsOutError(path, f"is a backing file, and {domain.name} writes to it")
        self._check_same(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        stack.callback(os.close, descriptor)
        return _Image(CloneDisk(path, "file", form), original_path, None), descriptor

    def _real(self, path: PurePosixPath | str) -> str:
        """The path without links; only for file systems of this host, which always answer."""
        try:
            return self._context.resolver.real_path(str(path))
        except NotOnZfsError as error:
            raise LeadsOutError(
                str(path), f"is {error.reason}, which snaporch does not access"
            ) from error

    def _check_same(self, path: str) -> None:
        """Check that a file outside the snapshot is unchanged, if the manifest describes it."""
        undescribed = any(disk.beneath is None for disk in self._source.disks)
        if undescribed and not came_from_elsewhere(self._source.members):
            return  # this manifest describes no backing files
        noted = [file for disk in self._source.disks for file in disk.beneath or ()]
        now = FileState.of(path)
        if not any(self._real(file.path) == path and is_same(file, now) for file in noted):
            raise IncompleteError(path, "is a backing file, and has changed since the snapshot")

    def _data_file(self, stack: ExitStack, image: _Image, name: str) -> CloneDisk:
        """The data file of an image; only one with a relative path inside the clone is allowed."""
        path = image.place.path
        if not name or name.startswith("/") or PROTOCOL.match(name) or image.dataset is None:
            where = name or "a file that it does not name"
            raise LeadsOutError(path, f"its data is in {where}, which a clone would write to")
        cloned = self._made[image.dataset]
        if cloned.kind is DatasetKind.VOLUME:
            raise LeadsOutError(path, f"its data is in {name}, which is not in the volume")
        wanted = (PurePosixPath(path).parent / name).relative_to(PurePosixPath(cloned.root))
        home = self._mount_points[image.dataset]
        found = stack.enter_context(open_beneath(cloned.root, wanted, home))
        if found.path != wanted:
            raise LeadsOutError(path, f"its data is in {name}, and a link leads there")
        return CloneDisk(str(PurePosixPath(path).parent / name), "file")


def _header(image: _Image, descriptor: int) -> Qcow2Header:
    path, form = image.place.path, image.place.format
    if form != "qcow2":
        raise LeadsOutError(
            path, f"its format is {form}, which may name files that snaporch cannot check"
        )
    return read_qcow2(descriptor)
