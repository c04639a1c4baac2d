"""Guests for tests: ``Guest.create(...)`` makes one that checks itself."""

from guests.disks import Disk, Image
from guests.guest import Guest
from guests.sector import DiskContentError, agreed_count

__all__ = ["Disk", "DiskContentError", "Guest", "Image", "agreed_count"]
