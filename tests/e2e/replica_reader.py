"""What a replica really has: read byte by byte, without snaporch."""

import hashlib
import os
import tempfile
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from guests.disks import destroy, zvol_node
from support import must

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class ZfsSnapshot:
    """A ZFS snapshot in a pool; a copy has the GUID of its original, and another txg."""

    name: str
    guid: str
    createtxg: str
    is_volume: bool

    @property
    def dataset(self) -> str:
        """The dataset that it is a snapshot of."""
        return self.name.partition("@")[0]


@dataclass(frozen=True)
class Taken:
    """A snapshot of a guest, as it was when it was taken."""

    domain: str
    snapshot: str
    parts: dict[tuple[str, str], str]
    """The digest of each ZFS snapshot, by its dataset and GUID."""
    bundle: str
    """``uuid/run``, or empty."""
    files: dict[str, str]
    """The SHA-256 of each file of the bundle."""

    def is_whole(self, copies: dict[tuple[str, str], str], bundles: Path) -> bool:
        """Whether a place has all of it.

        Args:
            copies: the digest of each ZFS snapshot in the place, by its dataset's name here and
                its GUID.
            bundles: the directory of the place's bundles.
        """
        return self.parts.items() <= copies.items() and self.has_files(bundles)

    def has_files(self, bundles: Path) -> bool:
        """Whether a place has all files of the bundle."""
        return not self.bundle or files_of(bundles / self.bundle) == self.files

    def has_manifest(self, bundles: Path) -> bool:
        """Whether a place has the manifest, and it is not damaged."""
        name = "manifest.json"
        return bool(self.bundle) and files_of(bundles / self.bundle).get(name) == self.files.get(
            name
        )


def zfs_snapshots(*datasets: str) -> list[ZfsSnapshot]:
    """The ZFS snapshots of datasets and of all below them, oldest first."""
    columns = "name,guid,createtxg,volsize"
    words = ("zfs", "list", "-Hp", "-r", "-t", "snapshot", "-o", columns, "-s", "createtxg")
    rows = [line.split("\t") for line in must(*words, *datasets).splitlines()]
    return [ZfsSnapshot(*rest, is_volume=size != "-") for *rest, size in rows]


class Reader:
    """Reads ZFS snapshots and bundles; a ZFS snapshot cannot change and is read once."""

    def __init__(self) -> None:
        self._digests: dict[ZfsSnapshot, str] = {}

    def digest(self, snapshot: ZfsSnapshot) -> str:
        """The SHA-256 of the content: of a volume, or of all files with their names."""
        if snapshot not in self._digests:
            read = _volume if snapshot.is_volume else _file_system
            self._digests[snapshot] = read(snapshot.name)
        return self._digests[snapshot]

    def digests(self, snapshots: Iterable[ZfsSnapshot]) -> dict[tuple[str, str], str]:
        """The digest of each, by dataset and GUID."""
        return {(each.dataset, each.guid): self.digest(each) for each in snapshots}

    def forget(self) -> None:
        """Read all ZFS snapshots again from now on."""
        self._digests.clear()


def files_of(bundle: Path) -> dict[str, str]:
    """The SHA-256 of each file of a bundle; the replica's own ``copy.json`` is no part of it."""
    if not bundle.is_dir():
        return {}
    found = {path.name: _sha256(path) for path in bundle.iterdir()}
    found.pop("copy.json", None)
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _file_system(name: str) -> str:
    with tempfile.TemporaryDirectory(prefix="reader-") as place:
        must("mount", "-t", "zfs", "-o", "ro", name, place)
        try:
            paths = [Path(top, each) for top, _, names in os.walk(place) for each in names]
            lines = [f"{path.relative_to(place)} {_sha256(path)}" for path in sorted(paths)]
        finally:
            must("umount", place)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _volume(name: str) -> str:
    clone = f"{name.partition('/')[0]}/reader-{uuid.uuid4().hex[:8]}"
    must("zfs", "clone", name, clone)
    try:
        return _sha256(zvol_node(clone))
    finally:
        destroy(clone)
