"""Rules about overlays, journals, the bundle store and RAM in pages.

All else about the host is judged by :mod:`.host`. Whether a snapshot is refused, or gets no
overlays, for want of room or because of its place, is decided by
:mod:`snaporch.snapshot.storage_blockers`.
"""

from __future__ import annotations

from collections.abc import Iterator

from snaporch.check.facts import HostFacts
from snaporch.check.findings import Finding, error, listed, warning

_OTHERS = 0o077


def one_mountpoint(facts: HostFacts) -> Iterator[Finding]:
    """File systems of one mount point, at or above a guest's dataset or the bundle store."""
    at: dict[str, list[str]] = {}
    for dataset, place in sorted(facts.mountpoints.items()):
        at.setdefault(place, []).append(dataset)
    used = {dataset: guest.name for guest in facts.guests for dataset in guest.datasets}
    if facts.store.dataset is not None:
        used[facts.store.dataset] = "the bundle store"
    for place, datasets in at.items():
        inside = [own for own in used for each in datasets if f"{own}/".startswith(f"{each}/")]
        if len(datasets) > 1 and inside:
            yield error(
                place,
                f"it is the mount point of {listed(datasets)}",
                f"after a boot either of them may hide the other: {used[inside[0]]} may then have "
                "other disks, or none",
                "leave it to one of them, and run for each other one",
                ("zfs set canmount=noauto DATASET",),
            )


def overlays_left(facts: HostFacts) -> Iterator[Finding]:
    """The overlay directory has entries that belong to no run."""
    if facts.overlays.unknown:
        yield warning(
            str(facts.overlays.path),
            f"{listed(facts.overlays.unknown)} belongs to no known run",
            "an overlay may hold a guest's writes",
            "see whether a guest uses it (`virsh domblklist`); docs/how-to/recovery.md, By hand",
        )


def overlays_quarantined(facts: HostFacts) -> Iterator[Finding]:
    """There are overlays in quarantine."""
    if facts.overlays.quarantined:
        yield warning(
            f"{facts.overlays.path}/quarantine",
            f"overlays are quarantined: {listed(facts.overlays.quarantined)}",
            "they hold writes that their base images do not have",
            "compare them, then commit or delete them: docs/how-to/recovery.md, By hand",
        )


def overlay_space(facts: HostFacts) -> Iterator[Finding]:
    """The overlay file system has less free space than the reserve."""
    overlays = facts.overlays
    if overlays.free_mib < overlays.reserve_mib:
        yield error(
            str(overlays.path),
            f"{overlays.free_mib} MiB are free, {overlays.reserve_mib} MiB are needed",
            "guests are not switched to overlays that could not grow",
            "free space, or see paths.overlays and paths.overlay_reserve_mib in snaporch.toml",
        )


def overlays_snapshotted(facts: HostFacts) -> Iterator[Finding]:
    """sanoid snapshots the dataset of the overlays."""
    if section := _snapshotting_section(facts, facts.overlays.dataset):
        yield warning(
            str(facts.overlays.path),
            f"it lies in {facts.overlays.dataset}, of which [{section}] takes snapshots",
            "the writes of guests during a run stay in the snapshots and take up space",
            "set paths.overlays in snaporch.toml to a dataset that sanoid does not snapshot",
        )


def volatile_directory(facts: HostFacts) -> Iterator[Finding]:
    """Overlays, journals or bundles are on a file system that a power loss empties."""
    for directory, kind in facts.volatile.items():
        yield error(
            str(directory),
            f"it is on {kind}, which a power loss empties",
            "overlays hold guests' writes, journals the state that recovery needs, and bundles "
            "the RAM of snapshots; no overlay is used while overlays or journals are there",
            "set paths.overlays, .journal and .bundles in snaporch.toml to directories on a disk",
        )


def store_unwritable(facts: HostFacts) -> Iterator[Finding]:
    """Bundles cannot be written."""
    store = facts.store
    if not store.writable:
        yield error(
            str(store.path),
            "it cannot be written" if store.exists else "it cannot be created",
            "snapshots have no RAM, UEFI variables and definitions, which are stored there",
            "see paths.bundles in snaporch.toml, and the mount of its file system",
        )


def store_readable(facts: HostFacts) -> Iterator[Finding]:
    """Users other than root can read the bundle store."""
    store = facts.store
    if store.writable and store.exists and store.mode & _OTHERS:
        yield warning(
            str(store.path),
            f"its mode is {store.mode:04o}",
            "it holds the RAM of guests, with their keys and passwords",
            "run",
            (f"chmod 700 {store.path}",),
        )


def store_snapshotted(facts: HostFacts) -> Iterator[Finding]:
    """sanoid snapshots the dataset of the bundle store."""
    if section := _snapshotting_section(facts, facts.store.dataset):
        yield warning(
            str(facts.store.path),
            f"it lies in {facts.store.dataset}, of which [{section}] takes snapshots",
            "pruned bundles stay in those snapshots, with the RAM of the guests",
            "set paths.bundles in snaporch.toml to a dataset that sanoid does not snapshot",
        )


def _snapshotting_section(facts: HostFacts, dataset: str | None) -> str:
    if dataset is None or facts.sanoid.config is None:
        return ""
    section = facts.sanoid.config.covering(dataset)
    return section.origin if section else ""


def store_unencrypted(facts: HostFacts) -> Iterator[Finding]:
    """A guest's dataset is encrypted, and the bundle store is not."""
    encrypted = _encrypted_datasets(facts)
    if encrypted and not facts.store.encrypted:
        yield warning(
            str(facts.store.path),
            f"it is not encrypted, but {listed(list(encrypted))} is",
            f"the RAM of {listed(list(encrypted.values()))} is stored there unencrypted",
            "set paths.bundles in snaporch.toml to a directory on an encrypted dataset",
        )


def pages_unencrypted(facts: HostFacts) -> Iterator[Finding]:
    """A guest's dataset is encrypted, and the dataset for its RAM in pages is not."""
    pages = facts.pages
    if pages is None or pages.encrypted or not _has_pool(facts, pages.dataset):
        return
    guests = sorted(set(_encrypted_datasets(facts).values()) & set(pages.guests))
    if guests:
        yield warning(
            pages.dataset,
            f"it is not encrypted, but datasets of {listed(guests)} are",
            "their RAM is stored there unencrypted",
            "set ram_pages.dataset in snaporch.toml to a dataset below an encrypted one",
        )


def pages_missing(facts: HostFacts) -> Iterator[Finding]:
    """The pool of the dataset for RAM in pages does not exist."""
    pages = facts.pages
    if pages is not None and not _has_pool(facts, pages.dataset):
        yield error(
            pages.dataset,
            "its pool does not exist",
            f"the RAM of {listed(pages.guests)} stays a whole image in the bundle store",
            "import the pool, or see ram_pages.dataset in snaporch.toml",
        )


def _has_pool(facts: HostFacts, dataset: str) -> bool:
    return dataset.split("/", maxsplit=1)[0] in facts.datasets


def _encrypted_datasets(facts: HostFacts) -> dict[str, str]:
    """Encrypted dataset → guest."""
    guests = {dataset: guest.name for guest in facts.guests for dataset in guest.datasets}
    return {dataset: guests[dataset] for dataset in sorted(facts.encrypted & guests.keys())}
