"""Test whether RAM can be streamed on this host, with a small image, pipe and compressor.

The image is written as libvirt writes a guest's RAM, which opens the pipe twice, and decompressed
by the program that libvirt would use. The test takes a moment and leaves no files.
"""

from __future__ import annotations

import subprocess
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from snaporch.bundle.compress import Compression, CompressionSettings, choose_compression
from snaporch.bundle.compression_tuning import FIRST_LEVEL
from snaporch.bundle.ram_pipe import RamPipe
from snaporch.bundle.save_image import (
    HEADER_SIZE,
    MAGIC,
    PARTIAL_MAGIC,
    QEMU_MAGIC,
    SaveImageHeader,
    SaveImageWriter,
)
from snaporch.command_log import LoggedCommand
from snaporch.config import DomainSettings
from snaporch.context import Context
from snaporch.errors import SnaporchError
from snaporch.snapshot.host_directories import existing_part

_PATIENCE_SECONDS = 30
_XML = b"<domain/>\0"
_PAYLOAD = QEMU_MAGIC + bytes(range(256)) * 4096 + bytes(1 << 20)
_UNDONE_BY = {Compression.ZSTD: "zstd", Compression.GZIP: "gzip"}
"""libvirt's decompressors (``qemuSaveImageGetCompressionProgram`` in its qemu_saveimage.c)."""


@dataclass(frozen=True, slots=True)
class CaptureMode:
    """How RAM gets into bundles on this host."""

    streams: bool
    compression: str
    wanted: str
    """``ram_capture`` as configured for all domains."""
    reason: str = ""
    """Why it cannot be streamed."""

    def describe(self) -> str:
        """Return one line for a message."""
        if self.wanted == "file":
            return "RAM goes through a file, as configured"
        if self.streams:
            return f"RAM is streamed (compression: {self.compression})"
        return f"RAM cannot be streamed: {self.reason}"


def capture_mode(context: Context, *, seconds: float = _PATIENCE_SECONDS) -> CaptureMode:
    """Test whether RAM can be streamed with the configuration for all domains.

    Args:
        seconds: how long the compressor may take.
    """
    settings = context.config.defaults
    try:
        zstd = context.hypervisor.reads_zstd()
        method = choose_compression(settings.compression, reads_zstd=zstd)
    except SnaporchError as error:
        return CaptureMode(False, settings.compression, settings.ram_capture, error.reason)
    place = existing_part(context.config.paths.runtime)
    reason = _try(place, settings, method, seconds)
    return CaptureMode(not reason, method.value, settings.ram_capture, reason)


def _try(place: Path, settings: DomainSettings, method: Compression, seconds: float) -> str:
    """Return why streaming does not work; empty if it works."""
    level = FIRST_LEVEL if settings.fixed_level is None else settings.fixed_level
    how = CompressionSettings(method, level, settings.compression_threads)
    try:
        with tempfile.TemporaryDirectory(prefix="snaporch-selftest-", dir=place) as name:
            image = Path(name) / "ram.save"
            _pass_through(Path(name) / "pipe", image, how, seconds)
            data = image.read_bytes()[HEADER_SIZE + len(_XML) :]
            return "" if _undone(method, data) == _PAYLOAD else "the streamed data was changed"
    except SnaporchError as error:
        return error.line()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    except subprocess.SubprocessError as error:
        return str(error)


def _pass_through(pipe: Path, image: Path, how: CompressionSettings, seconds: float) -> None:
    writer = SaveImageWriter(image, how, trailer=True)
    try:
        stream = RamPipe(pipe, writer)
    except BaseException:
        writer.abandon()
        raise
    # A compressor that hangs must not block the caller.
    watchdog = threading.Timer(seconds, stream.abort)
    watchdog.daemon = True
    watchdog.start()
    try:
        parts = [_header(PARTIAL_MAGIC) + _XML + _PAYLOAD, _header(MAGIC)]
        feeder = threading.Thread(target=_feed, args=(pipe, parts), daemon=True)
        feeder.start()
        feeder.join()
        stream.finish()
    except BaseException:
        stream.abandon()
        raise
    finally:
        watchdog.cancel()


def _feed(pipe: Path, parts: Iterable[bytes]) -> None:
    with suppress(OSError):  # the reader reports why
        for part in parts:
            with pipe.open("wb", buffering=0) as stream:
                view = memoryview(part)
                while view:
                    view = view[stream.write(view) :]


def _header(magic: bytes) -> bytes:
    return SaveImageHeader(magic, 2, len(_XML), True, 0, bytes(HEADER_SIZE - 32)).pack()


def _undone(method: Compression, data: bytes) -> bytes:
    if method is Compression.NONE:
        return data
    command = [_UNDONE_BY[method], "-dc"]
    with LoggedCommand(*command):
        done = subprocess.run(
            command, input=data, capture_output=True, check=True, timeout=_PATIENCE_SECONDS
        )
    return done.stdout
