"""Manifests that tests change: their checksums are right, as snaporch itself would write them."""

import hashlib
import json

from snaporch.bundle.manifest import with_checksum


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
