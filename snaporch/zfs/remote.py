"""The pools of another machine, or of this one as somewhere to replicate to."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from snaporch.remote_host import CommandError, Host
from snaporch.zfs.cli import ZfsCommand
from snaporch.zfs.interface import PoolError
from snaporch.zfs.mount_users import ForeignMount

_SCRIPT_BYTES = 60_000
"""A command line of ssh becomes one argument of a shell there (execve(2), MAX_ARG_STRLEN)."""


class RemoteZfs(ZfsCommand):
    """:class:`~snaporch.zfs.interface.Pool` by running ``zfs`` on a host."""

    def __init__(self, host: Host) -> None:
        super().__init__("zfs")
        self._host = host

    def _run(self, *arguments: str) -> str:
        return self._script(shlex.join(["zfs", *arguments]), f"zfs {arguments[0]}")

    def _script(self, script: str, what: str) -> str:
        try:
            return self._host.script(script, what=what)
        except CommandError as error:
            raise PoolError(error.thing, error.reason, error.step) from error

    def foreign_mounts(self, names: Collection[str] | None = None) -> list[ForeignMount]:
        """None that this host knows of."""
        return []

    def mounted_snapshot(self, snapshot: str) -> AbstractContextManager[Path]:
        """Not here: its files are on the other host.

        Raises:
            PoolError: always.
        """
        raise PoolError(snapshot, "cannot be read from here")

    def make(self, dataset: str) -> None:
        """Make a file system and those above it, unless they are there.

        Raises:
            PoolError: its pool is not there, or something else.
        """
        self._run("create", "-p", dataset)

    def mark(self, properties: Mapping[str, Mapping[str, str]]) -> None:
        """Set user properties on snapshots, on each its own.

        Raises:
            PoolError: one of them could not be marked; those before it were.
        """
        for script in _scripts(properties):
            self._script(script, "zfs set")


def _scripts(properties: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    lines: list[str] = []
    size = 0
    for name, values in properties.items():
        pairs = (f"{key}={value}" for key, value in values.items())
        line = shlex.join(["zfs", "set", *pairs, name])
        length = len(line.encode("utf-8", "surrogateescape"))
        if lines and size + length > _SCRIPT_BYTES:
            yield " && ".join(lines)
            lines, size = [], 0
        lines.append(line)
        size += length + 4
    if lines:
        yield " && ".join(lines)
