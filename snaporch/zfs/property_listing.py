"""Parse the properties that ``zfs get`` lists, whatever their values contain.

A user property can come from another host by a stream, and may contain tabs and line breaks, which
``zfs`` prints unchanged. So a value could imitate its own end and another snapshot after it.
Therefore an unset property with a random name is requested between any two user properties: where
its line is printed, the value before it has ended. (``zfs get -j`` exists only since OpenZFS 2.3,
and its output ends at the first byte that is not valid text.)
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator, Sequence

from snaporch.zfs.interface import PREFIX, PoolError

COLUMNS = "name,property,source,value"
_UNSET = "-"


class Listing:
    """One request to ``zfs get -Hp`` for :data:`COLUMNS`, and the parser of its answer."""

    def __init__(self, native: Sequence[str], free: Sequence[str]) -> None:
        """Request ``native`` properties, which have plain values, and user properties ``free``."""
        self._native = tuple(native)
        self._free = tuple(free)
        self._mark = f"{PREFIX}{secrets.token_hex(16)}"

    @property
    def properties(self) -> str:
        """The list of properties, an argument of ``zfs get``."""
        marked = [word for name in self._free for word in (name, self._mark)]
        return ",".join([*self._native, self._mark, *marked])

    def read(
        self, text: str, sources: Collection[str] = ()
    ) -> Iterator[tuple[str, dict[str, str]]]:
        """Parse the output: each listed dataset or snapshot, with those properties that are set.

        Args:
            text: the output of ``zfs get``.
            sources: return only properties with such a source (``local``, ``received``); all if
                empty.

        Raises:
            PoolError: the output does not match the request.
        """
        end = re.compile(rf"^([^\t\n]+)\t{self._mark}\t-\t-\n", re.MULTILINE)
        *parts, rest = end.split(text)
        pieces = list(zip(parts[::2], parts[1::2], strict=True))
        each = 1 + len(self._free)
        if rest or len(pieces) % each:
            raise _unexpected(rest)
        for start in range(0, len(pieces), each):
            (native, name), *free = pieces[start : start + each]
            rows = list(zip(self._native, native.splitlines(keepends=True), strict=False))
            if "".join(row for _, row in rows) != native or any(n != name for _, n in free):
                raise _unexpected(native)
            rows += [(key, row) for key, (row, _) in zip(self._free, free, strict=True)]
            answers = {key: _answer(name, key, row) for key, row in rows}
            yield (
                name,
                {
                    key: value
                    for key, (source, value) in answers.items()
                    if value != _UNSET and (not sources or source in sources)
                },
            )


def _answer(name: str, key: str, row: str) -> tuple[str, str]:
    start = f"{name}\t{key}\t"
    source, tab, value = row.removeprefix(start).partition("\t")
    if not (row.startswith(start) and tab and row.endswith("\n")):
        raise _unexpected(row)
    return source, value[:-1]


def _unexpected(text: str) -> PoolError:
    return PoolError("zfs get", f"unexpected output: {text[:80]!r}")
