"""Commands that run at once, each reading what the one before it writes, without a shell."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import IO

from snaporch.process_group import has_members
from snaporch.remote_host import search_path

POLL_SECONDS = 0.2


class Pipeline:
    """Running commands in a process group of their own, which can be ended as a whole.

    Args:
        commands: each as its words.
        output: gets the errors of all commands, and what the last one prints.
        first: a file that the first command reads, from its position on; nothing by default. The
            caller closes it.
        variables: of the commands' environment, beside those of this process.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        output: IO[bytes],
        first: IO[bytes] | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        environment = {**os.environ, **variables, "LC_ALL": "C", "PATH": search_path()}
        self._processes: list[subprocess.Popen[bytes]] = []
        source = first
        for words in commands:
            is_last = words is commands[-1]
            process = subprocess.Popen(
                words,
                stdin=source or subprocess.DEVNULL,
                stdout=output if is_last else subprocess.PIPE,
                stderr=output,
                env=environment,
                process_group=self._processes[0].pid if self._processes else 0,
            )
            self._processes.append(process)
            if source is not None and source is not first:
                source.close()  # a command must notice that its reader has exited
            source = process.stdout
        self.pids = [process.pid for process in self._processes]
        self.pid = self.pids[0]
        """The number of the process group."""

    def poll(self) -> int | None:
        """The exit status, see :meth:`wait`; None while a command runs."""
        statuses = [process.poll() for process in self._processes]
        if None in statuses:
            return None
        return next((status for status in reversed(statuses) if status), 0)

    def wait(self, seconds: float) -> int:
        """Wait for the end of all commands.

        Returns:
            The exit status of the last command that failed; 0 if none did.

        Raises:
            subprocess.TimeoutExpired: a command still runs.
        """
        end = time.monotonic() + seconds
        for process in self._processes:
            process.wait(max(0.0, end - time.monotonic()))
        return self.poll() or 0

    def end(self, seconds: float) -> None:
        """End the process group, unless all commands have exited.

        Waits for all members of the group, also for those that a command started: a receiver that
        still records its position would block the next transfer.

        Args:
            seconds: how long they may take after each signal: SIGTERM, then SIGKILL.
        """
        if self.poll() is not None:
            return
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signum)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if self.poll() is not None and not has_members(self.pid):
                    return
                time.sleep(POLL_SECONDS)
