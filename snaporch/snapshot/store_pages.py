"""Store RAM as pages, so that each image costs only the pages that changed.

The pages of a sealed bundle's image are copied into the page file of the guest. The page file is in
a dataset of its own, and each image is a ZFS snapshot of it, so ZFS keeps only the difference.

All of this happens after the run, when its bundle is complete. The image in the bundle is removed
only when the pages were read back from that snapshot as a restore reads them, and the manifest
names it. So after an error or a kill at any point the snapshot can be restored. A half-written page
file does no harm: only its snapshots are used, and the next image is compared with its contents.
"""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from snaporch.bundle.manifest import Manifest, PagesEntry, Part, Role, read_manifest
from snaporch.bundle.page_file import PAGES_NAME
from snaporch.bundle.page_image import SplitImage, Tick, check_image, split_image
from snaporch.bundle.save_image import SaveImageError
from snaporch.bundle.store import REST_NAME, replace_manifest
from snaporch.context import Context
from snaporch.errors import RefusedError, RunFailedError, SnaporchError
from snaporch.model import PoolSnapshot, SnapshotRecord
from snaporch.private_files import sha256_of, sync_directory
from snaporch.zfs import RAM_POOLS_PROPERTY, RAM_PROPERTY

COMPRESSION = "pages"
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
        reason = error.line() if isinstance(error, SnaporchError) else _of_system(error)
        context.progress.note(record.domain, f"RAM stays a whole image: {reason}")
        return record


def _move(context: Context, directory: Path, manifest: Manifest, ram: Part) -> Manifest:
    dataset = page_dataset(context, manifest.uuid)
    _check_room(dataset, ram)
    context.progress.step(manifest.domain, f"writing what changed in RAM to {dataset.name}")
    rest = directory / REST_NAME
    rest.unlink(missing_ok=True)
    total = ram.payload_bytes or 0

    def tick(done: int) -> None:
        context.interrupt.check(manifest.domain)
        context.progress.amount(manifest.domain, min(done, total), total)

    try:
        parts = split_image(directory / ram.name, rest, dataset.page_file, tick)
        taken, stored = _snapshot(context, dataset, manifest)
        moved = _with_pages(manifest, ram, parts, taken, stored)
        _read_back(context, moved, rest, tick)
    except BaseException:
        rest.unlink(missing_ok=True)
        raise
    replace_manifest(directory, moved)  # after an error either manifest may be on the disk
    (directory / ram.name).unlink()
    sync_directory(directory)
    return moved


def _read_back(context: Context, moved: Manifest, rest: Path, tick: Tick) -> None:
    """Check that RAM can be restored from the pages, before the image is removed."""
    part = moved.part(Role.RAM)
    assert part is not None
    assert part.pages is not None
    context.progress.step(moved.domain, f"reading RAM back from @{part.pages.name}")
    with context.pool.mounted_snapshot(part.pages.full_name) as root:
        check_image(rest, part.pages, root / PAGES_NAME, tick)
    if sha256_of(rest) != part.sha256:
        raise SaveImageError(str(rest), "its SHA-256 is not what was written: it is damaged")


def _check_room(dataset: PageDataset, ram: Part) -> None:
    """Check for room for all pages: the pool is also the guests', and must not be filled."""
    free, needed = shutil.disk_usage(dataset.root).free, int(ram.bytes * _MORE)
    if needed > free:
        raise RefusedError(
            dataset.name,
            f"pages may need {needed >> 20} MiB, {free >> 20} MiB are free",
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
    root.chmod(0o700)  # RAM holds keys and passwords; snapshots keep the mode
    return PageDataset(name, root)


def _snapshot(
    context: Context, dataset: PageDataset, manifest: Manifest
) -> tuple[PoolSnapshot, int]:
    """Snapshot the page file; return the snapshot and the bytes that it costs.

    Its name is that of the guest's snapshot; the run is added if an older snapshot has that name.
    """
    before = context.pool.snapshots([dataset.name])
    name = manifest.snapshot
    if name in {snapshot.name for snapshot in before}:
        name = f"{name}_{manifest.run}"
    full = f"{dataset.name}@{name}"
    pools = sorted({entry.dataset.split("/", 1)[0] for entry in manifest.snapshots})
    context.pool.snapshot(
        [full],
        {RAM_PROPERTY: f"{manifest.uuid}/{manifest.run}", RAM_POOLS_PROPERTY: ",".join(pools)},
    )
    after = context.pool.snapshots([dataset.name])
    taken = next((snapshot for snapshot in after if snapshot.name == name), None)
    if taken is None:
        raise RunFailedError(full, "was destroyed as soon as it was taken")
    if before:
        return taken, context.pool.written_since(before[-1].full_name)
    return taken, context.pool.sizes([full])[full][1]


def _with_pages(
    manifest: Manifest, ram: Part, parts: SplitImage, taken: PoolSnapshot, stored: int
) -> Manifest:
    entry = PagesEntry(
        dataset=taken.dataset,
        name=taken.name,
        guid=taken.guid,
        createtxg=taken.createtxg,
        bytes=parts.page_file_bytes,
        sha256=parts.page_sum,
        split=parts.split,
        stored_bytes=stored,
    )
    rest = Part(
        name=REST_NAME,
        role=Role.RAM,
        bytes=parts.rest_bytes,
        sha256=parts.rest_sha256,
        payload_bytes=ram.payload_bytes,
        compression=COMPRESSION,
        pace=ram.pace,
        pages=entry,
    )
    others = [rest if part is ram else part for part in manifest.parts]
    return manifest.model_copy(update={"parts": tuple(others)})


def _of_system(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"
