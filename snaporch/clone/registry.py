"""What clones are known by, and how they are removed. Nothing is remembered: ZFS and libvirt tell.

Every dataset of a clone carries the clone's UUID in a user property, set when ZFS makes it; the
domain's XML has a mark with its UUID; and ``CLONES/<UUID>/`` holds what the clone has beside its
disks. As long as a file ``making`` lies there, the clone is not finished, or is not meant to last.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from uuid import uuid4

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_fixed

from snaporch import default_paths
from snaporch.bundle.store import (
    explained_store,
    private_directory,
    sync_directory,
    write_private,
)
from snaporch.context import Context
from snaporch.errors import AttentionError, BusyError, NotFoundError, SnaporchError
from snaporch.hypervisor.domain_xml import tpm_directory
from snaporch.locks import domain_lock
from snaporch.zfs import PREFIX, MountedError, PoolError

MAKING = "making"
NAME_PROPERTY = f"{PREFIX}clone-name"
OF_PROPERTY = f"{PREFIX}clone-of"
_TRAVERSABLE = 0o711
"""The emulator is another user, and libvirt gives it the files it needs."""
_BUSY_SECONDS = 60
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_POLL_SECONDS = 0.2


class Purpose(StrEnum):
    """What a clone was made for."""

    CLONE = "clone"
    VERIFY = "verify"
    EXTRACT = "extract"

    @property
    def mark(self) -> str:
        """The user property that holds the clone's UUID."""
        return f"{PREFIX}{self.value}"


@dataclass(frozen=True, slots=True)
class CloneArtifacts:
    """What there is of one clone besides its domain."""

    uuid: str
    name: str
    purpose: Purpose
    datasets: tuple[str, ...]
    making: bool

    @property
    def may_be_left_over(self) -> bool:
        """Whether it is to go if nobody works on it any more."""
        return self.making or self.purpose is not Purpose.CLONE


def directory_of(context: Context, uuid: str) -> Path:
    """What a clone has beside its disks."""
    return context.config.paths.clones / uuid


def find_traces(context: Context) -> list[CloneArtifacts]:
    """Of every clone, finished or not."""
    marks = {purpose.mark: purpose for purpose in Purpose}
    found: dict[str, CloneArtifacts] = {}
    local = context.pool.local_properties([*marks, NAME_PROPERTY])
    for dataset, properties in sorted(local.items()):
        for mark, purpose in marks.items():
            uuid = properties.get(mark, "")
            if _UUID.fullmatch(uuid):
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
    with explained_store(clones):
        return sorted(path for path in clones.iterdir() if _UUID.fullmatch(path.name))


def _with_directory(directory: Path, known: CloneArtifacts | None) -> CloneArtifacts:
    """A mark that cannot be read was cut short, before anything else was made."""
    mark = directory / MAKING
    told: dict[str, str] = {}
    if mark.exists():
        try:
            told = json.loads(mark.read_text())
        except (OSError, ValueError):
            told = {}
    purpose = known.purpose if known else Purpose(told.get("purpose", Purpose.CLONE))
    name = told.get("name") or (known.name if known else "")
    datasets = known.datasets if known else ()
    return CloneArtifacts(directory.name, name, purpose, datasets, making=mark.exists())


@contextmanager
def workplace(context: Context, name: str, purpose: Purpose, of: str) -> Iterator[str]:
    """The UUID of a clone to be made; it is removed again unless the block ends well.

    Only a clone made to last stays after the block. A process that is killed inside leaves what
    :func:`sweep` removes.
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
        finally:  # nobody will ask for this UUID again
            if not directory_of(context, uuid).exists():
                (default_paths.LOCKS / f"{uuid}.lock").unlink(missing_ok=True)


def _begin(context: Context, uuid: str, name: str, purpose: Purpose, of: str) -> None:
    directory = directory_of(context, uuid)
    with explained_store(directory.parent):
        private_directory(directory.parent, _TRAVERSABLE)
        directory.mkdir(mode=_TRAVERSABLE)
        directory.chmod(_TRAVERSABLE)
        told = {"name": name, "purpose": purpose.value, "of": of}
        write_private(directory / MAKING, json.dumps(told).encode())
        sync_directory(directory)
        sync_directory(directory.parent)


def _undo(context: Context, uuid: str, error: BaseException) -> None:
    try:
        remove(context, uuid)
    except (SnaporchError, OSError) as second:
        raise AttentionError(
            uuid,
            f"the clone could not be made ({error}), and what there is of it could not be removed "
            f"({second})",
            "mend the cause and run `snaporch recover`",
        ) from error


def remove(context: Context, uuid: str) -> list[str]:
    """Remove the clone with this UUID: its domain, its datasets, its files; what was removed.

    Goes by the marks alone: a dataset that does not carry the UUID itself, or is no clone, stays.

    Raises:
        SnaporchError: something could not be removed; it can be tried again.
    """
    done = []
    domain = context.hypervisor.find(uuid)
    if domain is not None:
        with suppress(NotFoundError):  # a transient one may end by itself
            context.hypervisor.destroy(uuid)
        context.hypervisor.undefine(uuid)
        done.append(f"removed the domain {domain.name}")
    for traces in find_traces(context):
        if traces.uuid == uuid:
            done += _destroy_datasets(context, traces)
    directory = directory_of(context, uuid)
    if directory.is_dir():
        _remove_files(directory)
    shutil.rmtree(Path(tpm_directory(uuid, None)).parent, ignore_errors=True)
    return done


def _destroy_datasets(context: Context, traces: CloneArtifacts) -> list[str]:
    """A throw-away clone may have been snapshotted by somebody's timer meanwhile."""
    clones = context.pool.origins(traces.datasets)
    done = []
    for dataset in reversed(traces.datasets):  # children first
        if dataset not in clones:
            continue
        for attempt in _patience():
            with attempt:
                if traces.may_be_left_over:
                    names = [snapshot.full_name for snapshot in context.pool.snapshots([dataset])]
                    context.pool.destroy_snapshots(names)
                context.pool.destroy_dataset(dataset)
        done.append(f"destroyed {dataset}")
    return done


def _may_pass(error: BaseException) -> bool:
    """A guest that has it mounted may keep it for months."""
    return isinstance(error, PoolError) and not isinstance(error, MountedError)


def _patience() -> Retrying:
    """The kernel and udev keep a device open for a moment after its last user has gone."""
    return Retrying(
        stop=stop_after_delay(_BUSY_SECONDS),
        wait=wait_fixed(_POLL_SECONDS),
        retry=retry_if_exception(_may_pass),
        reraise=True,
    )


def _remove_files(directory: Path) -> None:
    mounted = [path for path in directory.iterdir() if os.path.ismount(path)]
    if mounted:
        raise AttentionError(
            str(mounted[0]), "something is mounted there", "unmount it, then snaporch recover"
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


def sweep(context: Context, *, dry_run: bool = False) -> list[str]:
    """Remove what killed clones, verifications and extractions left; what was done, in words."""
    done = []
    for traces in find_traces(context):
        if not traces.may_be_left_over:
            continue
        what = traces.name or traces.uuid
        try:
            with _locked(context, traces.uuid, what, "recover"):
                done += _sweep_one(context, traces.uuid, what, dry_run=dry_run)
        except BusyError:
            continue  # its maker is alive
    return done


def remove_leftovers(context: Context) -> None:
    """:func:`sweep`, with a note for everything that was removed."""
    for done in sweep(context):
        context.progress.note("snaporch", done)


def _sweep_one(context: Context, uuid: str, what: str, *, dry_run: bool) -> list[str]:
    """Looked at again under its lock: its maker may have finished it just before it let go."""
    now = [traces for traces in find_traces(context) if traces.uuid == uuid]
    if not now or not now[0].may_be_left_over:
        return []
    line = f"{what}: an unfinished {now[0].purpose}"
    if dry_run:
        return [f"{line}: remove its domain, {', '.join(now[0].datasets) or 'no datasets'}"]
    return [f"{line}: {text}" for text in remove(context, uuid)] or [f"{line}: removed its files"]


def blocked_by(context: Context, snapshots: Sequence[str]) -> list[str]:
    """Clones of these snapshots, which keep them from being destroyed."""
    return sorted({name for names in context.pool.clones(snapshots).values() for name in names})
