"""Find clones and remove them. There is no list of clones: ZFS and libvirt are asked each time.

Every dataset of a clone carries the clone's UUID in a user property, set when ZFS makes it. The
domain's XML has a mark with the UUID. ``CLONES/<UUID>/`` holds the clone's files other than disks.
While there is a file ``making`` in it, the clone is unfinished or temporary.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from uuid import uuid4

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_fixed

from snaporch import default_paths
from snaporch.context import Context
from snaporch.errors import AttentionError, BusyError, NotFoundError, SnaporchError
from snaporch.hypervisor.domain_xml import tpm_directory
from snaporch.locks import domain_lock, held_by
from snaporch.model import UUID_FORM
from snaporch.private_files import private_directory, store_errors, sync_directory, write_private
from snaporch.zfs import PREFIX, MountedError, PoolError

MAKING = "making"
NAME_PROPERTY = f"{PREFIX}clone-name"
OF_PROPERTY = f"{PREFIX}clone-of"
_TRAVERSABLE = 0o711
"""The emulator runs as another user; libvirt gives it access to the files it needs."""
_BUSY_SECONDS = 60
_POLL_SECONDS = 0.2


class Purpose(StrEnum):
    """The purpose of a clone; only CLONE is permanent."""

    CLONE = "clone"
    VERIFY = "verify"
    EXTRACT = "extract"

    @property
    def mark(self) -> str:
        """The user property that holds the clone's UUID."""
        return f"{PREFIX}{self.value}"


@dataclass(frozen=True, slots=True)
class CloneArtifacts:
    """The datasets and the directory of one clone."""

    uuid: str
    name: str
    purpose: Purpose
    datasets: tuple[str, ...]
    making: bool

    @property
    def is_disposable(self) -> bool:
        """Whether the clone is removed as soon as no process works on it."""
        return self.making or self.purpose is not Purpose.CLONE


def directory_of(context: Context, uuid: str) -> Path:
    """The directory for a clone's files other than disks."""
    return context.config.paths.clones / uuid


def find_artifacts(context: Context) -> list[CloneArtifacts]:
    """Find the artifacts of every clone, finished or not."""
    marks = {purpose.mark: purpose for purpose in Purpose}
    found: dict[str, CloneArtifacts] = {}
    local = context.pool.local_properties([*marks, NAME_PROPERTY])
    for dataset, properties in sorted(local.items()):
        for mark, purpose in marks.items():
            uuid = properties.get(mark, "")
            if UUID_FORM.fullmatch(uuid):
                known = found.get(uuid)
                datasets = (*(known.datasets if known else ()), dataset)
                name = properties.get(NAME_PROPERTY, "")
                found[uuid] = CloneArtifacts(uuid, name, purpose, datasets, making=False)
    for directory in _directories(context.config.paths.clones):
        found[directory.name] = _with_directory(directory, found.get(directory.name))
    return list(found.values())


def _directories(clones: Path) -> list[Path]:
    if not clones.is_dir():
        return []
    with store_errors(clones):
        return sorted(path for path in clones.iterdir() if UUID_FORM.fullmatch(path.name))


def clones_at_work(context: Context) -> frozenset[str]:
    """The UUIDs of clones on which a process works: a verification's, or one that is being made.

    Not those that a killed process left behind: the admin should see these.

    Raises:
        UnavailableError: the directory of the clones cannot be read.
    """
    making = (
        each for each in _directories(context.config.paths.clones) if (each / MAKING).exists()
    )
    return frozenset(
        each.name for each in making if held_by(default_paths.LOCKS, each.name) is not None
    )


def _with_directory(directory: Path, known: CloneArtifacts | None) -> CloneArtifacts:
    """Add what the file ``making`` records.

    If it cannot be read, its writing was interrupted, before anything else was made.
    """
    mark = directory / MAKING
    recorded: dict[str, str] = {}
    if mark.exists():
        try:
            recorded = json.loads(mark.read_text())
        except (OSError, ValueError):
            recorded = {}
    purpose = known.purpose if known else Purpose(recorded.get("purpose", Purpose.CLONE))
    name = recorded.get("name") or (known.name if known else "")
    datasets = known.datasets if known else ()
    return CloneArtifacts(directory.name, name, purpose, datasets, making=mark.exists())


@contextmanager
def new_clone(context: Context, name: str, purpose: Purpose, of: str) -> Iterator[str]:
    """Reserve a UUID and a directory for a clone; the caller makes the clone inside the block.

    After an exception the clone is removed. A temporary clone is removed after the block in any
    case. If the process is killed, :func:`remove_unfinished` removes the clone.

    Args:
        name: the name of the clone.
        purpose: see :class:`Purpose`.
        of: the snapshot, for the admin.

    Yields:
        The UUID of the clone.
    """
    uuid = str(uuid4())
    with _locked(context, uuid, name, purpose.value):
        _begin(context, uuid, name, purpose, of)
        try:
            yield uuid
        except BaseException as error:
            _undo(context, uuid, error)
            raise
        if purpose is not Purpose.CLONE:
            remove(context, uuid)
            return
        (directory_of(context, uuid) / MAKING).unlink()
        sync_directory(directory_of(context, uuid))


@contextmanager
def _locked(context: Context, uuid: str, name: str, doing: str) -> Iterator[None]:
    with domain_lock(default_paths.LOCKS, name, uuid, doing, wait=0, interrupt=context.interrupt):
        try:
            yield
        finally:  # no process will use this UUID again
            if not directory_of(context, uuid).exists():
                (default_paths.LOCKS / f"{uuid}.lock").unlink(missing_ok=True)


def _begin(context: Context, uuid: str, name: str, purpose: Purpose, of: str) -> None:
    directory = directory_of(context, uuid)
    with store_errors(directory.parent):
        private_directory(directory.parent, _TRAVERSABLE)
        directory.mkdir(mode=_TRAVERSABLE)
        directory.chmod(_TRAVERSABLE)
        recorded = {"name": name, "purpose": purpose.value, "of": of}
        write_private(directory / MAKING, json.dumps(recorded).encode())
        sync_directory(directory)
        sync_directory(directory.parent)


def _undo(context: Context, uuid: str, error: BaseException) -> None:
    try:
        remove(context, uuid)
    except (SnaporchError, OSError) as second:
        raise AttentionError(
            uuid,
            f"the clone could not be made ({error}), and its parts could not be removed ({second})",
            "fix the cause and run `snaporch recover`",
        ) from error


def remove(context: Context, uuid: str) -> list[str]:
    """Remove the clone with this UUID: its domain, its datasets, its files.

    Only the marks count: a dataset that does not carry the UUID itself, or is no clone, stays.

    Returns:
        One line for each thing that was removed.

    Raises:
        SnaporchError: something could not be removed; the caller can try again.
    """
    done = []
    domain = context.hypervisor.find(uuid)
    if domain is not None:
        with suppress(NotFoundError):  # a transient domain may have ended meanwhile
            context.hypervisor.destroy(uuid)
        context.hypervisor.undefine(uuid)
        done.append(f"removed the domain {domain.name}")
    for artifacts in find_artifacts(context):
        if artifacts.uuid == uuid:
            done += _destroy_datasets(context, artifacts)
    directory = directory_of(context, uuid)
    if directory.is_dir():
        _remove_files(directory)
    shutil.rmtree(Path(tpm_directory(uuid, None)).parent, ignore_errors=True)
    return done


def _destroy_datasets(context: Context, artifacts: CloneArtifacts) -> list[str]:
    """Destroy a clone's datasets; of a temporary clone also snapshots that another program took."""
    clones = context.pool.origins(artifacts.datasets)
    done = []
    for dataset in reversed(artifacts.datasets):  # children first
        if dataset not in clones:
            continue
        for attempt in _retry_while_busy():
            with attempt:
                if artifacts.is_disposable:
                    names = [snapshot.full_name for snapshot in context.pool.snapshots([dataset])]
                    context.pool.destroy_snapshots(names)
                context.pool.destroy_dataset(dataset)
        done.append(f"destroyed {dataset}")
    return done


def _is_temporary(error: BaseException) -> bool:
    """Whether a retry may help; not if a guest has it mounted, which may last for months."""
    return isinstance(error, PoolError) and not isinstance(error, MountedError)


def _retry_while_busy() -> Retrying:
    """Retry: the kernel and udev keep a device open for a moment after its last user closed it."""
    return Retrying(
        stop=stop_after_delay(_BUSY_SECONDS),
        wait=wait_fixed(_POLL_SECONDS),
        retry=retry_if_exception(_is_temporary),
        reraise=True,
    )


def _remove_files(directory: Path) -> None:
    mounted = [path for path in directory.iterdir() if os.path.ismount(path)]
    if mounted:
        raise AttentionError(
            str(mounted[0]),
            "a file system is mounted there",
            "unmount it, then run `snaporch recover`",
        )
    mark = directory / MAKING
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path != mark:
            path.unlink()
    mark.unlink(missing_ok=True)
    directory.rmdir()
    sync_directory(directory.parent)


def remove_unfinished(context: Context, *, dry_run: bool = False) -> list[str]:
    """Remove what killed clones, verifications and extractions left.

    Args:
        dry_run: only report what would be removed.

    Returns:
        One line for each thing that was removed, or would be.
    """
    done = []
    for artifacts in find_artifacts(context):
        if not artifacts.is_disposable:
            continue
        what = artifacts.name or artifacts.uuid
        try:
            with _locked(context, artifacts.uuid, what, "recover"):
                done += _sweep_unfinished(context, artifacts.uuid, what, dry_run=dry_run)
        except BusyError:
            continue  # the process that makes it is alive
    return done


def remove_leftovers(context: Context) -> None:
    """Remove what killed processes left, with a note for each thing that was removed."""
    for done in remove_unfinished(context):
        context.progress.note("snaporch", done)


def _sweep_unfinished(context: Context, uuid: str, what: str, *, dry_run: bool) -> list[str]:
    """Remove one clone, if it is still unfinished now that its lock is held."""
    now = [artifacts for artifacts in find_artifacts(context) if artifacts.uuid == uuid]
    if not now or not now[0].is_disposable:
        return []
    line = f"{what}: an unfinished {now[0].purpose}"
    if dry_run:
        return [f"{line}: remove its domain, {', '.join(now[0].datasets) or 'no datasets'}"]
    return [f"{line}: {text}" for text in remove(context, uuid)] or [f"{line}: removed its files"]


def clones_of(context: Context, snapshots: Sequence[str]) -> list[str]:
    """The clones of these snapshots; ZFS cannot destroy a snapshot that has clones."""
    return sorted({name for names in context.pool.clones(snapshots).values() for name in names})
