"""Running commands on this machine, or on another one by ssh."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence

from snaporch.command_log import LoggedCommand
from snaporch.errors import SnaporchError, UnavailableError

SSH_OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=20",
    "ServerAliveInterval=30",
    "ForwardAgent=no",
    "ForwardX11=no",
)
"""No terminal can answer a question, an unreachable host must not block for ever, and the other
machine gets no access to this one, whatever root's ssh configuration says."""
_SYSTEM_DIRECTORIES = "/usr/local/sbin:/usr/sbin:/sbin"
"""Where ``zfs`` is; the ``PATH`` of cron and of ssh may lack them."""
_PATH = f"PATH=$PATH:{_SYSTEM_DIRECTORIES}; export PATH; "
_SSH_FAILED = 255
_POLL_SECONDS = 0.2


class CommandError(SnaporchError):
    """A command failed, on this machine or on the other one."""


class Host:
    """A machine that runs commands.

    Args:
        name: ssh's name of the machine (``root@nas``); empty for this machine.
        check: called several times a second while a command runs; an exception ends the command.
    """

    def __init__(self, name: str, check: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self._check = check

    @property
    def label(self) -> str:
        """The machine's name for messages."""
        return self.name or "this machine"

    def words(self, script: str) -> list[str]:
        """Return the command line that runs a shell script on the machine."""
        if not self.name:
            return ["sh", "-c", _PATH + script]
        # A shared connection would outlive the command and keep its pipes open.
        return [*ssh_words("ControlPath=none"), "--", self.name, _PATH + script]

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs a command on the machine: no shell here reads it."""
        return self.words(shlex.join(words)) if self.name else list(words)

    def run(self, *words: str) -> str:
        """Run a command.

        Returns: its standard output.

        Raises:
            CommandError: it failed, or the machine cannot be reached.
            UnavailableError: ssh is not installed.
        """
        return self.script(shlex.join(words), what=words[0])

    def script(self, script: str, *, what: str) -> str:
        """Run a shell script.

        Args:
            what: names the script in an error.

        Returns: its standard output.

        Raises:
            CommandError: it failed, or the machine cannot be reached.
            UnavailableError: ssh is not installed.
        """
        command = self.words(script)
        check_installed(command[0])
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
                    # Its number is still its own, because it was not waited for.
                    os.killpg(process.pid, signal.SIGKILL)
                    raise
                return process.returncode, out, err


def ssh_words(*more: str) -> list[str]:
    """Return the first words of an ssh command line.

    Args:
        more: further options, such as ``Port=2222``.
    """
    return ["ssh", *(word for option in (*SSH_OPTIONS, *more) for word in ("-o", option))]


def search_path() -> str:
    """Return the directories in which commands are searched for."""
    return f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_DIRECTORIES}"


def check_installed(command: str) -> None:
    """Check that a command is installed.

    Raises:
        UnavailableError: it is not; names the Debian package.
    """
    packages = {"ssh": "openssh-client", "zfs": "zfsutils-linux"}
    if shutil.which(command, path=search_path()) is None:
        package = packages.get(command, command)
        raise UnavailableError(command, "is not installed", f"apt install {package}")


def _last(text: str) -> str:
    """Return the last line of an error output, which usually has the cause."""
    return (text.splitlines() or ["no output"])[-1].strip()
