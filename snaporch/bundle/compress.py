"""Compressors for the payload of a RAM image; those that libvirt itself can undo.

The numbers are libvirt's save image formats (``virQEMUSaveFormat`` in its qemu_saveimage.h).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, Protocol, cast

import zstandard

from snaporch.command_log import LoggedCommand
from snaporch.errors import RefusedError

Block = bytes | bytearray | memoryview
Sink = Callable[[Block], None]
_PIPE_READ = 1 << 20


class Compression(StrEnum):
    """How the payload is stored."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"

    @property
    def image_format(self) -> int:
        """The value for the header's compression field."""
        return {"none": 0, "gzip": 1, "zstd": 5}[self.value]


@dataclass(frozen=True, slots=True)
class Compressing:
    """Which compressor, how hard (its own levels), and on how many threads (0: all cores)."""

    method: Compression = Compression.ZSTD
    level: int = 1
    threads: int = 0


class Compressor(Protocol):
    """A stream: what goes in comes out at the sink it was made with, compressed."""

    def write(self, block: Block) -> None:
        """Take one block; it is not kept."""

    def finish(self) -> None:
        """Flush everything; nothing can be written afterwards."""

    def abandon(self) -> None:
        """Give up: stop processes and threads, flush nothing."""


def choose(wanted: str, *, reads_zstd: bool) -> Compression:
    """What ``auto`` means on this host, or the wish itself if libvirt could read it back.

    Raises:
        RefusedError: the wish cannot be restored here, or its program is missing.
    """
    gzip_possible = shutil.which("pigz") is not None
    zstd_possible = reads_zstd and shutil.which("zstd") is not None
    if wanted == "auto":
        if zstd_possible:
            return Compression.ZSTD
        return Compression.GZIP if gzip_possible else Compression.NONE
    chosen = Compression(wanted)
    if chosen is Compression.ZSTD and not zstd_possible:
        raise RefusedError(
            "compression = zstd",
            "libvirt 10.4 or later and the zstd program are needed to restore it here",
            'set compression = "auto" or apt install zstd',
        )
    if chosen is Compression.GZIP and not gzip_possible:
        raise RefusedError("compression = gzip", "pigz is not installed", "apt install pigz")
    return chosen


def compressor(how: Compressing, sink: Sink) -> Compressor:
    """A running compressor that hands its output to ``sink``."""
    if how.method is Compression.ZSTD:
        return _Zstd(how, sink)
    if how.method is Compression.GZIP:
        return _Pigz(how, sink)
    return _Plain(sink)


class _Plain:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, block: Block) -> None:
        self._sink(block)

    def finish(self) -> None:
        return

    def abandon(self) -> None:
        return


class _Taker:
    """A sink as a file, as far as zstandard needs one."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, data: Block) -> int:
        self._sink(data)
        return len(data)


class _Zstd:
    def __init__(self, how: Compressing, sink: Sink) -> None:
        threads = how.threads or os.cpu_count() or 1
        engine = zstandard.ZstdCompressor(level=how.level, threads=threads, write_checksum=True)
        # Not compressobj(): it copies what it has over and over while many threads' output comes.
        target = cast("IO[bytes]", _Taker(sink))
        self._stream = engine.stream_writer(target, write_size=_PIPE_READ, closefd=False)

    def write(self, block: Block) -> None:
        self._stream.write(block)

    def finish(self) -> None:
        self._stream.flush(zstandard.FLUSH_FRAME)

    def abandon(self) -> None:
        return


class _Pigz:
    """pigz as a child; a thread takes its output so that neither pipe can block the other."""

    def __init__(self, how: Compressing, sink: Sink) -> None:
        threads = how.threads or os.cpu_count() or 1
        command = ["pigz", f"-{min(max(how.level, 1), 9)}", "-p", str(threads), "-c"]
        self._log = LoggedCommand(*command)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C for us must not kill it under our hands
        )
        self._sink = sink
        self._failure: BaseException | None = None
        self._drain = threading.Thread(target=self._run, name="pigz-output", daemon=True)
        self._drain.start()

    def _run(self) -> None:
        assert self._process.stdout is not None
        try:
            while block := self._process.stdout.read(_PIPE_READ):
                self._sink(block)
        except OSError as error:
            self._failure = error
            self._process.kill()

    def write(self, block: Block) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(block)
        except BrokenPipeError as error:
            raise self._failure or OSError("pigz ended early") from error

    def finish(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._drain.join()
        status = self._process.wait()
        self._close()
        if self._failure is not None:
            raise self._failure
        if status != 0:
            raise OSError(f"pigz failed with status {status}")

    def abandon(self) -> None:
        self._process.kill()
        self._drain.join()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        self._log.exited(self._process.returncode)
        self._log.end()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):  # what was buffered for a killed pigz is of no use
                    stream.close()
