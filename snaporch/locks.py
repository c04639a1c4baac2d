"""Locks: one run per domain at a time, and readers of its snapshots."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_result,
    stop_after_delay,
    wait_fixed,
)

from snaporch.command_log import fields
from snaporch.errors import BusyError
from snaporch.interrupt import Interrupt
from snaporch.model import iso
from snaporch.private_files import private_directory, store_errors

_POLL_SECONDS = 0.2
_UNNAMED = "another run"
RECOVERING = "recover"
PRUNING = "prune"
SCHEDULE = "schedule"
"""The name and UUID of the lock that the daemon or ``run-due`` holds while it runs policies."""
DAEMON = "daemon"
"""What the daemon does, for :func:`domain_lock`."""
RETENTION = "retention"
DELETING = "delete"
REPLICATING = "replicate"
REPLICATION = "replication"
"""The name of the lock that lets one replication run at a time on a host."""
_BRIEF = (RECOVERING, PRUNING, RETENTION, DELETING)


@dataclass(frozen=True, slots=True)
class LockTimes:
    """How long to wait for a lock in any case, in seconds."""

    brief: float = 180
    """For a holder whose work is short."""
    nameless: float = 5
    """For a new holder to write its name; until then the file names the one before."""


_TIMES = LockTimes()


def replication_lock_name(uuid: str) -> str:
    """The name of the lock that keeps retention from deleting snapshots while they are copied."""
    return f"{uuid}-replication"


@contextmanager
def domain_lock(
    runtime: Path,
    name: str,
    uuid: str,
    doing: str,
    *,
    wait: float,
    interrupt: Interrupt,
    can_wait: bool = False,
    times: LockTimes = _TIMES,
    replica: str = "",
) -> Iterator[None]:
    """Hold a domain's lock for a run.

    The kernel drops the lock when the process exits, for whatever reason. The file stays: if it
    were unlinked, two runs could lock two files of one name.

    Args:
        runtime: the directory of the lock files.
        name: the domain's, for messages.
        doing: what the run does, for messages of other commands.
        wait: seconds; ``math.inf`` for no limit.
        can_wait: the command has the option ``--wait`` for this lock.
        times: how long to wait in any case.
        replica: where the domain's snapshots are copied to, for retention; empty if nowhere.

    Raises:
        BusyError: another run still holds the lock after ``wait`` seconds.
        InterruptedRunError: a signal came first.
        UnavailableError: the runtime directory cannot be written.
    """
    descriptor = _open(runtime, f"{uuid}.lock")

    def is_over(state: RetryCallState) -> bool:
        """Short work, and the recovery of this very domain, is waited for in any case."""
        longest = max(wait, _least_wait(_read_holder(descriptor), times))
        return (state.seconds_since_start or 0.0) >= longest

    try:
        if not _acquire(descriptor, fcntl.LOCK_EX, name, interrupt, is_over):
            step = f"see: snaporch status; {_again(can_wait)}"
            raise BusyError(name, f"held by {_holder(descriptor)}", step)
        holder = {"pid": os.getpid(), "doing": doing, "since": iso(datetime.now(UTC))}
        holder |= {"replica": replica} if replica else {}
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
    runtime: Path,
    name: str,
    uuid: str,
    *,
    alone: bool,
    wait: int = 0,
    interrupt: Interrupt,
    can_wait: bool = False,
) -> Iterator[None]:
    """Hold a domain's readers' lock: to read its snapshots beside other readers, or to roll back.

    It is not :func:`domain_lock`, because a domain can be snapshotted while its snapshots are
    cloned, verified, copied or mounted.

    Args:
        alone: exclude all readers, for a rollback.
        wait: seconds.
        can_wait: the command has the option ``--wait`` for this lock.

    Raises:
        BusyError: the lock could not be had after ``wait`` seconds.
        InterruptedRunError: a signal came first.
        UnavailableError: the runtime directory cannot be written.
    """
    descriptor = _open(runtime, f"{uuid}.readers.lock")
    operation = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    try:
        if not _acquire(descriptor, operation, name, interrupt, stop_after_delay(wait)):
            reading = "a snapshot of it is being cloned, verified, copied or mounted"
            rolling = "it is being rolled back"
            raise BusyError(name, reading if alone else rolling, _again(can_wait))
        with fields(DOMAIN=name):
            yield
    finally:
        os.close(descriptor)


def has_readers(runtime: Path, uuid: str, locks: Path = Path("/proc/locks")) -> bool:
    """Whether a domain's snapshots are being read; takes no lock, so that no reader is refused."""
    try:
        inode = os.stat(runtime / f"{uuid}.readers.lock").st_ino
        held = [line.split() for line in locks.read_text("utf-8").splitlines()]
    except OSError:
        return False
    return any("FLOCK" in words and words[-3].endswith(f":{inode}") for words in held)


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
class LockHolder:
    """The process that a lock file names: it holds the lock, or held it and was killed."""

    doing: str
    pid: int
    since: str
    """ISO 8601, UTC."""
    checked: str = ""
    """When the daemon last checked guests and policies, ISO 8601, UTC; empty if it has not yet."""
    replica: str = ""
    """The replica that the domain is being copied to; empty if it is not known."""

    @classmethod
    def parse(cls, text: bytes) -> LockHolder | None:
        """Read a lock file; ``None`` if it is empty or malformed."""
        try:
            fields = json.loads(text)
            found = cls(str(fields["doing"]), int(fields["pid"]), str(fields["since"]))
            checked, replica = (str(fields.get(key, "")) for key in ("checked", "replica"))
            return replace(found, checked=checked, replica=replica)
        except (ValueError, KeyError, TypeError):
            return None

    @property
    def alive(self) -> bool:
        """Whether the process exists."""
        return Path(f"/proc/{self.pid}").exists()


def lock_holder(runtime: Path, uuid: str) -> str | None:
    """The holder of a domain's lock, for a message; ``None`` if the lock is free."""
    found = held_by(runtime, uuid)
    return f"{found.doing} (pid {found.pid})" if found else None


def held_by(runtime: Path, uuid: str) -> LockHolder | None:
    """The holder of a domain's lock; ``None`` if the lock is free.

    It reads the kernel's list (proc(5), ``/proc/locks``): to take the lock could make a run fail.
    """
    path = runtime / f"{uuid}.lock"
    try:
        status = path.stat()
        locks = [line.split() for line in Path("/proc/locks").read_text("ascii").splitlines()]
        found = LockHolder.parse(path.read_bytes())
    except (OSError, ValueError):
        return None
    for words in locks:
        # only the inode counts: some file systems show another device number here than stat(2)
        if words[1] == "FLOCK" and words[5].endswith(f":{status.st_ino}"):
            if found is None:  # it has just taken the lock, or had no room to write its name
                since = iso(datetime.fromtimestamp(status.st_mtime, UTC))
                found = LockHolder(_UNNAMED, int(words[4]), since)
            return found if found.alive else None
    return None


def record_check(runtime: Path, at: datetime) -> None:
    """Record that the daemon has checked guests and policies; a failure is ignored.

    The caller holds the lock ``SCHEDULE``, in whose file this is written.

    Args:
        at: when the check began.
    """
    path = runtime / f"{SCHEDULE}.lock"
    with suppress(OSError):
        found = LockHolder.parse(path.read_bytes())
        if found is not None and found.pid == os.getpid():
            # in place, and always of the same length: readers need no lock
            with path.open("r+b", buffering=0) as stream:
                stream.write(json.dumps(asdict(replace(found, checked=iso(at)))).encode())


def _read_holder(descriptor: int) -> LockHolder | None:
    return LockHolder.parse(os.pread(descriptor, 4096, 0))


def _again(can_wait: bool) -> str:  # noqa: FBT001
    return "try again later, or wait for it with --wait" if can_wait else "try again later"


def _least_wait(holder: LockHolder | None, times: LockTimes) -> float:
    """How many seconds to wait for a holder in any case."""
    if holder is None or not holder.alive:
        return times.nameless
    return times.brief if holder.doing in _BRIEF else 0.0


def _holder(descriptor: int) -> str:
    """The holder for an error; without time and PID, so that repeated errors are equal."""
    found = _read_holder(descriptor)
    return found.doing if found is not None and found.alive else _UNNAMED
