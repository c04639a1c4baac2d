"""The file that is copied out of a snapshot.

It is made by :mod:`snaporch.restore.new_file`. Room for a disk is checked in
:mod:`snaporch.extract.extract`, for RAM in :mod:`snaporch.restore.ram_from_pages`.
"""

from __future__ import annotations

from dataclasses import dataclass


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
