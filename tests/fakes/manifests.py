"""Manifests that tests change: their checksums are right, as snaporch itself would write them."""

import hashlib
import json
from datetime import UTC, datetime

from snaporch.bundle.manifest import Manifest, SnapshotEntry, VersionsEntry, with_checksum
from snaporch.model import Level


def of_snapshots(reference, *snapshots):
    """The manifest of a bundle without parts, which belongs to these ZFS snapshots."""
    uuid, _, run = reference.partition("/")
    entries = [
        SnapshotEntry(dataset=e.dataset, name=e.name, guid=e.guid, createtxg=e.createtxg)
        for e in snapshots
    ]
    at = datetime(2026, 6, 1, tzinfo=UTC)
    return Manifest(
        run=run,
        domain="web",
        uuid=uuid,
        snapshot=snapshots[0].name,
        level=Level.OFF,
        was_running=False,
        started=at,
        created=at,
        finished=at,
        snapshots=tuple(entries),
        disks=(),
        parts=(),
        versions=VersionsEntry(snaporch="1", libvirt="1", emulator="", machine="pc"),
    )


def load(path):
    """The members of a manifest."""
    document = json.loads(path.read_text())
    del document["sha256"]
    return document


def store(path, document):
    """Write the members of a manifest."""
    path.write_bytes(with_checksum(json.dumps(document, indent=2)))


def replace_text(path, old, new):
    """Replace a text in a manifest."""
    store(path, json.loads(json.dumps(load(path), ensure_ascii=False).replace(old, new)))


def with_sums(directory):
    """Give the manifest of a bundle the sizes and sums of its files as they are now."""
    path = directory / "manifest.json"
    document = load(path)
    for part in document["parts"]:
        data = (directory / part["name"]).read_bytes()
        part |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    store(path, document)
