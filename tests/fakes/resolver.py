"""A resolver for datasets that are the directories ``POOL/NAME`` of a temporary directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from snaporch.model import Dataset, DatasetKind
from snaporch.zfs.resolver import Mount, NotOnZfsError, Resolver


@dataclass(frozen=True)
class FakeResolver(Resolver):
    """What a test sets is in the dictionaries, which are empty at first."""

    zfs: Path = Path("/")
    """The directory with a directory for each pool."""
    named: dict[str, str] = field(default_factory=dict)
    """Datasets that were renamed and stayed where they are mounted: the name of each now."""
    mount_points: dict[str, Path | None] = field(default_factory=dict)
    """Datasets that are mounted elsewhere, or not at all."""
    forgetful: dict[Path, str] = field(default_factory=dict)
    """Directories on a file system that a power loss empties, and its kind."""
    partitions: dict[str, int] = field(default_factory=dict)
    """The numbers of partitions, by their path."""
    volumes: set[str] = field(default_factory=set)
    """Datasets that are volumes."""
    table: list[Mount] = field(default_factory=list)
    """The host's mounts."""
    node: Callable[[str], Path] = Path
    """Returns the node of a volume."""

    def mounts(self) -> list[Mount]:
        """The mounts that the test has set."""
        return self.table

    def resolve(self, path: str, mounts: list[Mount] | None = None) -> Dataset:
        """The dataset of a directory; like the real one, it requires that the path exists."""
        real = Path(path).resolve(strict=True)
        if not real.is_relative_to(self.zfs):
            raise NotOnZfsError(str(real), "not on ZFS but on tmpfs")
        name = "/".join(real.relative_to(self.zfs).parts[:2])
        kind = DatasetKind.VOLUME if name in self.volumes else DatasetKind.FILESYSTEM
        return Dataset(self.named.get(name, name), kind)

    def mount_point_of(self, dataset: str) -> Path:
        """Its directory."""
        if self.mounted is not None:
            return super().mount_point_of(dataset)
        first = {now: name for name, now in self.named.items()}
        found = self.mount_points.get(dataset, self.zfs / first.get(dataset, dataset))
        if found is None or dataset in self.volumes:
            raise NotOnZfsError(dataset, "is not mounted", f"zfs mount {dataset}")
        return found

    def volume_node(self, volume: str, seconds: float = 0) -> Path:
        """Its node."""
        return self.node(volume)

    def partition_number(self, path: str) -> int | None:
        """The number that the test has set."""
        return self.partitions.get(path) or super().partition_number(path)

    def volatile_file_system(self, path: Path) -> str:
        """The kind that the test has set."""
        return self.forgetful.get(path, "")
