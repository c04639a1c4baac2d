"""Which properties of a guest's datasets a rebuild sets again, out of those that a manifest names.

The manifest comes from a replica, so only properties on a list are set, to values of their form
(zfsprops(7)). None of them lets a dataset be mounted elsewhere, or run programs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from snaporch.model import DatasetKind
from snaporch.zfs_names import quoted

Check = Callable[[str], bool]
_MAX_BYTES = 1 << 60
_MIN_RECORD, _MAX_RECORD = 512, 16 << 20
_COMPRESSION = re.compile(
    r"on|off|lz4|lzjb|zle|gzip(-[1-9])?|zstd(-[1-9]|-1[0-9])?|zstd-fast(-[0-9]{1,4})?"
)
RESERVED = ("reservation", "refreservation")
"""The properties that take room from other datasets."""


def _one_of(*values: str) -> Check:
    return lambda value: value in values


def _is_size(value: str) -> bool:
    return value == "none" or (_is_number(value) and int(value) <= _MAX_BYTES)


def _is_record_size(value: str) -> bool:
    if not _is_number(value):
        return False
    size = int(value)
    return _MIN_RECORD <= size <= _MAX_RECORD and size & (size - 1) == 0


def _is_number(value: str) -> bool:
    return value.isascii() and value.isdecimal() and len(value) < len(str(1 << 64))


_OF_ALL: Mapping[str, Check] = {
    "compression": lambda value: _COMPRESSION.fullmatch(value) is not None,
    "reservation": _is_size,
    "refreservation": _is_size,
    "primarycache": _one_of("all", "none", "metadata"),
    "secondarycache": _one_of("all", "none", "metadata"),
    "sync": _one_of("standard", "always", "disabled"),
    "logbias": _one_of("latency", "throughput"),
    "copies": _one_of("1", "2", "3"),
}
_OF_FILE_SYSTEMS: Mapping[str, Check] = {
    "recordsize": _is_record_size,
    "quota": _is_size,
    "refquota": _is_size,
    "atime": _one_of("on", "off"),
    "relatime": _one_of("on", "off"),
    "xattr": _one_of("on", "off", "sa", "dir"),
    "acltype": _one_of("off", "noacl", "posix", "posixacl", "nfsv4"),
    "setuid": _one_of("off"),
    "exec": _one_of("off"),
    "devices": _one_of("off"),
    "snapdir": _one_of("hidden", "visible", "disabled"),
}


class Settings(NamedTuple):
    """The properties of a dataset."""

    allowed: Mapping[str, str]
    refused: tuple[str, ...]
    """Those that are not set, for a message."""

    def reserved(self, key: str) -> int:
        """The bytes of one of :data:`RESERVED`; 0 without it."""
        value = self.allowed.get(key, "0")
        return int(value) if value.isdecimal() else 0


def allowed_settings(kind: DatasetKind, properties: Mapping[str, str]) -> Settings:
    """Which of these properties a dataset of this kind may get."""
    checks = _OF_ALL if kind is DatasetKind.VOLUME else {**_OF_ALL, **_OF_FILE_SYSTEMS}
    allowed, refused = {}, []
    for key, value in sorted(properties.items()):
        if key in checks and checks[key](value):
            allowed[key] = value
        else:
            refused.append(f"{quoted(key)} = {quoted(value)}")
    return Settings(allowed, tuple(refused))
