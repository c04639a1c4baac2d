"""snaporch in a child that was forked, not started: the modules are there, which saves seconds.

The child is a process like any other: it can be stopped, killed and waited for. When it exits, the
kernel drops all that it holds.
"""

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping

from outcome import Outcome

from faults import stopping
from snaporch.cli import main


class Run:
    """A snaporch under way."""

    def __init__(
        self,
        *arguments: str,
        point: str | None = None,
        guarded: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - close() does
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        self.status: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(arguments, point, guarded, env or {})

    def _become(
        self, arguments: tuple[str, ...], point: str | None, guarded: bool, env: Mapping[str, str]
    ) -> None:
        """The child: never returns."""
        status = 70
        try:
            os.dup2(self._out.fileno(), 1)
            os.dup2(self._err.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            os.environ.update(env)
            if not guarded:
                stopping.dismiss_guardian()
            if point is not None:
                stopping.stop_at(point)
            main.run(list(arguments))
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
            threading._shutdown()  # as an interpreter that ends: it waits for threads
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def wait_stopped(self) -> None:
        """Wait until the process has stopped itself at its point."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self.status = os.waitstatus_to_exitcode(status)
            raise AssertionError(f"ended before it came to the point: {self.outcome()}")

    def stop(self) -> None:
        """Stop the process where it is."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue the process."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def has_ended(self) -> bool:
        """Whether the process has ended, without waiting for it."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.status is not None or os.waitid(os.P_PID, self.pid, how) is not None

    def wait(self) -> Outcome:
        """Wait until the process has ended."""
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.outcome()

    def close(self) -> None:
        """Drop what the process printed."""
        self._out.close()
        self._err.close()

    def outcome(self) -> Outcome:
        """What the process printed; a status below zero is the signal that killed it."""
        said = []
        for stream in (self._out, self._err):
            size = os.fstat(stream.fileno()).st_size
            said.append(os.pread(stream.fileno(), size, 0).decode())
        return Outcome(self.status if self.status is not None else -1, *said)


def snaporch_here(*arguments: str, env: Mapping[str, str] | None = None) -> Outcome:
    """Run snaporch to its end."""
    run = Run(*arguments, env=env)
    try:
        return run.wait()
    finally:
        run.close()
