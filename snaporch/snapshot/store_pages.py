"""Store RAM as pages, so that each image costs only the pages that changed.

The page file of the guest is in a dataset of its own, and each image is a ZFS snapshot of it, so
ZFS keeps only the difference. A half-written page file does no harm: only its snapshots are used,
and the next image is compared with its contents.

The pages are written while RAM arrives (:func:`pages_target`, :func:`with_pages`), and the bundle
is sealed only when they were read back from the snapshot, as a restore reads them.

Where that is not possible, the image of the sealed bundle is copied into the page file after the
run (:func:`store_as_pages`). The image is removed only when the pages were read back and the
manifest names them. So after an error or a kill at any point the snapshot can be restored.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from snaporch.bundle.compression_tuning import RamSaveTimes
from snaporch.bundle.manifest import Manifest, PagesEntry, Part, Role, read_manifest
from snaporch.bundle.page_file import PAGES_NAME, SETTLE_BYTES
from snaporch.bundle.page_image import Tick, check_image, split_image
from snaporch.bundle.save_image import SaveImageError
from snaporch.bundle.store import REST_NAME, replace_manifest
from snaporch.catalog.run_snapshots import page_snapshots
from snaporch.context import Context
from snaporch.errors import RefusedError, RunFailedError, SnaporchError
from snaporch.hypervisor.domain_xml import parse, whole_memory
from snaporch.model import Domain, PoolSnapshot, SnapshotRecord
from snaporch.private_files import sha256_of, sync_directory
from snaporch.reserve import free_room
from snaporch.zfs import RAM_POOLS_PROPERTY, RAM_PROPERTY, PoolError

_COMPRESSION = "pages"
_IMAGE_FIRST_NAME = "image-first"
"""In the page dataset: a file that has the next run save a whole image first."""
_TOOK_TOO_LONG = b"time\n"
"""Its content if saving RAM took too long. Other causes leave it empty."""
_AFTER_TOO_LONG = timedelta(days=7)
"""How long it stays then: that a whole image was taken apart later does not make pages faster."""
_MORE = 1.25
"""How much more room pages may take than a whole image: small records compress less."""


@dataclass(frozen=True, slots=True)
class PageDataset:
    """The dataset that holds a domain's page file."""

    name: str
    root: Path

    @property
    def page_file(self) -> Path:
        """The page file into which the next image is written."""
        return self.root / PAGES_NAME

    @property
    def _mark(self) -> Path:
        return self.root / _IMAGE_FIRST_NAME

    @property
    def image_first(self) -> bool:
        """Whether an earlier run lost its RAM while it used pages."""
        return os.path.lexists(self._mark)

    def note_image_first(self, *, too_long: bool) -> None:
        """Have the next runs save a whole image first, which survives an error with pages.

        Args:
            too_long: whether saving RAM took too long.

        Raises:
            OSError: it cannot be noted.
        """
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(self._mark, flags, 0o600), "wb") as mark:
            mark.write(_TOOK_TOO_LONG if too_long else b"")

    def forget_image_first(self, now: datetime) -> None:
        """Have pages written while RAM arrives again, if that is due: a whole image was split."""
        if not self._took_too_long_lately(now):
            self._mark.unlink(missing_ok=True)

    def _took_too_long_lately(self, now: datetime) -> bool:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(self._mark, flags), "rb") as mark:
                age = timedelta(seconds=now.timestamp() - os.fstat(mark.fileno()).st_mtime)
                cause = mark.read(len(_TOOK_TOO_LONG) + 1)
        except OSError:
            return False
        return cause == _TOOK_TOO_LONG and timedelta() <= age < _AFTER_TOO_LONG


class PageRoom:
    """Watches over the room that is left for others while pages are written: guests use the pool.

    ZFS counts what was written only when it is on the disks.
    """

    def __init__(self, context: Context, dataset: PageDataset) -> None:
        self._context = context
        self._dataset = dataset
        self._unsynced = 0

    def settle(self, *, at_once: bool = False) -> None:
        """Check the room; the ``settle`` of :class:`~snaporch.bundle.page_file.PageFile`.

        Args:
            at_once: sync the pool, which is otherwise done only when room runs out. Else snapshots
                in the pause of any guest would wait for all that was written to the pool.

        Raises:
            OSError: ``ENOSPC``: only the :func:`~snaporch.reserve.reserve` is left.
        """
        self._unsynced += SETTLE_BYTES
        if at_once or self._is_short():
            with suppress(PoolError):  # the pool is slow; whether it takes pages, the file says
                self._context.pool.sync([self._dataset.name])
                self._unsynced = 0
        if self._is_short():
            reason = "the room that is left in the pool is kept for others"
            raise OSError(errno.ENOSPC, reason, str(self._dataset.page_file))

    def _is_short(self) -> bool:
        return free_room(self._dataset.root) <= self._unsynced


@dataclass(frozen=True, slots=True)
class PagesRun:
    """The run that pages belong to."""

    domain: str
    uuid: str
    run: str
    snapshot: str
    pools: tuple[str, ...]
    """The pools of its snapshots."""

    @property
    def mark(self) -> str:
        """What marks its page snapshot."""
        return f"{self.uuid}/{self.run}"

    @classmethod
    def of(cls, domain: str, uuid: str, run: str, snapshot: str, names: Iterable[str]) -> PagesRun:
        """The run whose snapshots are of the datasets with these names."""
        pools = sorted({name.split("/", 1)[0] for name in names})
        return cls(domain, uuid, run, snapshot, tuple(pools))


@dataclass(frozen=True, slots=True)
class WrittenPages:
    """A page file that was written while RAM arrived."""

    bytes: int
    sha256: str
    split: int
    """Where the pages belong in the rest."""


def pages_target(context: Context, domain: Domain) -> PageDataset | None:
    """The dataset into which pages can be written while RAM arrives; ``None`` if they cannot.

    Args:
        context: configuration, pools and progress.
        domain: the domain, which runs. The pool must have room for all of its memory, of which it
            may use more meanwhile.
    """
    if context.config.settings(domain.name, domain.uuid).ram_store != "pages":
        return None
    try:
        dataset = page_dataset(context, domain.uuid)
        if dataset.image_first:
            raise RunFailedError(dataset.name, "an earlier run lost its RAM with pages")
        _check_room(dataset, whole_memory(parse(domain.live_xml or "<domain/>")))
    except (SnaporchError, OSError) as error:
        context.progress.step(domain.name, f"RAM is saved as a whole image first: {_reason(error)}")
        return None
    return dataset


def with_pages(
    context: Context,
    of: PagesRun,
    dataset: PageDataset,
    rest: Path,
    part: Part,
    written: WrittenPages,
    tick: Tick,
) -> Part:
    """Snapshot a page file that was just written, and read it back.

    Args:
        context: configuration, pools and progress.
        of: the run.
        dataset: the page file's.
        rest: the file in the bundle.
        part: the rest.
        written: what was written into the page file.
        tick: see :data:`~snaporch.bundle.page_image.Tick`.

    Returns:
        The part with its pages.

    Raises:
        SnaporchError, OSError: RAM cannot be restored from the pages; their snapshot is destroyed.
    """
    try:
        taken, stored = _snapshot(context, dataset, of)
        entry = PagesEntry(
            dataset=taken.dataset,
            name=taken.name,
            guid=taken.guid,
            createtxg=taken.createtxg,
            bytes=written.bytes,
            sha256=written.sha256,
            split=written.split,
            stored_bytes=stored,
        )
        whole = part.model_copy(update={"pages": entry})
        _read_back(context, of.domain, whole, rest, tick)
    except BaseException:
        with suppress(SnaporchError):  # else it stays until its run's snapshots are gone
            if own := page_snapshots(context, of.uuid, of.run):
                context.pool.destroy_snapshots(own)
        raise
    return whole


def store_as_pages(context: Context, record: SnapshotRecord) -> SnapshotRecord:
    """Move the RAM of a new snapshot into its domain's page dataset, if so configured.

    The caller holds the domain's lock, and the run is over. If it fails, a note is printed and the
    bundle keeps its whole image.

    Returns:
        The record, with the bytes that are stored now.
    """
    settings = context.config.settings(record.domain, record.uuid)
    if settings.ram_store != "pages" or record.bundle is None:
        return record
    directory = Path(record.bundle)
    try:
        manifest = read_manifest(directory)
        ram = manifest.part(Role.RAM)
        if ram is None or ram.pages is not None:
            return record
        return replace(record, stored_bytes=_move(context, directory, manifest, ram).stored_bytes)
    except (SnaporchError, OSError) as error:
        context.progress.note(record.domain, f"RAM stays a whole image: {_reason(error)}")
        return record


def _move(context: Context, directory: Path, manifest: Manifest, ram: Part) -> Manifest:
    dataset = page_dataset(context, manifest.uuid)
    _check_room(dataset, int(ram.bytes * _MORE))
    context.progress.step(manifest.domain, f"writing what changed in RAM to {dataset.name}")
    rest = directory / REST_NAME
    rest.unlink(missing_ok=True)
    total = ram.payload_bytes or 0

    def tick(done: int) -> None:
        context.interrupt.check(manifest.domain)
        context.progress.amount(manifest.domain, min(done, total), total)

    try:
        image = directory / ram.name
        settle = partial(PageRoom(context, dataset).settle, at_once=True)
        parts = split_image(image, rest, dataset.page_file, tick, settle)
        names = [entry.dataset for entry in manifest.snapshots]
        of = PagesRun.of(manifest.domain, manifest.uuid, manifest.run, manifest.snapshot, names)
        written = WrittenPages(parts.page_file_bytes, parts.page_sum, parts.split)
        part = rest_part(parts.rest_bytes, parts.rest_sha256, ram.payload_bytes, ram.pace)
        part = with_pages(context, of, dataset, rest, part, written, tick)
    except BaseException:
        rest.unlink(missing_ok=True)
        raise
    others = [part if each is ram else each for each in manifest.parts]
    moved = manifest.model_copy(update={"parts": tuple(others)})
    replace_manifest(directory, moved)  # after an error either manifest may be on the disk
    (directory / ram.name).unlink()
    sync_directory(directory)
    dataset.forget_image_first(context.clock.now())
    return moved


def _read_back(context: Context, domain: str, part: Part, rest: Path, tick: Tick) -> None:
    """Check that RAM can be restored from the pages, before anything relies on that."""
    assert part.pages is not None
    context.progress.step(domain, f"reading RAM back from @{part.pages.name}")
    with context.pool.mounted_snapshot(part.pages.full_name) as root:
        check_image(rest, part.pages, root / PAGES_NAME, tick)
    if sha256_of(rest) != part.sha256:
        raise SaveImageError(str(rest), "its SHA-256 is not what was written: it is damaged")


def _check_room(dataset: PageDataset, needed: int) -> None:
    """Check for room for all pages: the pool is also the guests', and must not be filled."""
    free = free_room(dataset.root)
    if needed > free:
        raise RefusedError(
            dataset.name,
            f"pages may need {needed >> 20} MiB, {free >> 20} MiB are free for them",
            "make room in the pool",
        )


_SNAPDIR = "snapdir"
"""Makes ``.zfs`` available, from which an admin reads pages; a pool may have disabled it."""


def page_dataset(context: Context, uuid: str) -> PageDataset:
    """Return the page dataset of a domain, and create it if it does not exist.

    Raises:
        RefusedError: snaporch did not create the dataset of that name.
        PoolError: the dataset cannot be created.
        NotOnZfsError: the dataset is not mounted.
    """
    name = f"{context.config.ram_pages.dataset}/{uuid}"
    if name not in {dataset.name for dataset in context.pool.datasets()}:
        options = context.config.ram_pages
        context.pool.create_filesystem(
            name,
            {
                "recordsize": str(options.record_kib << 10),
                "compression": options.compression,
                "atime": "off",
                _SNAPDIR: "hidden",
                RAM_PROPERTY: uuid,
            },
        )
    own = context.pool.local_properties([RAM_PROPERTY, _SNAPDIR]).get(name, {})
    if own.get(RAM_PROPERTY) != uuid:
        raise RefusedError(
            name,
            "was not created for RAM by this snaporch",
            f"zfs set {RAM_PROPERTY}={uuid} {shlex.quote(name)}",
        )
    if own.get(_SNAPDIR) not in ("hidden", "visible"):
        context.pool.set_properties([name], {_SNAPDIR: "hidden"})
    root = context.resolver.mount_point_of(name)
    if stat.S_IMODE(root.stat().st_mode) != stat.S_IRWXU:
        root.chmod(stat.S_IRWXU)  # RAM holds keys and passwords; snapshots keep the mode
    return PageDataset(name, root)


def _snapshot(context: Context, dataset: PageDataset, of: PagesRun) -> tuple[PoolSnapshot, int]:
    """Snapshot the page file; return the snapshot and the bytes that it costs.

    Its name is that of the guest's snapshot; the run is added if an older snapshot has that name.
    """
    before = context.pool.snapshots([dataset.name])
    name = of.snapshot
    if name in {snapshot.name for snapshot in before}:
        name = f"{name}_{of.run}"
    full = f"{dataset.name}@{name}"
    context.pool.snapshot(
        [full],
        {RAM_PROPERTY: of.mark, RAM_POOLS_PROPERTY: ",".join(of.pools)},
    )
    after = context.pool.snapshots([dataset.name])
    taken = next((snapshot for snapshot in after if snapshot.name == name), None)
    if taken is None:
        raise RunFailedError(full, "was destroyed as soon as it was taken")
    return taken, _cost(context, full, before)


def _cost(context: Context, full: str, before: list[PoolSnapshot]) -> int:
    """The bytes that a page snapshot costs; 0 if they cannot be counted."""
    with suppress(SnaporchError):
        if before:
            return context.pool.written_since(before[-1].full_name)
        return context.pool.sizes([full])[full][1]
    return 0


def rest_part(size: int, sha256: str, payload_bytes: int | None, pace: RamSaveTimes | None) -> Part:
    """The part of a manifest for RAM whose pages are in a page file, before they are named.

    Args:
        size: bytes of the rest.
        sha256: of the rest.
        payload_bytes: of RAM, the pages included.
        pace: how fast it was saved, if known.
    """
    return Part(
        name=REST_NAME,
        role=Role.RAM,
        bytes=size,
        sha256=sha256,
        payload_bytes=payload_bytes,
        compression=_COMPRESSION,
        pace=pace,
    )


def _reason(error: SnaporchError | OSError) -> str:
    if isinstance(error, SnaporchError):
        return error.line()
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"
