"""The line to a replica, which a test interrupts at any byte: a proxy before the lab's sshd."""

import asyncio
import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.sharedctypes import RawValue
from pathlib import Path

_SSH_CONFIG = Path("/root/.ssh/config")
_SSHD_PORT = 2222
_PORT = 2223
_OPEN, _STALLED, _CUT = range(3)
_UNLIMITED = 1 << 62
_CHUNK_BYTES = 1 << 16
_POLL_SECONDS = 0.02


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
    """Lead all of root's connections to ``localhost`` through a :class:`Line`.

    To be used within ``sshd_here()``. The process of the line is forked: the test has one thread.
    """
    config, line = _SSH_CONFIG.read_text(), Line()
    listening = socket.create_server(("127.0.0.1", _PORT))
    process = multiprocessing.get_context("fork").Process(target=line.serve, args=(listening,))
    process.start()
    listening.close()
    _SSH_CONFIG.write_text(
        f"Host localhost\n    Port {_PORT}\n    HostKeyAlias [localhost]:{_SSHD_PORT}\n"
    )
    try:
        yield line
    finally:
        _SSH_CONFIG.write_text(config)
        process.terminate()
        process.join()
