"""List the items of the store. No link is followed; names that are not snaporch's are skipped.

What is done with each is decided by :mod:`snaporch.prune.decision`.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from snaporch.bundle.manifest import MANIFEST_NAME, Manifest, ManifestError, read_manifest
from snaporch.bundle.store import (
    COPY_NAME,
    LEFTOVERS,
    RAM_NAME,
    RAW_NAME,
    REST_NAME,
    RUN_NAME,
    UUID_NAME,
    copy_name,
)
from snaporch.catalog.safety_copy_holds import runs_of
from snaporch.errors import RefusedError
from snaporch.private_files import store_errors, subdirectories
from snaporch.prune.decision import ItemKind, SnapshotReference, StoreItem

TRASH_NAME = ".trash"
STAMP = "%Y%m%dT%H%M%SZ"
"""The time in names of the trash: UTC, to the second."""
DELETING = ".deleting"
"""The end of the name of a directory whose removal has begun."""

_TRASHED = re.compile(rf"\d{{8}}T\d{{6}}Z\.({UUID_NAME})\.({RUN_NAME})")
_REMAINS = re.compile(rf"\d{{8}}T\d{{6}}Z\.({UUID_NAME})\.(.+){re.escape(DELETING)}")
_PARTIAL = re.compile(rf"\.({RUN_NAME})\.partial")
_SAFETY = re.compile(r"safety-\d{8}T\d{6}\.\d{6}Z")
_OF_A_PARTIAL = re.compile(
    r"ram\.(save|raw)|domain(\.live)?\.xml|nvram\.fd|tpm\.\d+\.permall|manifest\.json"
)
_OF_A_SAFETY = re.compile(
    r"\d{3,}\.zfs|undo\.sh|undone|\.?undo\.json|(domain|barred)\.xml|nvram\.fd|tpm\..+"
    r"|(running|managed)\.save"
)


def scan_store(root: Path, only: Collection[str] | None = None) -> list[StoreItem]:
    """List all items of the store at ``root``.

    Args:
        root: the store.
        only: references (``uuid/run``) of the only bundles to list; the trash is listed anyway.

    Raises:
        RefusedError: the trash is not a directory.
        UnavailableError: the store cannot be read.
    """
    if not root.exists():
        return []
    with store_errors(root):
        found = list(_trash(root))
        if only is not None:
            for path in (root / reference for reference in only):
                found += _bundle(path) if _is_directory(path) else ()
            return _wanted(root, found)
        for path in subdirectories(root):
            if re.fullmatch(UUID_NAME, path.name):
                found += _of_domain(path)
        return _named(_wanted(root, found))


def _wanted(root: Path, found: list[StoreItem]) -> list[StoreItem]:
    """Mark the bundles whose snapshots an undo would, or may, bring back."""
    runs = {uuid: _runs(root / uuid) for uuid in {each.uuid for each in found}}
    return [
        replace(each, wanted=(held := runs[each.uuid]) is None or each.name in held)
        for each in found
    ]


def _runs(directory: Path) -> set[str] | None:
    """The runs whose snapshots are in a domain's safety copies; None if a record is unreadable."""
    try:
        return {run for copy in directory.glob("safety-*") for run in runs_of(copy)}
    except ManifestError:
        return None


def items_with_age(root: Path) -> list[Path]:
    """The items that are deleted by their age: bundles in the trash, and safety copies."""
    if not root.exists():
        return []
    with store_errors(root):
        trashed = [each.path for each in _trash(root) if each.kind is ItemKind.TRASHED]
        domains = [path for path in subdirectories(root) if re.fullmatch(UUID_NAME, path.name)]
        copies = [path for domain in domains for path in subdirectories(domain)]
    return trashed + [path for path in copies if _SAFETY.fullmatch(path.name)]


def _of_domain(directory: Path) -> Iterator[StoreItem]:
    for path in subdirectories(directory):
        if re.fullmatch(RUN_NAME, path.name):
            yield from _bundle(path)
        elif match := _PARTIAL.fullmatch(path.name):
            yield from _plain(ItemKind.PARTIAL, path, match[1], _OF_A_PARTIAL)
        elif _SAFETY.fullmatch(path.name):
            yield from _safety(path)
    yield from _ram_file(directory / RAW_NAME)


def _ram_file(path: Path) -> Iterator[StoreItem]:
    with suppress(FileNotFoundError):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode):
            uuid = path.parent.name
            yield StoreItem(ItemKind.RAM_FILE, path, uuid, path.name, bytes=found.st_size)


def _safety(path: Path) -> Iterator[StoreItem]:
    """A safety copy; prune cannot decide about one whose record is unreadable."""
    for found in _plain(ItemKind.SAFETY, path, path.name, _OF_A_SAFETY):
        try:
            runs_of(path)
        except ManifestError as error:
            yield replace(found, problem=f"{error.thing}: {error.reason}")
        else:
            yield found


def _trash(root: Path) -> Iterator[StoreItem]:
    trash = root / TRASH_NAME
    if not os.path.lexists(trash):
        return
    if not _is_directory(trash):
        raise RefusedError(str(trash), "is not a directory", "move it away; nothing was changed")
    for path in subdirectories(trash):
        if match := _TRASHED.fullmatch(path.name):
            uuid, run = match.groups()
            taken = os.path.lexists(root / uuid / run)
            found = StoreItem(ItemKind.TRASHED, path, uuid, run, place_taken=taken)
            yield from _with_manifest(found)
        elif match := _REMAINS.fullmatch(path.name):
            uuid, name = match.groups()
            yield from _with_size(StoreItem(ItemKind.REMAINS, path, uuid, name), lambda _name: True)


def _bundle(path: Path) -> Iterator[StoreItem]:
    return _with_manifest(StoreItem(ItemKind.BUNDLE, path, path.parent.name, path.name))


def _with_manifest(found: StoreItem) -> Iterator[StoreItem]:
    """Add the data of the bundle's manifest, and check that it names all files of the bundle."""
    try:
        manifest = _read_own_manifest(found)
        named = _name_on_this_host(found.path)
    except ManifestError as error:
        for each in _with_size(found, lambda _name: True):
            yield replace(each, problem=f"{error.thing}: {error.reason}")
        return
    known = {MANIFEST_NAME, COPY_NAME, *(part.name for part in manifest.parts)}
    if not known.isdisjoint({RAM_NAME, REST_NAME}):
        known |= {RAM_NAME, *LEFTOVERS}
    described = replace(
        found,
        domain=manifest.domain,
        snapshot=manifest.snapshot,
        references=tuple(
            SnapshotReference(named(s.dataset), s.name, s.guid) for s in manifest.snapshots
        ),
    )
    yield from _with_size(described, known.__contains__)


def _read_own_manifest(found: StoreItem) -> Manifest:
    path = found.path / MANIFEST_NAME
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise ManifestError(str(path), "is not a plain file")
    manifest = read_manifest(found.path)
    if (manifest.uuid, manifest.run) != (found.uuid, found.name):
        raise ManifestError(str(path), f"is of another bundle ({manifest.uuid}/{manifest.run})")
    return manifest


def _name_on_this_host(directory: Path) -> Callable[[str], str]:
    """A function that maps original dataset names to names on this host, which may be a replica."""
    path = directory / COPY_NAME
    if not os.path.lexists(path):
        return str
    try:
        above = json.loads(path.read_bytes())["dataset"].strip("/")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(
            str(path), "does not name the dataset that the copies are below"
        ) from error
    return lambda dataset: f"{above}/{copy_name(dataset)}"


def _plain(kind: ItemKind, path: Path, name: str, known: re.Pattern[str]) -> Iterator[StoreItem]:
    found = StoreItem(kind, path, path.parent.name, name)
    return _with_size(found, lambda inside: known.fullmatch(inside) is not None)


def _with_size(found: StoreItem, known: Callable[[str], bool]) -> Iterator[StoreItem]:
    """Add the size, and the problem if there are files that are not snaporch's.

    Yields nothing if the directory is missing by now: a run has sealed it, or another prune runs.
    """
    size = 0
    unknown = []
    try:
        with os.scandir(found.path) as entries:
            for entry in entries:
                size += entry.stat(follow_symlinks=False).st_size
                if not (known(entry.name) and entry.is_file(follow_symlinks=False)):
                    unknown.append(entry.name)
    except FileNotFoundError:
        return
    problem = ""
    if unknown:
        names = ", ".join(sorted(unknown))
        problem = f"{found.path} holds {names}, which snaporch did not put there"
    yield replace(found, bytes=size, problem=problem)


def _named(found: list[StoreItem]) -> list[StoreItem]:
    """Give items without a manifest the domain name of the bundles with the same UUID."""
    names = {each.uuid: each.domain for each in found if each.domain}
    return [replace(each, domain=each.domain or names.get(each.uuid, "")) for each in found]


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
