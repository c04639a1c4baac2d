"""Read a guest's files one by one, where one that cannot be read is an error of it alone."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from snaporch.extract.appliance import Appliance
from snaporch.extract.guest_files import MAX_NAMES, beneath
from snaporch.extract.guestfish_text import AnswerError, Entry, parse_entry, parse_names

_NAME_BYTES = 64
"""Of a name in a directory of the most names."""
_MAX_LINK = 4095


class TolerantFiles:
    """The files of a guest, of which some may be damaged.

    Each method raises :class:`OSError` (EIO) if this file cannot be read, and
    :class:`~snaporch.extract.appliance.ApplianceError` if the appliance itself fails.

    Args:
        appliance: it has the guest's file systems mounted.
    """

    def __init__(self, appliance: Appliance) -> None:
        self._appliance = appliance

    def names(self, directory: bytes) -> list[bytes]:
        """The names in a directory, sorted."""
        found = bytearray()
        too_many = False

        def take(block: bytes) -> None:
            nonlocal too_many
            too_many = too_many or len(found) + len(block) > MAX_NAMES * _NAME_BYTES
            if not too_many:
                found.extend(block)

        if not self._appliance.attempt_data("ls0", directory, into=take) or too_many:
            raise self._unreadable()
        try:
            return parse_names(bytes(found), MAX_NAMES)
        except AnswerError as error:
            raise self._unreadable() from error

    def entries(self, directory: bytes, names: Sequence[bytes]) -> list[Entry]:
        """What these names in a directory are; if one cannot be read, the first one alone."""
        for some in (names, names[:1]):
            words = [("lstatns", beneath(directory, each)) for each in some]
            answers = self._appliance.attempt_all(words)
            if answers is not None:
                try:
                    return [parse_entry(*each) for each in zip(some, answers, strict=True)]
                except AnswerError:
                    continue
        raise self._unreadable()

    def link(self, path: bytes) -> bytes:
        """Where a link leads."""
        answer = self._appliance.attempt("readlink", path)
        target = (answer or b"").removesuffix(b"\n")
        if not 0 < len(target) <= _MAX_LINK or b"\0" in target:
            raise self._unreadable()
        return target

    def part(self, path: bytes, offset: int, size: int) -> bytes:
        """A part of a file's data, of at most 1 MiB."""
        answer = self._appliance.attempt("pread", path, str(size), str(offset))
        if answer is None:
            raise self._unreadable()
        return answer

    def _unreadable(self) -> OSError:
        self._appliance.ask("ping-daemon")  # else every file of a dead appliance were unreadable
        return OSError(errno.EIO, "cannot be read")
