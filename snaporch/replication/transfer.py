"""Run the commands of a transfer, which may take hours: end those that move no data."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import IO

from snaporch.command_log import LoggedCommand
from snaporch.errors import SnaporchError
from snaporch.interrupt import Interrupt
from snaporch.progress import Progress
from snaporch.remote_host import check_installed
from snaporch.replication.interface import ReplicaError
from snaporch.replication.pipeline import POLL_SECONDS, Pipeline
from snaporch.replication.stall_detector import STALL_SECONDS, StallDetector, passed_bytes

_OUTPUT_BYTES = 1 << 20
_MAX_OUTPUT_BYTES = 1 << 24
"""What a transfer may print at most: ``zfs send`` prints a line for each snapshot that is gone."""

_ERROR = "snaporch: "
"""With this begins the line of an error of ``snaporch receive``."""


class RateChangedError(SnaporchError):
    """A transfer was ended, because it must continue at another rate."""


class Transfers:
    """Runs the commands of transfers to one replica.

    Args:
        name: the replica's name in the configuration.
        label: names its host, for messages.
        interrupt: a signal ends a transfer, and so does the end of the replica's window.
        progress: gets the bytes.
        rate: the most MiB a second at this moment; 0 for no limit.
        end_seconds: how long the commands may take to end after SIGTERM.
        watch: watches whether a process group still moves data.
        environment: variables for the commands, beside those of this process.
    """

    def __init__(
        self,
        name: str,
        label: str,
        interrupt: Interrupt,
        progress: Progress,
        rate: Callable[[], int] = lambda: 0,
        *,
        end_seconds: float = 10,
        watch: Callable[[int], StallDetector] = StallDetector,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._environment = environment
        self._name = name
        self._label = label
        self._interrupt = interrupt
        self._progress = progress
        self.rate = rate
        self._end_seconds = end_seconds
        self._watch = watch

    def run(
        self,
        *commands: Sequence[str],
        through: int,
        size: int,
        source: IO[bytes] | None = None,
        rate: int | None = None,
    ) -> tuple[int, list[str]]:
        """Run a transfer, which may take hours, and report the bytes; end it when no data moves.

        Args:
            commands: each gets the output of the one before it.
            through: the index of a command that reads and writes all data, such as mbuffer: what
                ``zfs send`` writes in the kernel is not counted.
            size: the expected bytes; 0 if that is not known, and nothing is reported.
            source: a file that the first command reads, from its position on; nothing by default.
            rate: the MiB a second of the commands; ``None`` if they have no limit.

        Returns:
            The exit status, and the lines of output.

        Raises:
            RateChangedError: the rate of this moment is another one; the transfer was ended.
        """

        def report(process: Pipeline) -> None:
            if rate is not None and (now := self.rate()) != rate:
                text = f"continues with {now} MiB/s" if now else "continues without a limit"
                self._progress.note(self._name, text)
                raise RateChangedError(self._name, text)
            if size:
                self._progress.amount(self._name, passed_bytes(process.pids[through]), size)

        status, text = self._run(commands, None, report, source)
        return status, text_lines(text)

    def output(self, *command: str, limit: float) -> tuple[int, str]:
        """Run a command that moves no data.

        Args:
            limit: seconds; if the command takes longer, it is ended.

        Returns:
            The exit status, and the output.
        """
        return self._run([command], limit, lambda _process: None)

    def _run(
        self,
        commands: Sequence[Sequence[str]],
        limit: float | None,
        report: Callable[[Pipeline], None],
        source: IO[bytes] | None = None,
    ) -> tuple[int, str]:
        """Run commands; a file gets their output: a child that stays would hold a pipe open.

        Args:
            commands: each gets the output of the one before it.
            limit: seconds; None for as long as data moves.
            report: called several times a second.
            source: the first command reads it; nothing by default.

        Returns:
            The exit status, and the output.
        """
        for command in commands:
            check_installed(command[0])
        words = [word for command in commands for word in ("|", *command)][1:]
        with self.local_errors(), LoggedCommand(*words) as log, tempfile.TemporaryFile() as output:
            process = Pipeline(commands, output, source, self._environment)
            try:
                status = self._wait(process, output, limit, report)
            finally:
                process.end(self._end_seconds)
            log.exited(status)
            output.seek(0)
            return status, output.read(_OUTPUT_BYTES).decode("utf-8", "replace")

    @contextmanager
    def local_errors(self) -> Iterator[None]:
        """Turn an error of this host, such as a full directory for temporary files, into ours."""
        try:
            yield
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise ReplicaError(self._name, f"{error.strerror or error}{where}") from error

    def _wait(
        self,
        process: Pipeline,
        output: IO[bytes],
        limit: float | None,
        report: Callable[[Pipeline], None],
    ) -> int:
        pace, end = self._watch(process.pid), time.monotonic() + (limit or 0)
        while True:
            self._interrupt.check(self._name)
            with suppress(subprocess.TimeoutExpired):
                return process.wait(POLL_SECONDS)
            report(process)
            if os.fstat(output.fileno()).st_size > _MAX_OUTPUT_BYTES:
                reason = f"a transfer prints over {_MAX_OUTPUT_BYTES >> 20} MiB, and was ended"
                raise ReplicaError(self._name, reason)
            if limit is not None and time.monotonic() > end:
                reason = f"zfs takes over {limit:.0f} s, and was ended"
                raise ReplicaError(self._name, reason, "see: zpool status, on this machine")
            if limit is None and pace.is_stalled():
                raise ReplicaError(
                    self._name,
                    f"no data moved for {STALL_SECONDS // 60} minutes, so the transfer was ended",
                    f"see: zpool status, on {self._label}",
                )


def limits_rate() -> bool:
    """Whether :func:`buffer_words` limits a rate here."""
    return shutil.which("mbuffer") is not None


def buffer_words(rate: int) -> list[str]:
    """The command in the middle of a transfer, whose bytes are counted: mbuffer, or else ``cat``.

    Without a command between them, only the kernel would count what others move.

    Args:
        rate: the most MiB a second; 0 for no limit. ``cat`` has none.
    """
    if not limits_rate():
        return ["cat"]
    return ["mbuffer", "-q", "-s", "128k", "-m", "16M", *(["-R", f"{rate}M"] if rate else [])]


def expected_bytes(report: str) -> int:
    """The size in the output of ``zfs send -nP``; 0 if it has none."""
    sizes = re.findall(r"^size\t([0-9]{1,20})$", report, re.MULTILINE)
    return int(sizes[-1]) if sizes else 0


def reason_of_receiver(lines: Sequence[str]) -> str:
    """The reason of a failure in an output: the line of ``snaporch receive``, or the last one."""
    own = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
    return (own or [*lines] or ["no output"])[-1]


def reason_of_failure(lines: Sequence[str]) -> str:
    """The reason of a failure, from the output of ``zfs``, ssh and ``snaporch receive``."""
    if any(line.startswith("snaporch: ") for line in lines):
        said, found, reason = reason_of_receiver(lines).partition(": cannot ")
        return f"cannot {reason}" if found else said
    reason = next((line for line in lines if line.startswith("cannot ")), "")
    others = [line for line in lines if not line.startswith(("warning: cannot send", "mbuffer:"))]
    return reason or (others or lines or ["zfs send failed without output"])[-1]


def text_lines(text: str) -> list[str]:
    """The lines of a text that are not empty."""
    return [line.strip() for line in text.splitlines() if line.strip()]
