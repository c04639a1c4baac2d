"""The pools of a replica: of another host, or of this one."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from snaporch.remote_host import LIMIT_SECONDS, CommandError, Host
from snaporch.zfs.copies import CopiesZfs
from snaporch.zfs.interface import PoolError
from snaporch.zfs.mount_users import BlockingMount

_SCRIPT_BYTES = 60_000
"""ssh passes a command line to the remote shell as one argument (execve(2), MAX_ARG_STRLEN)."""
_SET_SECONDS = 3600
"""How long a script of many ``zfs set`` may take: each waits until it is on the disks."""
_ROOT_OPTIONS = ("-o", "mountpoint=none", "-o", "volmode=none")
"""Of the dataset of all copies, which inherit them: no copy is mounted, also when the host boots,
and no volume has a device, whose partitions the host would scan."""
_OR_FAILED = " || failed=1; "


class RemoteZfs(CopiesZfs):
    """:class:`~snaporch.zfs.interface.Pool` by running ``zfs`` on a host."""

    def __init__(self, host: Host) -> None:
        super().__init__("zfs")
        self._host = host

    def _run(self, *arguments: str) -> str:
        return self._script(shlex.join(["zfs", *arguments]), f"zfs {arguments[0]}")

    def _script(self, script: str, what: str, limit: float = LIMIT_SECONDS) -> str:
        try:
            return self._host.script(script, what=what, limit=limit)
        except CommandError as error:
            raise PoolError(error.thing, error.reason, error.step) from error

    def blocking_mounts(self, names: Collection[str] | None = None) -> list[BlockingMount]:
        """Always empty: this host cannot see the other host's mounts."""
        return []

    def mounted_snapshot(self, snapshot: str) -> AbstractContextManager[Path]:
        """Not possible: the files are on the other host.

        Raises:
            PoolError: always.
        """
        raise PoolError(snapshot, "is on another host, and cannot be mounted here")

    def make(self, dataset: str) -> None:
        """Create the dataset of all copies, and its parents, unless they exist.

        Raises:
            PoolError: its pool does not exist, or creating failed.
        """
        script = " && ".join(
            f"{{ {shlex.join(['zfs', 'list', create[-1]])} >/dev/null 2>&1"
            f" || {shlex.join(create)}; }}"
            for create in creations(dataset)
        )
        self._script(script, "zfs create")

    def mark(self, properties: Mapping[str, Mapping[str, str]]) -> None:
        """Set user properties on datasets or snapshots, different ones on each.

        Args:
            properties: an empty value removes the property.

        Raises:
            PoolError: setting failed for some of them; the others have theirs.
        """
        failures = []
        for script in _scripts(properties):
            try:
                self._script(script, "zfs set", _SET_SECONDS)
            except PoolError as error:
                failures.append(error)
        for first in failures:
            raise first


def creations(dataset: str, known: Collection[str] = ()) -> list[list[str]]:
    """The commands that create the dataset of all copies, and its parents.

    Parents are not mounted, either, as ``zfs create -p`` would do. But datasets that the admin
    creates below them are: these do not inherit ``canmount``.

    Args:
        known: datasets that exist.
    """
    parts = dataset.split("/")
    options = {"/".join(parts[:end]): ["-o", "canmount=off"] for end in range(2, len(parts))}
    options[dataset] = [*_ROOT_OPTIONS]
    return [["zfs", "create", *options[name], name] for name in options if name not in known]


def _scripts(properties: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    lines: list[str] = []
    size = 0
    for name, values in properties.items():
        pairs = [f"{key}={value}" for key, value in values.items() if value]
        commands = [["zfs", "set", *pairs, name]] if pairs else []
        commands += [["zfs", "inherit", key, name] for key, value in values.items() if not value]
        line = " && ".join(map(shlex.join, commands))
        length = len(line.encode("utf-8", "surrogateescape"))
        if lines and size + length > _SCRIPT_BYTES:
            yield _all_of(lines)
            lines, size = [], 0
        lines.append(line)
        size += length + len(_OR_FAILED)
    if lines:
        yield _all_of(lines)


def _all_of(lines: Iterable[str]) -> str:
    """A script of all lines, which continues after one that fails, and then fails."""
    return "".join(["failed=; ", *(f"{line}{_OR_FAILED}" for line in lines), 'test -z "$failed"'])
