"""Compressors for the payload of a RAM image, in formats that libvirt itself can decompress.

The level is chosen by :mod:`snaporch.bundle.compression_tuning`.

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
_READ_BYTES = 1 << 20


class Compression(StrEnum):
    """How the payload of a RAM image is compressed."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"

    @property
    def image_format(self) -> int:
        """The value of the header's compression field."""
        return {"none": 0, "gzip": 1, "zstd": 5}[self.value]


@dataclass(frozen=True, slots=True)
class CompressionSettings:
    """The compressor's method, its level, and its number of threads (0: one for each core)."""

    method: Compression = Compression.ZSTD
    level: int = 1
    threads: int = 0


class Compressor(Protocol):
    """A stream that compresses what is written to it and passes the result to its sink."""

    def write(self, block: Block) -> None:
        """Compress one block. The caller may reuse the block afterwards."""

    def finish(self) -> None:
        """Flush everything. Nothing can be written afterwards."""

    def abandon(self) -> None:
        """Stop processes and threads without flushing."""


def choose_compression(setting: str, *, reads_zstd: bool) -> Compression:
    """The compression to use on this host.

    Args:
        setting: ``auto``, or the name of a :class:`Compression`.
        reads_zstd: whether this host's libvirt restores images compressed with zstd.

    Returns: ``setting`` itself; for ``auto`` the best compression that libvirt can read back here.

    Raises:
        RefusedError: images compressed like that cannot be restored here, or the program is
            missing.
    """
    gzip_possible = shutil.which("pigz") is not None
    zstd_possible = reads_zstd and shutil.which("zstd") is not None
    if setting == "auto":
        if zstd_possible:
            return Compression.ZSTD
        return Compression.GZIP if gzip_possible else Compression.NONE
    chosen = Compression(setting)
    if chosen is Compression.ZSTD and not zstd_possible:
        raise RefusedError(
            "compression = zstd",
            "libvirt 10.4 or later and the zstd program are needed to restore it here",
            'set compression = "auto" or apt install zstd',
        )
    if chosen is Compression.GZIP and not gzip_possible:
        raise RefusedError("compression = gzip", "pigz is not installed", "apt install pigz")
    return chosen


def start_compressor(how: CompressionSettings, sink: Sink) -> Compressor:
    """Start a compressor that passes its output to ``sink``."""
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


class _SinkFile:
    """A sink with the one method of a file that zstandard needs."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, data: Block) -> int:
        self._sink(data)
        return len(data)


class _Zstd:
    def __init__(self, how: CompressionSettings, sink: Sink) -> None:
        threads = how.threads or os.cpu_count() or 1
        engine = zstandard.ZstdCompressor(level=how.level, threads=threads, write_checksum=True)
        # Not compressobj(): it copies its buffer repeatedly while many threads emit.
        target = cast("IO[bytes]", _SinkFile(sink))
        self._stream = engine.stream_writer(target, write_size=_READ_BYTES, closefd=False)

    def write(self, block: Block) -> None:
        self._stream.write(block)

    def finish(self) -> None:
        self._stream.flush(zstandard.FLUSH_FRAME)
        del self._stream  # its threads end now, and not when this object is collected

    def abandon(self) -> None:
        return


class _Pigz:
    """Runs pigz as a child process.

    A thread reads its output, so that the two pipes cannot deadlock.
    """

    def __init__(self, how: CompressionSettings, sink: Sink) -> None:
        threads = how.threads or os.cpu_count() or 1
        command = ["pigz", f"-{min(max(how.level, 1), 9)}", "-p", str(threads), "-c"]
        self._log = LoggedCommand(*command)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C must not kill it
        )
        self._sink = sink
        self._failure: BaseException | None = None
        self._drain = threading.Thread(target=self._run, name="pigz-output", daemon=True)
        self._drain.start()

    def _run(self) -> None:
        assert self._process.stdout is not None
        try:
            while block := self._process.stdout.read(_READ_BYTES):
                self._sink(block)
        except OSError as error:
            self._failure = error
            self._process.kill()

    def write(self, block: Block) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(block)
        except BrokenPipeError as error:
            raise self._failure or OSError("pigz exited too early") from error

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
                with suppress(OSError):  # a killed pigz needs its buffered input no more
                    stream.close()
