"""The bundles of an append-only replica: listed, read, and stored once, on the replica itself.

Which requests are accepted is decided by :mod:`snaporch.replication.receive_request`.

No path is ever followed: each name was checked by ``receive_request``, and is opened without links,
relative to the directory above it. A bundle that has its name is never changed. Only if the replica
itself finds that it differs from its record (``copy.json``), another may get the name. The former
one is moved to :data:`REPLACED_NAME`; nothing deletes it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import BinaryIO

from snaporch.bundle.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES
from snaporch.bundle.store import COPY_NAME, COPYING_SUFFIX, RUN_NAME, UUID_NAME
from snaporch.errors import BusyError, RefusedError, UnavailableError
from snaporch.replication.interface import BundleCopy, ReplicaError
from snaporch.replication.receive_request import SentFile
from snaporch.zfs.received import Readable
from snaporch.zfs_names import quoted

REPLACED_NAME = ".replaced"
"""The directory of bundles that were found damaged, and got a successor."""
_BLOCK = 1 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_RECORD_BYTES = 1 << 20
_NO_ROOM = "make room there, or raise the quota, and try again"
_UNUSABLE = "it must exist, and belong to the user that receives bundles"


class ReceivedBundles:
    """The bundles in a directory that belongs to the receiving user.

    Args:
        root: the directory, which must exist.
        dataset: the dataset of the copies, which each bundle's record names; empty where bundles
            come back to the host of the originals, which get no record and replace none.
    """

    def __init__(self, root: Path, dataset: str) -> None:
        self._root = root
        self._dataset = dataset

    def check(self) -> None:
        """Check that the directory exists, and that bundles can be stored in it.

        Raises:
            UnavailableError: it does not, or they cannot.
        """
        with self._opened() as root:
            if not os.access(f"/proc/self/fd/{root}", os.W_OK | os.X_OK):
                step = f"on the replica: chown USER {self._root}"
                raise UnavailableError(str(self._root), "the receiving user cannot write", step)

    def free_bytes(self) -> int:
        """The bytes that are free for bundles."""
        with self._opened() as root:
            return shutil.disk_usage(root).free

    def bundles(self, uuid: str) -> dict[str, BundleCopy]:
        """The bundles of a domain, by run.

        Raises:
            UnavailableError: the directory of all bundles is missing, or cannot be read.
        """
        _check_names(uuid)
        found = {}
        now = datetime.now(UTC).timestamp()
        with self._opened() as root, suppress(FileNotFoundError), _directory(uuid, root) as domain:
            for run in os.listdir(domain):
                if re.fullmatch(RUN_NAME, run):
                    with suppress(OSError), _directory(run, domain) as bundle:
                        found[run] = _described(bundle, now)
        return found

    def manifest(self, uuid: str, run: str) -> str:
        """The text of a bundle's manifest; empty if there is none."""
        _check_names(uuid, run)
        with (
            self._opened() as root,
            suppress(FileNotFoundError),
            _directory(uuid, root) as domain,
            _directory(run, domain) as bundle,
            _file(MANIFEST_NAME, bundle) as stream,
        ):
            return stream.read(MAX_MANIFEST_BYTES).decode("utf-8", "surrogateescape")
        return ""

    def damaged(self, uuid: str, run: str, sums: Mapping[str, str]) -> list[str]:
        """Read a bundle.

        The time of the reading is recorded only if all files of its own record are whole, too.

        Args:
            uuid: of the domain.
            run: of the bundle.
            sums: the SHA-256 of each file, as the host has it.

        Returns:
            The files that are missing, cannot be read or differ.

        Raises:
            UnavailableError: the directory of all bundles is missing.
        """
        _check_names(uuid, run)
        with self._opened() as root:
            try:
                with _directory(uuid, root) as domain, _directory(run, domain) as bundle:
                    recorded = _recorded(bundle) or {}
                    found = {name: _digest(name, bundle) for name in {**recorded, **sums}}
                    wrong = [name for name, digest in sums.items() if found[name] != digest]
                    own = [name for name, digest in recorded.items() if found[name] != digest]
                    if sums and recorded and not wrong and not own:
                        os.utime(COPY_NAME, dir_fd=bundle, follow_symlinks=False)
                    return [*wrong, *(name for name in own if name not in wrong)]
            except FileNotFoundError:
                return list(sums)

    def begun(self, uuid: str, run: str) -> dict[str, int]:
        """The sizes of the files that an interrupted :meth:`store` has left, by name."""
        _check_names(uuid, run)
        with (
            self._opened() as root,
            suppress(FileNotFoundError),
            _directory(uuid, root) as domain,
            _directory(_partial(run), domain) as partial,
        ):
            return dict(_described(partial, 0).sizes)
        return {}

    def store(self, uuid: str, run: str, files: Sequence[SentFile], stream: Readable) -> list[str]:
        """Store a bundle; the replica has all of it or none.

        Args:
            uuid: of the domain.
            run: of the bundle.
            files: its files, in the order of the stream.
            stream: the bytes of each file from its offset on.

        Returns:
            The files that differ from their SHA-256; if there are any, what arrived was discarded.

        Raises:
            RefusedError: the bundle exists, and is as its record says, or this is no replica.
            BusyError: another bundle of the domain is being stored.
            ReplicaError: the stream ended early; what arrived stays for the next try.
            UnavailableError: the directory of all bundles is missing.
        """
        _check_names(uuid, run)
        reference = f"{uuid}/{run}"
        with self._opened() as root:
            with suppress(FileExistsError):
                os.mkdir(uuid, 0o700, dir_fd=root)
            with _directory(uuid, root) as domain, _locked(domain, reference):
                replaced = self._must_be_replaced(run, domain, reference)
                _remove_partials(domain, except_for=_partial(run))
                with suppress(FileExistsError):
                    os.mkdir(_partial(run), 0o700, dir_fd=domain)
                with _directory(_partial(run), domain) as partial:
                    for name in set(os.listdir(partial)) - {each.name for each in files}:
                        os.unlink(name, dir_fd=partial)
                    wrong = [each.name for each in files if not _take(each, partial, stream)]
                    if not wrong and self._dataset:
                        self._record(files, partial)
                    os.fsync(partial)
                if wrong:
                    _remove(_partial(run), domain)
                    return wrong
                if replaced:
                    self._keep(uuid, run, domain, root)
                os.rename(_partial(run), run, src_dir_fd=domain, dst_dir_fd=domain)
                os.fsync(domain)
                os.fsync(root)
        return []

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The directory of all bundles, opened; errors of it and below it have a next step."""
        try:
            root = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                yield root
            finally:
                os.close(root)
        except OSError as error:
            below = error.filename not in (None, str(self._root), self._root)
            raise UnavailableError(
                str(self._root),
                f"{error.strerror or error}{f' ({error.filename})' if below else ''}",
                _NO_ROOM if error.errno in (errno.ENOSPC, errno.EDQUOT) else _UNUSABLE,
            ) from error

    def _must_be_replaced(self, run: str, domain: int, reference: str) -> bool:
        """Whether a bundle has the name, and is damaged.

        Raises:
            RefusedError: it is whole, or it has no record of what it should contain.
        """
        try:
            with _directory(run, domain) as bundle:
                if not self._dataset:
                    step = f"move it away: {self._root}/{reference}"
                    raise RefusedError(reference, "there is a bundle of this run already", step)
                recorded = _recorded(bundle)
                if recorded is None:
                    return True
                if all(_digest(name, bundle) == digest for name, digest in recorded.items()):
                    raise RefusedError(
                        reference,
                        "the replica has a bundle of this run, which is as it was stored, and is "
                        "never replaced",
                        f"if another must take its place, move it away there: {self._root}/"
                        f"{reference}",
                    )
        except FileNotFoundError:
            return False
        return True

    def _record(self, files: Sequence[SentFile], partial: int) -> None:
        """Write the record of a bundle, and sync it."""
        document = {
            "dataset": self._dataset,
            "stored": datetime.now(UTC).isoformat(timespec="seconds"),
            "files": {each.name: each.sha256 for each in files},
        }
        with _file(COPY_NAME, partial, _WRITE | os.O_EXCL) as stream:
            stream.write(json.dumps(document).encode())
            stream.flush()
            os.fsync(stream.fileno())

    def _keep(self, uuid: str, run: str, domain: int, root: int) -> None:
        """Move a damaged bundle away, under a name with the time."""
        with suppress(FileExistsError):
            os.mkdir(REPLACED_NAME, 0o700, dir_fd=root)
        with _directory(REPLACED_NAME, root) as kept:
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
            os.rename(run, f"{stamp}.{uuid}.{run}", src_dir_fd=domain, dst_dir_fd=kept)
            os.fsync(kept)


def _check_names(uuid: str, run: str = "0") -> None:
    """Refuse names that could lead out of the directory of all bundles.

    Raises:
        RefusedError: one is neither a UUID nor the name of a run.
    """
    for name, form in ((uuid, UUID_NAME), (run, RUN_NAME)):
        if re.fullmatch(form, name) is None:
            raise RefusedError(quoted(name), "is no name of a bundle")


def _partial(run: str) -> str:
    return f".{run}{COPYING_SUFFIX}"


@contextmanager
def _directory(name: str, above: int) -> Iterator[int]:
    descriptor = os.open(name, _DIRECTORY, dir_fd=above)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _file(name: str, above: int, flags: int = _READ) -> Iterator[BinaryIO]:
    """A plain file in a directory.

    Raises:
        OSError: it does not exist, is a link, or is no plain file.
    """
    descriptor = os.open(name, flags, 0o600, dir_fd=above)
    with os.fdopen(descriptor, "rb" if flags == _READ else "r+b") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(f"{name} is no plain file")
        yield stream


@contextmanager
def _locked(domain: int, reference: str) -> Iterator[None]:
    try:
        fcntl.flock(domain, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BusyError(reference, "a bundle of this domain is being stored") from error
    yield  # closing the directory releases it


def _described(bundle: int, now: float) -> BundleCopy:
    """The sizes of the plain files in a directory, and the seconds since the last reading."""
    sizes, unread = {}, inf
    for name in os.listdir(bundle):
        found = os.stat(name, dir_fd=bundle, follow_symlinks=False)
        if stat.S_ISREG(found.st_mode):
            sizes[name] = found.st_size
            if name == COPY_NAME and found.st_mtime <= now:
                unread = now - found.st_mtime
    return BundleCopy(sizes, unread)


def _recorded(bundle: int) -> dict[str, str] | None:
    """The SHA-256 of each file in a bundle's own record; None if the record is damaged or missing.

    Raises:
        RefusedError: the record is of another program version, and has no sums.
    """
    try:
        with _file(COPY_NAME, bundle) as stream:
            document = json.loads(stream.read(_MAX_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    files = document.get("files")
    if files is None:
        raise RefusedError(
            COPY_NAME,
            "the replica's bundle has a record without sums, so it is never replaced",
            "it was copied by rsync; move it away there if another must take its place",
        )
    if not isinstance(files, dict):
        return None
    return {str(name): str(digest) for name, digest in files.items()}


def _digest(name: str, bundle: int) -> str:
    """The SHA-256 of a file; empty if there is none, or it cannot be read from the disks.

    Raises:
        OSError: another reason, such as no permission, which says nothing about its content.
    """
    digest = hashlib.sha256()
    try:
        with _file(name, bundle) as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        if error.errno not in (None, errno.ENOENT, errno.ELOOP, errno.EIO, errno.ENXIO):
            raise
        return ""
    return digest.hexdigest()


def _take(file: SentFile, partial: int, stream: Readable) -> bool:
    """Write a file from the stream, and sync it; whether it has its SHA-256.

    Raises:
        ReplicaError: the stream ended early, or less of the file is here than the host says.
    """
    digest, left = hashlib.sha256(), file.bytes - file.offset
    with _file(file.name, partial, _WRITE) as target:
        target.truncate(min(file.offset, os.fstat(target.fileno()).st_size))
        while block := target.read(_BLOCK):
            digest.update(block)
        if target.seek(0, os.SEEK_CUR) != file.offset:
            raise ReplicaError(file.name, "less of it has arrived than the host says", "try again")
        while left:
            block = stream.read(min(left, _BLOCK))
            if not block:
                raise ReplicaError(file.name, "the stream ended early", "try again")
            target.write(block)
            digest.update(block)
            left -= len(block)
        target.flush()
        os.fsync(target.fileno())
    return digest.hexdigest() == file.sha256


def _remove_partials(domain: int, *, except_for: str) -> None:
    """Remove what abandoned transfers of a domain left: the next one may need the room."""
    for name in os.listdir(domain):
        if name.startswith(".") and name.endswith(COPYING_SUFFIX) and name != except_for:
            _remove(name, domain)


def _remove(name: str, above: int) -> None:
    """Remove a directory that has only files."""
    with _directory(name, above) as directory:
        for each in os.listdir(directory):
            os.unlink(each, dir_fd=directory)
    os.rmdir(name, dir_fd=above)
