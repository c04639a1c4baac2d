"""The bundle store: ``STORE/<domain UUID>/<run>/``, private to root.

When a bundle is deleted is decided by :mod:`snaporch.prune.decision`.

A bundle is built in ``STORE/<domain UUID>/.<run>.partial/``, which is renamed when all its files
are synced. So a directory without the leading dot was complete; it may have been damaged later.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from snaporch.bundle.compression_tuning import SHORTEST_SECONDS, RamSaveTimes
from snaporch.bundle.firmware_files import read_host_file
from snaporch.bundle.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestError,
    Part,
    Role,
    manifest_bytes,
    read_manifest,
)
from snaporch.errors import SnaporchError
from snaporch.model import BundleState
from snaporch.private_files import (
    private_directory,
    sha256_of,
    store_errors,
    subdirectories,
    sync_directory,
    write_private,
)

RAM_NAME = "ram.save"
RAW_NAME = ".ram.raw"
"""In a domain's directory: the file into which libvirt saves RAM without a pipe. One name for all
runs, because libvirt adds it to the guest's AppArmor profile each time.
"""
REST_NAME = "ram.rest"
"""Replaces the image when its pages are in a page file."""
NEW_MANIFEST_NAME = "manifest.json.new"
LEFTOVERS = (REST_NAME, NEW_MANIFEST_NAME)
"""Files that a killed move of RAM into pages may leave; the image may exist beside them."""
MARKER = ".snaporch-store"
"""Exists in every store. A store that is not mounted has an empty directory or none, and so no
marker.
"""
COPY_NAME = "copy.json"
"""In a bundle on a replica: names the dataset below which the copies of its snapshots are."""
COPYING_SUFFIX = ".copying"
"""Suffix of the directory of a bundle that is being copied to a replica."""
UUID_NAME = "[0-9a-f-]{36}"
RUN_NAME = "[0-9A-Za-z][0-9A-Za-z-]*"
_BUNDLES_SEARCHED = 16
_REFERENCE = re.compile(f"{UUID_NAME}/{RUN_NAME}")


def copy_name(dataset: str) -> str:
    """The name of a dataset's copy on a replica. It contains no ``/``: copies must not nest."""
    return dataset.replace("/", ":")


class BundleError(SnaporchError):
    """A bundle is damaged."""


OnRead = Callable[[int, int], None]
"""Is called with the bytes that were read so far, and those to read in all."""


class BundleStore:
    """The store rooted at ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, reference: str) -> Path:
        """The directory of the bundle that ``snaporch:bundle`` names (``uuid/run``).

        Raises:
            BundleError: it is not a valid reference, and might lead out of the store.
        """
        if not _REFERENCE.fullmatch(reference):
            raise BundleError(reference, "is not a bundle reference (uuid/run)")
        return self.root / reference

    def references(self) -> list[str]:
        """Every ``uuid/run`` in the store, by the names of directories alone.

        Raises:
            UnavailableError: the store cannot be read.
        """
        with store_errors(self.root):
            return [
                f"{domain.name}/{bundle.name}"
                for domain in _directories(self.root, UUID_NAME)
                for bundle in _directories(domain, RUN_NAME)
            ]

    def is_known(self) -> bool:
        """Whether it is a store: it has the marker, or at least one bundle.

        Raises:
            UnavailableError: the store cannot be read.
        """
        with store_errors(self.root):
            return (self.root / MARKER).exists() or bool(self.references())

    def last_save_times(self, uuid: str) -> RamSaveTimes | None:
        """The times of the latest RAM save into an image, searched in the newest bundles with RAM.

        Pages say nothing of a compressor.
        """
        return next((pace for each, pace in self._timed_saves(uuid) if not each.pages), None)

    def last_save_speed(self, uuid: str) -> float | None:
        """Bytes of RAM a second in the latest save of a domain that took a second or more.

        It is searched in the newest bundles with RAM. A shorter save says little of the speed.
        """
        for manifest, pace in self._timed_saves(uuid):
            if pace.seconds >= SHORTEST_SECONDS and manifest.ram_bytes:
                return manifest.ram_bytes / pace.seconds
        return None

    def _timed_saves(self, uuid: str) -> Iterator[tuple[Manifest, RamSaveTimes]]:
        with suppress(OSError):
            bundles = sorted(_directories(self.root / uuid, RUN_NAME), reverse=True)
            with_ram = (each for each in bundles if _has_ram(each))
            for directory in itertools.islice(with_ram, _BUNDLES_SEARCHED):
                with suppress(ManifestError):
                    manifest = read_manifest(directory)
                    if pace := manifest.pace:
                        yield manifest, pace

    def create(self, uuid: str, run: str) -> PartialBundle:
        """Begin a bundle; the caller holds the domain's lock.

        Raises:
            UnavailableError: the store cannot be written.
        """
        with store_errors(self.root):
            private_directory(self.root)
            (self.root / MARKER).touch(mode=0o600)
            private_directory(self.root / uuid)
            (self.root / uuid / RAW_NAME).unlink(missing_ok=True)  # left by a run without a journal
            partial = self.root / uuid / f".{run}.partial"
            partial.mkdir(mode=0o700)
        return PartialBundle(partial, self.root / uuid / run)

    def has_partial(self, uuid: str, run: str) -> bool:
        """Whether the bundle of a run was begun, and not sealed."""
        return (self.root / uuid / f".{run}.partial").is_dir()

    def discard_partial(self, uuid: str, run: str) -> None:
        """Remove the partial bundle of an unfinished run; the caller holds the domain's lock."""
        shutil.rmtree(self.root / uuid / f".{run}.partial", ignore_errors=True)
        with suppress(OSError):
            (self.root / uuid / RAW_NAME).unlink(missing_ok=True)

    def manifest(self, reference: str) -> Manifest | None:
        """The manifest of a bundle; ``None`` if there is no such directory.

        Raises:
            ManifestError: the directory exists, but its manifest is missing or invalid.
        """
        directory = self.path(reference)
        return read_manifest(directory) if directory.is_dir() else None

    def state(self, reference: str) -> tuple[BundleState, Manifest | None]:
        """The state of a bundle, by existence and size of each part.

        :meth:`verify` compares checksums.
        """
        try:
            directory = self.path(reference)
        except BundleError:
            return BundleState.INCOMPLETE, None
        with store_errors(self.root):
            return state_of(directory)

    def verify(self, reference: str, on_read: OnRead = lambda _done, _total: None) -> Manifest:
        """Read every part and compare its SHA-256.

        Args:
            reference: ``uuid/run``.
            on_read: see :func:`damage_of`.

        Raises:
            BundleError, ManifestError: a part is missing or differs.
        """
        for error in self.damage(reference, on_read).values():
            raise error
        manifest = self.manifest(reference)
        if manifest is None:
            raise BundleError(str(self.path(reference)), "there is no such bundle")
        return manifest

    def damage(
        self, reference: str, on_read: OnRead = lambda _done, _total: None
    ) -> dict[str, BundleError]:
        """The damaged parts of a bundle: an error for each, by the part's name.

        Args:
            reference: ``uuid/run``.
            on_read: see :func:`damage_of`.

        Raises:
            BundleError, ManifestError: there is no such bundle, or its manifest is invalid.
        """
        return damage_of(self.path(reference), on_read)


def state_of(directory: Path) -> tuple[BundleState, Manifest | None]:
    """The state of the bundle in a directory, by existence and size of each part.

    Encrypted files, as a replica may have them, are not the parts of a bundle.
    """
    if not directory.is_dir():
        return BundleState.MISSING, None
    try:
        manifest = read_manifest(directory)
    except ManifestError:
        return BundleState.INCOMPLETE, None
    whole = has_all_files(directory, manifest) and not manifest.is_encrypted
    return (BundleState.COMPLETE if whole else BundleState.INCOMPLETE), manifest


def has_all_files(directory: Path, manifest: Manifest) -> bool:
    """Whether each part is there, with the size in the manifest."""
    return all(_size(directory / part.name) == part.bytes for part in manifest.parts)


def damage_of(
    directory: Path, on_read: OnRead = lambda _done, _total: None
) -> dict[str, BundleError]:
    """The damaged parts of the bundle in a directory: an error for each, by the part's name.

    Args:
        directory: the bundle's.
        on_read: is called while the parts are read.

    Raises:
        BundleError, ManifestError: there is no bundle, or its manifest is invalid.
    """
    if not directory.is_dir():
        raise BundleError(str(directory), "there is no such bundle")
    found: dict[str, BundleError] = {}
    parts = read_manifest(directory).parts
    total = sum(part.bytes for part in parts)
    before = 0
    for part in parts:
        path = directory / part.name
        try:
            digest = sha256_of(path, _in_all(on_read, before, total))
        except OSError as error:
            found[part.name] = BundleError(str(path), error.strerror or "cannot be read")
            continue
        finally:
            before += part.bytes
        if digest != part.sha256:
            reason = "its SHA-256 differs from the manifest's: it is damaged"
            found[part.name] = BundleError(str(path), reason)
    return found


def _in_all(on_read: OnRead, before: int, total: int) -> Callable[[int], None]:
    """Report the bytes of one part after those of the parts ``before`` it."""
    return lambda done: on_read(before + done, total)


class PartialBundle:
    """A bundle that is being written."""

    def __init__(self, directory: Path, final: Path) -> None:
        self.directory = directory
        self._final = final

    @property
    def reference(self) -> str:
        """The future value of ``snaporch:bundle``."""
        return f"{self._final.parent.name}/{self._final.name}"

    @property
    def raw_ram(self) -> Path:
        """The file into which libvirt saves RAM without a pipe."""
        return self.directory.parent / RAW_NAME

    def add_text(self, name: str, role: Role, text: str) -> Part:
        """Write a small part."""
        return self._add(name, role, text.encode("utf-8", "surrogateescape"))

    def add_copy(self, name: str, role: Role, source: Path, *, before: float | None) -> Part:
        """Copy a file of the host into the bundle.

        Args:
            before: the time of the freeze, in seconds since the epoch. The part is marked as exact
                if the file had not changed since; ``None`` leaves that open.

        Raises:
            HostFileError: it is not a regular file of a sensible size.
        """
        data, status = read_host_file(source)
        exact = None if before is None else status.st_mtime < before
        part = self._add(name, role, data)
        return part.model_copy(
            update={
                "source": str(source),
                "uid": status.st_uid,
                "gid": status.st_gid,
                "mode": status.st_mode & 0o7777,
                "exact": exact,
            }
        )

    def _add(self, name: str, role: Role, data: bytes) -> Part:
        write_private(self.directory / name, data)
        return Part(name=name, role=role, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def seal(self, manifest: Manifest) -> Path:
        """Write the manifest, sync everything and give the bundle its final name.

        Returns: the final path.
        """
        write_private(self.directory / MANIFEST_NAME, manifest_bytes(manifest))
        sync_directory(self.directory)
        self.directory.rename(self._final)
        sync_directory(self._final.parent)
        sync_directory(self._final.parent.parent)  # it is the domain's first bundle, maybe
        return self._final


def replace_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest of a sealed bundle in one step, on stable storage."""
    fresh = directory / NEW_MANIFEST_NAME
    fresh.unlink(missing_ok=True)
    write_private(fresh, manifest_bytes(manifest))
    sync_directory(directory)  # also for the parts that it names
    fresh.rename(directory / MANIFEST_NAME)
    sync_directory(directory)


def _directories(path: Path, name: str) -> list[Path]:
    """The subdirectories whose names match, sorted; links do not count."""
    if not path.is_dir():
        return []
    return [each for each in subdirectories(path) if re.fullmatch(name, each.name)]


def _has_ram(directory: Path) -> bool:
    return any((directory / name).exists() for name in (RAM_NAME, REST_NAME))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
