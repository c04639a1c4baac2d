"""Test guests that show whether RAM and disks are of the same instant."""

import contextlib
import hashlib
import mmap
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import libvirt
import libvirt_qemu

from guests import disks, sector, serial
from guests.artefacts import artefact
from guests.disks import Disk, Format, Image
from guests.domain_xml import (
    DirectBoot,
    Firmware,
    Machine,
    Mutate,
    agent_connected,
    disk_images,
    disk_sources,
    domain_xml,
    existing_machine,
    nvram_path,
)

Kind = Literal["probe", "load", "busy", "linux", "database"]

T = TypeVar("T")
LOG_DIRECTORY = Path("/var/log/snaporch-guests")
URI = "qemu:///system"

_STATES = {
    libvirt.VIR_DOMAIN_RUNNING: "running",
    libvirt.VIR_DOMAIN_BLOCKED: "running",
    libvirt.VIR_DOMAIN_PAUSED: "paused",
    libvirt.VIR_DOMAIN_SHUTDOWN: "shutting down",
    libvirt.VIR_DOMAIN_SHUTOFF: "shut off",
    libvirt.VIR_DOMAIN_CRASHED: "crashed",
    libvirt.VIR_DOMAIN_PMSUSPENDED: "suspended",
}
_UNDEFINE = (
    libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE
    | libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
    | libvirt.VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA
    | libvirt.VIR_DOMAIN_UNDEFINE_NVRAM
)
# Memory the guests can do with, by (kind, firmware).
# Makes Linux leave things out, to start sooner under emulation.
_KERNEL_OPTIONS = (
    "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off tsc=reliable no_timer_check "
    "lsm=capability audit=0 cryptomgr.notests init_on_alloc=0"
)
_LINUX = ("linux", "database")
_MEMORY_MIB = {
    ("probe", "bios"): 16,
    ("load", "bios"): 4,
    ("busy", "bios"): 16,
    ("probe", "uefi"): 64,
    ("busy", "uefi"): 64,
    ("linux", "bios"): 128,
    ("linux", "uefi"): 192,
    # With 384 MiB the lab's QEMU 10.0.13 crashed once, and hung once, as it began to save RAM.
    ("database", "bios"): 256,
}


class Guest:
    """One libvirt domain with a probe in it, and its disks.

    Marks are places in the serial log, from mark(). Everything that waits
    takes seconds and raises TimeoutError with the end of the log.
    """

    def __init__(self, machine: Machine, images: Sequence[Image]) -> None:
        self.name = machine.name
        self.machine = machine
        self.images = list(images)
        self.log = serial.Log(machine.serial_log)

    @classmethod
    def create(
        cls,
        name: str,
        disks: Sequence[Disk],
        *,
        firmware: Firmware = "bios",
        kind: Kind = "probe",
        memory_mib: int | None = None,
        vcpus: int = 1,
        machine: str = "pc",
        title: str | None = None,
        format: Format = "raw",  # noqa: A002
        cache: str | None = None,
        command_line: str = "",
        mutate: Mutate | None = None,
        start: bool = True,
        timeout: float = 600,
    ) -> "Guest":
        """Makes the disks and the domain; with ``start`` waits for a count.

        ``command_line`` is added to the Linux guest's. ``mutate`` may change
        the domain XML before it is defined. What was made is removed again if
        this fails.
        """
        stem = file_stem(name)
        LOG_DIRECTORY.mkdir(parents=True, exist_ok=True)
        log = LOG_DIRECTORY / f"{stem}.serial"
        log.unlink(missing_ok=True)
        guest = cls(
            Machine(
                name=name,
                title=title,
                firmware=firmware,
                machine=machine,
                memory_mib=memory_mib or _memory(kind, firmware, command_line),
                vcpus=vcpus,
                serial_log=log,
                boot=_direct_boot(kind, command_line),
                agent=kind in _LINUX,
            ),
            [],
        )
        try:
            guest._make_disks(disks, stem, kind, format, cache)
            connect().defineXML(domain_xml(guest.machine, guest.images, mutate))
            if start:
                guest.start(timeout=timeout)
        except BaseException:
            with contextlib.suppress(Exception):
                guest.remove()
            raise
        return guest

    def _make_disks(
        self,
        wanted: Sequence[Disk],
        stem: str,
        kind: Kind,
        form: Format,
        cache_mode: str | None,
    ) -> None:
        for index, disk in enumerate(wanted):
            content: bytes | mmap.mmap = b""
            if index == 0:
                content = _first_disk(kind, self.machine.firmware)
            self.images.append(disks.create(disk, index, stem, form, cache_mode, content))

    # -- the domain --------------------------------------------------------

    def domain(self) -> Any:
        """The libvirt domain. Raises libvirt.libvirtError if undefined."""
        return connect().lookupByName(self.name)

    def start(self, wait: bool = True, timeout: float = 600) -> int | None:
        """Powers on; with ``wait`` until it counts, giving the first count."""
        mark = self.mark()
        self.domain().create()
        return self.first_count_since(mark, timeout) if wait else None

    def destroy(self) -> None:
        """Pulls the plug. A guest that is off, or not defined, stays so."""
        with contextlib.suppress(libvirt.libvirtError):
            self.domain().destroy()

    def undefine(self) -> None:
        """Undefines the domain, if it is defined; the disks stay.

        Its NVRAM, managed save and libvirt's snapshot metadata go too.
        """
        with contextlib.suppress(libvirt.libvirtError):
            self.domain().undefineFlags(_UNDEFINE)

    def remove(self) -> None:
        """Destroys and undefines the guest, its disks and datasets.

        Snapshots, holds and clones of the datasets go too; parents stay.
        """
        self.destroy()
        self.undefine()
        for dataset in self.datasets():
            disks.destroy(dataset)
        for image in self.images:
            if image.dataset is None:
                image.path.unlink(missing_ok=True)
        self.images.clear()

    def state(self) -> str:
        """Give "running", "paused", "shut off", "undefined" and the like."""
        try:
            return _STATES.get(self.domain().state()[0], "unknown")
        except libvirt.libvirtError as error:
            if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                return "undefined"
            raise

    def xml(self, inactive: bool = False) -> str:
        """The domain's XML, as it runs or as it will be started next."""
        flags = libvirt.VIR_DOMAIN_XML_INACTIVE if inactive else 0
        return str(self.domain().XMLDesc(flags))

    def sources(self, inactive: bool = False) -> dict[str, str]:
        """Target (vda, ...) to source path, live or in the inactive XML."""
        return disk_sources(self.xml(inactive))

    @classmethod
    def existing(cls, name: str) -> "Guest":
        """Use a domain that another program made from a guest, such as a clone.

        Its serial log and its disks, in that order, are those in its inactive XML.
        """
        xml = str(connect().lookupByName(name).XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
        images = [
            disks.existing(index, Path(path), form)
            for index, (path, form) in enumerate(disk_images(xml))
        ]
        return cls(existing_machine(xml), images)

    def datasets(self) -> list[str]:
        """The datasets and volumes its disks are on, each once."""
        found = (image.dataset for image in self.images)
        return list(dict.fromkeys(name for name in found if name is not None))

    # -- what it says ------------------------------------------------------

    def serial(self) -> str:
        """The serial log from the beginning, over all starts and restores."""
        return self.log.since(0).decode("ascii", "replace")

    def mark(self) -> int:
        """The present end of the serial log."""
        return self.log.mark()

    def counts_since(self, mark: int) -> list[int]:
        """The counts printed since the mark."""
        return self.log.report(mark).counts

    def cold_boots_since(self, mark: int) -> list[dict[int, int]]:
        """For each power-on since the mark: the count found on each disk."""
        return self.log.report(mark).cold

    def bad_since(self, mark: int) -> list[str]:
        """The guest's complaints since the mark."""
        return self.log.report(mark).bad

    def first_count_since(self, mark: int, timeout: float = 300) -> int:
        """Waits for the first count after the mark."""
        return self._wait(mark, timeout, None)

    def wait_count(self, beyond: int | None = None, timeout: float = 300) -> int:
        """Waits for a count printed from now on, greater than ``beyond``."""
        return self._wait(self.mark(), timeout, beyond)

    def wait_agent(self, timeout: float = 300) -> None:
        """Wait until the guest agent's channel is connected."""
        self._until(lambda: agent_connected(self.xml()), "an agent", timeout)

    def wait_filled(self, timeout: float = 300) -> None:
        """Wait until the Linux probe has filled the memory that it keeps dirty."""
        self._until(lambda: b"DIRTY " in self.log.since(0), "filled memory", timeout)

    def wait_nvram_set(self, mark: int, timeout: float = 300) -> int:
        """Waits for the UEFI probe to set its variable; the value it set."""
        return self._until(lambda: self.log.report(mark).nvset, "NVRAM", timeout)[0]

    def wait_nvram(self, mark: int, timeout: float = 300) -> list[int]:
        """Waits for the UEFI probe to be powered on; what it found in its variable."""
        return self._until(lambda: self.log.report(mark).nvram, "a power-on", timeout)

    def wait_bad(self, mark: int, timeout: float = 300) -> str:
        """Waits for the first complaint after the mark."""
        return self._until(lambda: self.bad_since(mark), "a complaint", timeout)[0]

    def _wait(self, mark: int, timeout: float, beyond: int | None) -> int:
        def new() -> list[int]:
            counts = self.counts_since(mark)
            return [count for count in counts if beyond is None or count > beyond]

        return self._until(new, "a new count", timeout)[0]

    def _until(self, probe: Callable[[], T], wanted: str, timeout: float) -> T:
        end = time.monotonic() + timeout
        while not (found := probe()):
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{self.name!r} ({self.state()}) printed no sign of {wanted}; "
                    f"end of {self.log.path}:\n{self.log.tail()}\n{self._processor()}"
                )
            time.sleep(0.02)
        return found

    def _processor(self) -> str:
        """The registers of its processor, twice: a guest that hangs prints nothing itself."""
        ask = libvirt_qemu.qemuMonitorCommand
        hmp = libvirt_qemu.VIR_DOMAIN_QEMU_MONITOR_COMMAND_HMP
        try:
            return "\n".join(str(ask(self.domain(), "info registers", hmp)) for _ in range(2))
        except libvirt.libvirtError as error:
            return str(error)

    # -- what is on its disks ----------------------------------------------

    def disk_counts(self, snapshot: str | None = None) -> list[int]:
        """The count on every disk, live or in the ZFS snapshots @snapshot.

        What a running guest wrote to overlays is not seen. See
        assert_continues for how this relates to what the guest prints.
        Raises guests.sector.DiskContentError for a torn or foreign sector.
        """
        return [image.count(snapshot) for image in self.images]

    def assert_load_whole(self, snapshot: str | None = None) -> None:
        """Check all that the busy probe wrote besides its counts, live or in @snapshot.

        To be used on a guest that does not run, or on a snapshot.
        Raises guests.sector.DiskContentError.
        """
        for image in self.images:
            image.assert_load_whole(image.count(snapshot), snapshot)

    def snapshot_count(self, snapshot: str) -> int:
        """The count all disks agree on in @snapshot, to be continued from.

        Raises guests.sector.DiskContentError if they are not of one instant.
        """
        return sector.agreed_count(self.disk_counts(snapshot))

    def nvram(self) -> Path | None:
        """The NVRAM file of a UEFI guest; see guests.nvram.probe_value."""
        return nvram_path(self.xml())

    # -- the oracle ----------------------------------------------------------

    def assert_continues(self, mark: int, expected: int, timeout: float = 300) -> int:
        """The guest went on after the mark from exactly that count on disk.

        To be called after a restore, with a mark taken before the guest ran
        again and expected = snapshot_count(NAME): no cold boot, no complaint,
        and the first count printed is ``expected`` or ``expected`` + 1.

        Which of the two: a cycle adds one in RAM (to R), writes R to each
        disk in turn, verifies, and prints R. At the frozen instant the disks
        hold, and the first line after the restore is:

        =========================  ==============  ===================
        frozen                     snapshot_count  first full line
        =========================  ==============  ===================
        after printing R           R               R + 1
        while printing R           R               R + 1 (the rest of R's
                                                   line is no full line)
        after writing, not printed R               R
        while writing, some disks  R (the others   R
        done                       R - 1)
        before the first write     R - 1           R
        =========================  ==============  ===================

        So the count on the disks may be one ahead of the last printed one,
        never two, and never behind it. Waits until the guest has gone through
        three cycles, which has it check all its disks; counts must be without
        gaps. Returns the first count.
        """
        first = self.first_count_since(mark, timeout)
        self._wait(mark, timeout, first + 2)
        said = self.log.report(mark)
        assert not said.cold, f"cold boot instead of a resume: {said.cold}"
        assert not said.bad, f"the guest complains: {said.bad[:4]}"
        assert first in (expected, expected + 1), (
            f"went on at {first:#x}, the disks were at {expected:#x}"
        )
        _assert_gapless(said.counts)
        return first

    def assert_frozen(self, seconds: float = 1) -> None:
        """Check that the guest prints no count for so long."""
        # One count may have been on its way to the log.
        with contextlib.suppress(TimeoutError):
            self.wait_count(timeout=seconds / 2)
        with contextlib.suppress(TimeoutError):
            count = self.wait_count(timeout=seconds)
            raise AssertionError(f"counts on: {count:#x}")

    def assert_undisturbed(self, mark: int) -> list[int]:
        """Since the mark no boot, no complaint and no count left out.

        Returns the counts.
        """
        said = self.log.report(mark)
        assert not said.cold, f"booted: {said.cold}"
        assert not said.bad, f"the guest complains: {said.bad[:4]}"
        _assert_gapless(said.counts)
        return said.counts


_opened: dict[str, Any] = {}


def connect() -> Any:
    """The connection guests are driven over; a new one if libvirtd went."""
    connection = _opened.get(URI)
    if connection is None or not _alive(connection):
        libvirt.registerErrorHandler(lambda _context, _error: None, None)
        connection = _opened[URI] = libvirt.open(URI)
    return connection


def _alive(connection: Any) -> bool:
    # isAlive() says yes until something is sent.
    try:
        return bool(connection.getLibVersion())
    except libvirt.libvirtError:
        return False


def file_stem(name: str) -> str:
    """A file name for a domain name; different for different names."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)
    if safe == name and not safe.startswith((".", "-")):
        return safe
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{safe.lstrip('.-')}-{digest}"


def _first_disk(kind: Kind, firmware: Firmware) -> bytes | mmap.mmap:
    if kind == "linux":
        return artefact("linux-disk.img").read_bytes()
    if kind == "database":  # half a GiB, of which the lab need not have all in memory
        with artefact("database.img").open("rb") as image:
            return mmap.mmap(image.fileno(), 0, access=mmap.ACCESS_READ)
    suffix = "" if kind == "probe" else f"-{kind}"
    image = "probe{}.bin" if firmware == "bios" else "probe-efi{}.img"
    return artefact(image.format(suffix)).read_bytes()


def _memory(kind: Kind, firmware: Firmware, command_line: str) -> int:
    dirty = re.search(r"\bdirty_mib=(\d+)", command_line)
    return _MEMORY_MIB[kind, firmware] + (int(dirty[1]) if dirty else 0)


def _direct_boot(kind: Kind, command_line: str) -> DirectBoot | None:
    if kind not in _LINUX:
        return None
    if kind == "database":
        command_line = f"root=/dev/vda {command_line}"
    return DirectBoot(
        artefact("vmlinux"),
        artefact("initrd"),
        f"{_KERNEL_OPTIONS} {command_line}".strip(),
    )


def _assert_gapless(counts: Sequence[int]) -> None:
    if counts:
        expected = list(range(counts[0], counts[0] + len(counts)))
        assert list(counts) == expected, f"counts left out: {counts}"
