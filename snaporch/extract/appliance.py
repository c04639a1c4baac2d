"""Run libguestfs's appliance: a small VM that opens file systems which no host should open.

guestfish starts it, reads commands on its standard input and answers on its standard output. It
runs as the user ``nobody``, with no access but to the disks that it is given. The appliance exits
with this process, however that ends: guestfish gets a signal of the kernel, and libguestfs ends the
VM. Words and answers are in :mod:`snaporch.extract.guestfish_text`.
"""

from __future__ import annotations

import errno
import grp
import os
import re
import secrets
import selectors
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from snaporch.command_log import LoggedCommand
from snaporch.errors import RefusedError, RunFailedError, SnaporchError
from snaporch.extract.guestfish_text import quoted
from snaporch.interrupt import Interrupt
from snaporch.model import Owner
from snaporch.private_files import private_directory
from snaporch.process_group import has_members
from snaporch.remote_host import check_installed, search_path

MEMORY_BYTES = 768 << 20
"""The appliance's memory."""
APPLIANCE_USER = Owner(65534, 65534)
"""The user of the appliance: another than the guests' emulators have."""
START_SECONDS = 600
"""Without KVM the appliance takes a minute to boot, and to be made as long again."""
ANSWER_SECONDS = 300
"""After so long without a byte an answer is given up."""
MAX_WORD = 4095
"""Bytes of a word, such as a path; no kernel opens a longer one."""
MAX_FILE = 4 << 30
"""Bytes of an overlay. libguestfs's own image of this length has to fit, too."""
MIN_FREE = 1 << 30
"""Bytes that stay free where the overlays are; otherwise the appliance is ended."""
MAX_ANSWER = 4 << 20
"""Bytes of an answer that is kept in memory."""
_BEFORE_REASON = re.compile(r"(\*stdin\*:[0-9]+: )?libguestfs: error: |guestfish: ")
_POLL_SECONDS = 0.2
_END_SECONDS = 10
_BLOCK = 1 << 20
"""As much as a pipe can hold."""
_MAX_ERRORS = 1 << 16


class ApplianceError(SnaporchError):
    """guestfish or its appliance failed, or does not answer."""


@dataclass(frozen=True, slots=True)
class DataPipe:
    """The named pipe that guestfish writes data to."""

    path: Path
    descriptor: int
    """Open for reading without waiting, and for writing: else it ends when guestfish closes it."""


class Appliance:
    """A running appliance; made by :func:`running_appliance`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        errors: IO[bytes],
        pipe: DataPipe,
        directory: Path,
        thing: str,
        interrupt: Interrupt,
    ) -> None:
        self._errors, self._thing, self._interrupt = errors, thing, interrupt
        self._process, self._pipe, self._directory = process, pipe, directory
        self.pid = process.pid
        """The number of its process group."""
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        self._unsent = b""
        self._buffer = b""
        self._tolerated = 0
        """Bytes of errors of commands that might fail; none is why the appliance failed."""

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
        answers = self.attempt_all([words])
        return None if answers is None else answers[0]

    def attempt_all(self, commands: Sequence[Sequence[str | bytes]]) -> list[bytes] | None:
        """The answers to several commands, which are sent at once; None if one failed.

        Errors as those of :meth:`attempt`.
        """
        before = self._errors_size()
        marks = [self._send(*words, may_fail=True) for words in commands]
        answers = [self._until(mark, lambda _block: None, ANSWER_SECONDS) for mark in marks]
        self._tolerated = self._errors_size()
        return answers if self._tolerated == before else None

    def attempt_data(self, *words: str | bytes, into: Callable[[bytes], object]) -> bool:
        """Carry out a command as :meth:`data` does, which may fail; whether it succeeded.

        Errors as those of :meth:`attempt`.
        """
        before = self._errors_size()
        mark = self._send(*words, str(self._pipe.path), may_fail=True)
        self._until(mark, into, ANSWER_SECONDS)
        self._tolerated = self._errors_size()
        return self._tolerated == before

    def check(self) -> None:
        """Check that it has neither ended nor filled the disk, between two commands.

        Raises:
            ApplianceError: it has.
            InterruptedRunError: a signal came.
        """
        self._interrupt.check(self._thing)
        self._check_room()
        if self._process.poll() is not None:
            raise self._error()

    def _errors_size(self) -> int:
        return os.fstat(self._errors.fileno()).st_size

    def data(self, *words: str | bytes, into: Callable[[bytes], object]) -> None:
        """Carry out a command that writes data to a file; the data go to ``into``.

        Args:
            words: the command and its arguments, without the file, which is the last.
            into: is called with each block.

        Errors as those of :meth:`ask`, and those of ``into``.
        """
        self._until(self._send(*words, str(self._pipe.path)), into, ANSWER_SECONDS)

    def _send(self, *words: str | bytes, may_fail: bool = False) -> bytes:
        """Send a command; return the line that follows its answer."""
        if any(len(os.fsencode(word)) > MAX_WORD for word in words):
            raise ApplianceError(self._thing, f"a path is longer than {MAX_WORD} bytes")
        mark = secrets.token_hex(16)
        line = " ".join([str(words[0]), *map(quoted, words[1:])])
        self._unsent += f"{'-' if may_fail else ''}{line}\necho {mark}\n".encode()
        return f"{mark}\n".encode()

    def _until(self, mark: bytes, into: Callable[[bytes], object], limit: float) -> bytes:
        """Send what is to be sent, and read up to a mark.

        The pipe's data are complete then, since guestfish closed it.
        """
        heard = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            selector.register(self._pipe.descriptor, selectors.EVENT_READ)
            if self._unsent:
                selector.register(self._stdin, selectors.EVENT_WRITE)
            while mark not in self._buffer:
                self._interrupt.check(self._thing)
                self._check_room()
                ready = {key.fd for key, _ in selector.select(_POLL_SECONDS)}
                self._drain(into)
                if self._stdin in ready and not self._send_some():
                    selector.unregister(self._stdin)
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
        self._drain(into)
        answer, _, self._buffer = self._buffer.partition(mark)
        return answer

    def _send_some(self) -> bool:
        """Write what guestfish takes now; whether something is left."""
        try:
            self._unsent = self._unsent[os.write(self._stdin, self._unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # the reason is read with the answer
            self._unsent = b""
        return bool(self._unsent)

    def _check_room(self) -> None:
        if free_bytes(self._directory) < MIN_FREE:
            raise ApplianceError(self._thing, _no_room(self._directory))

    def _drain(self, into: Callable[[bytes], object]) -> None:
        """Take all that is in the pipe now."""
        with suppress(BlockingIOError):
            if block := os.read(self._pipe.descriptor, _BLOCK):
                into(block)

    def _error(self) -> ApplianceError:
        # a seek would move guestfish's own position
        start = max(self._tolerated, self._errors_size() - _MAX_ERRORS)
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
    check_installed("prlimit")
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
        directory: a directory that belongs to ``owner``, for the appliance's files. The one that
            it is in belongs to this process's user, and gets a named pipe.
        disks: images that the appliance may write to, which are qcow2.
        interrupt: a signal ends it.
        owner: the user of the appliance; None for this process's.
        cache: where libguestfs keeps the appliance's own system, which it makes of the host's
            programs; that takes long.

    Raises:
        ApplianceError: it could not be started, or filled the disk.
        RefusedError: there is too little room for its overlays.
        RunFailedError: its files could not be made.
        InterruptedRunError: a signal came.
    """
    if free_bytes(directory) < MIN_FREE:
        raise RefusedError(thing, _no_room(directory), "make room there, or set `paths.clones`")
    words = [*_confined(owner), "guestfish"]
    with (
        _data_pipe(thing, directory, cache, owner) as pipe,
        LoggedCommand("guestfish") as log,
        tempfile.TemporaryFile() as errors,
    ):
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(directory, cache),
            cwd=directory,
            process_group=0,  # a terminal's Ctrl-C must not end it before its disks are removed
        )
        try:
            appliance = Appliance(process, errors, pipe, directory, thing, interrupt)
            for disk in disks:
                appliance.ask("add-drive", str(disk), "format:qcow2", "discard:disable")
            appliance.ask("run", limit=START_SECONDS)
            yield appliance
        finally:
            _end(process)
            log.exited(0)


def free_bytes(directory: Path) -> int:
    """The room that is free where a directory is."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _no_room(directory: Path) -> str:
    return f"less than {MIN_FREE >> 20} MiB are free in {directory.parent.parent}"


@contextmanager
def _data_pipe(thing: str, directory: Path, cache: Path, owner: Owner | None) -> Iterator[DataPipe]:
    """Make the cache and a named pipe, which is beside ``directory``.

    The appliance's user may write to the pipe, and cannot put another file in its place.
    """
    path = directory.with_name(f"{directory.name}.data")
    with ExitStack() as stack:
        try:
            make_private(cache, owner)
            os.mkfifo(path, 0o600)
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            _check_pipe(path, descriptor)
            if owner is not None:
                os.fchown(descriptor, owner.uid, owner.gid)
        except OSError as error:
            reason = error.strerror or str(error)
            raise RunFailedError(thing, f"the appliance cannot be started ({reason})") from error
        yield DataPipe(path, descriptor)


def _check_pipe(path: Path, descriptor: int) -> None:
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, f"{path} is no named pipe")


def _confined(owner: Owner | None) -> list[str]:
    """The words before guestfish: it exits with this process, and has no rights of root."""
    words = ["prlimit", f"--fsize={MAX_FILE}", "setpriv", "--pdeathsig", "KILL"]
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
    while time.monotonic() < end and has_members(process.pid):
        time.sleep(_POLL_SECONDS)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
