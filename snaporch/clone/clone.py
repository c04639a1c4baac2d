"""Make a second guest from a snapshot, beside the original guest.

Every dataset is cloned with ``zfs clone``, which takes no space and no time. The RAM image is
copied, because it has to carry the clone's XML (:mod:`snaporch.bundle.save_image_copy`).
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from snaporch.bundle.manifest import Role
from snaporch.bundle.save_image_copy import copy_with_xml, read_preface
from snaporch.catalog.records import COPY
from snaporch.clone.address_conflicts import address_lock, check_network
from snaporch.clone.find_clones import (
    NAME_PROPERTY,
    OF_PROPERTY,
    Purpose,
    directory_of,
    find_artifacts,
    new_clone,
)
from snaporch.clone.firmware import check_tpm, copy_firmware
from snaporch.clone.images import ClonedDataset, Images
from snaporch.clone.open_file_check import check_open_files
from snaporch.context import Context
from snaporch.errors import RefusedError, RunFailedError, UsageError
from snaporch.hypervisor import domain_xml
from snaporch.hypervisor.clone_xml import (
    NO_NETWORK,
    CloneDisk,
    CloneSpec,
    CloneXml,
    SharedError,
    make_clone_xml,
)
from snaporch.model import DatasetKind
from snaporch.restore.disk_checks import check_beneath
from snaporch.restore.foreign_definition import came_from_elsewhere, is_foreign, to_accept
from snaporch.restore.foreign_images import check_foreign_images
from snaporch.restore.host_requirements import available_memory
from snaporch.restore.own_places import OwnPlaces, with_paths
from snaporch.restore.ram_from_pages import image_bytes, make_image
from snaporch.restore.source import (
    Source,
    check_whole_disks,
    dataset_kinds,
    image_path_in_dataset,
    reading_lock,
)
from snaporch.zfs import PREFIX
from snaporch.zfs_names import MAX_FULL_NAME

RAM_COPY = "ram.save"
COPIED_PROPERTIES = (
    "atime",
    "compression",
    "logbias",
    "primarycache",
    "recordsize",
    "redundant_metadata",
    "relatime",
    "secondarycache",
    "sync",
)
"""Properties that a clone gets if they were set on the original dataset itself: they make the clone
as safe and as fast. Mount points, quotas, reservations and the user properties that other tools
read for replication and snapshots are not copied."""
_INVALID_CHARACTERS = re.compile(r"[^A-Za-z0-9_.:-]")
_MEMORY_MARGIN = 64 << 20
"""Memory that the emulator needs beside the guest's."""


@dataclass(frozen=True, slots=True)
class CloneRequest:
    """The clone to make."""

    name: str
    resumed: bool
    network: str = NO_NETWORK
    purpose: Purpose = Purpose.CLONE
    loading_seconds: int = 600
    """How long to wait while another clone loads its RAM on the same network."""


@dataclass(frozen=True, slots=True)
class Clone:
    """A clone that was made."""

    name: str
    uuid: str
    of: str
    resumed: bool
    network: str
    datasets: dict[str, str]
    """The name of each clone, by the snapshot's dataset."""
    disks: dict[str, str]
    """The path of each disk, by its target."""
    missing: tuple[str, ...]
    """Devices of the original that the clone does not have."""
    has_cards: bool
    """It has network cards."""

    def as_json(self) -> dict[str, object]:
        """The documented JSON object."""
        return {
            "name": self.name,
            "uuid": self.uuid,
            "of": self.of,
            "resumed": self.resumed,
            "network": self.network,
            "datasets": self.datasets,
            "disks": self.disks,
            "missing": list(self.missing),
        }


def dataset_name(origin: str, name: str) -> str:
    """Name the clone of a dataset: ``tank/vm/web`` cloned as ``test`` is ``tank/vm/web-test``.

    Characters that ZFS does not allow in names become ``_``; a checksum of the name follows.
    """
    fit = _INVALID_CHARACTERS.sub("_", name)
    if fit != name:
        fit += "-" + hashlib.sha256(name.encode()).hexdigest()[:8]
    pool, slash, _ = origin.partition("/")
    return f"{origin}-{fit}" if slash else f"{pool}/{pool}-{fit}"


class MarkedError(SharedError):
    """It is refused only since it came from another host; the step has it count as this one's."""


def check_clone(context: Context, source: Source, request: CloneRequest) -> None:
    """Check everything that can be checked before anything is made.

    Raises:
        UsageError, RefusedError, NotFoundError: the clone cannot be made.
    """
    _check_name(context, request)
    if request.resumed and not source.has_ram:
        raise RefusedError(
            source.thing, f"has no RAM to resume from ({source.manifest.level})", "omit --running"
        )
    if not request.resumed and source.text(Role.INACTIVE_XML) is None:
        raise RefusedError(
            source.thing,
            "is of a transient domain: there is no definition to boot from",
            "clone it with --running if it has RAM",
        )
    xml = _start_xml(source, request)
    check_network(context, source.thing, xml, request.network, resumed=request.resumed)
    check_beneath(source.thing, source.manifest)
    existing = dataset_kinds(context)
    for member in source.members:
        made = dataset_name(member.dataset, request.name)
        if made in existing:
            raise RefusedError(made, "exists already", "take another name")
        if len(made) > MAX_FULL_NAME:
            raise RefusedError(made, "is too long for the name of a dataset", "take a shorter name")
    if not source.disks:
        raise RefusedError(source.thing, "has no disks")
    check_whole_disks(context.resolver, source.thing, source.disks)
    for disk in source.disks:
        if existing.get(disk.dataset or "") is DatasetKind.FILESYSTEM:
            image_path_in_dataset(context.resolver, disk)
    _check_xml(context, source, request)
    if request.resumed or request.purpose is Purpose.VERIFY:
        _check_resources(context, source, request)


def _check_xml(context: Context, source: Source, request: CloneRequest) -> None:
    """Check the XML that the clone starts from, and the definition of a permanent clone."""
    start = _start_xml(source, request)
    identity = _identity(context, source, request, "0" * 36, {}, check=True)
    try:
        _make_all(source, request, start, identity)
    except SharedError as error:
        if error.step or context.foreign or not came_from_elsewhere(source.members):
            raise
        try:
            _make_all(source, request, start, replace(identity, emulators=None))
        except RefusedError:
            raise error from None
        if not _needs_no_consent(context, source, start):
            step = "restore it, which names what of this host you would have to accept"
            raise SharedError(error.thing, error.reason, step) from error
        names = [each.full_name for each in source.members if COPY in each.properties]
        released = shlex.join(["zfs", "inherit", PREFIX + COPY, *names])
        step = (
            "to have it count as this host's own, of which nothing is checked and "
            f"which retention may delete then: {released}"
        )
        raise MarkedError(error.thing, error.reason, step) from error
    check_tpm(source, start, resumed=request.resumed)


def _needs_no_consent(context: Context, source: Source, start: str) -> bool:
    """Whether a restore takes it as another host's without ``--accept``.

    Its definitions and images name no path outside of the guest's own datasets then, but firmware
    of packages. Others are not to count as this host's own: a clone or restore would open what they
    name.

    Args:
        context: of this host.
        source: the snapshot.
        start: the definition that the clone starts from.
    """
    texts = (start, source.text(Role.INACTIVE_XML), source.text(Role.LIVE_XML))
    try:
        own = OwnPlaces(context, source.thing, [each.dataset for each in source.members])
        definitions = with_paths(context, filter(None, texts))
        check_foreign_images(context, source.thing, source.members, own, definitions, ())
        return not to_accept(definitions, own.has)
    except RefusedError:  # or a file system is not mounted, so its paths are not known
        return False


def _make_all(source: Source, request: CloneRequest, start: str, identity: CloneSpec) -> None:
    definition = source.text(Role.INACTIVE_XML) if request.purpose is Purpose.CLONE else None
    for xml in filter(None, (start, definition)):
        make_clone_xml(xml, identity)


def _check_name(context: Context, request: CloneRequest) -> None:
    name = request.name
    if not name or name != name.strip() or "/" in name or not name.isprintable() or name[0] == "-":
        raise UsageError(f"clone name {name!r}", "is not a valid domain name")
    if any(name in (domain.name, domain.uuid) for domain in context.hypervisor.domains()):
        raise RefusedError(name, "a domain has this name already", "take another name")
    if any(artifacts.name == name for artifacts in find_artifacts(context)):
        raise RefusedError(
            name,
            "there are disks of a clone with this name",
            f"delete them: {shlex.join(['snaporch', 'clone', '--delete', name])}",
        )


def _check_resources(context: Context, source: Source, request: CloneRequest) -> None:
    needed = domain_xml.memory_bytes(domain_xml.parse(_start_xml(source, request))) + _MEMORY_MARGIN
    free = available_memory(context.resolver.host)
    if needed > free:
        raise RefusedError(
            source.thing,
            f"needs {needed >> 20} MiB of memory, {free >> 20} MiB are free",
            "shut down another guest first",
        )
    ram = source.part(Role.RAM)
    if ram is None or not request.resumed:
        return
    place = context.config.paths.clones
    existing = next(path for path in (place, *place.parents) if path.exists())
    room = shutil.disk_usage(existing).free
    needed = image_bytes(ram)
    if needed > room:
        raise RefusedError(
            str(place),
            f"no room for a copy of the RAM image: {needed >> 20} MiB needed, "
            f"{room >> 20} MiB free",
            "see paths.clones in the configuration",
        )


def check_parts(context: Context, source: Source, *, ram: bool) -> None:
    """Compare the SHA-256 of the bundle's parts with the manifest.

    Args:
        ram: check the RAM image, too.

    Raises:
        RefusedError: a part is damaged.
    """
    context.progress.step(source.thing, "checking the bundle's SHA-256")
    on_read = partial(context.progress.amount, source.thing)
    damage = context.store.damage(f"{source.record.uuid}/{source.record.run}", on_read)
    for part in source.manifest.parts:
        if part.name in damage and (ram or part.role is not Role.RAM):
            error = damage[part.name]
            raise RefusedError(error.thing, error.reason, "choose another snapshot: snaporch list")


def clone(context: Context, source: Source, request: CloneRequest) -> Clone:
    """Make a clone after :func:`check_clone` has passed.

    Raises:
        SnaporchError: the clone could not be made; nothing of it is left.
    """
    with (
        reading_lock(context, source.record),
        new_clone(context, request.name, request.purpose, source.thing) as uuid,
    ):
        return build_clone(context, source, request, uuid)


def build_clone(context: Context, source: Source, request: CloneRequest, uuid: str) -> Clone:
    """Make the datasets and files of the clone ``uuid``, define it and start it.

    The caller is inside :func:`~snaporch.clone.find_clones.new_clone`.

    Raises:
        SnaporchError: a step failed; the caller's context manager removes the clone.
    """
    try:
        return _build(context, source, request, uuid)
    except OSError as error:
        reason = f"{error.filename or source.thing}: {error.strerror}"
        raise RunFailedError(request.name, f"could not be made ({reason})") from error


def _build(context: Context, source: Source, request: CloneRequest, uuid: str) -> Clone:
    progress, thing = context.progress, request.name
    progress.step(thing, f"cloning {', '.join(member.full_name for member in source.members)}")
    datasets, places = _clone_disks(context, source, request, uuid)
    context.interrupt.check(thing)
    identity = _identity(context, source, request, uuid, places)
    start = make_clone_xml(_start_xml(source, request), identity)
    copy_firmware(context, source, identity, start.xml)
    _define_and_start(context, source, request, identity, start)
    return Clone(
        name=request.name,
        uuid=uuid,
        of=source.thing,
        resumed=request.resumed,
        network=request.network,
        datasets=datasets,
        disks={target: place.path for target, place in places.items()},
        missing=start.missing,
        has_cards=bool(domain_xml.parse(start.xml).findall("devices/interface")),
    )


def _start_xml(source: Source, request: CloneRequest) -> str:
    """The XML that the clone starts from: that of the RAM image, or the inactive definition."""
    if request.resumed:
        part = source.part(Role.RAM)
        assert part is not None
        return read_preface(source.directory / part.name).xml
    return source.text(Role.INACTIVE_XML) or ""


def _identity(
    context: Context,
    source: Source,
    request: CloneRequest,
    uuid: str,
    places: dict[str, CloneDisk],
    *,
    check: bool = False,
) -> CloneSpec:
    files = str(directory_of(context, uuid))
    if check:
        places = {disk.target: CloneDisk(f"{files}/disk", "file") for disk in source.disks}
    return CloneSpec(
        name=request.name,
        uuid=uuid,
        of=source.thing,
        disks=places,
        files=files,
        network=request.network,
        resumed=request.resumed,
        throw_away=request.purpose is not Purpose.CLONE,
        emulators=context.hypervisor.emulators() if is_foreign(context, source.members) else None,
    )


def clone_dataset(
    context: Context, source: Source, name: str, purpose: Purpose, uuid: str, dataset: str
) -> ClonedDataset:
    """Clone one dataset and mark it with the UUID of the clone it belongs to.

    Args:
        name: the name of the clone.
        purpose: decides which user property holds the UUID.
        uuid: the UUID of the clone.
        dataset: the dataset of the snapshot.

    Raises:
        PoolError: ZFS cannot clone it.
    """
    made = dataset_name(dataset, name)
    kind = dataset_kinds(context)[dataset]
    index = [member.dataset for member in source.members].index(dataset)
    mount = directory_of(context, uuid) / f"disk{index}"
    properties = {purpose.mark: uuid, NAME_PROPERTY: name, OF_PROPERTY: source.thing}
    if kind is DatasetKind.FILESYSTEM:
        properties |= {"mountpoint": str(mount), "canmount": "on"}
    else:
        properties |= {"volmode": "dev"}
        properties |= {"readonly": "on"} if purpose is Purpose.EXTRACT else {}
    properties |= context.pool.local_properties(COPIED_PROPERTIES).get(dataset, {})
    if is_foreign(context, source.members):
        properties = {**_of_a_copy(kind), **properties}
    context.pool.clone(source.member(dataset).full_name, made, properties)
    if kind is DatasetKind.FILESYSTEM:
        return ClonedDataset(made, kind, mount)
    node = context.resolver.volume_node(made)
    # A permanent clone needs the link: the device node may be another one after a reboot.
    permanent = purpose is Purpose.CLONE
    return ClonedDataset(made, kind, node if permanent else Path(os.path.realpath(node)))


def _of_a_copy(kind: DatasetKind) -> dict[str, str]:
    """Properties of a copy's clone, which would be read-only like the copy.

    The files come from another host: no user of this one may run them, or open a device of them.
    """
    found = {"readonly": "off"}
    if kind is DatasetKind.FILESYSTEM:
        found |= {"setuid": "off", "exec": "off", "devices": "off"}
    return found


def _clone_disks(
    context: Context, source: Source, request: CloneRequest, uuid: str
) -> tuple[dict[str, str], dict[str, CloneDisk]]:
    made = {
        name: clone_dataset(context, source, request.name, request.purpose, uuid, name)
        for name in (member.dataset for member in source.members)
    }
    images = Images(context, source, made)
    places = {disk.target: images.place_of(disk) for disk in source.disks}
    return {origin: cloned.name for origin, cloned in made.items()}, places


def _define_and_start(
    context: Context,
    source: Source,
    request: CloneRequest,
    identity: CloneSpec,
    start: CloneXml,
) -> None:
    """Define a permanent clone; resume or boot the clone if that was requested.

    A temporary clone is a transient domain, which disappears when its emulator exits.
    """
    definition = source.text(Role.INACTIVE_XML)
    if request.purpose is Purpose.CLONE and definition is not None:
        xml = make_clone_xml(definition, identity).xml if request.resumed else start.xml
        context.hypervisor.define(xml)
    if request.resumed:
        _resume(context, source, request, identity, start.xml)
    elif request.purpose is not Purpose.CLONE:
        context.progress.step(request.name, "booting")
        context.hypervisor.create(
            start.xml, paused=True, validate=is_foreign(context, source.members)
        )
        _check_and_resume(context, source, identity, running=True)


def _resume(
    context: Context, source: Source, request: CloneRequest, identity: CloneSpec, xml: str
) -> None:
    part = source.part(Role.RAM)
    assert part is not None
    image = Path(identity.files) / RAM_COPY
    if part.pages is not None:
        make_image(context, request.name, source.directory, part, image, xml)
    else:
        copy_with_xml(source.directory / part.name, image, xml)
    context.interrupt.check(request.name)
    context.progress.step(request.name, "resuming from RAM")
    xml_of_start, wait = _start_xml(source, request), request.loading_seconds
    with address_lock(context, source.thing, xml_of_start, request.network, wait):
        context.hypervisor.restore(image, running=False)
    image.unlink()
    running = source.manifest.was_running or request.purpose is not Purpose.CLONE
    _check_and_resume(context, source, identity, running=running)


def _check_and_resume(
    context: Context, source: Source, identity: CloneSpec, *, running: bool
) -> None:
    """Let the clone run if its emulator has only the clone's own files open.

    Checked again after the resume, since QEMU may open a file for writing only then.
    """
    nodes = [Path(place.path) for place in identity.disks.values() if place.kind == "block"]
    directory = Path(identity.files)
    check_open_files(context, source.thing, identity.uuid, directory, nodes)
    if running:
        context.hypervisor.resume(identity.uuid)
        check_open_files(context, source.thing, identity.uuid, directory, nodes)
