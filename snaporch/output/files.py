"""Tables of file systems and files in a guest's disks, as ``snaporch files`` prints them."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from snaporch.errors import one_line
from snaporch.extract.guest_files import shown
from snaporch.extract.guestfish_text import Entry, FileSystem, disk_of
from snaporch.output.format import compact, size
from snaporch.output.terminal import print_result


def print_file_systems(
    found: Sequence[FileSystem], targets: Sequence[str], points: Mapping[str, str]
) -> None:
    """Print what is in a guest's disks.

    Args:
        found: the file systems.
        targets: of the disks, in the appliance's order.
        points: where the guest's system mounts them, by device.
    """
    rows = [
        (each.device, each.kind, disk_of(each.device, targets) or "-", points.get(each.device, "-"))
        for each in found
    ]
    _print([("DEVICE", "TYPE", "DISK", "MOUNTED AT"), *rows])


def print_entries(listings: Sequence[tuple[bytes, Sequence[Entry]]]) -> None:
    """Print files; several listings have their path as a heading.

    Args:
        listings: the path, and what is there.
    """
    for number, (path, entries) in enumerate(listings):
        if len(listings) > 1:
            print_result(f"{chr(10) if number else ''}{shown(path)}:")
        rows = [
            (
                stat.filemode(each.mode),
                f"{each.uid}:{each.gid}",
                compact(size(each.size)),
                _moment(each.mtime_ns),
                shown(each.name or b"/") + (f" -> {shown(each.link)}" if each.link else ""),
            )
            for each in entries
        ]
        _print([("MODE", "OWNER", "SIZE", "MODIFIED", "NAME"), *rows], right=(2,))


def entry_as_json(path: bytes, entry: Entry) -> dict[str, object]:
    """The documented JSON object of a file.

    Args:
        path: the path that was listed.
        entry: the file; bytes of its name that are no UTF-8 are surrogates.
    """
    return {
        "listed": os.fsdecode(path),
        "name": os.fsdecode(entry.name),
        "type": entry.kind,
        "mode": f"{stat.S_IMODE(entry.mode):04o}",
        "uid": entry.uid,
        "gid": entry.gid,
        "bytes": entry.size,
        "modified": entry.mtime_ns / 10**9,
        "link": os.fsdecode(entry.link) if entry.link is not None else None,
    }


def _moment(nanoseconds: int) -> str:
    try:
        moment = datetime.fromtimestamp(nanoseconds // 10**9, UTC)
    except (OverflowError, ValueError, OSError):
        return "-"
    return f"{moment:%Y-%m-%d %H:%M}"


def _print(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            one_line(cell).rjust(width) if number in right else one_line(cell).ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print_result("  ".join(cells).rstrip())
