"""Commands on this machine, or on another one by ssh."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence

from snaporch.command_log import LoggedCommand
from snaporch.errors import SnaporchError, UnavailableError

SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=30")
"""Nobody is there to answer a question, and a host that went away must not hold us for ever."""
_PATH = "PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin; export PATH; "
_SSH_FAILED = 255
_POLL_SECONDS = 0.2


class CommandError(SnaporchError):
    """A command failed, here or there."""


class Host:
    """Where commands run.

    Args:
        name: as ssh takes it (``root@nas``); empty for this machine.
        check: is called every now and then while one runs; what it raises ends the command.
    """

    def __init__(self, name: str, check: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self._check = check

    @property
    def label(self) -> str:
        """For people."""
        return self.name or "this machine"

    def words(self, script: str) -> list[str]:
        """The command line that runs a line of shell there."""
        if not self.name:
            return ["sh", "-c", _PATH + script]
        # A connection that stays would hold our pipes open.
        return [*ssh("ControlPath=none"), "--", self.name, _PATH + script]

    def run(self, *words: str) -> str:
        """Run a command; what it printed.

        Raises:
            CommandError: it failed, or the machine cannot be reached.
            UnavailableError: there is no ssh here.
        """
        return self.script(shlex.join(words), what=words[0])

    def script(self, script: str, *, what: str) -> str:
        """Run lines of shell; what they printed. ``what`` names them in an error.

        Raises:
            CommandError: they failed, or the machine cannot be reached.
            UnavailableError: there is no ssh here.
        """
        command = self.words(script)
        needed(command[0])
        with LoggedCommand(*(["ssh", self.name] if self.name else ["sh", "-c"]), script) as log:
            status, out, err = self._run(command)
            log.exited(status)
        if status == 0:
            return out.decode("utf-8", "surrogateescape")
        said = err.decode("utf-8", "replace").strip()
        if self.name and status == _SSH_FAILED:
            step = f"see: ssh -o BatchMode=yes {shlex.quote(self.name)} true"
            raise CommandError(self.name, f"cannot be reached: {_last(said)}", step)
        where = f" on {self.name}" if self.name else ""
        raise CommandError(f"{what}{where}", said or f"exit status {status}")

    def _run(self, command: Sequence[str]) -> tuple[int, bytes, bytes]:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        ) as process:
            while True:
                try:
                    self._check()
                    out, err = process.communicate(timeout=_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
                except BaseException:
                    os.killpg(process.pid, signal.SIGKILL)  # not waited for, so it is its own
                    raise
                return process.returncode, out, err


def ssh(*more: str) -> list[str]:
    """The words that begin a command line of ssh; ``more`` are options such as ``Port=2222``."""
    return ["ssh", *(word for option in (*SSH_OPTIONS, *more) for word in ("-o", option))]


def needed(command: str) -> None:
    """See that a command is installed.

    Raises:
        UnavailableError: it is not; the package has the command's name, or sanoid's.
    """
    packages = {"ssh": "openssh-client", "syncoid": "sanoid"}
    if shutil.which(command) is None:
        package = packages.get(command, command)
        raise UnavailableError(command, "is not installed", f"apt install {package}")


def _last(text: str) -> str:
    """The last line, which says most."""
    return (text.splitlines() or ["without a word"])[-1].strip()
