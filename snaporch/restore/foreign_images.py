"""Whether a snapshot that came from another host lets its guest read other files of this one.

Its data may be forged: the header of an image names files that the emulator opens with it, and a
link or a device file leads out of the guest's datasets. So each image is read as it is in the
snapshot, before the guest is defined. What a header names must be in the snapshot, in the
definition that the admin was shown, or accepted. And it must stay as it was read: nothing that is
opened for the guest may be where the guest makes links, and no image where it writes any bytes.
What the definition itself may have is decided by :mod:`snaporch.restore.foreign_definition`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from xml.etree.ElementTree import Element

from snaporch.context import Context
from snaporch.disks.foreign_image import named_by
from snaporch.errors import RefusedError
from snaporch.hypervisor import domain_xml
from snaporch.hypervisor.foreign_xml import ForeignImage, images, written_as_bytes
from snaporch.hypervisor.qcow2 import MAX_CHAIN, PROTOCOL, SELF_CONTAINED, HeaderError
from snaporch.model import PoolSnapshot
from snaporch.restore.own_places import OwnPlaces
from snaporch.restore.safe_path import LeadsOutError, SafeFile, check_beneath, open_beneath
from snaporch.zfs import PoolError
from snaporch.zfs_names import quoted

_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_SHARED = ("devices/filesystem/source", "dir")
_DIRECTORIES = (_SHARED, ("devices/tpm/backend/source[@type='dir']", "path"))
"""Where a definition names a directory, and the attribute that does."""
_SNAPSHOTS = PurePosixPath(".zfs")
"""Below it are the other snapshots of a file system, which came from the other host, too."""


def check_foreign_images(
    context: Context,
    thing: str,
    members: Sequence[PoolSnapshot],
    places: OwnPlaces,
    definitions: Sequence[str],
    accepted: Collection[str],
    why: str = "it comes from another host",
    *,
    live: bool = False,
) -> None:
    """Refuse a snapshot whose files lead to other files of this host.

    Args:
        thing: the subject of errors.
        members: its ZFS snapshots.
        places: where their datasets are.
        definitions: those that the guest may have afterwards.
        accepted: files, and targets of disks, about which the admin knows.
        why: they are checked.
        live: images in volumes are read as they are now, and not as in the snapshot.

    Raises:
        RefusedError: the first such file, and the option that accepts it.
    """
    with ExitStack() as stack:
        check = _Check(context, thing, members, places, accepted, stack, why, live=live)
        check.check(definitions)


class _Check:
    def __init__(
        self,
        context: Context,
        thing: str,
        members: Sequence[PoolSnapshot],
        places: OwnPlaces,
        accepted: Collection[str],
        stack: ExitStack,
        why: str,
        *,
        live: bool,
    ) -> None:
        self._why, self._live = why, live
        self._context, self._thing, self._accepted, self._stack = context, thing, accepted, stack
        self._members = {each.dataset: each for each in members}
        self._places = places
        self._roots: dict[str, Path] = {}
        self._images: frozenset[str | None] = frozenset()
        self._real: dict[str, PurePosixPath] = {}
        self._shared: list[str] = []
        self._written: set[PurePosixPath] = set()

    def check(self, definitions: Sequence[str]) -> None:
        roots = list(map(domain_xml.parse, definitions))
        named: set[str] = set().union(*map(domain_xml.host_paths, roots))
        shared = {path for each in _DIRECTORIES for path in _directories(roots, *each)}
        for path in sorted(named - set(self._accepted)):
            if (place := self._places.place(path)) is not None and place[0] in self._places.homes:
                with self._explained(path):
                    root, home, full, covered = self._beneath(place[0])
                    inside = check_beneath(
                        root,
                        place[1],
                        home,
                        called=full,
                        covered=covered,
                        may_be_directory=path in shared,
                    )
                    self._real[path] = home / inside
        self._shared = sorted(_directories(roots, *_SHARED) - set(self._accepted))
        for path in sorted(named):
            self._check_not_shared(path)
        having = {root: images(root) for root in roots}
        found = set().union(*having.values())
        # not all that is named: a description may have any path
        self._images = frozenset(each.path for each in found)
        for image in sorted(found, key=lambda each: (each.target, each.path or "", each.format)):
            self._written = {
                self._place(path)
                for root in roots
                if image in having[root]
                for path in written_as_bytes(root, image)
            }
            self._check_image(image)

    def _place(self, path: str) -> PurePosixPath:
        """A path with its links resolved, as far as it is in the snapshot; one for each volume."""
        if path in self._real:
            return self._real[path]
        if (place := self._places.place(path)) is None:
            return PurePosixPath(path)
        dataset, inside = place
        return self._places.homes.get(dataset, PurePosixPath("/dev/zvol", dataset)) / inside

    def _check_not_shared(self, path: str) -> None:
        """Refuse a path in a directory in which the guest can replace it by a link."""
        for directory in self._shared:
            if path != directory and self._place(path).is_relative_to(self._place(directory)):
                reason = f"its guest can replace {path}, which is in the shared {directory}"
                raise self._refusal(reason, directory)

    def _check_image(self, image: ForeignImage) -> None:
        if image.format in SELF_CONTAINED or image.target in self._accepted:
            return
        if image.path is None:
            reason = f"its disk {image.target} is an image that cannot be read before it starts"
            raise self._refusal(reason, image.target)
        self._follow(image.path, image.format, 0)

    def _follow(self, path: str, form: str, depth: int) -> None:
        """Check what the header of an image names, and what these images name."""
        if path in self._accepted:
            return
        if depth > MAX_CHAIN:
            raise self._refusal(f"{path} is over more than {MAX_CHAIN} images", path)
        with self._opened(path) as descriptor:
            self._check_not_shared(path)
            if form not in SELF_CONTAINED and self._place(path) in self._written:
                reason = f"its guest can write the header of {path}, which is a file of bytes, too"
                raise self._refusal(reason, path)
            if descriptor is None:
                return  # it is of this host
            try:
                names = named_by(descriptor, form)
            except HeaderError as error:
                raise self._refusal(f"{path} {error}", path) from error
            except OSError as error:
                raise self._refusal(f"{path} cannot be read: {error.strerror}", path) from error
        for name, below in names:
            self._check_name(path, name)
            if name not in self._accepted:
                self._follow(str(PurePosixPath(path).parent / name), below, depth + 1)

    def _check_name(self, path: str, name: str) -> None:
        found = str(PurePosixPath(path).parent / name)
        is_path = PROTOCOL.match(name) is None
        if name in self._accepted or (is_path and found in self._images):
            return
        if not is_path or self._places.place(found) is None:
            reason = f"the header of {path} names {quoted(name)}"
            raise self._refusal(f"{reason}, which is not in the snapshot", name)

    @contextmanager
    def _opened(self, path: str) -> Iterator[int | None]:
        """Open a path as it is in the snapshot; ``None`` if it is not below one of its datasets.

        Raises:
            RefusedError: a link leads out, it is no regular file, or it cannot be read.
        """
        place = self._places.place(path)
        with ExitStack() as stack:
            descriptor = None
            with self._explained(path):
                if place is not None and place[0] in self._places.homes:
                    file = stack.enter_context(self._in_snapshot(*place))
                    self._real[path] = self._places.homes[place[0]] / file.path
                    descriptor = file.descriptor
                elif place is not None:
                    descriptor = self._volume(stack, place[0], path)
            yield descriptor

    @contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            pass  # the guest could not open it either
        except LeadsOutError as error:
            raise self._refusal(f"{path}: {error.reason}", path) from error
        except OSError as error:
            raise self._refusal(f"{path}: {error.strerror}", path) from error

    @contextmanager
    def _in_snapshot(self, dataset: str, inside: PurePosixPath) -> Iterator[SafeFile]:
        root, home, full, covered = self._beneath(dataset)
        with open_beneath(root, inside, home, called=full, covered=covered) as file:
            yield file

    def _beneath(self, dataset: str) -> tuple[Path, PurePosixPath, str, set[PurePosixPath]]:
        """Where its snapshot is, its mount point, its name, and what is mounted below it."""
        full = self._members[dataset].full_name
        if dataset not in self._roots:
            mounted = self._context.pool.mounted_snapshot(full)
            self._roots[dataset] = self._stack.enter_context(mounted)
        root, home = self._roots[dataset], self._places.homes[dataset]
        covered = {each.relative_to(home) for each in self._places.covered(home)} | {_SNAPSHOTS}
        return root, home, full, covered

    def _volume(self, stack: ExitStack, dataset: str, path: str) -> int:
        """Open a volume, which has to have the data of the snapshot now."""
        try:
            modified = not self._live and self._context.pool.is_volume_modified(
                self._members[dataset].full_name
            )
        except PoolError as error:
            raise self._refusal(f"{dataset} cannot be checked: {error.reason}", path) from error
        if modified:
            reason = f"what an image in {dataset} names can be read only after the rollback"
            raise self._refusal(reason, path)
        descriptor = os.open(path, _OPEN)
        stack.callback(os.close, descriptor)
        return descriptor

    def _refusal(self, reason: str, what: str) -> RefusedError:
        step = f"if that is what you want: --accept {shlex.quote(what)}"
        return RefusedError(self._thing, f"{self._why}, and {reason}", step)


def _directories(roots: Sequence[Element], place: str, attribute: str) -> set[str]:
    """What an attribute has in all elements at a place."""
    return {
        path for root in roots for each in root.iterfind(place) if (path := each.get(attribute))
    }
