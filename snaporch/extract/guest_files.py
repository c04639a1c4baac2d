"""Find and list files in the file systems of a guest's disks, by :mod:`snaporch.extract.appliance`.

How a guest's names are checked is in :mod:`snaporch.extract.guestfish_text`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from snaporch.context import Context
from snaporch.errors import NotFoundError, RefusedError
from snaporch.extract.appliance import APPLIANCE_USER, Appliance, ApplianceError, running_appliance
from snaporch.extract.guestfish_text import (
    AnswerError,
    Entry,
    FileSystem,
    mount_order,
    parse_entry,
    parse_file_systems,
    parse_names,
)
from snaporch.extract.throw_away_disks import throw_away_disks
from snaporch.restore.source import Source

CACHE = "appliance"
"""The directory, beside the clones' files, in which libguestfs keeps the appliance."""
MAX_NAMES = 200_000
"""Names in a directory."""
MAX_TEXT = 16 << 20
"""Bytes of the names and links that one listing has."""
_AT_ONCE = 16
"""Commands that are sent at once."""
_MAX_LINK = 4096
_MAX_FSTAB = 1 << 20
_DEVICES = ("list-devices", "list-partitions", "lvs", "list-md-devices")
_PARTS_OF_DEVICES = {"LVM2_member": "lvs", "linux_raid_member": "list-md-devices"}
"""Of which list above the devices are made of such parts."""


class GuestFiles:
    """The files of a guest.

    Args:
        appliance: it has the guest's disks.
        thing: the snapshot, for errors.
    """

    def __init__(self, appliance: Appliance, thing: str) -> None:
        self.appliance, self._thing = appliance, thing

    def file_systems(self) -> list[FileSystem]:
        """All file systems, and what is none that libguestfs opens, such as ``crypto_LUKS``.

        A part of a volume group or RAID is among them if libguestfs has made none of such parts.
        """
        found = parse_file_systems(self.appliance.ask("list-filesystems"))
        known = {each.device for each in found}
        lists = {command: self._lines(command) for command in _DEVICES}
        for device in (each for devices in lists.values() for each in devices):
            if device in known:
                continue
            known.add(device)
            answer = self.appliance.attempt("vfs-type", device) or b""
            kind = answer.decode("utf-8", "backslashreplace").strip()
            if kind and not lists.get(_PARTS_OF_DEVICES.get(kind, "")):
                found.append(FileSystem(device, kind))
        return sorted(found, key=lambda each: each.device)

    def system_places(self, *, choose: bool = True) -> list[tuple[str, str]]:
        """Where the guest's own system mounts its file systems; empty if no system is found.

        Args:
            choose: refuse several systems; else those of all are returned.

        Returns:
            Pairs of mount point and device, parents first.

        Raises:
            RefusedError: there are several systems.
        """
        roots = self._lines("inspect-os")
        if choose and len(roots) > 1:
            raise RefusedError(
                self._thing,
                f"has several systems, on {', '.join(roots)}",
                "choose a file system with --device",
            )
        places = []
        for root in roots:
            points = mount_order(self.appliance.ask("inspect-get-mountpoints", root))
            # the fstab may name the root as another device than the appliance has
            places += [("/", root), *(pair for pair in points if pair[0] != "/")]
        return places

    def mount(self, places: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Mount file systems, read-only; the first one has to succeed.

        Returns:
            Pairs of mount point and device of those that could be mounted.

        Raises:
            ApplianceError: the first one cannot be mounted.
        """
        (point, device), *others = places
        self.appliance.ask("mount-ro", device, point)
        return [(point, device)] + [
            (point, device)
            for point, device in others
            if self.appliance.attempt("mount-ro", device, point) is not None
        ]

    def fstab(self) -> str:
        """The text of the mounted system's ``/etc/fstab``; empty if it has none.

        Raises:
            ApplianceError: it cannot be read.
        """
        try:
            path, entry = self.find(b"/etc/fstab")
        except NotFoundError:
            return ""
        if entry.kind != "file" or entry.size > _MAX_FSTAB:
            raise ApplianceError(self._thing, "its /etc/fstab is not a short file")
        text = bytearray()

        def take(block: bytes) -> None:
            if len(text) + len(block) > _MAX_FSTAB:
                raise ApplianceError(self._thing, "its /etc/fstab is not a short file")
            text.extend(block)

        self.read(path, take)
        return text.decode("utf-8", "backslashreplace")

    def _lines(self, command: str) -> list[str]:
        return self.appliance.ask(command).decode("utf-8", "surrogateescape").splitlines()

    def find(self, path: bytes) -> tuple[bytes, Entry]:
        """The file that a path leads to; links are followed inside the guest.

        Returns:
            Its path without links, and what it is.

        Raises:
            NotFoundError: there is no such file.
        """
        answer = self.appliance.attempt("realpath", path)
        if answer is None:
            raise NotFoundError(self._thing, f"has no {shown(path)}, or it is a link to nowhere")
        real = answer.removesuffix(b"\n")
        parent, _, name = real.rpartition(b"/")
        return real, next(self.entries(parent, [name]))

    def listing(self, path: bytes, entry: Entry) -> list[Entry]:
        """What is in a directory, with the links' targets; of another path, itself.

        Args:
            path: without links, as ``entry`` from :meth:`find`.

        Raises:
            RefusedError: the names and the links are too long together.
        """
        if entry.kind != "directory":
            return [entry]
        found = []
        room = MAX_TEXT
        for each in self.entries(path, self.names(path)):
            is_link = each.kind == "link"
            found.append(
                replace(each, link=self.link(beneath(path, each.name))) if is_link else each
            )
            room -= len(each.name) + len(found[-1].link or b"")
            if room < 0:
                raise RefusedError(
                    f"{self._thing} {shown(path)}",
                    f"has more than {MAX_TEXT >> 20} MiB of names and links",
                    "copy it with --to",
                )
        return found

    def names(self, directory: bytes) -> list[bytes]:
        """The names in a directory, sorted."""
        parts: list[bytes] = []
        room = MAX_NAMES * 64

        def take(block: bytes) -> None:
            nonlocal room
            room -= len(block)
            if room < 0:
                raise self._wrong(directory, AnswerError("has too many names"))
            parts.append(block)

        self.appliance.data("ls0", directory, into=take)
        try:
            return parse_names(b"".join(parts), MAX_NAMES)
        except AnswerError as error:
            raise self._wrong(directory, error) from error

    def read(self, path: bytes, into: Callable[[bytes], object]) -> None:
        """Read a file's data."""
        self.appliance.data("download", path, into=into)

    def entries(self, directory: bytes, names: Sequence[bytes]) -> Iterator[Entry]:
        """What these names in a directory are; a few are in memory at once.

        Where a link leads is not among it: see :meth:`link`.
        """
        for start in range(0, len(names), _AT_ONCE):
            some = names[start : start + _AT_ONCE]
            answers = self.appliance.ask_all([("lstatns", beneath(directory, n)) for n in some])
            try:
                found = [parse_entry(*each) for each in zip(some, answers, strict=True)]
            except AnswerError as error:
                raise self._wrong(directory, error) from error
            yield from found

    def link(self, path: bytes) -> bytes:
        """Where a link leads."""
        return self.appliance.ask("readlink", path).removesuffix(b"\n")[:_MAX_LINK]

    def _wrong(self, directory: bytes, error: AnswerError) -> ApplianceError:
        return ApplianceError(self._thing, f"{shown(directory)}: {error}")


@contextmanager
def opened_files(context: Context, source: Source) -> Iterator[GuestFiles]:
    """Open a snapshot's disks in an appliance, which has ended after the block.

    Raises:
        SnaporchError: as :func:`~snaporch.extract.throw_away_disks.throw_away_disks` and
            :func:`~snaporch.extract.appliance.running_appliance`.
    """
    owner = APPLIANCE_USER if os.geteuid() == 0 else None
    cache = context.config.paths.clones / CACHE
    with throw_away_disks(context, source, owner) as (directory, disks):
        context.progress.step(source.thing, "starting libguestfs's appliance")
        with running_appliance(
            source.thing, directory, disks, context.interrupt, owner=owner, cache=cache
        ) as appliance:
            yield GuestFiles(appliance, source.thing)


def beneath(directory: bytes, name: bytes) -> bytes:
    """The path of a name in a directory."""
    return directory.rstrip(b"/") + b"/" + name


def shown(path: bytes) -> str:
    """A path or a name as it is printed: on one line, without control characters."""
    text = path.decode("utf-8", "surrogateescape")
    return "".join(char if char.isprintable() and char != "\\" else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    data = char.encode("utf-8", "surrogateescape")
    return "\\\\" if char == "\\" else "".join(f"\\x{byte:02x}" for byte in data)


def choose_places(
    thing: str, found: Sequence[FileSystem], system: Sequence[tuple[str, str]], device: str | None
) -> list[tuple[str, str]]:
    """Choose what is mounted where; a pure function.

    Args:
        thing: the snapshot, for errors.
        found: all file systems.
        system: where the guest's own system mounts them.
        device: the only one to mount, if one was asked for.

    Raises:
        NotFoundError: there is no such device.
        RefusedError: it is encrypted, or one of them is and none was chosen, or it is unclear which
            one is meant.
    """
    if device is not None:
        chosen = next((each for each in found if each.device == device), None)
        if chosen is None:
            names = ", ".join(each.device for each in found) or "none"
            raise NotFoundError(f"{thing} {device}", f"no such file system; there are: {names}")
        if chosen.is_encrypted:
            raise _encrypted(thing, chosen)
        return [("/", device)]
    mountable = [each for each in found if each.is_mountable]
    names = ", ".join(each.device for each in mountable)
    for each in found:
        if each.is_encrypted:
            raise _encrypted(
                thing, each, f"choose another one with --device: {names}" * bool(names)
            )
    if system:
        return list(system)
    if not mountable:
        raise RefusedError(thing, "no file system was found in its disks")
    if len(mountable) > 1:
        raise RefusedError(
            thing,
            "no system was found that says where its file systems belong",
            f"choose one with --device: {names}",
        )
    return [("/", mountable[0].device)]


def _encrypted(thing: str, system: FileSystem, step: str = "") -> RefusedError:
    return RefusedError(
        f"{thing} {system.device}",
        f"is encrypted ({system.kind}), and snaporch does not ask for its key",
        step or "use `snaporch clone`, or open a copy made by `snaporch extract`",
    )
