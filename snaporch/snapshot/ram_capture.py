"""Receives a guest's RAM during a run, through a pipe or in a raw file, and seals its image.

What arrives through the pipe becomes an image, or is split at once into pages and a rest.
Which of the two is the option ``ram_capture`` (:mod:`snaporch.config.schema`); the pipe itself is
:mod:`snaporch.bundle.ram_pipe`. How long sealing is waited for is set by ``RamTimes`` in
:mod:`snaporch.waiting_times`; when it is given up is decided by
:mod:`snaporch.snapshot.strategies.ram_limits`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from snaporch.bundle.compress import Compression, CompressionSettings, Sink
from snaporch.bundle.manifest import Part, Role
from snaporch.bundle.page_splitter import PageSplitter
from snaporch.bundle.ram_pipe import RamPipe
from snaporch.bundle.rate_limit import RateLimit
from snaporch.bundle.save_image import SaveImage, SaveImageWriter
from snaporch.bundle.store import RAM_NAME, REST_NAME
from snaporch.snapshot.store_pages import WrittenPages, rest_part
from snaporch.waiting_times import RamTimes

_READ = 1 << 20
_FORMAT_NAMES = {method.image_format: method.value for method in Compression} | {
    2: "bzip2",
    3: "xz",
    4: "lzop",
}


class _Sealing(threading.Thread):
    """Finishes the RAM image in a thread of its own, so that the caller can abort it."""

    def __init__(self, finish: Callable[[], SaveImage]) -> None:
        super().__init__(name="seal", daemon=True)
        self._finish = finish
        self._image: SaveImage | None = None
        self._failure: BaseException | None = None

    def run(self) -> None:
        try:
            self._image = self._finish()
        except BaseException as error:  # noqa: BLE001 - raised by `image`
            self._failure = error

    def ended_within(self, seconds: float) -> bool:
        """Wait at most so many seconds; return whether it has ended."""
        self.join(seconds)
        return not self.is_alive()

    @property
    def succeeded(self) -> bool:
        """Whether the image is finished."""
        return self._image is not None

    def image(self) -> SaveImage:
        """Return the finished image, or raise the error of the thread."""
        if self._failure is not None:
            raise self._failure
        assert self._image is not None
        return self._image


class RamCapture:
    """Receives RAM: through a pipe and a compressor, or in a raw file that is compressed later."""

    def __init__(
        self,
        directory: Path,
        pipe: Path,
        raw: Path,
        how: CompressionSettings,
        times: RamTimes,
    ) -> None:
        self._times = times
        self._directory = directory
        self._pipe = pipe
        self._raw = raw
        self._how = how
        self._throttle = RateLimit(0)
        self._stream: RamPipe | None = None
        self._writer: SaveImageWriter | None = None
        self._enlarged = False
        self._pages: tuple[Path, Callable[[], None]] | None = None
        self._splitter: PageSplitter | None = None
        self.written_pages: WrittenPages | None = None
        """The pages that were written in place of an image; known after :meth:`seal`."""

    def split_into(self, pages: Path, settle: Callable[[], None]) -> None:
        """Split what arrives through the pipe; to be called before the stream is opened.

        Args:
            pages: the page file.
            settle: see :class:`~snaporch.bundle.page_file.PageFile`.
        """
        self._pages = (pages, settle)

    @property
    def splits(self) -> bool:
        """Whether what arrives is split into pages."""
        return self._stream is not None and self._pages is not None

    @property
    def streams(self) -> bool:
        """Whether RAM is received through a pipe."""
        return self._stream is not None

    @property
    def target(self) -> Path:
        """The path to which libvirt writes RAM."""
        return self._pipe if self._stream else self._raw

    @property
    def arrived_bytes(self) -> int:
        """Bytes of RAM that libvirt has written so far."""
        if self._stream is not None:
            return self._stream.payload_bytes
        return self._raw.stat().st_size if self._raw.exists() else 0

    @property
    def is_enlarged(self) -> bool:
        """Whether all is taken at once: the guest is paused."""
        return self._enlarged

    @property
    def room_while_paused(self) -> int:
        """Bytes that are taken at once from a guest that is paused, without compressing them."""
        return self._stream.room_while_paused if self._stream is not None else 0

    @property
    def compressed_bytes(self) -> int:
        """Bytes of RAM that were compressed so far."""
        if self._splitter is not None:
            return self._splitter.moved_bytes
        return self._writer.payload_bytes if self._writer is not None else 0

    @property
    def failure(self) -> BaseException | None:
        """The error of the stream, if it failed."""
        return self._stream.failure if self._stream else None

    def limit(self, rate: float) -> None:
        """Read at most ``rate`` MiB of RAM a second; to be called before the stream is opened."""
        self._throttle = RateLimit(rate)

    def open_stream(self) -> None:
        """Make the pipe and start its reader; to be called before libvirt is."""
        self._writer = writer = self._image_writer() if self._pages is None else self._rest_writer()
        try:
            self._stream = RamPipe(self._pipe, writer, self._throttle)
        except BaseException:
            writer.abandon()
            raise

    def _image_writer(self) -> SaveImageWriter:
        return SaveImageWriter(self._directory / RAM_NAME, self._how, trailer=True)

    def _rest_writer(self) -> SaveImageWriter:
        plain = replace(self._how, method=Compression.NONE)
        path = self._directory / REST_NAME
        return SaveImageWriter(path, plain, trailer=True, start=self._start_splitter)

    def _start_splitter(self, _how: CompressionSettings, sink: Sink) -> PageSplitter:
        assert self._pages is not None
        self._splitter = splitter = PageSplitter(self._pages[0], sink, self._pages[1])
        if self._enlarged:
            splitter.enlarge()
        return splitter

    @property
    def is_limited(self) -> bool:
        """Whether a rate limits the reader of the pipe."""
        return self.streams and self._throttle.limits

    def lift_limit(self) -> None:
        """Lift the rate limit."""
        if self._stream is not None:
            self._stream.lift_limit()

    def record_times(self) -> None:
        """Record the times of saving RAM, which end now: libvirt has written all of it."""
        if self._stream is not None:
            self._stream.end_measurement()

    def enlarge_pipe(self) -> None:
        """Enlarge the pipe and lift the limit: the guest is paused and must not wait for us."""
        self._enlarged = True  # first: the stream may just be starting
        if self._splitter is not None:
            self._splitter.enlarge()
        if self._stream is not None:
            self._stream.enlarge_buffers()

    def abort(self) -> None:
        """Abort: stop the reader and the compressor, so that no process waits for them."""
        if self._stream is not None:
            self._stream.abort()
        elif self._writer is not None:
            self._writer.abort()

    def seal(self, tick: Callable[[int], None]) -> Part:
        """Finish the compressed image.

        Args:
            tick: called at each interval with the bytes compressed and stored so far, until only
                syncing is left. If it raises, the image is aborted and the error raised, even if
                the store or the compressor hangs.

        Returns:
            The image as a part of the manifest.

        Raises:
            SaveImageError, OSError: the image is incomplete.
        """
        sealing = _Sealing(self._finish)
        sealing.start()
        while not sealing.ended_within(self._times.tick):
            if self._writer is None or self._writer.syncing:
                continue
            try:
                tick(
                    self._writer.moved_bytes + (self._splitter.moved_bytes if self._splitter else 0)
                )
            except BaseException:
                if not self._abort_sealing(sealing):
                    raise
        return self._part(sealing.image())

    def _abort_sealing(self, sealing: _Sealing) -> bool:
        """Abort sealing; return whether the image was finished nevertheless."""
        self.abort()
        if not sealing.ended_within(self._times.abort):
            self._stream = None  # its open file is deleted with the unfinished bundle
        return sealing.succeeded

    def _finish(self) -> SaveImage:
        return self._stream.finish() if self._stream else self._compress_raw()

    def _part(self, image: SaveImage) -> Part:
        if self._splitter is not None:
            found = self._splitter.found
            split = image.stored_bytes - len(found.tail)
            self.written_pages = WrittenPages(found.page_file_bytes, found.page_sum, split)
            pace = self._stream.pace if self._stream else None
            return rest_part(image.stored_bytes, image.sha256, image.payload_bytes, pace)
        return Part(
            name=RAM_NAME,
            role=Role.RAM,
            bytes=image.stored_bytes,
            sha256=image.sha256,
            payload_bytes=image.payload_bytes,
            compression=_FORMAT_NAMES.get(image.image_format, str(image.image_format)),
            pace=self._stream.pace
            if self._stream and image.image_format == Compression.ZSTD.image_format
            else None,
        )

    def _compress_raw(self) -> SaveImage:
        self._writer = writer = SaveImageWriter(
            self._directory / RAM_NAME, self._how, trailer=False
        )
        try:
            with self._raw.open("rb") as stream:
                self._raw.unlink()  # first: a later run of the domain uses the same name
                while block := stream.read(_READ):
                    writer.write(block)
                    self._throttle.spend(len(block))
            image = writer.finish()
        except BaseException:
            writer.abandon()
            raise
        return image

    def abandon(self) -> None:
        """Close the pipe, so that libvirt cannot wait for a reader, and discard the image."""
        if self._stream is not None:
            self._stream.abandon()
            self._stream = self._splitter = self._pages = None
            self._enlarged = False
