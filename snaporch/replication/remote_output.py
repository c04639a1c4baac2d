"""What a script on another machine prints, as a stream that is read while the script runs."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, cast

from snaporch.command_log import LoggedCommand
from snaporch.interrupt import Interrupt
from snaporch.remote_host import Host, check_installed
from snaporch.replication.interface import ReplicaError

AGAIN = "try again; it continues where it stopped"
"""The next step after a transfer that was cut."""
_POLL_SECONDS = 0.5
_END_SECONDS = 10
_ERROR_BYTES = 1 << 13


@contextmanager
def remote_output(host: Host, script: str, thing: str, interrupt: Interrupt) -> Iterator[IO[bytes]]:
    """The output of a script on a machine, which is ended with the block.

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
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            process_group=0,
        ) as process,
    ):
        stream = cast("IO[bytes]", process.stdout)
        try:
            yield stream
        except ReplicaError as error:
            said = _last_line(errors)
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
            reason = _last_line(errors) or f"exit status {status}"
            raise ReplicaError(thing, reason, AGAIN)


def _wait(process: subprocess.Popen[bytes], host: Host, interrupt: Interrupt) -> int:
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_SECONDS)
        interrupt.check(host.label)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_line(errors: IO[bytes]) -> str:
    """The last line of an error output."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - _ERROR_BYTES))
    lines = errors.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
