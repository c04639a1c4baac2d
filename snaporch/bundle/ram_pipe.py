"""The reading end of the pipe into which libvirt saves RAM.

libvirt opens the path, streams the image, closes it, and opens it *again* to write the finished
header; the second open may come before or after the reader could see the first end of file. So
there is no end of file here at all: this process keeps a writing end of its own, an empty pipe only
means "nothing just now", and the stream ends when libvirt's call has returned and the pipe is
drained. When anything fails both ends are closed, which gives libvirt EPIPE instead of a reader
that never comes.

While the guest runs the pipe is short, so that QEMU learns how fast its RAM is taken. Once the
guest stands still, the pipe takes the rest whole, and nobody reads for a moment: the guest waits
neither for the compressor and the store nor for cores that they keep busy.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import threading
import time
from pathlib import Path

from snaporch.bundle.compression_tuning import RamSaveTimes
from snaporch.bundle.rate_limit import RateLimit
from snaporch.bundle.save_image import SaveImage, SaveImageWriter

_BLOCK = 1 << 20
_ROOM = 128 << 20
"""For the rest of RAM: what QEMU leaves is what goes through in the time of the downtime limit."""
_REST_SECONDS = 0.5
_REST_LOOK_MS = 2


class RamPipe:
    """A FIFO at ``path`` whose content goes to ``writer``, read by a thread of its own."""

    def __init__(
        self, path: Path, writer: SaveImageWriter, throttle: RateLimit | None = None
    ) -> None:
        self._path = path
        self._writer = writer
        self._throttle = throttle or RateLimit(0)
        self._limited = self._throttle.limits
        self._stop = threading.Event()
        self._broken = False
        self._began = self._asked = 0.0
        self._waited_for_ram = 0.0
        self._pace: RamSaveTimes | None = None
        self._roomy = False
        self._resting_until = 0.0
        self._failure: BaseException | None = None
        self._buffer = memoryview(bytearray(_BLOCK))
        os.mkfifo(path, 0o600)
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._keeper = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with contextlib.suppress(OSError):  # an unprivileged user may be over the pipe quota
            fcntl.fcntl(self._reader, fcntl.F_SETPIPE_SZ, _BLOCK)
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ram-stream", daemon=True)
        self._thread.start()

    @property
    def payload_bytes(self) -> int:
        """Bytes of RAM that came through so far."""
        return self._writer.payload_bytes

    @property
    def failure(self) -> BaseException | None:
        """Why reading or storing failed; the pipe is closed by then."""
        return self._failure

    def _run(self) -> None:
        try:
            while self._pump():
                pass
        except BaseException as error:  # noqa: BLE001 - handed to the main thread by `failure` and `finish`
            self._failure = error
        finally:
            self._path.unlink(missing_ok=True)  # first: a later open must fail, not wait for us
            with self._closing:
                self._closed = True
                os.close(self._keeper)
                os.close(self._reader)

    def _pump(self) -> bool:
        """Move what is there; False when the stream is over."""
        self._rest()
        stopping = self._stop.is_set()  # looked at first: what came before it is taken yet
        self._asked = time.monotonic()
        ready = {descriptor for descriptor, _ in self._poll()}
        if self._broken:
            return False
        if self._began:
            self._waited_for_ram += time.monotonic() - self._asked
        self._asked = 0.0
        if self._reader in ready:
            self._began = self._began or time.monotonic()
            count = os.readv(self._reader, [self._buffer])
            self._writer.write(self._buffer[:count])
            self._throttle.spend(count)
            return True
        return not stopping

    def _rest(self) -> None:
        """Keep still for a guest that stands still, unless the pipe fills up or the stream ends."""
        poll = select.poll()
        poll.register(self._keeper, select.POLLOUT)
        while time.monotonic() < self._resting_until:
            if not poll.poll(0) or self._stop.wait(_REST_LOOK_MS / 1000):
                self._resting_until = 0.0

    def _poll(self) -> list[tuple[int, int]]:
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        if not self._stop.is_set():
            poll.register(self._wake_reader, select.POLLIN)
        return poll.poll(0 if self._stop.is_set() else None)

    @property
    def pace(self) -> RamSaveTimes | None:
        """How RAM was taken while the guest ran; nothing to go by if there was a limit."""
        return self._pace

    def take_pace(self) -> None:
        """What comes from now on tells nothing of the pace; only the first call counts."""
        if self._pace is None and not self._limited:
            now, asked = time.monotonic(), self._asked
            began = self._began or now
            waiting = now - asked if asked and self._began else 0.0
            times = (
                now - began,
                self._waited_for_ram + waiting,
                self._writer.waited_for_store,
            )
            self._pace = RamSaveTimes(self._writer.level, *(round(each, 3) for each in times))

    def finish(self) -> SaveImage:
        """After libvirt's call returned: drain, close, and seal the image.

        Raises:
            RamImageError: the stream is not a finished save image.
            OSError: it could not be stored.
        """
        self.take_pace()
        self.hurry()
        self._end()
        if self._failure is not None:
            raise self._failure
        return self._writer.finish()

    def hurry(self) -> None:
        """Take what comes as fast as it comes, whatever the limit was."""
        self._throttle.lift()

    def make_room(self) -> None:
        """The guest stands still: take the rest of its RAM whole, as far as the kernel allows.

        What does not fit in the pipe is compressed, and waits in memory for the store.
        More than ``/proc/sys/fs/pipe-max-size`` needs ``CAP_SYS_RESOURCE`` (pipe(7)).
        """
        if self._roomy:
            return
        self.take_pace()
        self.hurry()
        self._roomy = True
        self._writer.make_room()
        with self._closing:
            if not self._closed and self._widen():
                self._resting_until = time.monotonic() + _REST_SECONDS

    def _widen(self) -> bool:
        size = _ROOM
        while size > _BLOCK:
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._reader, fcntl.F_SETPIPE_SZ, size)
                return True
            size //= 2
        return False

    def break_off(self) -> None:
        """Close the pipe at once, even if the compressor stands still.

        QEMU cannot be called back from a write into a full pipe; only its reader's end frees it.
        """
        self.hurry()
        self._broken = True
        self._writer.break_off()
        self._end()

    def abandon(self) -> None:
        """Close the pipe at once and remove what was written."""
        self.break_off()
        self._writer.abandon()

    def _end(self) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        os.write(self._wake_writer, b"\0")
        self._thread.join()
        os.close(self._wake_reader)
        os.close(self._wake_writer)
