"""The line to a replica, which a test interrupts at any byte: a proxy before the lab's sshd."""

import asyncio
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.sharedctypes import RawValue
from pathlib import Path

from support import started, wait_for

_SSH_CONFIG = Path("/root/.ssh/config")
_SSHD_PORT = 2222
_PORT = 2223
_OPEN, _STALLED, _CUT = range(3)
_UNLIMITED = 1 << 62
_CHUNK_BYTES = 1 << 16
_POLL_SECONDS = 0.02
_PATIENCE_SECONDS = 600


class Line:
    """All connections to the replica; one process carries their bytes, in both directions."""

    def __init__(self) -> None:
        self._state = RawValue("i", _OPEN)
        self._left = RawValue("q", _UNLIMITED)
        self._carried = RawValue("q", 0)

    @property
    def carried(self) -> int:
        """All bytes that were carried."""
        return self._carried.value

    @property
    def is_stalled(self) -> bool:
        """Whether the limit was reached; no byte is carried until the line is opened or cut."""
        return self._state.value == _STALLED

    def limit(self, count: int) -> None:
        """Carry this many bytes more, and then none."""
        self._left.value = count

    def open(self) -> None:
        """Carry everything."""
        self._left.value = _UNLIMITED
        self._state.value = _OPEN

    def cut(self) -> None:
        """End all connections, and each new one."""
        self._state.value = _CUT

    def cut_after(self, count: int, has_ended: Callable[[], bool]) -> None:
        """Carry this many bytes more and end all connections, unless the program ends before.

        Raises:
            TimeoutError: neither happens.
        """
        self.limit(count)
        end = time.monotonic() + _PATIENCE_SECONDS
        while not (self.is_stalled or has_ended()):
            if time.monotonic() > end:
                raise TimeoutError(f"{self._left.value} of {count} bytes were not carried")
            time.sleep(_POLL_SECONDS)
        self.cut()

    def serve(self, listening: socket.socket) -> None:
        """Accept connections and carry their bytes until the process is ended."""
        asyncio.run(self._serve(listening))

    async def _serve(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(self._connected, sock=listening)
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, here = await asyncio.open_connection("127.0.0.1", _SSHD_PORT)
        both = asyncio.gather(self._carry(reader, here), self._carry(there, writer))
        while self._state.value != _CUT and not both.done():
            await asyncio.wait([both], timeout=_POLL_SECONDS)
        both.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await both
        for each in (here, writer):
            if self._state.value == _CUT:
                each.transport.abort()
            each.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            while data:
                while self._state.value != _OPEN:  # noqa: ASYNC110 - another process sets it
                    await asyncio.sleep(_POLL_SECONDS)
                now = data[: self._left.value]
                data = data[len(now) :]
                writer.write(now)
                self._carried.value += len(now)
                self._left.value -= len(now)
                if not self._left.value:
                    self._state.value = _STALLED
                await writer.drain()
        writer.write_eof()


@contextmanager
def line_to_sshd() -> Iterator[Line]:
    """Lead all of root's connections to the lab's sshd through a :class:`Line`.

    To be used within ``sshd_here()``. The process of the line is forked: the test has one thread.
    """
    config, line = _SSH_CONFIG.read_text(), Line()
    listening = socket.create_server(("127.0.0.1", _PORT))
    process = multiprocessing.get_context("fork").Process(target=line.serve, args=(listening,))
    process.start()
    listening.close()
    through = f"Port {_PORT}\n    HostKeyAlias [localhost]:{_SSHD_PORT}"
    _SSH_CONFIG.write_text(config.replace(f"Port {_SSHD_PORT}", through))
    try:
        yield line
    finally:
        _SSH_CONFIG.write_text(config)
        process.terminate()
        process.join()


def begins() -> bool:
    """The phase in which a command begins."""
    return True


def cut(line: Line, words: Sequence[str], count: int, when: Callable[[], bool] = begins) -> None:
    """Cut the line of a command in a phase of it, and open it again; the command must fail of it.

    Args:
        line: the line.
        words: of snaporch.
        count: bytes that are carried from the phase on.
        when: whether the phase has begun.
    """
    with started(*words, env={}) as process:

        def has_ended() -> bool:
            return process.poll() is not None

        wait_for(lambda: when() or has_ended(), "the phase", _PATIENCE_SECONDS)
        line.cut_after(count, has_ended)
        _, errors = process.communicate(timeout=_PATIENCE_SECONDS)
    line.open()
    assert process.returncode == 8, f"{count}: {process.returncode}: {errors}"
    assert errors.splitlines()[-1].startswith("snaporch: "), errors
    assert "Traceback" not in errors, errors
