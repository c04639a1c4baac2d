"""One run per domain at a time."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tenacity import (
    RetryCallState,
    RetryError,
    Retrying,
    retry_if_result,
    stop_after_delay,
    wait_fixed,
)

from snaporch.bundle.store import explained_store, private_directory
from snaporch.command_log import fields
from snaporch.context import Interrupt
from snaporch.errors import BusyError
from snaporch.model import iso

_POLL_SECONDS = 0.2
_BRIEF_SECONDS = 180
_NAMELESS_SECONDS = 5
"""For who has just taken the lock to say so; until then its file tells of the one before."""
_UNTOLD = "another run"
RECOVERING = "recover"
PRUNING = "prune"
SCHEDULE = "schedule"
"""The lock, by name and UUID, of whoever carries policies out."""
RETENTION = "retention"
_BRIEF = (RECOVERING, PRUNING, RETENTION)


@contextmanager
def domain_lock(
    runtime: Path, name: str, uuid: str, doing: str, *, wait: int, interrupt: Interrupt
) -> Iterator[None]:
    """Hold the domain for a run.

    The kernel drops the lock with the process, however it ends. The file stays: unlinking it would
    let two runs lock two files of one name.

    Raises:
        BusyError: another run holds it after ``wait`` seconds.
        UnavailableError: the runtime directory cannot be written.
    """
    with explained_store(runtime):
        private_directory(runtime)
        descriptor = os.open(runtime / f"{uuid}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _acquire(descriptor, name, wait, interrupt)
        holder = {"pid": os.getpid(), "doing": doing, "since": iso(datetime.now(UTC))}
        os.ftruncate(descriptor, 0)
        with suppress(
            OSError
        ):  # the kernel's lock counts; a full /run must not keep a guest frozen
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        with fields(DOMAIN=name):
            yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, name: str, wait: int, interrupt: Interrupt) -> None:
    def attempt() -> bool:
        interrupt.check(name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def give_up(state: RetryCallState) -> bool:
        """What is short, and mends what is in our own way, is waited for anyway."""
        longest = max(wait, _anyway(_told(descriptor)))
        return (state.seconds_since_start or 0.0) >= longest

    patience = Retrying(
        stop=give_up,
        wait=wait_fixed(_POLL_SECONDS),
        retry=retry_if_result(lambda got: not got),
    )
    try:
        patience(attempt)
    except RetryError as error:
        step = "see: snaporch status; try again later, with --wait if the command has it"
        raise BusyError(name, f"held by {_holder(descriptor)}", step) from error


@contextmanager
def readers_lock(
    runtime: Path, name: str, uuid: str, *, alone: bool, wait: int = 0, interrupt: Interrupt
) -> Iterator[None]:
    """Read a domain's snapshots beside others that do, or roll back alone.

    Not :func:`domain_lock`: snapshots are taken while others are cloned, verified or copied.

    Args:
        alone: nobody else may read.
        wait: seconds.

    Raises:
        BusyError: it cannot be had after ``wait`` seconds.
        UnavailableError: the runtime directory cannot be written.
    """
    path = runtime / f"{uuid}.readers.lock"
    with explained_store(runtime):
        private_directory(runtime)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def attempt() -> bool:
        interrupt.check(name)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    try:
        patience = Retrying(
            stop=stop_after_delay(wait),
            wait=wait_fixed(_POLL_SECONDS),
            retry=retry_if_result(lambda got: not got),
        )
        try:
            patience(attempt)
        except RetryError as error:
            reading = "a snapshot of it is being cloned, verified or copied"
            rolling = "it is being rolled back"
            raise BusyError(name, reading if alone else rolling, "try again later") from error
        with fields(DOMAIN=name):
            yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock, as its file tells; or held it, and was killed."""

    doing: str
    pid: int
    since: str
    """ISO 8601, UTC."""

    @classmethod
    def parse(cls, text: bytes) -> Holder | None:
        """``None`` for what nobody has written."""
        try:
            told = json.loads(text)
            return cls(str(told["doing"]), int(told["pid"]), str(told["since"]))
        except (ValueError, KeyError, TypeError):
            return None

    @property
    def alive(self) -> bool:
        """Whether there is such a process."""
        return Path(f"/proc/{self.pid}").exists()


def holder(runtime: Path, uuid: str) -> str | None:
    """Who holds the domain, for a message; ``None`` for nobody."""
    found = held_by(runtime, uuid)
    return f"{found.doing} (pid {found.pid})" if found else None


def held_by(runtime: Path, uuid: str) -> Holder | None:
    """Who holds the domain; ``None`` for nobody.

    Asks the kernel's list (proc(5), ``/proc/locks``): taking the lock could make a run fail.
    """
    path = runtime / f"{uuid}.lock"
    try:
        status = path.stat()
        locks = [line.split() for line in Path("/proc/locks").read_text("ascii").splitlines()]
        found = Holder.parse(path.read_bytes())
    except (OSError, ValueError):
        return None
    for words in locks:
        # only the inode: some file systems show another device number here than stat(2) does
        if words[1] == "FLOCK" and words[5].endswith(f":{status.st_ino}"):
            if found is None:  # it has only just taken it, or had no room to say so
                since = iso(datetime.fromtimestamp(status.st_mtime, UTC))
                found = Holder(_UNTOLD, int(words[4]), since)
            return found if found.alive else None
    return None


def _told(descriptor: int) -> Holder | None:
    return Holder.parse(os.pread(descriptor, 4096, 0))


def _anyway(holder: Holder | None) -> float:
    """Seconds to wait even if nobody asked for that."""
    if holder is None or not holder.alive:
        return _NAMELESS_SECONDS
    return _BRIEF_SECONDS if holder.doing in _BRIEF else 0.0


def _holder(descriptor: int) -> str:
    """Without a time or a process: who is told again and again, is told the same."""
    told = _told(descriptor)
    return told.doing if told is not None and told.alive else _UNTOLD
