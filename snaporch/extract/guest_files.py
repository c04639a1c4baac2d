"""Find and list files in the file systems of a guest's disks, by :mod:`snaporch.extract.appliance`.

How a guest's names are checked is in :mod:`snaporch.extract.guestfish_text`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

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
_AT_ONCE = 16
"""Commands that are sent at once: their words and their answers fit into a pipe."""
_MAX_LINK = 4096


@dataclass(frozen=True, slots=True)
class Mounted:
    """The file systems that were mounted in the appliance."""

    places: tuple[tuple[str, str], ...]
    """Pairs of mount point and device."""
    failed: tuple[tuple[str, str], ...]
    """Those that could not be mounted."""


class GuestFiles:
    """The files of a guest.

    Args:
        appliance: it has the guest's disks.
        thing: the snapshot, for errors.
    """

    def __init__(self, appliance: Appliance, thing: str) -> None:
        self._appliance, self._thing = appliance, thing

    def file_systems(self) -> list[FileSystem]:
        """All file systems, and encrypted containers."""
        return parse_file_systems(self._appliance.ask("list-filesystems"))

    def system_places(self, *, choose: bool = True) -> list[tuple[str, str]]:
        """Where the guest's own system mounts its file systems; empty if no system is found.

        Args:
            choose: refuse several systems; else those of all are returned.

        Returns:
            Pairs of mount point and device, parents first.

        Raises:
            RefusedError: there are several systems.
        """
        roots = self._appliance.ask("inspect-os").decode("utf-8", "surrogateescape").splitlines()
        if choose and len(roots) > 1:
            raise RefusedError(
                self._thing,
                f"has several systems, on {', '.join(roots)}",
                "choose a file system with --device",
            )
        places = [mount_order(self._appliance.ask("inspect-get-mountpoints", e)) for e in roots]
        return [pair for each in places for pair in each]

    def mount(self, places: Sequence[tuple[str, str]]) -> Mounted:
        """Mount file systems, read-only; the first one has to succeed.

        Raises:
            ApplianceError: the first one cannot be mounted.
        """
        done, failed = [], []
        for number, (point, device) in enumerate(places):
            if number == 0:
                self._appliance.ask("mount-ro", device, point)
            elif self._appliance.attempt("mount-ro", device, point) is None:
                failed.append((point, device))
                continue
            done.append((point, device))
        return Mounted(tuple(done), tuple(failed))

    def find(self, path: bytes) -> tuple[bytes, Entry]:
        """The file that a path leads to; links are followed inside the guest.

        Returns:
            Its path without links, and what it is.

        Raises:
            NotFoundError: there is no such file.
        """
        answer = self._appliance.attempt("realpath", path)
        if answer is None:
            raise NotFoundError(self._thing, f"has no {shown(path)}, or it is a link to nowhere")
        real = answer.removesuffix(b"\n")
        parent, _, name = real.rpartition(b"/")
        return real, self._entries(parent, [name])[0]

    def entries(self, directory: bytes) -> list[Entry]:
        """What is in a directory, sorted by name."""
        parts: list[bytes] = []
        room = MAX_NAMES * 64

        def take(block: bytes) -> None:
            nonlocal room
            room -= len(block)
            if room < 0:
                raise self._wrong(directory, AnswerError("has too many names"))
            parts.append(block)

        self._appliance.data("ls0", directory, into=take)
        try:
            names = parse_names(b"".join(parts), MAX_NAMES)
        except AnswerError as error:
            raise self._wrong(directory, error) from error
        return self._entries(directory, names)

    def read(self, path: bytes, into: Callable[[bytes], object]) -> None:
        """Read a file's data."""
        self._appliance.data("download", path, into=into)

    def _entries(self, directory: bytes, names: Sequence[bytes]) -> list[Entry]:
        found = []
        for start in range(0, len(names), _AT_ONCE):
            some = names[start : start + _AT_ONCE]
            answers = self._appliance.ask_all([("lstatns", beneath(directory, n)) for n in some])
            try:
                found += [parse_entry(*each) for each in zip(some, answers, strict=True)]
            except AnswerError as error:
                raise self._wrong(directory, error) from error
        links = [place for place, each in enumerate(found) if each.kind == "link"]
        for start in range(0, len(links), _AT_ONCE):
            chosen = links[start : start + _AT_ONCE]
            paths = [beneath(directory, found[place].name) for place in chosen]
            answers = self._appliance.ask_all([("readlink", path) for path in paths])
            for place, answer in zip(chosen, answers, strict=True):
                found[place] = replace(found[place], link=answer.removesuffix(b"\n")[:_MAX_LINK])
        return found

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
        RefusedError: it is encrypted, or it is unclear which one is meant.
    """
    if device is not None:
        chosen = next((each for each in found if each.device == device), None)
        if chosen is None:
            names = ", ".join(each.device for each in found) or "none"
            raise NotFoundError(f"{thing} {device}", f"no such file system; there are: {names}")
        if chosen.is_encrypted:
            raise _encrypted(thing, chosen)
        return [("/", device)]
    if system:
        return list(system)
    mountable = [each for each in found if each.is_mountable]
    names = ", ".join(each.device for each in mountable)
    for each in found:
        if each.is_encrypted:
            raise _encrypted(
                thing, each, f"choose another one with --device: {names}" * bool(names)
            )
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
