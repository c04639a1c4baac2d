"""Making a guest of a snapshot, beside the one it was taken of.

Every dataset is cloned (``zfs clone``), so it costs no space and no time; RAM is copied, for its
image has to carry the clone's XML (:mod:`snaporch.bundle.save_image_copy`).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from snaporch import default_paths
from snaporch.bundle.manifest import Role
from snaporch.bundle.save_image_copy import copy_with_xml, read_preface
from snaporch.clone.firmware import check_tpm, copy_firmware
from snaporch.clone.images import ClonedDataset, Images
from snaporch.clone.open_file_check import check_own_files
from snaporch.clone.registry import (
    NAME_PROPERTY,
    OF_PROPERTY,
    Purpose,
    directory_of,
    find_traces,
    workplace,
)
from snaporch.context import Context
from snaporch.errors import RefusedError, RunFailedError, UsageError
from snaporch.hypervisor import domain_xml
from snaporch.hypervisor.clone_xml import (
    ISOLATED,
    NO_NETWORK,
    CloneDisk,
    CloneIdentity,
    CloneXml,
    memory_bytes,
    rewrite,
)
from snaporch.locks import domain_lock
from snaporch.model import DatasetKind
from snaporch.names import MAX_FULL_NAME
from snaporch.restore.disk_checks import check_beneath
from snaporch.restore.host_requirements import available_memory as memory_available
from snaporch.restore.ram_from_pages import image_bytes, make_image
from snaporch.restore.source import Source, check_whole_disks, kinds, path_inside, reading
from snaporch.zfs import resolver

RAM_COPY = "ram.save"
AS_THE_ORIGINAL = (
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
"""Properties that a clone has as well if they were set on the original dataset itself: they make it
as safe and as fast. What says where a dataset is mounted, how much room it has or keeps, what is
replicated or snapshotted by other tools (user properties) is the original's alone."""
_UNFIT = re.compile(r"[^A-Za-z0-9_.:-]")
_MEMORY_MARGIN = 64 << 20
"""For the emulator itself."""
_LOADING_SECONDS = 600
"""How long another clone may take to load its RAM before this one does."""


@dataclass(frozen=True, slots=True)
class CloneRequest:
    """The clone that is wanted."""

    name: str
    resumed: bool
    network: str = NO_NETWORK
    purpose: Purpose = Purpose.CLONE


@dataclass(frozen=True, slots=True)
class Clone:
    """What was made."""

    name: str
    uuid: str
    of: str
    resumed: bool
    network: str
    datasets: dict[str, str]
    """The clone of each of the snapshot's datasets."""
    disks: dict[str, str]
    """Path by target."""
    missing: tuple[str, ...]
    """What the original has and the clone does not."""

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
    """Beside its origin: ``tank/vm/web`` cloned as ``test`` is ``tank/vm/web-test``.

    Characters that ZFS does not take in names become ``_``, followed by a checksum of the name.
    """
    fit = _UNFIT.sub("_", name)
    if fit != name:
        fit += "-" + hashlib.sha256(name.encode()).hexdigest()[:8]
    pool, slash, _ = origin.partition("/")
    return f"{origin}-{fit}" if slash else f"{pool}/{pool}-{fit}"


def check_clone(context: Context, source: Source, wish: CloneRequest) -> None:
    """Everything that can be known before anything is made.

    Raises:
        UsageError, RefusedError, NotFoundError: it cannot be done, and why.
    """
    _check_name(context, wish)
    _check_network(context, source, wish)
    if wish.resumed and not source.has_ram:
        raise RefusedError(
            source.thing, f"has no RAM to resume from ({source.manifest.level})", "omit --running"
        )
    if not wish.resumed and source.text(Role.INACTIVE_XML) is None:
        raise RefusedError(
            source.thing, "is of a transient domain: there is no definition to boot from"
        )
    check_beneath(source.thing, source.manifest)
    existing = kinds(context)
    for member in source.members:
        made = dataset_name(member.dataset, wish.name)
        if made in existing:
            raise RefusedError(made, "exists already", "take another name")
        if len(made) > MAX_FULL_NAME:
            raise RefusedError(made, "is too long for the name of a dataset", "take a shorter name")
    if not source.disks:
        raise RefusedError(source.thing, "has no disks")
    check_whole_disks(source.thing, source.disks)
    for disk in source.disks:
        if existing.get(disk.dataset or "") is DatasetKind.FILESYSTEM:
            path_inside(disk)
    _check_xml(context, source, wish)
    if wish.resumed or wish.purpose is Purpose.VERIFY:
        _check_room(context, source, wish)


def _check_xml(context: Context, source: Source, wish: CloneRequest) -> None:
    """What it starts with, and what it is defined with if it is to last."""
    leading = _leading_xml(source, wish)
    definition = source.text(Role.INACTIVE_XML) if wish.purpose is Purpose.CLONE else None
    for xml in filter(None, (leading, definition)):
        rewrite(xml, _identity(context, source, wish, "0" * 36, {}, check=True))
    check_tpm(source, leading, resumed=wish.resumed)


def _check_name(context: Context, wish: CloneRequest) -> None:
    name = wish.name
    if not name or name != name.strip() or "/" in name or not name.isprintable() or name[0] == "-":
        raise UsageError(f"clone name {name!r}", "is no name for a domain")
    if any(name in (domain.name, domain.uuid) for domain in context.hypervisor.domains()):
        raise RefusedError(name, "a domain has this name already", "take another name")
    if any(traces.name == name for traces in find_traces(context)):
        raise RefusedError(
            name, "there are disks of a clone of this name", f"snaporch clone --delete {name}"
        )


def _check_network(context: Context, source: Source, wish: CloneRequest) -> None:
    if wish.network in (NO_NETWORK, ISOLATED):
        return
    isolated = context.hypervisor.network_is_isolated(wish.network)
    if wish.resumed and isolated:
        _check_addresses(context, source, wish)
    if wish.resumed and not isolated:
        raise RefusedError(
            source.thing,
            f"the network {wish.network} leads out, and in its RAM the clone has the addresses of "
            "the original",
            "use --network isolated, or a network without <forward>",
        )


def _check_addresses(context: Context, source: Source, wish: CloneRequest) -> None:
    """From RAM it has the addresses of its original, as has each other clone of it."""
    cards = domain_xml.parse(_leading_xml(source, wish)).findall("devices/interface/mac")
    own = {mac.get("address", "").lower() for mac in cards}
    for domain in context.hypervisor.domains():
        if domain.live_xml is None:
            continue
        taken = own & domain_xml.cards(domain_xml.parse(domain.live_xml), wish.network)
        if taken:
            raise RefusedError(
                source.thing,
                f"{domain.name} is on the network {wish.network} with the same MAC address "
                f"{min(taken)}, which the clone has in its RAM",
                "use --network isolated, or another network without <forward>",
            )


@contextmanager
def _addresses(context: Context, source: Source, wish: CloneRequest) -> Iterator[None]:
    """Start a clone from RAM while no other that has its addresses starts on its network."""
    if wish.network in (NO_NETWORK, ISOLATED):
        yield
        return
    network, wait = wish.network, _LOADING_SECONDS
    key, interrupt = f"network-{network}", context.interrupt
    with domain_lock(default_paths.LOCKS, network, key, "clone", wait=wait, interrupt=interrupt):
        _check_addresses(context, source, wish)
        yield


def _check_room(context: Context, source: Source, wish: CloneRequest) -> None:
    needed = memory_bytes(_leading_xml(source, wish)) + _MEMORY_MARGIN
    free = memory_available()
    if needed > free:
        raise RefusedError(
            source.thing,
            f"needs {needed >> 20} MiB of memory, {free >> 20} MiB are free",
            "shut something down first",
        )
    ram = source.part(Role.RAM)
    if ram is None or not wish.resumed:
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
    """Compare what will be used of the bundle with the manifest, SHA-256 and all.

    Raises:
        RefusedError: something is damaged.
    """
    context.progress.step(source.thing, "checking the bundle's SHA-256")
    damage = context.store.damage(f"{source.record.uuid}/{source.record.run}")
    for part in source.manifest.parts:
        if part.name in damage and (ram or part.role is not Role.RAM):
            error = damage[part.name]
            raise RefusedError(error.thing, error.reason, "see `snaporch list` for another")


def clone(context: Context, source: Source, wish: CloneRequest) -> Clone:
    """Make a clone that lasts; it was checked.

    Raises:
        SnaporchError: it could not be made, and nothing of it is left.
    """
    with (
        reading(context, source.record),
        workplace(context, wish.name, wish.purpose, source.thing) as uuid,
    ):
        return build(context, source, wish, uuid)


def build(context: Context, source: Source, wish: CloneRequest, uuid: str) -> Clone:
    """Datasets, files, definition, and the start, in the workplace of ``uuid``."""
    try:
        return _build(context, source, wish, uuid)
    except OSError as error:
        reason = f"{error.filename or source.thing}: {error.strerror}"
        raise RunFailedError(wish.name, f"could not be made ({reason})") from error


def _build(context: Context, source: Source, wish: CloneRequest, uuid: str) -> Clone:
    progress, thing = context.progress, wish.name
    progress.step(thing, f"cloning {', '.join(member.full_name for member in source.members)}")
    datasets, places = _clone_disks(context, source, wish, uuid)
    context.interrupt.check(thing)
    identity = _identity(context, source, wish, uuid, places)
    leading = rewrite(_leading_xml(source, wish), identity)
    copy_firmware(source, identity, leading.xml)
    _bring_up(context, source, wish, identity, leading)
    return Clone(
        name=wish.name,
        uuid=uuid,
        of=source.thing,
        resumed=wish.resumed,
        network=wish.network,
        datasets=datasets,
        disks={target: place.path for target, place in places.items()},
        missing=leading.missing,
    )


def _leading_xml(source: Source, wish: CloneRequest) -> str:
    """The XML that the clone starts with: that of its RAM, or the definition."""
    if wish.resumed:
        part = source.part(Role.RAM)
        assert part is not None
        return read_preface(source.directory / part.name).xml
    return source.text(Role.INACTIVE_XML) or ""


def _identity(
    context: Context,
    source: Source,
    wish: CloneRequest,
    uuid: str,
    places: dict[str, CloneDisk],
    *,
    check: bool = False,
) -> CloneIdentity:
    if check:
        places = {disk.target: CloneDisk("/", "file") for disk in source.disks}
    return CloneIdentity(
        name=wish.name,
        uuid=uuid,
        of=source.thing,
        disks=places,
        files=str(directory_of(context, uuid)),
        network=wish.network,
        resumed=wish.resumed,
        throw_away=wish.purpose is not Purpose.CLONE,
    )


def clone_dataset(
    context: Context, source: Source, name: str, purpose: Purpose, uuid: str, dataset: str
) -> ClonedDataset:
    """Clone one dataset, with the marks of the clone ``uuid``."""
    made = dataset_name(dataset, name)
    kind = kinds(context)[dataset]
    index = [member.dataset for member in source.members].index(dataset)
    mount = directory_of(context, uuid) / f"disk{index}"
    properties = {purpose.mark: uuid, NAME_PROPERTY: name, OF_PROPERTY: source.thing}
    if kind is DatasetKind.FILESYSTEM:
        properties |= {"mountpoint": str(mount), "canmount": "on"}
    else:
        properties |= {"volmode": "dev"}
        properties |= {"readonly": "on"} if purpose is Purpose.EXTRACT else {}
    properties |= context.pool.local_properties(AS_THE_ORIGINAL).get(dataset, {})
    context.pool.clone(source.member(dataset).full_name, made, properties)
    if kind is DatasetKind.FILESYSTEM:
        return ClonedDataset(made, kind, mount)
    node = resolver.volume_node(made)
    lasts = purpose is Purpose.CLONE  # over a reboot the link is the same, the node is not
    return ClonedDataset(made, kind, node if lasts else Path(os.path.realpath(node)))


def _clone_disks(
    context: Context, source: Source, wish: CloneRequest, uuid: str
) -> tuple[dict[str, str], dict[str, CloneDisk]]:
    made = {
        name: clone_dataset(context, source, wish.name, wish.purpose, uuid, name)
        for name in (member.dataset for member in source.members)
    }
    images = Images(context, source, made)
    places = {disk.target: images.place_of(disk) for disk in source.disks}
    return {origin: cloned.name for origin, cloned in made.items()}, places


def _bring_up(
    context: Context, source: Source, wish: CloneRequest, identity: CloneIdentity, leading: CloneXml
) -> None:
    """Defined if it is to last; a throw-away clone is gone with its emulator."""
    definition = source.text(Role.INACTIVE_XML)
    if wish.purpose is Purpose.CLONE and definition is not None:
        xml = rewrite(definition, identity).xml if wish.resumed else leading.xml
        context.hypervisor.define(xml)
    if wish.resumed:
        _resume(context, source, wish, identity, leading.xml)
    elif wish.purpose is not Purpose.CLONE:
        context.progress.step(wish.name, "booting")
        context.hypervisor.create(leading.xml, paused=True)
        _let_run(context, source, identity, running=True)


def _resume(
    context: Context, source: Source, wish: CloneRequest, identity: CloneIdentity, xml: str
) -> None:
    part = source.part(Role.RAM)
    assert part is not None
    image = Path(identity.files) / RAM_COPY
    if part.pages is not None:
        make_image(context, wish.name, source.directory, part, image, xml)
    else:
        copy_with_xml(source.directory / part.name, image, xml)
    context.interrupt.check(wish.name)
    context.progress.step(wish.name, "resuming from RAM")
    with _addresses(context, source, wish):
        context.hypervisor.restore(image, running=False)
    image.unlink()
    running = source.manifest.was_running or wish.purpose is not Purpose.CLONE
    _let_run(context, source, identity, running=running)


def _let_run(context: Context, source: Source, identity: CloneIdentity, *, running: bool) -> None:
    """When everything that its emulator has open is its own.

    Looked at again afterwards: QEMU may open something for writing only when the guest runs.
    """
    nodes = [Path(place.path) for place in identity.disks.values() if place.kind == "block"]
    directory = Path(identity.files)
    check_own_files(context, source.thing, identity.uuid, directory, nodes)
    if running:
        context.hypervisor.resume(identity.uuid)
        check_own_files(context, source.thing, identity.uuid, directory, nodes)
