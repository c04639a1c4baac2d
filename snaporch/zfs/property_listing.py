"""Properties as ``zfs get`` lists them, whatever their values hold.

A user property comes along with a stream from another host, and may hold tabs and line breaks,
which ``zfs`` prints as they are: a value could look like its own end and a snapshot after it. So
between any two user properties one is asked for whose name nobody can know: where that is printed,
a value has ended. (``zfs get -j`` is known since OpenZFS 2.3 only, and its output ends at the first
byte that is no character.)
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator, Sequence

from snaporch.zfs.interface import PREFIX, PoolError

COLUMNS = "name,property,source,value"
_UNSET = "-"


class Listing:
    """A question to ``zfs get -Hp`` for :data:`COLUMNS`, to be asked once."""

    def __init__(self, native: Sequence[str], free: Sequence[str]) -> None:
        """Ask for these properties of ZFS, whose values are plain, and these of users."""
        self._native = tuple(native)
        self._free = tuple(free)
        self._mark = f"{PREFIX}{secrets.token_hex(16)}"

    @property
    def properties(self) -> str:
        """What to ask for, an argument of ``zfs get``."""
        marked = [word for name in self._free for word in (name, self._mark)]
        return ",".join([*self._native, self._mark, *marked])

    def read(
        self, text: str, sources: Collection[str] = ()
    ) -> Iterator[tuple[str, dict[str, str]]]:
        """Each dataset or snapshot that was listed, with its properties that are set.

        Args:
            text: what ``zfs`` has answered.
            sources: ``local``, ``received``: only properties that come from there.

        Raises:
            PoolError: this is no answer to the question.
        """
        end = re.compile(rf"^([^\t\n]+)\t{self._mark}\t-\t-\n", re.MULTILINE)
        *parts, rest = end.split(text)
        pieces = list(zip(parts[::2], parts[1::2], strict=True))
        each = 1 + len(self._free)
        if rest or len(pieces) % each:
            raise _unknown(rest)
        for start in range(0, len(pieces), each):
            (native, name), *free = pieces[start : start + each]
            rows = list(zip(self._native, native.splitlines(keepends=True), strict=False))
            if "".join(row for _, row in rows) != native or any(n != name for _, n in free):
                raise _unknown(native)
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
        raise _unknown(row)
    return source, value[:-1]


def _unknown(text: str) -> PoolError:
    return PoolError("zfs get", f"answers what it was not asked: {text[:80]!r}")
