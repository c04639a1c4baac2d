"""Safety copies: what one holds, and which there are of a domain."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from snaporch.bundle.manifest import Manifest, SnapshotEntry
from snaporch.bundle.store import BundleStore, sha256_of
from snaporch.context import Context
from snaporch.errors import NotFoundError, RefusedError
from snaporch.restore.journal import KeptDataset, Target
from snaporch.zfs import Pool

RECORD = "undo.json"
"""What says in a safety copy's directory what it holds; there as soon as the copy is whole."""
RAM = "running.save"
MANAGED_SAVE = "managed.save"
DIRECTORY = "safety-"
"""What the names of their directories begin with; the rest is the time, in UTC."""
HALF_WAY = "was made when a restore was half done, so its disks are of two instants"


class SafetyRecord(BaseModel):
    """What a safety copy holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    manifest: Manifest = Field(
        description="the state that was kept, like a bundle's; its snapshots are those that were "
        "rolled back to, its snapshot is the one that was restored"
    )
    last: tuple[SnapshotEntry, ...] = Field(description="the last snapshots in its streams")
    kept: tuple[KeptDataset, ...] = Field(description="with names of files in place of their paths")
    sizes: dict[str, int] = Field(description="of the streams, in bytes")
    half_way: bool = Field(
        default=False, description="the disks were half rolled back by a restore that was cut short"
    )
    whole: str = Field(
        default="", description="if they were: the copy of the time before that, or empty"
    )

    def as_json(self) -> bytes:
        """To be kept. Bytes of properties that are no characters stay what they are."""
        return json.dumps(self.model_dump(mode="json")).encode()


@dataclass(frozen=True, slots=True)
class SafetyCopy:
    """A safety copy that is whole, by its own account."""

    directory: Path
    record: SafetyRecord

    @property
    def name(self) -> str:
        """What it is chosen by."""
        return self.directory.name

    @property
    def manifest(self) -> Manifest:
        """The state that it holds."""
        return self.record.manifest

    @property
    def ram(self) -> Path | None:
        """The RAM of the guest that was running, if it was kept."""
        path = self.directory / RAM
        return path if path.exists() else None

    @property
    def thing(self) -> str:
        """What it undoes, for a message."""
        restored = self.manifest.snapshot
        if restored.startswith(DIRECTORY):
            return f"the undo of {self.manifest.domain} with {restored}"
        return f"the restore of {self.manifest.domain} to @{restored}"

    @property
    def way_out(self) -> str:
        """What to do instead of undoing with it, if its disks are of two instants."""
        if not self.record.whole:
            return "restore a snapshot: see `snaporch list`"
        words = ["snaporch", "undo", self.manifest.domain, "--copy", self.record.whole]
        return f"undo the restore that was cut short: {shlex.join(words)}"

    def kept(self, dataset: str) -> KeptDataset:
        """What it has of one dataset."""
        found = next(each for each in self.record.kept if each.dataset == dataset)
        paths = tuple(str(self.directory / name) for name in found.streams)
        return KeptDataset(dataset, paths, found.properties, found.bookmarks)

    def size(self, dataset: str) -> int:
        """Bytes in the streams of one dataset."""
        found = next(each for each in self.record.kept if each.dataset == dataset)
        return sum(self.record.sizes[name] for name in found.streams)

    def check(self) -> None:
        """See that every file is there and what it was; of streams, which ZFS checks, the size.

        Raises:
            RefusedError: one is not, or the disks that it holds are of two instants.
        """
        if self.record.half_way:
            raise RefusedError(f"{self.manifest.domain}@{self.name}", HALF_WAY, self.way_out)
        for part in self.manifest.parts:
            self._check(part.name, part.sha256, sha256_of)
        for name, size in self.record.sizes.items():
            self._check(name, size, _size)

    def _check(self, name: str, wanted: object, found: Callable[[Path], object]) -> None:
        path = self.directory / name
        try:
            right = found(path) == wanted
        except OSError as error:
            raise RefusedError(str(path), error.strerror or "cannot be read") from error
        if not right:
            raise RefusedError(str(path), "is damaged, so the restore cannot be undone")


def _size(path: Path) -> int:
    return path.stat().st_size


def copies_of(store: BundleStore, domain: str | None = None) -> list[SafetyCopy]:
    """The safety copies of a domain, by name or UUID, or of all, oldest first.

    Without those whose records cannot be read.
    """
    found = []
    for path in store.root.glob(f"*/{DIRECTORY}*/{RECORD}"):
        with suppress(RefusedError):
            copy = SafetyCopy(path.parent, _read(path))
            if domain in (None, copy.manifest.domain, copy.manifest.uuid):
                found.append(copy)
    return sorted(found, key=lambda copy: copy.name)


def name_and_uuid(context: Context, domain: str) -> tuple[str, str]:
    """Name and UUID of a domain, which may be undefined if there are safety copies of it.

    Raises:
        NotFoundError: it is neither defined nor in a copy.
    """
    if copies := copies_of(context.store, domain):
        return copies[-1].manifest.domain, copies[-1].manifest.uuid
    known = context.hypervisor.domain(domain)
    return known.name, known.uuid


def choose(context: Context, domain: str, name: str | None) -> SafetyCopy:
    """The safety copy called ``name``, or the newest whose disks are of one instant.

    If there is none such, the newest; it is :meth:`~SafetyCopy.check` that refuses it.

    Raises:
        NotFoundError: there is none.
        RefusedError: one says what no snaporch of this version writes.
    """
    called, uuid = name_and_uuid(context, domain)
    paths = sorted((context.store.root / uuid).glob(f"{DIRECTORY}*/{RECORD}"))
    if not paths:
        raise NotFoundError(
            called,
            "there is no safety copy of a restore, so none can be undone",
            "see `snaporch list` for snapshots to go back to",
        )
    found = [path for path in paths if name in (None, path.parent.name)]
    if not found:
        there = ", ".join(path.parent.name for path in paths)
        raise NotFoundError(called, f"has no safety copy {name}", f"there is {there}")
    copies = (SafetyCopy(path.parent, _read(path)) for path in reversed(found))
    newest = next(copies)
    if not newest.record.half_way:
        return newest
    return next((copy for copy in copies if not copy.record.half_way), newest)


def _read(path: Path) -> SafetyRecord:
    try:
        return SafetyRecord.model_validate(json.loads(path.read_bytes()))
    except OSError as error:
        raise RefusedError(str(path), error.strerror or "cannot be read") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in first["loc"]) or "document"
        raise RefusedError(
            str(path), f"{where}: {first['msg']}", "use the snaporch that wrote it"
        ) from error
    except ValueError as error:
        raise RefusedError(str(path), f"is no JSON: {error}", "choose another copy") from error


def bookmarks_since(pool: Pool, target: str) -> tuple[dict[str, str], list[str]]:
    """The bookmarks that a rollback to ``target`` destroys.

    Returns: those that can be made again, with their snapshots, and those whose snapshot is gone.
    """
    dataset = target.partition("@")[0]
    newer = set(pool.newer(target))
    born = {each.createtxg: each.full_name for each in pool.snapshots([dataset])}
    marks = {name: txg for name, txg in pool.bookmarks(dataset).items() if name in newer}
    again = {name: born[txg] for name, txg in marks.items() if txg in born}
    return again, sorted(marks.keys() - again.keys())


def kept_of(pool: Pool, target: Target, streams: Sequence[str]) -> KeptDataset:
    """What is kept of a dataset beside its streams: what does not travel in them."""
    newer = [name for name in pool.newer(target.full_name) if "@" in name]
    again, _ = bookmarks_since(pool, target.full_name)
    return KeptDataset(target.dataset, tuple(streams), pool.user_properties(newer), again)
