"""What was copied out of a snapshot, and where it may go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from snaporch.errors import RefusedError


@dataclass(frozen=True, slots=True)
class ExtractedFile:
    """A disk, or the RAM, that was copied."""

    target: str
    path: str
    format: str
    bytes: int
    """The image's length."""
    stored_bytes: int
    """What it takes on its file system."""

    def as_json(self) -> dict[str, object]:
        """The documented JSON object."""
        return {
            "disk": self.target,
            "path": self.path,
            "format": self.format,
            "bytes": self.bytes,
            "stored_bytes": self.stored_bytes,
        }


def check_destination(path: Path) -> None:
    """A new file in a directory that there is.

    Raises:
        RefusedError: it is not.
    """
    if path.exists():
        raise RefusedError(str(path), "exists already", "remove it, or take another name")
    if not path.parent.is_dir():
        raise RefusedError(str(path.parent), "is not a directory", "make it first")
