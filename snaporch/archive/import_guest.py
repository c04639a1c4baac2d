"""Import a guest from an archive: check, unpack into a private directory, define, start."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO
from uuid import UUID, uuid4

from snaporch import default_paths
from snaporch.archive.contents import MAX_XML
from snaporch.archive.import_firmware import (
    check_firmware,
    discard_tpm,
    lacks_variables,
    place_firmware,
)
from snaporch.archive.import_place import MARK, ImportPlace
from snaporch.archive.import_xml import HostRules, imported_xml
from snaporch.archive.read_archive import ArchiveReader
from snaporch.archive.unpack import RAM_NAME, Head, read_head, sparse, unpack
from snaporch.bundle.compress import Compression
from snaporch.bundle.manifest import Role
from snaporch.bundle.save_image import SaveImageError
from snaporch.bundle.save_image_copy import copy_with_xml, read_preface
from snaporch.clone.address_conflicts import address_lock, check_network
from snaporch.context import Context
from snaporch.errors import (
    AttentionError,
    BusyError,
    RefusedError,
    RunFailedError,
    SnaporchError,
    UsageError,
)
from snaporch.hypervisor import HypervisorError, LostLibvirtError
from snaporch.hypervisor.clone_xml import CloneDisk, CloneSpec, CloneXml, SharedError
from snaporch.hypervisor.domain_xml import memory_bytes, networks, parse
from snaporch.hypervisor.qcow2 import read_qcow2
from snaporch.locks import domain_lock
from snaporch.model import Level
from snaporch.reserve import RoomWatch, reserve
from snaporch.restore.definition_checks import check_identity
from snaporch.restore.host_requirements import check_memory, total_memory
from snaporch.restore.source import mounted_at
from snaporch.zfs import PoolError
from snaporch.zfs_names import is_dataset, quoted

_ADDRESS_SECONDS = 600
"""How long to wait while another guest with these addresses loads its RAM."""
_MAX_NAME = 200
_READY_RAM = f"{MARK}-ram.save"


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """What is imported, and how."""

    directory: Path
    """The guest's directory is made in it."""
    parent: str | None = None
    """A dataset: the guest's dataset is made in it, instead."""
    name: str | None = None
    """Another name, with another UUID and other MAC addresses."""
    network: str = "none"
    """As of a clone: ``none``, ``isolated``, or a libvirt network."""
    cold: bool = False
    starts: bool = True
    accepted: tuple[str, ...] = ()
    """Paths of this host that the definition may name."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A guest that was imported."""

    name: str
    uuid: str
    of: str
    directory: str
    disks: dict[str, str]
    """The path of each disk, by its target."""
    state: str
    """``resumed``, ``paused`` (resumed, and paused as it was), ``booted`` or ``defined``."""
    cold_reason: str
    """Why it was not resumed although the archive has RAM; else empty."""
    missing: tuple[str, ...]
    """Devices of the original that it does not have."""

    def as_json(self) -> dict[str, object]:
        """The documented JSON object."""
        return {
            "name": self.name,
            "uuid": self.uuid,
            "of": self.of,
            "directory": self.directory,
            "disks": self.disks,
            "state": self.state,
            "cold_reason": self.cold_reason or None,
            "missing": list(self.missing),
        }


@dataclass(frozen=True, slots=True)
class _Plan:
    """The definitions of the guest, and how it starts."""

    spec: CloneSpec
    definition: CloneXml
    start: CloneXml
    """What it is resumed with, or the definition."""
    resumes: bool
    cold_reason: str


def import_guest(
    context: Context, stream: BinaryIO, thing: str, request: ImportRequest
) -> Imported:
    """Import a guest.

    Args:
        context: of this host. ZFS is used only for :attr:`ImportRequest.parent`.
        stream: the archive.
        thing: the name of its file, for errors.

    Raises:
        ArchiveError: the archive is damaged, incomplete or no archive; nothing of it is left.
        RefusedError: this host cannot have the guest; nothing of it is left.
        BusyError: another guest with its addresses loads its RAM; nothing of it is left.
        RunFailedError, HypervisorError: a step failed; nothing of it is left.
        AttentionError: libvirt did not answer, or the guest is defined and does not start;
            everything was kept.
    """
    reader = ArchiveReader(stream, thing)
    head = read_head(reader, thing)
    name = request.name or head.manifest.domain
    uuid = str(uuid4()) if request.name else head.manifest.uuid
    _check_name(thing, name, uuid)
    key = f"import-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    with _lock(context, name, key):
        try:
            _check_unfinished(context, name, request)
            _check_is_free(context, name, uuid)
            with _directory(context, request, name) as place:
                left = place.check()
                if request.name and left:
                    uuid = left  # the files that the interrupted import left have it
                with _lock(context, name, uuid):
                    return _import(context, reader, head, place, request, thing, (name, uuid))
        except RecursionError as error:
            raise RefusedError(thing, "its definition is nested too deeply") from error
        except OSError as error:
            reason = f"{error.filename or name}: {error.strerror or error}"
            raise RunFailedError(thing, f"could not be imported ({reason})") from error


def _lock(context: Context, name: str, key: str) -> AbstractContextManager[None]:
    """Hold the lock of a guest's name or UUID; all other commands take that of the UUID."""
    interrupt = context.interrupt
    return domain_lock(default_paths.LOCKS, name, key, "import", wait=0, interrupt=interrupt)


def _import(
    context: Context,
    reader: ArchiveReader,
    head: Head,
    place: ImportPlace,
    request: ImportRequest,
    thing: str,
    identity: tuple[str, str],
) -> Imported:
    name, uuid = identity
    _check_is_free(context, name, uuid)
    plan = _plan(context, head, place, request, thing, identity)
    check_firmware(head, plan.definition.xml, thing, overwrites=place.check() == uuid)
    if lacks_variables(head, plan.definition.xml):
        context.progress.note(name, "the archive has no UEFI variables: the guest gets new ones")
    _check_room(head, place, thing)
    context.progress.step(name, f"unpacking {head.contents.domain}@{head.contents.snapshot}")
    place.begin(uuid)
    try:
        unpack(reader, head, place.path, thing, _ticker(context, name, head, place))
        _note_growth(context, head, plan.spec, place)
        if plan.resumes:
            plan = _with_ram_definition(context, head, place, request, thing, plan)
        _check_is_free(context, name, uuid)
        place_firmware(head, plan.spec, plan.definition.xml)
        place.complete(running=head.manifest.was_running)
        _check_is_free(context, name, uuid)
        _define(context, plan)
    except (LostLibvirtError, AttentionError):
        raise  # libvirt may have defined it
    except BaseException:
        if _is_not_defined(context, uuid):  # else another program has defined one of this UUID
            discard_tpm(head, plan.definition.xml)
        place.discard()
        raise
    try:
        state, reason = _start(context, head, plan, place, request)
        place.finish()
    except OSError as error:
        failed = f"is imported, and then failed: {error.filename or place.path}: {error.strerror}"
        raise AttentionError(name, failed, "run the same command again: it finishes it") from error
    return Imported(
        name=name,
        uuid=uuid,
        of=f"{head.contents.domain}@{head.contents.snapshot}",
        directory=str(place.path),
        disks={target: disk.path for target, disk in plan.spec.disks.items()},
        state=state,
        cold_reason=reason,
        missing=plan.definition.missing,
    )


def _check_name(thing: str, name: str, uuid: str) -> None:
    valid = name.isprintable() and name == name.strip() and "/" not in name
    if not valid or not name or name[0] in "-." or len(name.encode()) > _MAX_NAME:
        raise UsageError(f"name {quoted(name)}", "cannot be the name of a guest", "use --name NEW")
    try:
        valid = str(UUID(uuid)) == uuid
    except ValueError:
        valid = False
    if not valid:
        raise RefusedError(thing, f"its UUID is none: {quoted(uuid)}", "use --name NEW")


def _check_unfinished(context: Context, name: str, request: ImportRequest) -> None:
    """Finish an import that was killed after the guest was defined.

    Raises:
        AttentionError: it was; the guest is there. It is resumed from RAM if the first import was
            to do so and no guest has written to its disks since; then the RAM is removed.
    """
    guest = next((each for each in context.hypervisor.domains() if each.name == name), None)
    if guest is None:
        return
    for disk in guest.disks:
        place = ImportPlace(Path(disk.source or "").parent)
        if place.path.name == name and place.marked() == guest.uuid:
            step = "it is complete, and runs"
            with _lock(context, name, guest.uuid):
                if guest.live_xml is None:
                    step = _resume_unfinished(context, name, place, request)
                place.finish()
            reason = f"was imported into {place.path} by an import that was interrupted then"
            raise AttentionError(name, reason, step)


def _resume_unfinished(
    context: Context, name: str, place: ImportPlace, request: ImportRequest
) -> str:
    """Resume a guest whose import was killed between its definition and its start.

    Returns: what was done, or is to be done.
    """
    image, running = place.path / _READY_RAM, place.unwritten()
    start = f"virsh start {shlex.quote(name)}"
    if request.cold or not request.starts or not image.exists():
        return f"it is complete: {start}"
    if running is None:
        return f"a guest may have written to its disks since; without its RAM: {start}"
    try:
        xml = read_preface(image).xml
        network = min(networks(parse(xml)), default="none")  # the import gave it one at most
        with address_lock(context, name, xml, network, _ADDRESS_SECONDS):
            context.hypervisor.restore(image, running=running)
    except (LostLibvirtError, RefusedError, BusyError):
        raise  # its RAM stays: the same import resumes it when its address is free
    except (SaveImageError, HypervisorError) as error:
        return f"it is complete, and was not resumed from RAM ({error.reason}): {start}"
    return f"it is complete, and was resumed from RAM{'' if running else ', paused as it was'}"


def _check_is_free(context: Context, name: str, uuid: str) -> None:
    """Refuse a name or UUID that a guest has: to define one of its UUID would replace it."""
    for domain in context.hypervisor.domains():
        if name in (domain.name, domain.uuid) or uuid == domain.uuid:
            what = "UUID" if uuid == domain.uuid else "name"
            reason = f"the guest {domain.name} has its {what}"
            raise RefusedError(name, reason, "import it beside that: --name NEW")


@contextmanager
def _directory(context: Context, request: ImportRequest, name: str) -> Iterator[ImportPlace]:
    """The guest's directory, or that of its dataset, which is destroyed after an exception."""
    if request.parent is None:
        yield ImportPlace(request.directory / name)
        return
    dataset = f"{request.parent}/{name}"
    if not is_dataset(dataset):
        raise RefusedError(dataset, "cannot be the name of a dataset", "use --name NEW")
    existing = {each.name for each in context.pool.datasets()}
    if request.parent not in existing:
        step = f"zfs create {shlex.quote(request.parent)}"
        raise RefusedError(request.parent, "there is no such dataset", step)
    is_new = dataset not in existing
    if is_new:
        context.pool.create_filesystem(dataset, {})
    place = None
    try:
        place = ImportPlace(mounted_at(context.resolver, dataset))
        yield place
    except BaseException:
        if is_new and (place is None or place.is_empty()):
            try:
                context.pool.destroy_dataset(dataset)
            except PoolError as error:
                context.progress.note(dataset, f"is left, and empty: {error.explanation}")
        raise


def _spec(
    head: Head,
    place: ImportPlace,
    request: ImportRequest,
    identity: tuple[str, str],
    *,
    resumed: bool,
) -> CloneSpec:
    disks = {
        disk.target: CloneDisk(
            str(place.path / f"{disk.target}.{disk.format}"), "file", disk.format
        )
        for disk in map(sparse, head.contents.disks)
    }
    return CloneSpec(
        name=identity[0],
        uuid=identity[1],
        of=f"{head.contents.domain}@{head.contents.snapshot}",
        disks=disks,
        files=str(place.path),
        network=request.network,
        resumed=resumed,
        is_clone=False,
        keeps_addresses=request.name is None,
    )


def _plan(
    context: Context,
    head: Head,
    place: ImportPlace,
    request: ImportRequest,
    thing: str,
    identity: tuple[str, str],
) -> _Plan:
    """Check both definitions, and decide whether the guest is resumed.

    Raises:
        RefusedError: a definition is of another guest or takes something of this host, or the guest
            cannot run here.
    """
    rules = HostRules(context.hypervisor.emulators(), request.accepted)
    live, inactive = head.text(Role.LIVE_XML), head.text(Role.INACTIVE_XML)
    definition = inactive or live
    if definition is None:
        raise RefusedError(thing, "has no definition")
    for what, xml in (("its live XML", live), ("its definition", inactive)):
        if xml is not None:
            check_identity(thing, what, xml, head.manifest)
    if request.network not in ("none", "isolated"):
        context.hypervisor.network_is_isolated(request.network)  # raises if there is none
    reason = _why_cold(context, head, request)
    if not reason and live is not None:
        spec = _spec(head, place, request, identity, resumed=True)
        try:
            start = imported_xml(live, spec, head.formats, rules)
            kept = imported_xml(definition, replace(spec, loads_ram=False), head.formats, rules)
            reason = _cannot_run(context, head, thing, start.xml, resumes=True)
            if not reason:
                _check_network(context, thing, start.xml, request)
                return _Plan(spec, kept, start, resumes=True, cold_reason="")
        except SharedError as error:
            reason = error.reason
    spec = _spec(head, place, request, identity, resumed=False)
    made = imported_xml(definition, spec, head.formats, rules)
    if request.starts and (problem := _cannot_run(context, head, thing, made.xml, resumes=False)):
        raise RefusedError(thing, f"this host cannot run it: {problem}", "or use --no-start")
    has_ram = head.manifest.part(Role.RAM) is not None and not request.cold and request.starts
    return _Plan(spec, made, made, resumes=False, cold_reason=reason if has_ram else "")


def _check_network(context: Context, thing: str, xml: str, request: ImportRequest) -> None:
    """Refuse a network on which the addresses in the RAM may be in use.

    A guest with another name is a second one. One that keeps its name is the original, which moved.
    """
    if request.name is not None:
        check_network(context, thing, xml, request.network, resumed=True)
    with address_lock(context, thing, xml, request.network, 0):
        pass  # no guest here has them


def _why_cold(context: Context, head: Head, request: ImportRequest) -> str:
    """Why the guest is not resumed from RAM; empty if nothing is known that prevents it."""
    part = head.manifest.part(Role.RAM)
    if part is None or head.manifest.level is not Level.RAM:
        return "the archive has no RAM"
    if request.cold or not request.starts:
        return "that was requested"
    if part.compression == Compression.ZSTD and not context.hypervisor.reads_zstd():
        return "this libvirt cannot read RAM that zstd has compressed"
    return ""


def _cannot_run(context: Context, head: Head, thing: str, xml: str, *, resumes: bool) -> str:
    """Why this host cannot run the guest now: its machine type, CPU or memory; else empty."""
    cpu = head.manifest.versions.cpu if resumes else ""
    if reason := context.hypervisor.incompatibility(xml, cpu):
        return reason
    try:
        check_memory(context, thing, xml, head.manifest if resumes else None, None)
        needed = _memory(xml)  # an archive may say that its RAM is small
    except RefusedError as error:
        return f"it {error.reason}"
    total = total_memory(context.resolver.host)
    if needed > total:
        return f"it has {needed >> 20} MiB of memory, this host has {total >> 20} MiB"
    return ""


def _memory(xml: str) -> int:
    """The bytes that a guest can use, without what could still be plugged."""
    root = parse(xml)
    for limit in root.findall("maxMemory"):
        root.remove(limit)
    return memory_bytes(root)


def _check_room(head: Head, place: ImportPlace, thing: str) -> None:
    ram = head.manifest.part(Role.RAM)
    needed = head.contents.data_bytes + (ram.bytes if ram else 0)
    existing = next(path for path in (place.path, *place.path.parents) if path.is_dir())
    usage = shutil.disk_usage(existing)
    free = max(usage.free - reserve(usage.total), 0)
    if needed > free:
        reason = f"needs {needed >> 20} MiB in {existing}, {free >> 20} MiB are free"
        raise RefusedError(thing, reason, "choose another --directory or --dataset")


def _note_growth(context: Context, head: Head, spec: CloneSpec, place: ImportPlace) -> None:
    """Note that the disks, which are unpacked, may grow beyond what is free."""
    growth = 0
    for disk in map(sparse, head.contents.disks):
        with Path(spec.disks[disk.target].path).open("rb") as image:
            size = read_qcow2(image.fileno()).size if disk.format == "qcow2" else disk.size
            growth += max(size - os.fstat(image.fileno()).st_blocks * 512, 0)
    usage = shutil.disk_usage(place.path)
    free = max(usage.free - reserve(usage.total), 0)
    if growth > free:
        text = f"its disks may grow by {growth >> 20} MiB, and {free >> 20} MiB are free"
        context.progress.note(str(place.path), text)


def _ticker(context: Context, name: str, head: Head, place: ImportPlace) -> Callable[[int], None]:
    done, total = 0, sum(each.bytes for each in head.contents.members)
    room = RoomWatch(place.path)

    def tick(count: int) -> None:
        nonlocal done
        context.interrupt.check(name)
        done += count
        room.wrote(count)
        context.progress.amount(name, done, total)

    return tick


def _with_ram_definition(
    context: Context,
    head: Head,
    place: ImportPlace,
    request: ImportRequest,
    thing: str,
    plan: _Plan,
) -> _Plan:
    """Put the guest's definition into its RAM image, after a check of the one that is there."""
    image, rules = (
        place.path / RAM_NAME,
        HostRules(context.hypervisor.emulators(), request.accepted),
    )
    try:
        xml = read_preface(image).xml
        if len(xml) > MAX_XML:
            raise RefusedError(thing, f"the definition in its RAM has {len(xml) >> 10} KiB")
        check_identity(thing, "the definition in its RAM", xml, head.manifest)
        start = imported_xml(xml, plan.spec, head.formats, rules)
        problem = context.hypervisor.incompatibility(start.xml, head.manifest.versions.cpu)
        if _memory(start.xml) > _memory(plan.start.xml):
            problem = "it has more memory"
        if problem:
            raise RefusedError(thing, f"its RAM is of another guest than its definition: {problem}")
        copy_with_xml(image, place.path / _READY_RAM, start.xml)
    except SaveImageError as error:
        raise RefusedError(thing, f"its RAM is no save image: {error.reason}") from error
    image.unlink()
    return _Plan(plan.spec, plan.definition, start, resumes=True, cold_reason="")


def _define(context: Context, plan: _Plan) -> None:
    """Define the guest.

    Raises:
        AttentionError: it failed, and libvirt may have defined it.
        HypervisorError, OSError: it is not defined.
    """
    try:
        context.hypervisor.define(plan.definition.xml, validate=True)
    except (HypervisorError, OSError) as error:
        if _is_not_defined(context, plan.spec.uuid):
            raise
        reason = error.explanation if isinstance(error, HypervisorError) else str(error)
        step = "all files were kept: see virsh list --all"
        raise AttentionError(plan.spec.name, reason, step) from error


def _is_not_defined(context: Context, uuid: str) -> bool:
    try:
        return context.hypervisor.find(uuid) is None
    except SnaporchError:
        return False


def _start(
    context: Context, head: Head, plan: _Plan, place: ImportPlace, request: ImportRequest
) -> tuple[str, str]:
    """Resume or boot the guest; return how it was started, and why it was not resumed."""
    name, reason = plan.spec.name, plan.cold_reason
    running = head.manifest.was_running
    if plan.resumes:
        context.progress.step(name, "resuming from RAM")
        try:
            with address_lock(context, name, plan.start.xml, request.network, _ADDRESS_SECONDS):
                context.hypervisor.restore(place.path / _READY_RAM, running=running)
        except LostLibvirtError:
            raise
        except HypervisorError as error:
            reason = error.reason
        except (RefusedError, BusyError) as error:
            _undo(context, head, plan, place, error)
            raise
        else:
            return ("resumed" if running else "paused"), ""
    was_paused = bool(reason) and not running  # it must not run because its RAM is of no use
    if not request.starts or head.manifest.level is Level.OFF or was_paused:
        return "defined", reason
    context.progress.step(name, "booting from its disks")
    try:
        context.hypervisor.start(plan.spec.uuid, paused=False)
    except HypervisorError as error:
        place.finish()
        problem = f"does not start: {error.reason}"
        if plan.resumes:
            problem = f"was not resumed from its RAM, which is discarded: {reason}; it {problem}"
        step = f"correct the cause, and boot it: virsh start {shlex.quote(name)}"
        raise AttentionError(name, f"is imported, and {problem}", step) from error
    return "booted", reason


def _undo(
    context: Context, head: Head, plan: _Plan, place: ImportPlace, cause: SnaporchError
) -> None:
    """Remove a guest that is defined and has not run, because its RAM may not be resumed now.

    Args:
        cause: why not.

    Raises:
        AttentionError: another program has started it, or it cannot be removed; its disks are kept.
    """
    name, uuid = plan.spec.name, plan.spec.uuid
    reason = f"is imported, and was not resumed from its RAM: {cause.reason}"
    try:
        guest = context.hypervisor.find(uuid)
        if guest is not None and guest.active:
            place.finish()
            raise AttentionError(name, f"{reason}; another program has started it") from cause
        context.hypervisor.undefine(uuid)
    except HypervisorError as error:
        step = (
            f"its files were kept; to import it again: virsh undefine {shlex.quote(name)} --nvram"
        )
        raise AttentionError(name, f"{reason}; it stays: {error.reason}", step) from cause
    discard_tpm(head, plan.definition.xml)
    place.discard()
