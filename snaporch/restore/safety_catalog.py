"""Safety copies: the content of one, and the list of those of a domain."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from snaporch.bundle.manifest import (
    Manifest,
    ManifestError,
    SnapshotEntry,
    with_checksum,
    without_checksum,
)
from snaporch.bundle.store import BundleStore
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.model import PoolSnapshot
from snaporch.private_files import sha256_of
from snaporch.restore.journal import KeptDataset, Target
from snaporch.zfs import DatasetListing, Pool

RECORD = "undo.json"
"""The file that describes the content of a safety copy. It exists once the copy is complete."""
RAM = "running.save"
MANAGED_SAVE = "managed.save"
DIRECTORY = "safety-"
"""The prefix of the directories' names; the rest is the time in UTC."""
UNDONE = "undone"
"""A file that ``undo.sh`` leaves in the safety copy that it has brought back."""
NAMES_OPTIONS = "(--dry-run names the options that it needs)"
"""Follows an undo's command where nothing was checked; it may need ``--discard-newer``, say."""
HALF_WAY = "was made when a restore was half done, so its disks are of two instants"


class SafetyRecord(BaseModel):
    """The content of a safety copy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    manifest: Manifest = Field(
        description="the state that was kept, like a bundle's; its snapshots are those that were "
        "rolled back to, its snapshot is the one that was restored"
    )
    last: tuple[SnapshotEntry, ...] = Field(description="the last snapshots in its streams")
    kept: tuple[KeptDataset, ...] = Field(description="with names of files in place of their paths")
    sizes: dict[str, int] = Field(description="of the streams, in bytes")
    half_way: bool = Field(
        default=False, description="the disks were half rolled back by an interrupted restore"
    )
    whole: str = Field(
        default="", description="if they were: the copy of the time before that, or empty"
    )

    def as_json(self) -> bytes:
        """The content of the file, with its checksum, as a manifest has.

        Bytes that are not UTF-8 are kept as surrogates.
        """
        return with_checksum(json.dumps(self.model_dump(mode="json"), indent=2))


@dataclass(frozen=True, slots=True)
class SafetyCopy:
    """A safety copy that is complete according to its record."""

    directory: Path
    record: SafetyRecord

    @property
    def name(self) -> str:
        """The name of its directory, which ``--copy`` takes."""
        return self.directory.name

    @property
    def manifest(self) -> Manifest:
        """The manifest of the state that it holds."""
        return self.record.manifest

    @property
    def ram(self) -> Path | None:
        """The RAM image of the guest that was running; ``None`` if it was not kept."""
        path = self.directory / RAM
        return path if path.exists() else None

    @property
    def is_offered(self) -> bool:
        """Whether an undo may choose it by itself: of one instant, and not yet brought back."""
        return not self.record.half_way and not (self.directory / UNDONE).exists()

    def has_bases(self, present: Iterable[PoolSnapshot]) -> bool:
        """Whether each dataset has a snapshot to roll back to; it may have been renamed.

        Without one, as after ``zfs destroy``, an undo is refused.
        """
        there = {each.guid for each in present}
        last = {entry.dataset for entry in self.record.last if entry.guid in there}
        return all(e.guid in there or e.dataset in last for e in self.manifest.snapshots)

    @property
    def thing(self) -> str:
        """The restore or undo that it undoes, as messages name it."""
        restored = self.manifest.snapshot
        if restored.startswith(DIRECTORY):
            return f"the undo of {self.manifest.domain} with {restored}"
        return f"the restore of {self.manifest.domain} to @{restored}"

    @property
    def way_out(self) -> str:
        """The command to use instead if its disks are of two instants."""
        if not self.record.whole:
            return "restore a snapshot: see `snaporch list`"
        words = ["snaporch", "undo", self.manifest.domain, "--copy", self.record.whole]
        return f"undo the interrupted restore: {shlex.join(words)} {NAMES_OPTIONS}"

    def kept(self, dataset: str) -> KeptDataset:
        """Return its data of one dataset, with the streams' full paths."""
        found = next(each for each in self.record.kept if each.dataset == dataset)
        paths = tuple(str(self.directory / name) for name in found.streams)
        return KeptDataset(dataset, paths, found.properties, found.bookmarks)

    def size(self, dataset: str) -> int:
        """Return the bytes in the streams of one dataset."""
        found = next(each for each in self.record.kept if each.dataset == dataset)
        return sum(self.record.sizes[name] for name in found.streams)

    def check(self) -> None:
        """Check every file's SHA-256; of streams only the size, since ZFS verifies them itself.

        Raises:
            RefusedError: a file is missing or damaged, or the disks are of two instants.
        """
        if self.record.half_way:
            raise RefusedError(f"{self.manifest.domain}@{self.name}", HALF_WAY, self.way_out)
        for part in self.manifest.parts:
            self._check(part.name, part.sha256, sha256_of)
        for name, size in self.record.sizes.items():
            self._check(name, size, _size)

    def _check(self, name: str, expected: object, measure: Callable[[Path], object]) -> None:
        path = self.directory / name
        try:
            matches = measure(path) == expected
        except OSError as error:
            raise RefusedError(str(path), error.strerror or "cannot be read") from error
        if not matches:
            raise RefusedError(str(path), "is damaged, so the restore cannot be undone")


def _size(path: Path) -> int:
    return path.stat().st_size


def safety_copies(store: BundleStore, domain: str | None = None) -> list[SafetyCopy]:
    """Return the safety copies of a domain, oldest first, except those without a valid record.

    Args:
        domain: its name or UUID; ``None`` for all domains.
    """
    found = []
    for path in store.root.glob(f"*/{DIRECTORY}*/{RECORD}"):
        with suppress(RefusedError):
            copy = SafetyCopy(path.parent, read_record(path))
            if domain in (None, copy.manifest.domain, copy.manifest.uuid):
                found.append(copy)
    return sorted(found, key=lambda copy: copy.name)


def name_and_uuid(context: Context, domain: str) -> tuple[str, str]:
    """Return name and UUID of a domain. It may be undefined if it has a safety copy.

    Raises:
        NotFoundError: the domain is not defined and has no safety copy.
    """
    if copies := safety_copies(context.store, domain):
        return copies[-1].manifest.domain, copies[-1].manifest.uuid
    known = context.hypervisor.domain(domain)
    return known.name, known.uuid


def read_record(path: Path) -> SafetyRecord:
    """Read the file that describes a safety copy.

    Raises:
        RefusedError: it cannot be read by this version of snaporch.
    """
    try:
        document = without_checksum(path.read_bytes(), str(path))
        return SafetyRecord.model_validate(json.loads(document))
    except OSError as error:
        raise RefusedError(str(path), error.strerror or "cannot be read") from error
    except ManifestError as error:
        raise RefusedError(str(path), error.reason, "choose another copy") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in first["loc"]) or "document"
        raise RefusedError(
            str(path), f"{where}: {first['msg']}", "use the snaporch that wrote it"
        ) from error


def bookmarks_since(there: DatasetListing, target: str) -> tuple[dict[str, str], list[str]]:
    """Return the bookmarks that a rollback to ``target`` destroys.

    Args:
        there: what exists of its dataset.
        target: a snapshot.

    Returns: the bookmarks that can be made again, each with its snapshot, and the bookmarks that
        cannot, because their snapshot does not exist any more.

    Raises:
        PoolError: the target is missing.
    """
    dataset = target.partition("@")[0]
    born = {each.createtxg: each.full_name for each in there.snapshots if each.dataset == dataset}
    marks = {name: there.bookmarks[name] for name in there.newer(target) if "#" in name}
    again = {n: born[mark.createtxg] for n, mark in marks.items() if mark.createtxg in born}
    return again, sorted(marks.keys() - again.keys())


def kept_of(
    pool: Pool,
    target: Target,
    streams: Sequence[str],
    there: DatasetListing,
    made: Collection[str],
) -> KeptDataset:
    """Return the data of a dataset that its streams do not contain: properties and bookmarks.

    The guest is off meanwhile, so what is known is not asked again.

    Args:
        there: what exists of the dataset, and maybe of others.
        made: those of them that the copy itself made, which have no properties.

    Raises:
        PoolError: the target is missing.
    """
    newer = [name for name in there.newer(target.full_name) if "@" in name and name not in made]
    again, _ = bookmarks_since(there, target.full_name)
    return KeptDataset(target.dataset, tuple(streams), pool.user_properties(newer), again)
