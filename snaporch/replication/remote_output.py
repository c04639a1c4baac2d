"""What a script on another machine prints, as a stream that is read while the script runs.

How much a short command may print, and how long it may take, is set in :mod:`snaporch.remote_host`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from select import POLLIN, poll
from typing import IO, Self, cast

from snaporch.command_log import LoggedCommand
from snaporch.interrupt import Interrupt
from snaporch.remote_host import Host, check_installed
from snaporch.replication.interface import ReplicaError

AGAIN = "try again; it continues where it stopped"
"""The next step after a transfer that was cut."""
_POLL_SECONDS = 0.5
_END_SECONDS = 10
_ERROR_BYTES = 1 << 13
_READ_BYTES = 1 << 13
_READS = 64


@contextmanager
def remote_output(host: Host, script: str, thing: str, interrupt: Interrupt) -> Iterator[IO[bytes]]:
    """The output of a script on a machine, which is ended with the block.

    A block without an error has read all that it wanted. So a script that does not end soon after
    it is ended, and that is no error.

    Args:
        host: the machine.
        script: what it runs.
        thing: names what is read, for errors.
        interrupt: a signal ends the script.

    Raises:
        ReplicaError: the script failed.
    """
    words = host.words(script)
    check_installed(words[0])
    with (
        LoggedCommand(*(["ssh", host.name] if host.name else []), script) as log,
        _LastErrors() as errors,
        _started(host, words, errors.writer, thing) as process,
    ):
        errors.begin()
        stream = cast("IO[bytes]", process.stdout)
        try:
            yield stream
        except ReplicaError as error:
            said = errors.last_line()
            _end(process)
            reason = f"{error.reason} ({said})" if said else error.reason
            raise ReplicaError(thing, reason, error.step) from error
        except BaseException:
            _end(process)
            raise
        stream.close()
        status = _wait(process, host, interrupt)
        log.exited(status)
        # SIGPIPE: it had more to send than was asked for, which the receiver has checked.
        if status not in (0, -signal.SIGPIPE, 128 + signal.SIGPIPE):
            reason = errors.last_line() or f"exit status {status}"
            raise ReplicaError(thing, reason, AGAIN)


def _started(host: Host, words: Sequence[str], errors: int, thing: str) -> subprocess.Popen[bytes]:
    """Start a process whose output is read.

    Raises:
        ReplicaError: it cannot be started, such as with too many names in its command line.
    """
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            env=host.environment,
            process_group=0,
        )
    except OSError as error:
        raise ReplicaError(thing, f"cannot be read: {error.strerror}") from error


def _wait(process: subprocess.Popen[bytes], host: Host, interrupt: Interrupt) -> int:
    """The exit status of a process; 0 if it had to be ended."""
    end = time.monotonic() + _END_SECONDS
    while time.monotonic() < end:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_SECONDS)
        interrupt.check(host.label)
    _end(process)
    return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class _LastErrors:
    """The last bytes of an error output, which is read all the time: it may be endless."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._begun = False
        self._kept = bytearray()
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._done.set()
        if self._begun:
            self._thread.join()
        else:  # the process was not started
            os.close(self.writer)
        os.close(self._reader)

    def begin(self) -> None:
        """Read from now on: the process has its end of the pipe."""
        self._begun = True
        os.close(self.writer)
        self._thread.start()

    def last_line(self) -> str:
        """The last line so far."""
        self._take()
        lines = self._kept.decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def _read(self) -> None:
        waiting = poll()
        waiting.register(self._reader, POLLIN)
        while not self._done.is_set():
            if waiting.poll(_POLL_SECONDS * 1000) and not self._take():
                return

    def _take(self) -> bool:
        """Read what is there; whether more may come."""
        with self._lock, suppress(BlockingIOError):
            for _ in range(_READS):
                block = os.read(self._reader, _READ_BYTES)
                if not block:
                    return False
                self._kept += block
                del self._kept[:-_ERROR_BYTES]
        return True
