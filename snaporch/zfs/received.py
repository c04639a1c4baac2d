"""ZFS as an append-only replica uses it: nothing here destroys, rolls back, renames or overwrites.

The receiving user needs no root, but ``zfs allow``.
"""

from __future__ import annotations

import grp
import os
import pwd
import selectors
import shlex
import subprocess
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from snaporch.command_log import LoggedCommand
from snaporch.zfs.copies import CopiesZfs
from snaporch.zfs.interface import PoolError

_BLOCK = 1 << 20
_ERROR_BYTES = 1 << 16
STALLED_SECONDS = 3600
"""How long ``zfs receive`` may take no data, as its pool may be suspended; as long as a transfer
may move none (``replication/stall_detector.py``)."""
_END_SECONDS = 10
_RELEASE = Path("/sys/module/zfs/version")


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes:
        """Some of the next bytes, at most ``size``; empty at the end."""


class ReceivedZfs(CopiesZfs):
    """The copies below one dataset, for the user that receives them."""

    def kernel_release(self, path: Path = _RELEASE) -> str:
        """The version of the kernel's OpenZFS; empty if it is unknown."""
        try:
            return path.read_text().strip()
        except OSError:
            return ""

    def permissions(self, dataset: str) -> frozenset[str]:
        """What ``zfs allow`` permits to this user on a dataset and on those directly below it.

        Permissions that creating a dataset gives count, too. A set has its name, with an ``@``.

        Raises:
            PoolError: the dataset does not exist.
        """
        user = pwd.getpwuid(os.geteuid()).pw_name
        groups = set()
        for number in {os.getegid(), *os.getgroups()}:
            with suppress(KeyError):
                groups.add(grp.getgrgid(number).gr_name)
        own = {f"user {user}", "everyone", *(f"group {each}" for each in groups)}
        kinds = ("-t", "filesystem,volume", "-d", "1", "-o", "name")
        names = self._run("list", "-H", *kinds, dataset).splitlines()
        return frozenset().union(*(_permitted(self._run("allow", name), own) for name in names))

    def values(self, dataset: str, properties: Collection[str]) -> dict[str, str]:
        """The values of properties of ZFS's own.

        Raises:
            PoolError: the dataset does not exist.
        """
        listing = self._run("get", "-Hp", "-o", "property,value", ",".join(properties), dataset)
        return dict(line.split("\t", 1) for line in listing.splitlines())

    def append(
        self,
        snapshot: str,
        header: bytes,
        rest: Readable,
        options: Collection[str] = (),
        *,
        limit: float = STALLED_SECONDS,
    ) -> None:
        """Receive a snapshot that follows the newest one of its dataset, or makes the dataset.

        An interrupted transfer can be continued. Never ``-F``: that discards what is there.

        Args:
            snapshot: its full name.
            header: the first bytes of the stream.
            rest: the other bytes.
            options: further ones of ``zfs receive``.
            limit: seconds in which ``zfs receive`` takes more data, and ends after the last.

        Raises:
            PoolError: ZFS refused the stream, took no more data, or the stream is incomplete.
        """
        words = ("receive", "-s", "-u", *options, snapshot)
        with LoggedCommand("zfs", *words) as log, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [self._zfs, *words],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                env={**os.environ, "LC_ALL": "C"},
            )
            is_stalled = False
            try:
                with suppress(BrokenPipeError), process.stdin as receiver:  # type: ignore[union-attr]
                    is_stalled = not _feed(receiver.fileno(), header, rest, limit)
            finally:
                # It still records its position, and would block the next one.
                is_stalled = not _has_ended(process, 0 if is_stalled else limit)
            if is_stalled:
                reason = f"took no data for {limit:.0f} s, and was ended: its pool may be suspended"
                raise PoolError(f"zfs receive {snapshot}", reason, _status_step(snapshot))
            log.exited(process.returncode)
            errors.seek(0)
            said = errors.read(_ERROR_BYTES).decode("utf-8", "replace").strip()
        if process.returncode != 0:
            raise _failure(snapshot, said or f"status {process.returncode}")

    def discard_partial(self, dataset: str) -> None:
        """Discard the part of a snapshot that arrived by an interrupted transfer.

        Raises:
            PoolError: there is none, or ``zfs allow`` does not permit it.
        """
        self._run("receive", "-A", dataset)


def _feed(receiver: int, header: bytes, rest: Readable, limit: float) -> bool:
    """Write a stream into a pipe; False if its reader took nothing for ``limit`` seconds."""
    os.set_blocking(receiver, False)
    with selectors.PollSelector() as selector:
        selector.register(receiver, selectors.EVENT_WRITE)
        block = memoryview(header)
        while block:
            if not selector.select(limit):
                return False
            block = block[os.write(receiver, block) :] or memoryview(rest.read(_BLOCK))
    return True


def _has_ended(process: subprocess.Popen[bytes], limit: float) -> bool:
    """Wait for the end of a process, and kill it after ``limit`` seconds.

    Returns:
        Whether it has ended by itself. Where its pool is suspended, it ends only later.
    """
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        return False
    return True


def _failure(snapshot: str, said: str) -> PoolError:
    """The error for what ``zfs receive`` has printed, which may be several lines."""
    if "Partially received snapshot is saved" in said:
        damaged = "checksum mismatch" in said.replace("checksum mismatch or incomplete", "")
        what = "a stream with a checksum mismatch" if damaged else "an incomplete stream"
        reason = f"got {what}, and has kept what arrived"
        return PoolError(f"zfs receive {snapshot}", reason, "try again; it continues there")
    reason = next((line for line in said.splitlines() if line.startswith("cannot ")), said)
    return PoolError(f"zfs receive {snapshot}", reason)


def _status_step(snapshot: str) -> str:
    return f"see: zpool status {shlex.quote(snapshot.partition('/')[0])}"


def _permitted(listing: str, own: Collection[str]) -> set[str]:
    """The permissions in the output of ``zfs allow``.

    Args:
        listing: sections with a line for each grant: to whom, and which permissions.
        own: to whom grants count.
    """
    found: set[str] = set()
    section = ""
    for line in listing.splitlines():
        if not line.startswith("\t"):
            section = line
            continue
        whom, _, permissions = line.strip().rpartition(" ")
        if section.startswith("Create time") or whom in own:
            found |= {*permissions.split(",")}
    return found
