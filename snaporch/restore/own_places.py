"""Where a guest's own datasets are on this host, and which paths lead there."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import PurePosixPath

from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.hypervisor.volume_paths import with_volume_paths
from snaporch.model import DatasetKind
from snaporch.zfs.resolver import NotOnZfsError


class OwnPlaces:
    """The places of some datasets that are here."""

    def __init__(self, context: Context, thing: str, datasets: Collection[str]) -> None:
        """Find them.

        Args:
            context: of this host.
            thing: the subject of errors.
            datasets: the guest's.

        Raises:
            RefusedError: a file system is not mounted.
        """
        self._context, self._thing = context, thing
        self._datasets = frozenset(datasets)
        kinds = {dataset.name: dataset.kind for dataset in context.pool.datasets()}
        self.homes = {
            name: self._home(name)
            for name in self._datasets
            if kinds[name] is DatasetKind.FILESYSTEM
        }
        """The mount point of each file system."""
        self._mounts = {PurePosixPath(each.mount_point) for each in context.resolver.mounts()}

    def has(self, path: str) -> bool:
        """Whether a path is in one of the datasets, or a volume of them."""
        return path.startswith("/") and self.place(path) is not None

    def place(self, path: str) -> tuple[str, PurePosixPath] | None:
        """The dataset that has a path, and where it is in it; ``None`` if none of them has it."""
        path = f"/{path.lstrip('/')}"  # libvirt and the emulator run in /
        nearest = sorted(self.homes.items(), key=lambda pair: -len(pair[1].parts))
        for each in map(PurePosixPath, (path, os.path.realpath(path))):
            for name, home in nearest:
                if each.is_relative_to(home):
                    if self.covered(home).isdisjoint((each, *each.parents)):
                        return name, each.relative_to(home)
                    break  # it is in another file system
        with suppress(OSError, NotOnZfsError):
            found = self._context.resolver.resolve(path)
            if found.name in self._datasets:
                inside = self._context.resolver.inside(path, found)
                return found.name, PurePosixPath(inside or "")
        return None

    def covered(self, home: PurePosixPath) -> set[PurePosixPath]:
        """Where others are mounted below a file system: its snapshot does not have their files."""
        return {each for each in self._mounts if each != home and each.is_relative_to(home)}

    def _home(self, dataset: str) -> PurePosixPath:
        try:
            return PurePosixPath(self._context.resolver.mount_point_of(dataset))
        except NotOnZfsError as error:
            reason = f"{dataset} is not mounted, so that its images cannot be checked"
            step = f"zfs mount -l {shlex.quote(dataset)}"
            raise RefusedError(self._thing, reason, step) from error


def with_paths(context: Context, xmls: Iterable[str]) -> list[str]:
    """Definitions with the paths of disks that are volumes of this host's storage pools."""

    def pools() -> list[str]:
        return [each.xml for each in context.hypervisor.defined_storage_pools()]

    return [with_volume_paths(each, pools) for each in xmls]
