"""Run libguestfs's appliance: a small VM that opens file systems which no host should open.

guestfish starts it, reads commands on its standard input and answers on its standard output. It
runs as the user ``nobody``, with no access but to the disks that it is given. The appliance exits
with this process, however that ends: guestfish gets a signal of the kernel, and libguestfs ends the
VM. Words and answers are in :mod:`snaporch.extract.guestfish_text`.
"""

from __future__ import annotations

import grp
import os
import re
import secrets
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from snaporch.command_log import LoggedCommand
from snaporch.errors import RefusedError, SnaporchError
from snaporch.extract.guestfish_text import quoted
from snaporch.interrupt import Interrupt
from snaporch.model import Owner
from snaporch.private_files import private_directory
from snaporch.remote_host import check_installed, search_path

MEMORY_BYTES = 768 << 20
"""The appliance's memory."""
APPLIANCE_USER = Owner(65534, 65534)
"""The user of the appliance: another than the guests' emulators have."""
START_SECONDS = 600
"""Without KVM the appliance takes a minute to boot, and to be made as long again."""
ANSWER_SECONDS = 300
"""After so long without a byte an answer is given up."""
MAX_ANSWER = 4 << 20
"""Bytes of an answer that is kept in memory."""
_BEFORE_REASON = re.compile(r"(\*stdin\*:[0-9]+: )?libguestfs: error: |guestfish: ")
_POLL_SECONDS = 0.2
_END_SECONDS = 10
_BLOCK = 1 << 18
_MAX_ERRORS = 1 << 16


class ApplianceError(SnaporchError):
    """guestfish or its appliance failed, or does not answer."""


class Appliance:
    """A running appliance; made by :func:`running_appliance`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        errors: IO[bytes],
        pipe: Path,
        thing: str,
        interrupt: Interrupt,
    ) -> None:
        self._process, self._errors, self._thing = process, errors, thing
        self._interrupt = interrupt
        self._pipe_path = pipe
        self.pid = process.pid
        """The number of its process group."""
        assert process.stdout is not None
        self._stdout = process.stdout.fileno()
        # open for writing too, or it would be at its end whenever guestfish has it not open
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._buffer = b""

    def close(self) -> None:
        """Close the pipe of :meth:`data`."""
        os.close(self._pipe)

    def ask(self, *words: str | bytes, limit: float = ANSWER_SECONDS) -> bytes:
        """The answer to one command, which is text.

        Args:
            words: the command and its arguments.
            limit: seconds without a byte after which it is given up.

        Raises:
            ApplianceError: the command failed.
            InterruptedRunError: a signal came.
        """
        return self.ask_all([words], limit=limit)[0]

    def ask_all(
        self, commands: Sequence[Sequence[str | bytes]], *, limit: float = ANSWER_SECONDS
    ) -> list[bytes]:
        """The answers to several short commands, which are sent at once.

        Errors as those of :meth:`ask`.
        """
        marks = [self._send(*words) for words in commands]
        return [self._until(mark, lambda _block: None, limit) for mark in marks]

    def attempt(self, *words: str | bytes) -> bytes | None:
        """The answer to a command that may fail; None if it failed.

        Errors as those of :meth:`ask`, if the appliance itself fails.
        """
        before = self._errors_size()
        answer = self._until(self._send(*words, may_fail=True), lambda _block: None, ANSWER_SECONDS)
        return answer if self._errors_size() == before else None

    def _errors_size(self) -> int:
        return os.fstat(self._errors.fileno()).st_size

    def data(self, *words: str | bytes, into: Callable[[bytes], object]) -> None:
        """Carry out a command that writes data to a file; the data go to ``into``.

        Args:
            words: the command and its arguments, without the file, which is the last.
            into: is called with each block.

        Errors as those of :meth:`ask`, and those of ``into``.
        """
        self._until(self._send(*words, str(self._pipe_path)), into, ANSWER_SECONDS)

    def _send(self, *words: str | bytes, may_fail: bool = False) -> bytes:
        """Send a command; return the line that follows its answer."""
        mark = secrets.token_hex(16)
        line = " ".join([str(words[0]), *map(quoted, words[1:])])
        text = f"{'-' if may_fail else ''}{line}\necho {mark}\n"
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the reason is read with the answer
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()
        return f"{mark}\n".encode()

    def _until(self, mark: bytes, into: Callable[[bytes], object], limit: float) -> bytes:
        """Read up to a mark; the pipe's data are complete then, since guestfish closed it."""
        heard = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            selector.register(self._pipe, selectors.EVENT_READ)
            while mark not in self._buffer:
                self._interrupt.check(self._thing)
                ready = {key.fd for key, _ in selector.select(_POLL_SECONDS)}
                self._drain(into)
                if self._stdout in ready:
                    block = os.read(self._stdout, _BLOCK)
                    if not block:
                        raise self._error()
                    self._buffer += block
                now = time.monotonic()
                heard = now if ready else heard
                if now - heard > limit:
                    raise ApplianceError(self._thing, f"the appliance is silent for {limit:.0f} s")
                if len(self._buffer) > MAX_ANSWER:
                    raise ApplianceError(self._thing, "the appliance answers too much")
        while self._drain(into):
            pass
        answer, _, self._buffer = self._buffer.partition(mark)
        return answer

    def _drain(self, into: Callable[[bytes], object]) -> bool:
        """Take what is in the pipe now; whether that was something."""
        try:
            block = os.read(self._pipe, _BLOCK)
        except BlockingIOError:
            return False
        if block:
            into(block)
        return bool(block)

    def _error(self) -> ApplianceError:
        # a seek would move guestfish's own position
        start = max(0, self._errors_size() - _MAX_ERRORS)
        data = os.pread(self._errors.fileno(), _MAX_ERRORS, start)
        return ApplianceError(self._thing, reason_of(data.decode("utf-8", "replace")))


def reason_of(text: str) -> str:
    """The line of guestfish's errors that has the cause."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [_BEFORE_REASON.sub("", line) for line in lines if _BEFORE_REASON.match(line)]
    return (named or lines or ["the appliance ended without a reason"])[-1]


def check_can_run(thing: str, free_bytes: int) -> None:
    """Check what the appliance needs of the host.

    Args:
        thing: the subject of an error.
        free_bytes: the memory that is free.

    Raises:
        UnavailableError: guestfish is not installed.
        RefusedError: there is too little memory.
    """
    check_installed("guestfish")
    check_installed("setpriv")
    if free_bytes < MEMORY_BYTES:
        raise RefusedError(
            thing,
            f"the appliance needs {MEMORY_BYTES >> 20} MiB of memory, {free_bytes >> 20} MiB are "
            "free",
            "shut down another guest first",
        )


def make_private(directory: Path, owner: Owner | None) -> None:
    """Make a directory that only the appliance's user can enter, unless it exists."""
    private_directory(directory)
    if owner is not None:
        os.chown(directory, owner.uid, owner.gid)


@contextmanager
def running_appliance(
    thing: str,
    directory: Path,
    disks: Sequence[Path],
    interrupt: Interrupt,
    *,
    owner: Owner | None,
    cache: Path,
) -> Iterator[Appliance]:
    """Run an appliance in the block; it has ended after the block.

    Args:
        thing: the subject of errors.
        directory: a directory that belongs to ``owner``, for the appliance's files.
        disks: images that the appliance may write to, which are qcow2.
        interrupt: a signal ends it.
        owner: the user of the appliance; None for this process's.
        cache: where libguestfs keeps the appliance's own system, which it makes of the host's
            programs; that takes long.

    Raises:
        ApplianceError: it could not be started.
        InterruptedRunError: a signal came.
    """
    make_private(cache, owner)
    pipe = directory / "data"
    os.mkfifo(pipe, 0o600)
    if owner is not None:
        os.chown(pipe, owner.uid, owner.gid)
    words = [*_confined(owner), "guestfish"]
    with LoggedCommand("guestfish") as log, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(directory, cache),
            cwd=directory,
            process_group=0,  # a terminal's Ctrl-C must not end it before its disks are removed
        )
        appliance = Appliance(process, errors, pipe, thing, interrupt)
        try:
            for disk in disks:
                appliance.ask("add-drive", str(disk), "format:qcow2", "discard:disable")
            appliance.ask("run", limit=START_SECONDS)
            yield appliance
        finally:
            _end(process)
            appliance.close()
            log.exited(0)


def _confined(owner: Owner | None) -> list[str]:
    """The words before guestfish: it exits with this process, and has no rights of root."""
    words = ["setpriv", "--pdeathsig", "KILL"]
    if owner is None:
        return words
    groups = ["--clear-groups"]
    with suppress(KeyError):  # KVM makes it fast
        groups = ["--groups", str(grp.getgrnam("kvm").gr_gid)]
    words += ["--reuid", str(owner.uid), "--regid", str(owner.gid), *groups]
    return [*words, "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]


def _environment(directory: Path, cache: Path) -> dict[str, str]:
    return {
        "PATH": search_path(),
        "LC_ALL": "C",
        "HOME": str(directory),
        "TMPDIR": str(directory),
        "LIBGUESTFS_TMPDIR": str(directory),
        "LIBGUESTFS_CACHEDIR": str(cache),
        "LIBGUESTFS_BACKEND": "direct",
        "LIBGUESTFS_MEMSIZE": str(MEMORY_BYTES >> 20),
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End guestfish and the VM; what that has written is thrown away."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end = time.monotonic() + _END_SECONDS
    while time.monotonic() < end and _has_members(process.pid):
        time.sleep(_POLL_SECONDS)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
