"""The read end of the pipe into which libvirt saves RAM.

libvirt opens the path, writes the image, closes it, and opens it *again* to write the finished
header. The second open may come before or after the reader could see the first end of file. So this
module does not use the end of file at all: the process also keeps a write end open. An empty pipe
only means that there is no data at the moment. The stream ends when libvirt's call has returned and
the pipe is drained. On failure both ends are closed, so that libvirt gets EPIPE instead of waiting
for a reader.

While the guest runs the pipe is short, so that QEMU measures how fast its RAM is read. Once the
guest is paused, the pipe is enlarged to take all the remaining RAM, and the reader rests for a
moment. So the guest waits neither for the compressor and the store nor for cores that they keep
busy.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from snaporch.bundle.compression_tuning import RamSaveTimes
from snaporch.bundle.rate_limit import RateLimit
from snaporch.bundle.save_image import SaveImage, SaveImageWriter


@dataclass(frozen=True, slots=True)
class PipeTuning:
    """Sizes in bytes, and times."""

    block: int = 1 << 20
    """Of the pipe while the guest runs, and of one read."""
    large_pipe: int = 128 << 20
    """For the remaining RAM, which QEMU limits to what it can send within the downtime limit."""
    rest_seconds: float = 0.5
    """At most so long the enlarged pipe is not read, while the guest is paused."""
    rest_poll_ms: int = 2


_TUNING = PipeTuning()


class RamPipe:
    """A FIFO at ``path``. A thread reads it and passes the content to ``writer``.

    Args:
        throttle: limits the rate of reading; unlimited by default.
        tuning: the sizes of the pipe.
    """

    def __init__(
        self,
        path: Path,
        writer: SaveImageWriter,
        throttle: RateLimit | None = None,
        tuning: PipeTuning = _TUNING,
    ) -> None:
        self._path = path
        self._writer = writer
        self._tuning = tuning
        self._throttle = throttle or RateLimit(0)
        self._limited = self._throttle.limits
        self._stop = threading.Event()
        self._aborted = False
        self._began = self._polling_since = 0.0
        self._waited_for_ram = 0.0
        self._pace: RamSaveTimes | None = None
        self._enlarged = False
        self._resting_until = 0.0
        self._failure: BaseException | None = None
        self._buffer = memoryview(bytearray(tuning.block))
        os.mkfifo(path, 0o600)
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._own_write_end = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.room_while_paused = _longest_pipe(tuning)
        """Bytes that the pipe will take at once after :meth:`enlarge_buffers`."""
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with contextlib.suppress(OSError):  # an unprivileged user may be over the pipe quota
            fcntl.fcntl(self._reader, fcntl.F_SETPIPE_SZ, tuning.block)
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ram-stream", daemon=True)
        self._thread.start()

    @property
    def payload_bytes(self) -> int:
        """Bytes of RAM read so far."""
        return self._writer.payload_bytes

    @property
    def failure(self) -> BaseException | None:
        """The error that ended reading or storing; the pipe is closed by then."""
        return self._failure

    def _run(self) -> None:
        try:
            while self._pump():
                pass
        except BaseException as error:  # noqa: BLE001 - handed to the main thread by `failure` and `finish`
            self._failure = error
        finally:
            self._path.unlink(missing_ok=True)  # first: a later open must fail, not wait for ever
            with self._closing:
                self._closed = True
                os.close(self._own_write_end)
                os.close(self._reader)

    def _pump(self) -> bool:
        """Move the available data to the writer; ``False`` at the end of the stream."""
        self._rest()
        stopping = self._stop.is_set()  # read first: data that arrived before it still counts
        self._polling_since = time.monotonic()
        ready = {descriptor for descriptor, _ in self._poll()}
        if self._aborted:
            return False
        if self._began:
            self._waited_for_ram += time.monotonic() - self._polling_since
        self._polling_since = 0.0
        if self._reader in ready:
            self._began = self._began or time.monotonic()
            count = os.readv(self._reader, [self._buffer])
            self._writer.write(self._buffer[:count])
            self._throttle.spend(count)
            return True
        return not stopping

    def _rest(self) -> None:
        """Read nothing for a moment while the guest is paused.

        The rest ends early if the pipe fills up or the stream ends.
        """
        poll = select.poll()
        poll.register(self._own_write_end, select.POLLOUT)
        while time.monotonic() < self._resting_until:
            if not poll.poll(0) or self._stop.wait(self._tuning.rest_poll_ms / 1000):
                self._resting_until = 0.0

    def _poll(self) -> list[tuple[int, int]]:
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        if not self._stop.is_set():
            poll.register(self._wake_reader, select.POLLIN)
        return poll.poll(0 if self._stop.is_set() else None)

    @property
    def pace(self) -> RamSaveTimes | None:
        """How fast RAM was read while the guest ran; ``None`` if the rate was limited."""
        return self._pace

    def end_measurement(self) -> None:
        """End the measurement for :attr:`pace`. Only the first call has an effect."""
        if self._pace is None and not self._limited:
            now, asked = time.monotonic(), self._polling_since
            began = self._began or now
            waiting = now - asked if asked and self._began else 0.0
            times = (
                now - began,
                self._waited_for_ram + waiting,
                self._writer.waited_for_store,
            )
            self._pace = RamSaveTimes(self._writer.level, *(round(each, 3) for each in times))

    def finish(self) -> SaveImage:
        """Drain and close the pipe, and seal the image; to be called after libvirt's call returned.

        Raises:
            SaveImageError: the stream is not a finished save image.
            OSError: it could not be stored.
        """
        self.end_measurement()
        self.lift_limit()
        self._end()
        if self._failure is not None:
            raise self._failure
        return self._writer.finish()

    def lift_limit(self) -> None:
        """Lift the rate limit."""
        self._throttle.lift()

    def enlarge_buffers(self) -> None:
        """Take all the remaining RAM of a guest that is paused, as far as the kernel allows.

        RAM that does not fit into the pipe is compressed, and queued in memory for the store. More
        than ``/proc/sys/fs/pipe-max-size`` needs ``CAP_SYS_RESOURCE`` (pipe(7)).
        """
        if self._enlarged:
            return
        self.end_measurement()
        self.lift_limit()
        self._enlarged = True
        self._writer.enlarge_buffers()
        with self._closing:
            if not self._closed and self._enlarge_pipe():
                self._resting_until = time.monotonic() + self._tuning.rest_seconds

    def _enlarge_pipe(self) -> bool:
        return _enlarge(self._reader, self._tuning) > self._tuning.block

    def abort(self) -> None:
        """Close the pipe at once, even if the compressor is blocked.

        QEMU cannot be interrupted in a write to a full pipe; only closing the read end releases it.
        """
        self.lift_limit()
        self._aborted = True
        self._writer.abort()
        self._end()

    def abandon(self) -> None:
        """Close the pipe at once and remove the image."""
        self.abort()
        self._writer.abandon()

    def _end(self) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        os.write(self._wake_writer, b"\0")
        self._thread.join()
        os.close(self._wake_reader)
        os.close(self._wake_writer)


def _longest_pipe(tuning: PipeTuning) -> int:
    """How long a pipe can be made here."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        return _enlarge(reader, tuning)
    finally:
        os.close(reader)
        os.close(writer)


def _enlarge(pipe: int, tuning: PipeTuning) -> int:
    """Make a pipe as long as the kernel allows; return its length in bytes, at least a block."""
    size = tuning.large_pipe
    while size > tuning.block:
        with contextlib.suppress(OSError):
            return fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size)
        size //= 2
    return tuning.block
