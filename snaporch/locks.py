"""Locks: one run per domain at a time, and readers of its snapshots."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_result,
    stop_after_delay,
    wait_fixed,
)

from snaporch.bundle.store import private_directory, store_errors
from snaporch.command_log import fields
from snaporch.context import Interrupt
from snaporch.errors import BusyError
from snaporch.model import iso

_POLL_SECONDS = 0.2
_BRIEF_SECONDS = 180
_NAMELESS_SECONDS = 5
"""How long a new holder may take to write its name; until then the file names the one before."""
_UNNAMED = "another run"
RECOVERING = "recover"
PRUNING = "prune"
SCHEDULE = "schedule"
"""The name and UUID of the lock that the daemon or ``run-due`` holds while it runs policies."""
RETENTION = "retention"
_BRIEF = (RECOVERING, PRUNING, RETENTION)


@contextmanager
def domain_lock(
    runtime: Path, name: str, uuid: str, doing: str, *, wait: int, interrupt: Interrupt
) -> Iterator[None]:
    """Hold a domain's lock for a run.

    The kernel drops the lock when the process exits, for whatever reason. The file stays: if it
    were unlinked, two runs could lock two files of one name.

    Args:
        runtime: the directory of the lock files.
        name: the domain's, for messages.
        doing: what the run does, for messages of other commands.
        wait: seconds.

    Raises:
        BusyError: another run still holds the lock after ``wait`` seconds.
        InterruptedRunError: a signal came first.
        UnavailableError: the runtime directory cannot be written.
    """
    descriptor = _open(runtime, f"{uuid}.lock")

    def is_over(state: RetryCallState) -> bool:
        """Short work, and the recovery of this very domain, is waited for in any case."""
        longest = max(wait, _least_wait(_read_holder(descriptor)))
        return (state.seconds_since_start or 0.0) >= longest

    try:
        if not _acquire(descriptor, fcntl.LOCK_EX, name, interrupt, is_over):
            step = "see: snaporch status; try again later, with --wait if the command has it"
            raise BusyError(name, f"held by {_holder(descriptor)}", step)
        holder = {"pid": os.getpid(), "doing": doing, "since": iso(datetime.now(UTC))}
        os.ftruncate(descriptor, 0)
        # the kernel's lock counts, not the file; a full /run must not keep a guest frozen
        with suppress(OSError):
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        with fields(DOMAIN=name):
            yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


@contextmanager
def readers_lock(
    runtime: Path, name: str, uuid: str, *, alone: bool, wait: int = 0, interrupt: Interrupt
) -> Iterator[None]:
    """Hold a domain's readers' lock: to read its snapshots beside other readers, or to roll back.

    It is not :func:`domain_lock`, because a domain can be snapshotted while its snapshots are
    cloned, verified or copied.

    Args:
        alone: exclude all readers, for a rollback.
        wait: seconds.

    Raises:
        BusyError: the lock could not be had after ``wait`` seconds.
        InterruptedRunError: a signal came first.
        UnavailableError: the runtime directory cannot be written.
    """
    descriptor = _open(runtime, f"{uuid}.readers.lock")
    operation = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    try:
        if not _acquire(descriptor, operation, name, interrupt, stop_after_delay(wait)):
            reading = "a snapshot of it is being cloned, verified or copied"
            rolling = "it is being rolled back"
            raise BusyError(name, reading if alone else rolling, "try again later")
        with fields(DOMAIN=name):
            yield
    finally:
        os.close(descriptor)


def _open(runtime: Path, file: str) -> int:
    with store_errors(runtime):
        private_directory(runtime)
        return os.open(runtime / file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _acquire(
    descriptor: int,
    operation: int,
    name: str,
    interrupt: Interrupt,
    stop: Callable[[RetryCallState], bool],
) -> bool:
    """Try flock(2) until it succeeds or ``stop`` ends it; whether it succeeded."""

    def attempt() -> bool:
        interrupt.check(name)
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    retrying = Retrying(
        stop=stop,
        wait=wait_fixed(_POLL_SECONDS),
        retry=retry_if_result(lambda acquired: not acquired),
        retry_error_callback=lambda _state: False,
    )
    return bool(retrying(attempt))


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that a lock file names: it holds the lock, or held it and was killed."""

    doing: str
    pid: int
    since: str
    """ISO 8601, UTC."""

    @classmethod
    def parse(cls, text: bytes) -> Holder | None:
        """Read a lock file; ``None`` if it is empty or malformed."""
        try:
            fields = json.loads(text)
            return cls(str(fields["doing"]), int(fields["pid"]), str(fields["since"]))
        except (ValueError, KeyError, TypeError):
            return None

    @property
    def alive(self) -> bool:
        """Whether the process exists."""
        return Path(f"/proc/{self.pid}").exists()


def holder(runtime: Path, uuid: str) -> str | None:
    """The holder of a domain's lock, for a message; ``None`` if the lock is free."""
    found = held_by(runtime, uuid)
    return f"{found.doing} (pid {found.pid})" if found else None


def held_by(runtime: Path, uuid: str) -> Holder | None:
    """The holder of a domain's lock; ``None`` if the lock is free.

    It reads the kernel's list (proc(5), ``/proc/locks``): to take the lock could make a run fail.
    """
    path = runtime / f"{uuid}.lock"
    try:
        status = path.stat()
        locks = [line.split() for line in Path("/proc/locks").read_text("ascii").splitlines()]
        found = Holder.parse(path.read_bytes())
    except (OSError, ValueError):
        return None
    for words in locks:
        # only the inode counts: some file systems show another device number here than stat(2)
        if words[1] == "FLOCK" and words[5].endswith(f":{status.st_ino}"):
            if found is None:  # it has just taken the lock, or had no room to write its name
                since = iso(datetime.fromtimestamp(status.st_mtime, UTC))
                found = Holder(_UNNAMED, int(words[4]), since)
            return found if found.alive else None
    return None


def _read_holder(descriptor: int) -> Holder | None:
    return Holder.parse(os.pread(descriptor, 4096, 0))


def _least_wait(holder: Holder | None) -> float:
    """How many seconds to wait for a holder in any case."""
    if holder is None or not holder.alive:
        return _NAMELESS_SECONDS
    return _BRIEF_SECONDS if holder.doing in _BRIEF else 0.0


def _holder(descriptor: int) -> str:
    """The holder for an error; without time and PID, so that repeated errors are equal."""
    found = _read_holder(descriptor)
    return found.doing if found is not None and found.alive else _UNNAMED
