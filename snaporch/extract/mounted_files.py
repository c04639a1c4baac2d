"""Answer the kernel's requests for the files of a guest: what ``snaporch mount`` shows.

A file that cannot be read is an error of that file alone. When the appliance itself fails, the
mount ends. What is kept of the guest in memory is bounded, but for the files that the kernel knows.
"""

from __future__ import annotations

import errno
import stat
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from snaporch.errors import UnavailableError
from snaporch.extract.fuse_messages import (
    ROOT,
    Code,
    Request,
    answer,
    attributes,
    first_answer,
    forgotten,
    looked_up,
    looked_up_name,
    no_space,
    parse_request,
    read_range,
    some_names,
    speaks,
)
from snaporch.extract.guest_files import beneath
from snaporch.extract.guestfish_text import Entry

BLOCK = 1 << 20
"""Bytes that are read at once."""
MAX_BLOCKS = 16
MAX_DIRECTORIES = 64
MAX_NAMES = 400_000
"""Names of directories that are kept."""
_AT_ONCE = 16
"""Names that are asked for together: who asks for one asks for the next ones, too."""
_DOTS = (b".", b"..")


class Files(Protocol):
    """A guest's files; :class:`~snaporch.extract.tolerant_files.TolerantFiles` has them."""

    def names(self, directory: bytes) -> list[bytes]:
        """The names in a directory, sorted."""

    def entries(self, directory: bytes, names: Sequence[bytes]) -> list[Entry]:
        """What the first of these names is, and maybe the next ones."""

    def link(self, path: bytes) -> bytes:
        """Where a link leads."""

    def part(self, path: bytes, offset: int, size: int) -> bytes:
        """A part of a file's data."""


@dataclass(slots=True)
class _Node:
    """A file that the kernel knows."""

    path: bytes
    entry: Entry
    lookups: int = 0


@dataclass(slots=True)
class _Directory:
    names: list[bytes]
    entries: dict[bytes, Entry] = field(default_factory=dict)


class MountedFiles:
    """What the kernel knows of a guest's files.

    Args:
        files: the guest's files.
        root: what the root directory is.
    """

    def __init__(self, files: Files, root: Entry) -> None:
        self._files = files
        self._nodes = {ROOT: _Node(b"/", root)}
        self._numbers = {b"/": ROOT}
        self._last = ROOT
        self._directories: OrderedDict[bytes, _Directory] = OrderedDict()
        self._blocks: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()

    def answer(self, data: bytes) -> bytes | None:
        """The answer to one request; None if it has none.

        Raises:
            UnavailableError: the kernel is too old.
            ApplianceError: the appliance failed.
            InterruptedRunError: a signal came.
        """
        request = parse_request(data)
        if request.code in (Code.FORGET, Code.BATCH_FORGET):
            for number, count in forgotten(request):
                self._forget(number, count)
            return None
        if request.code == Code.INTERRUPT:
            return None
        try:
            return answer(request, self._body(request))
        except OSError as error:
            return answer(request, error=error.errno or errno.EIO)

    def _body(self, request: Request) -> bytes:
        """The answer to a request that is about no file."""
        if request.code == Code.INIT:
            if not speaks(request.body):
                raise UnavailableError("/dev/fuse", "this kernel is older than 5.10")
            return first_answer(request.body)
        if request.code == Code.STATFS:
            return no_space()
        if request.code == Code.DESTROY:
            return b""
        return self._about(request)

    def _about(self, request: Request) -> bytes:
        """The answer to a request that is about a file."""
        node = self._nodes.get(request.node)
        if node is None:
            raise OSError(errno.ESTALE, "forgotten")
        if request.code == Code.LOOKUP:
            return self._look_up(node.path, looked_up_name(request.body))
        if request.code == Code.GETATTR:
            return attributes(request.node, node.entry)
        if request.code == Code.READLINK:
            return self._files.link(node.path)
        if request.code == Code.READDIR:
            names = self._directory(node.path).names
            return some_names([*_DOTS, *names], *read_range(request.body))
        if request.code == Code.READ:
            return self._read(node, *read_range(request.body))
        raise OSError(errno.ENOSYS, "no such request")  # an open, too: there is nothing to do

    def _look_up(self, directory: bytes, name: bytes) -> bytes:
        path = beneath(directory, name)
        number = self._numbers.get(path)
        if number is None:
            entry = self._entry(directory, name)
            self._last = number = self._last + 1
            self._nodes[number] = _Node(path, entry)
            self._numbers[path] = number
        node = self._nodes[number]
        node.lookups += 1
        return looked_up(number, node.entry)

    def _entry(self, directory: bytes, name: bytes) -> Entry:
        """What a name in a directory is; the error of a name that is none is ENOENT."""
        found = self._directory(directory)
        if name not in found.entries:
            start = bisect_left(found.names, name)
            if found.names[start : start + 1] != [name]:
                raise FileNotFoundError(errno.ENOENT, "no such name")
            some = found.names[start : start + _AT_ONCE]
            found.entries |= {each.name: each for each in self._files.entries(directory, some)}
        return found.entries[name]

    def _directory(self, path: bytes) -> _Directory:
        kept = self._directories
        if path not in kept:
            kept[path] = _Directory(self._files.names(path))
        kept.move_to_end(path)
        while len(kept) > 1 and (
            len(kept) > MAX_DIRECTORIES
            or sum(len(each.names) for each in kept.values()) > MAX_NAMES
        ):
            kept.popitem(last=False)
        return kept[path]

    def _read(self, node: _Node, offset: int, size: int) -> bytes:
        if not stat.S_ISREG(node.entry.mode):
            raise OSError(errno.EINVAL, "not a file")
        end = min(offset + size, node.entry.size)
        parts = []
        while offset < end:
            block = self._block(node, offset // BLOCK)
            part = block[offset % BLOCK :][: end - offset]
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def _block(self, node: _Node, number: int) -> bytes:
        key = node.path, number
        if key not in self._blocks:
            start = number * BLOCK
            size = min(BLOCK, node.entry.size - start)
            data = self._files.part(node.path, start, size)
            if len(data) != size:
                raise OSError(errno.EIO, "the file has not the length that it should have")
            self._blocks[key] = data
        self._blocks.move_to_end(key)
        while len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)
        return self._blocks[key]

    def _forget(self, number: int, count: int) -> None:
        node = self._nodes.get(number)
        if node is None or number == ROOT:
            return
        node.lookups -= count
        if node.lookups <= 0:
            del self._nodes[number], self._numbers[node.path]
