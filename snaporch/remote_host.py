"""Running commands on this machine, or on another one by ssh, with limits of time and output.

``LIMIT_SECONDS`` applies to each command that lists or changes something, ``_OUTPUT_BYTES`` to what
it prints, ``JSON_BYTES`` to what is read as JSON. Others set their own: transfers in
:mod:`snaporch.replication.transfer` and :mod:`snaporch.replication.stall_detector`, what
``receive`` and ``send`` wait for in :mod:`snaporch.replication.receive_limits`.
"""

from __future__ import annotations

import os
import selectors
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import IO

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
LIMIT_SECONDS = 600
"""How long a command may take that lists or changes something, on slow disks, too."""
_OUTPUT_BYTES = 1 << 27
"""The most output that is read: a listing of 60 000 snapshots with their properties."""
JSON_BYTES = 1 << 24
"""The most of an answer in JSON, which takes up to 25 times its length of memory when it is read:
20 000 snapshots with their properties. The kernel would end a guest for the memory."""
_ERROR_BYTES = 1 << 13
_READ_BYTES = 1 << 16
_END_SECONDS = 10


class CommandError(SnaporchError):
    """A command failed, on this machine or on the other one."""


class Host:
    """A machine that runs commands.

    Args:
        name: ssh's name of the machine (``root@nas``); empty for this machine.
        check: called several times a second while a command runs; an exception ends the command.
        prelude: what each script begins with on another machine.
        limit: seconds that a command may take that lists or changes something.
        environment: variables for commands, beside those of this process; ssh does not pass them.

    A pool that is suspended meanwhile blocks a command that uses it, and any that reads its files,
    while the connection stays alive. So each command has a limit of time, and after one that took
    over ``limit``, no other is run. What a command prints is bounded, too: the machine
    may be hostile.
    """

    def __init__(
        self,
        name: str,
        check: Callable[[], None] = lambda: None,
        *,
        prelude: str = _PATH,
        limit: float = LIMIT_SECONDS,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self.environment = {**os.environ, **environment}
        """Of commands, on this machine."""
        self._check = check
        self._prelude = prelude
        self._limit = limit
        self._blocked_by = ""

    @property
    def label(self) -> str:
        """The machine's name for messages."""
        return self.name or "this machine"

    def words(self, script: str) -> list[str]:
        """Return the command line that runs a shell script on the machine."""
        if not self.name:
            return ["sh", "-c", _PATH + script]
        # A shared connection would outlive the command and keep its pipes open.
        return [*ssh_words("ControlPath=none"), "--", self.name, self._prelude + script]

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs a command on the machine: no shell here reads it."""
        return self.words(shlex.join(words)) if self.name else list(words)

    def run(self, *words: str, limit: float | None = None) -> str:
        """Run a command; see :meth:`script`."""
        return self.script(shlex.join(words), what=shlex.join(words[:2]), limit=limit)

    def script(
        self, script: str, *, what: str, limit: float | None = None, most: int = _OUTPUT_BYTES
    ) -> str:
        """Run a shell script.

        Args:
            what: names the script in an error.
            limit: seconds; a script that takes longer is ended; the host's by default.
            most: bytes of output; a script that prints more is ended.

        Returns: its standard output.

        Raises:
            CommandError: it failed, took too long or printed too much, or the machine cannot be
                reached.
            UnavailableError: ssh is not installed.
        """
        if self._blocked_by:
            reason = f"was not run: {self._blocked_by} took over {self._limit:.0f} s"
            raise CommandError(self._where(what), reason, self._status_step)
        limit = self._limit if limit is None else limit
        command = self.words(script)
        check_installed(command[0])
        with LoggedCommand(*(["ssh", self.name] if self.name else ["sh", "-c"]), script) as log:
            status, out, err = self._run(command, self._where(what), limit, most)
            log.exited(status)
        if status == 0:
            return out.decode("utf-8", "surrogateescape")
        said = err.decode("utf-8", "replace").strip()
        if self.name and status == _SSH_FAILED:
            name = shlex.quote(self.name)
            asks = _UNKNOWN_KEY in said  # only at a terminal, and without BatchMode
            step = f"see: ssh {name}" if asks else f"see: ssh -o BatchMode=yes {name} true"
            reason = f"cannot be reached: {_last(said).removesuffix('.')}"
            raise CommandError(self.name, reason, step)
        raise CommandError(self._where(what), said or f"exit status {status}")

    @property
    def _status_step(self) -> str:
        return f"see: zpool status, on {self.label}"

    def _where(self, what: str) -> str:
        return f"{what} on {self.name}" if self.name else what

    def _run(
        self, command: Sequence[str], what: str, limit: float, most: int
    ) -> tuple[int, bytes, bytes]:
        """Run a command in a process group of its own; see :meth:`script`."""
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self.environment,
                process_group=0,
            )
        except OSError as error:  # such as E2BIG
            raise CommandError(what, f"cannot be run: {error.strerror}") from error
        end = time.monotonic() + limit
        printed, errors = bytearray(), bytearray()

        def check() -> None:
            self._check()
            if time.monotonic() > end:
                if limit == self._limit:  # one that moves much data may be slow by itself
                    self._blocked_by = what
                said = errors.decode("utf-8", "replace").strip()
                last = f": {_last(said)}" if said else ""
                reason = f"takes over {limit:.0f} s, and was ended{last}"
                raise CommandError(what, reason, self._status_step)

        try:
            with process.stdout as out, process.stderr as err:  # type: ignore[union-attr]
                _read_both((out, printed), (err, errors), what, check, most)
            while process.poll() is None:
                check()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
        except BaseException:
            # Its number is still its own, because it was not waited for.
            os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # it may be blocked in the kernel
                process.wait(_END_SECONDS)
            raise
        return process.returncode, bytes(printed), bytes(errors)


def _read_both(
    out: tuple[IO[bytes], bytearray],
    err: tuple[IO[bytes], bytearray],
    what: str,
    check: Callable[[], None],
    most: int,
) -> None:
    """Read both outputs of a command to their ends; of the errors, only the last are kept.

    Args:
        out: the output, and what gets it.
        err: the errors, and what gets them.
        what: the command, for an error.
        check: called several times a second.
        most: bytes of output.

    Raises:
        CommandError: there is too much output.
    """
    (_, printed), (_, errors) = out, err
    with selectors.DefaultSelector() as selector:
        for stream, target in (out, err):
            selector.register(stream, selectors.EVENT_READ, target)
        while selector.get_map():
            check()
            for key, _ in selector.select(_POLL_SECONDS):
                chunk = os.read(key.fd, _READ_BYTES)
                key.data.extend(chunk)
                if not chunk:
                    selector.unregister(key.fileobj)
            del errors[:-_ERROR_BYTES]
            if len(printed) > most:
                raise CommandError(what, f"prints over {most >> 20} MiB, and was ended")


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
    packages = {"setpriv": "util-linux", "ssh": "openssh-client", "zfs": "zfsutils-linux"}
    if shutil.which(command, path=search_path()) is None:
        package = packages.get(command, command)
        raise UnavailableError(command, "is not installed", f"apt install {package}")


_UNKNOWN_KEY = "Host key verification failed"
"""In ssh's errors for a host that is not in known_hosts, or has another key there."""


def _last(text: str) -> str:
    """Return the last line of an error output, which usually has the cause."""
    return (text.splitlines() or ["no output"])[-1].strip()
