"""Find bundles by a snapshot's name.

Only the standard library is imported: hooks must start fast.
"""

from __future__ import annotations

import os
from pathlib import Path

_MANIFEST = "manifest.json"


def find_bundles(root: Path, dataset: str, snapshot: str) -> list[str]:
    """References (``uuid/run``) of bundles whose manifests contain both names.

    The manifest's text is searched, not parsed: neither name can contain a character that JSON
    escapes. The two names need not belong together in the manifest. Unreadable manifests are
    skipped.
    """
    names = (f'"{snapshot}"'.encode(), f'"{dataset}"'.encode())
    found: list[str] = []
    for domain in _directories(root):
        if not domain.name.startswith("."):
            found += [
                f"{domain.name}/{bundle.name}"
                for bundle in _directories(domain)
                if not bundle.name.startswith(".") and _mentions(bundle / _MANIFEST, names)
            ]
    return sorted(found)


def _directories(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return [path / e.name for e in entries if e.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _mentions(path: Path, names: tuple[bytes, ...]) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(descriptor, "rb") as stream:
        text = stream.read()
    return all(name in text for name in names)
