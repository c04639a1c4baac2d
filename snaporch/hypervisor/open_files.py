"""What the kernel knows about an emulator: its open files and its memory (proc(5))."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from snaporch.errors import UnavailableError
from snaporch.hypervisor.interface import OpenFile

_PROC = Path("/proc")


def open_files_of(uuid: str, proc: Path = _PROC) -> list[OpenFile]:
    """All files that the emulator of a domain has open.

    Raises:
        UnavailableError: there is no such process on this host, or it cannot be inspected.
    """
    try:
        process = emulator_process(uuid, proc)
        return [
            each
            for number in os.listdir(process / "fd")
            if (each := _open_file(process, number)) is not None
        ]
    except OSError as error:
        raise UnavailableError(
            uuid,
            f"the open files of its emulator cannot be read ({error.strerror})",
            "run snaporch as root",
        ) from error


def resident_bytes_of(uuid: str, proc: Path = _PROC) -> int:
    """The resident memory of a domain's emulator in bytes; 0 if it is not on this host."""
    with suppress(OSError, UnavailableError):
        pages = (emulator_process(uuid, proc) / "statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    return 0


def emulator_process(uuid: str, proc: Path) -> Path:
    """Find the emulator's directory in ``/proc``: libvirt starts QEMU with ``-uuid UUID``.

    Raises:
        UnavailableError: there is no such process on this host.
        OSError: a process cannot be inspected.
    """
    argument = f"\0-uuid\0{uuid}\0".encode()
    for process in proc.glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if argument in (process / "cmdline").read_bytes():
                return process
    raise UnavailableError(uuid, "its emulator cannot be found", "is libvirt on another host?")


def _open_file(process: Path, number: str) -> OpenFile | None:
    """One open file; ``None`` if it was closed meanwhile."""
    with suppress(FileNotFoundError, ProcessLookupError):
        link = process / "fd" / number
        lines = (process / "fdinfo" / number).read_text().splitlines()
        flags = next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))
        writable = not flags & os.O_PATH and flags & os.O_ACCMODE != os.O_RDONLY
        return OpenFile(os.readlink(link), os.stat(link), writable)
    return None
