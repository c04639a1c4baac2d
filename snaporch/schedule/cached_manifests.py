"""Manifests of bundles in a repository of restic, kept here so that each is read only once.

A prune needs the manifests of all bundles in the repository. Most of these are not on this host any
more, and restic takes seconds for each. The name of a file is the SHA-256 that the record of the
bundle has of its manifest, so what is here is what was stored, or is read again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from snaporch.bundle.manifest import MAX_MANIFEST_BYTES
from snaporch.private_files import private_directory, replace_private

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class CachedManifests:
    """Manifests in a directory, which may be deleted at any time.

    Args:
        directory: is made when the first one is kept.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, digest: str) -> bytes | None:
        """The manifest with this SHA-256; ``None`` if it is not here, or is another one."""
        try:
            descriptor = os.open(self._directory / digest, _READ)
            with os.fdopen(descriptor, "rb") as stream:
                text = stream.read(MAX_MANIFEST_BYTES + 1)
        except OSError:
            return None
        return text if hashlib.sha256(text).hexdigest() == digest else None

    def put(self, digest: str, text: bytes) -> None:
        """Keep a manifest, if it has this SHA-256. Without room for it, it is read again."""
        if hashlib.sha256(text).hexdigest() == digest:
            with suppress(OSError):
                private_directory(self._directory)
                replace_private(self._directory / digest, text)

    def only(self, digests: Collection[str]) -> None:
        """Delete those that no bundle has any more."""
        with suppress(OSError):
            for path in [*self._directory.iterdir()]:
                if path.name not in digests:
                    path.unlink(missing_ok=True)
