"""The file that is copied out of a snapshot, and the check of its destination.

Room for a disk is checked in :mod:`snaporch.extract.extract`, for RAM in
:mod:`snaporch.restore.ram_from_pages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from snaporch.errors import RefusedError


@dataclass(frozen=True, slots=True)
class ExtractedFile:
    """A disk or a RAM image that was copied out of a snapshot."""

    target: str
    path: str
    format: str
    bytes: int
    """The length of the image."""
    stored_bytes: int
    """The space that it takes on its file system."""

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
    """Require that the file does not exist and that its directory does.

    Raises:
        RefusedError: otherwise.
    """
    if path.exists():
        raise RefusedError(str(path), "exists already", "remove it, or take another name")
    if not path.parent.is_dir():
        raise RefusedError(str(path.parent), "is not a directory", "make it first")
