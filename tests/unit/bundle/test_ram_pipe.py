import errno
import fcntl
import os
import select
import threading
from contextlib import suppress
from dataclasses import replace

import pytest
from fakes import images

from snaporch.bundle.compress import Compression, CompressionSettings
from snaporch.bundle.ram_pipe import PipeTuning, RamPipe
from snaporch.bundle.rate_limit import RateLimit
from snaporch.bundle.save_image import SaveImageError, SaveImageHeader, SaveImageWriter

PATIENCE = 5
SMALL = 1 << 16
XML = b"<domain/>\0"
BODY = images.image(XML, magic=images.UNFINISHED)
CLOSING = images.header(data_length=len(XML))


class Sink:
    """A writer that signals after a number of bytes, and fails on request."""

    level = 3
    waited_for_store = 0.25

    def __init__(self, announce=1 << 60, fail_after=1 << 60):
        self.taken = bytearray()
        self.reached = threading.Event()
        self.abandoned = False
        self.room = 0
        self._announce, self._fail_after = announce, fail_after

    def announce(self, size):
        """Signal again, at another size."""
        self._announce = size
        self.reached.clear()

    def write(self, block):
        self.taken += block
        if len(self.taken) >= self._announce:
            self.reached.set()
        if len(self.taken) >= self._fail_after:
            raise OSError(errno.ENOSPC, "No space left on device")

    def finish(self):
        return bytes(self.taken)

    def enlarge_buffers(self):
        self.room += 1

    @property
    def payload_bytes(self):
        return len(self.taken)

    def abort(self):
        return

    def abandon(self):
        self.abandoned = True


@pytest.fixture
def fifo(tmp_path):
    return tmp_path / "ram"


def pour(path, *parts):
    """Write like libvirt: each part with its own open and close."""
    for part in parts:
        with open(path, "wb", buffering=0) as pipe:
            view = memoryview(part)
            while view:
                view = view[pipe.write(view) :]


def in_thread(action):
    """Run ``action`` in a thread; daemon, so that a hang fails only the test."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def test_libvirts_two_opens_become_one_image(fifo, tmp_path):
    writer = SaveImageWriter(
        tmp_path / "ram.save", CompressionSettings(Compression.NONE), trailer=True
    )
    stream = RamPipe(fifo, writer)
    pour(fifo, BODY, CLOSING)
    image = stream.finish()
    assert image.payload_bytes == len(images.qemu_stream())
    assert (tmp_path / "ram.save").read_bytes() == images.image(XML)
    assert not fifo.exists()


def test_a_second_open_after_the_reader_drained_the_pipe(fifo):
    sink = Sink(announce=len(BODY))
    stream = RamPipe(fifo, sink)
    pour(fifo, BODY)
    assert sink.reached.wait(PATIENCE)
    pour(fifo, CLOSING)
    assert stream.finish() == BODY + CLOSING


def test_a_second_open_before_the_first_was_closed(fifo):
    stream = RamPipe(fifo, Sink())
    with open(fifo, "wb", buffering=0) as first:
        first.write(BODY)
        pour(fifo, CLOSING)
    assert stream.finish() == BODY + CLOSING


def test_data_just_before_the_end_is_read(fifo):
    """A poll that began earlier may report only the end."""

    class PollsTooEarly(RamPipe):
        def _poll(self):
            if not self._stop.is_set():
                assert self._stop.wait(PATIENCE)
                return [(self._wake_reader, select.POLLIN)]
            return super()._poll()

    stream = PollsTooEarly(fifo, Sink())
    pour(fifo, BODY, CLOSING)
    assert stream.finish() == BODY + CLOSING


def test_a_pipe_that_was_removed_is_no_failure(fifo):
    stream = RamPipe(fifo, Sink())
    pour(fifo, BODY)
    fifo.unlink()
    assert stream.finish() == BODY


def test_a_process_that_ends_waits_for_no_stream_and_hands_no_pipe_on(fifo):
    before = set(os.listdir("/proc/self/fd"))
    stream = RamPipe(fifo, Sink())
    new = {int(name) for name in set(os.listdir("/proc/self/fd")) - before}
    assert not [
        fd for fd in new if os.path.exists(f"/proc/self/fd/{fd}") and os.get_inheritable(fd)
    ]
    (thread,) = [each for each in threading.enumerate() if each.name == "ram-stream"]
    assert thread.daemon
    stream.abandon()


def test_the_pipe_holds_a_block(fifo):
    stream = RamPipe(fifo, Sink(), tuning=PipeTuning(block=2 * SMALL))
    descriptor = os.open(fifo, os.O_WRONLY)
    assert fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ) == 2 * SMALL
    os.close(descriptor)
    stream.abandon()
    assert PipeTuning().large_pipe > PipeTuning().block


def test_a_pipe_that_may_not_be_enlarged_works_too(fifo, monkeypatch):
    """The kernel's limit for an unprivileged user."""

    def refuse(*_what):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    stream = RamPipe(fifo, Sink())
    pour(fifo, BODY)
    assert stream.finish() == BODY


def test_all_data_that_was_read_is_stored_and_counted(fifo):
    class Counting(RateLimit):
        spent = 0

        def spend(self, count):
            self.spent += count

    throttle = Counting(0)
    stream = RamPipe(fifo, Sink(), throttle)
    pour(fifo, BODY, CLOSING)
    stream.finish()
    assert throttle.spent == stream.payload_bytes == len(BODY + CLOSING)


def test_a_stream_larger_than_the_pipe_is_stored(fifo):
    sink = Sink()
    stream = RamPipe(fifo, sink)
    much = os.urandom(5 << 20)
    pour(fifo, much)
    assert stream.finish() == much


def test_finish_drains_the_pipe(fifo):
    gate, entered = threading.Event(), threading.Event()

    class Slow(Sink):
        def write(self, block):
            entered.set()
            gate.wait(PATIENCE)
            super().write(block)

    stream = RamPipe(fifo, Slow())
    pour(fifo, b"first")
    assert entered.wait(PATIENCE)
    pour(fifo, b" second")
    results = []
    finishing = in_thread(lambda: results.append(stream.finish()))
    gate.set()
    finishing.join(PATIENCE)
    assert results == [b"first second"]


def test_a_stream_without_data_is_no_image(fifo, tmp_path):
    writer = SaveImageWriter(
        tmp_path / "ram.save", CompressionSettings(Compression.NONE), trailer=True
    )
    stream = RamPipe(fifo, writer)
    with pytest.raises(SaveImageError):
        stream.finish()
    stream.abandon()
    assert list(tmp_path.iterdir()) == []


def test_the_pipe_is_private(fifo):
    stream = RamPipe(fifo, Sink())
    assert fifo.stat().st_mode & 0o777 == 0o600
    stream.abandon()


def write_for_ever(path, outcome):
    try:
        with open(path, "wb", buffering=0) as pipe:
            while True:
                pipe.write(bytes(1 << 16))
    except OSError as error:
        outcome.append(error.errno)


def test_the_writer_gets_epipe_when_the_image_cannot_be_stored(fifo):
    stream = RamPipe(fifo, Sink(fail_after=1000))
    outcome = []
    writing = in_thread(lambda: write_for_ever(fifo, outcome))
    writing.join(PATIENCE)
    assert outcome == [errno.EPIPE]
    assert stream.failure.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space left"):
        stream.finish()
    stream.abandon()


def test_the_writer_gets_epipe_when_the_stream_is_no_image(fifo, tmp_path):
    writer = SaveImageWriter(
        tmp_path / "ram.save", CompressionSettings(Compression.NONE), trailer=True
    )
    stream = RamPipe(fifo, writer)
    outcome = []
    in_thread(lambda: write_for_ever(fifo, outcome)).join(PATIENCE)
    assert outcome == [errno.EPIPE]
    assert isinstance(stream.failure, SaveImageError)
    stream.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_second_open_after_a_failure_does_not_wait_for_a_reader_that_never_comes(fifo):
    """Storing may fail after QEMU has finished and before libvirt opens the pipe again."""
    stream = RamPipe(fifo, Sink(fail_after=len(BODY)))
    pour(fifo, BODY)
    stream._thread.join(PATIENCE)
    assert stream.failure is not None

    def open_again():
        with suppress(OSError):
            os.close(os.open(fifo, os.O_WRONLY))

    opening = in_thread(open_again)
    opening.join(1)
    stuck = opening.is_alive()
    if stuck:  # unblock it
        os.close(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK))
        opening.join(PATIENCE)
    stream.abandon()
    assert not stuck


def test_the_pipe_is_unlinked_before_its_reader_closes(fifo, monkeypatch):
    """A program that opened it after that would wait for ever."""
    stream, named, read, real = RamPipe(fifo, Sink()), [], [], os.close

    def close(descriptor):
        if descriptor in (stream._reader, stream._own_write_end):
            named.append(fifo.exists())
        if descriptor in (stream._wake_reader, stream._wake_writer):
            read.append(stream._thread.is_alive())
        real(descriptor)

    monkeypatch.setattr(os, "close", close)
    stream.abandon()
    assert named == [False, False]
    assert read == [False, False], "a descriptor that is closed may be another's by then"


def test_abandoning_removes_pipe_and_image(fifo):
    class Abandoned(Sink):
        def abandon(self):
            assert not stream._thread.is_alive(), "it might write what is removed"
            super().abandon()

    sink = Abandoned()
    stream = RamPipe(fifo, sink)
    pour(fifo, BODY)
    stream.abandon()
    assert sink.abandoned
    assert not fifo.exists()


def test_abandoning_twice_or_after_a_failure_is_fine(fifo):
    stream = RamPipe(fifo, Sink(fail_after=1))
    pour(fifo, b"x")
    stream._thread.join(PATIENCE)
    stream.abandon()
    stream.abandon()


def test_abandoning_does_not_wait_for_an_active_writer(fifo):
    taking, go_on = threading.Event(), threading.Event()
    go_on.set()

    class NeverDrained(Sink):
        """Takes the next block only when there is another one behind it."""

        def write(self, block):
            taking.set()
            select.select([stream._reader], [], [], PATIENCE)

    stream = RamPipe(fifo, NeverDrained())
    outcome = []

    def write_while_allowed():
        try:
            with open(fifo, "wb", buffering=0) as pipe:
                while go_on.is_set():
                    pipe.write(bytes(1 << 16))
        except BrokenPipeError:
            outcome.append("EPIPE")

    writing = in_thread(write_while_allowed)
    assert taking.wait(PATIENCE)
    abandoning = in_thread(stream.abandon)
    abandoning.join(PATIENCE)
    stuck = abandoning.is_alive()
    if not stuck:
        writing.join(PATIENCE)
    go_on.clear()  # unblock it
    abandoning.join(PATIENCE)
    writing.join(PATIENCE)
    assert not stuck
    assert outcome == ["EPIPE"]


def test_aborting_frees_a_writer_even_if_the_compressor_is_blocked(fifo):
    class BlockedSink(Sink):
        def __init__(self):
            super().__init__()
            self.entered, self.broken = threading.Event(), threading.Event()

        def write(self, block):
            self.entered.set()
            assert self.broken.wait(3 * PATIENCE)
            raise OSError(errno.EPIPE, "Broken pipe")

        def abort(self):
            self.broken.set()

    sink, outcome = BlockedSink(), []
    stream = RamPipe(fifo, sink)
    writing = in_thread(lambda: write_for_ever(fifo, outcome))
    assert sink.entered.wait(PATIENCE)
    breaking = in_thread(stream.abort)
    breaking.join(PATIENCE)
    assert not breaking.is_alive()
    writing.join(PATIENCE)
    assert outcome == [errno.EPIPE]
    stream.abandon()
    assert sink.abandoned


@pytest.mark.parametrize("end", ["finish", "abandon"])
def test_no_file_stays_open_and_no_thread_stays(fifo, end):
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    stream = RamPipe(fifo, Sink())
    pour(fifo, BODY, CLOSING)
    getattr(stream, end)()
    assert len(os.listdir("/proc/self/fd")) == files
    assert threading.active_count() == threads


def test_a_pipe_that_exists_is_not_taken_over(fifo):
    os.mkfifo(fifo)
    with pytest.raises(FileExistsError):
        RamPipe(fifo, Sink())


def test_the_stored_header_is_the_finished_one(fifo, tmp_path):
    writer = SaveImageWriter(
        tmp_path / "ram.save", CompressionSettings(Compression.ZSTD), trailer=True
    )
    stream = RamPipe(fifo, writer)
    pour(fifo, BODY, CLOSING)
    stream.finish()
    header = SaveImageHeader.parse((tmp_path / "ram.save").read_bytes(), "stored")
    assert (header.magic, header.compression, header.was_running) == (images.FINISHED, 5, True)


@pytest.mark.parametrize("end", ["finish", "abort", "abandon"])
def test_a_limited_stream_ends_at_once(fifo, end):
    """A wait for a terabyte ends at once."""
    sink = Sink(announce=len(BODY))
    throttle = RateLimit(1e-6)
    stream = RamPipe(fifo, sink, throttle)
    pour(fifo, BODY)
    assert sink.reached.wait(PATIENCE)
    ending = in_thread(getattr(stream, end))
    ending.join(PATIENCE)
    assert not ending.is_alive()
    assert not fifo.exists()


def test_the_bottleneck_is_measured(fifo):
    sink = Sink(announce=len(BODY))
    stream = RamPipe(fifo, sink)
    assert stream.pace is None
    pour(fifo, BODY)
    assert sink.reached.wait(PATIENCE)
    sink.announce(2 * len(BODY))
    threading.Event().wait(0.2)  # no RAM of the guest arrives
    pour(fifo, BODY)
    assert sink.reached.wait(PATIENCE)
    stream.finish()
    assert stream.pace.level == 3
    assert 0.2 <= stream.pace.waited_for_ram <= stream.pace.seconds
    assert stream.pace.waited_for_store == 0.25


def test_only_the_time_while_the_guest_ran_counts(fifo):
    sink = Sink(announce=len(BODY))
    stream = RamPipe(fifo, sink)
    pour(fifo, BODY)
    assert sink.reached.wait(PATIENCE)
    stream.enlarge_buffers()
    pace = stream.pace
    sink.waited_for_store = 5.0
    stream.finish()
    assert (pace.waited_for_store, stream.pace) == (0.25, pace)


def test_data_that_the_guest_delays_until_the_end_counts(fifo):
    sink = Sink(announce=len(BODY))
    stream = RamPipe(fifo, sink)
    pour(fifo, BODY)
    assert sink.reached.wait(PATIENCE)
    threading.Event().wait(0.2)
    stream.enlarge_buffers()
    assert 0.1 <= stream.pace.waited_for_ram <= stream.pace.seconds
    stream.abandon()


def test_time_of_storing_is_no_waiting_for_the_guest(fifo):
    sink = StalledSink()
    stream = RamPipe(fifo, sink)
    pour(fifo, BODY)
    assert sink.stalled.wait(PATIENCE)
    stream.enlarge_buffers()
    assert stream.pace.waited_for_ram == 0.0
    sink.gate.set()
    stream.abandon()


def test_nothing_after_the_pause_counts(fifo):
    sink = Sink(announce=len(BODY))
    stream = RamPipe(fifo, sink)
    stream.enlarge_buffers()
    pour(fifo, BODY)
    assert sink.reached.wait(PATIENCE)
    stream.finish()
    assert (stream.pace.seconds, stream.pace.waited_for_ram) == (0.0, 0.0)


@pytest.mark.parametrize("eased", [False, True])
def test_a_limited_stream_has_no_measurement(fifo, eased):
    stream = RamPipe(fifo, Sink(), RateLimit(1e6))
    pour(fifo, BODY)
    if eased:
        stream.lift_limit()
    stream.finish()
    assert stream.pace is None


SMALL_PIPE = PipeTuning(block=SMALL, large_pipe=1 << 20, rest_seconds=3600)
"""Small pipe sizes, so that enlarging needs no privilege: 64 KiB, at most 1 MiB."""


class StalledSink(Sink):
    """Blocks from the first block until it is unblocked."""

    def __init__(self):
        super().__init__()
        self.stalled, self.gate = threading.Event(), threading.Event()

    def write(self, block):
        self.stalled.set()
        self.gate.wait(PATIENCE)
        super().write(block)


def test_a_paused_guest_does_not_wait_for_the_store(fifo):
    sink = StalledSink()
    stream = RamPipe(fifo, sink, tuning=SMALL_PIPE)
    body = os.urandom(12 * SMALL)
    pouring = in_thread(lambda: pour(fifo, body))
    assert sink.stalled.wait(PATIENCE)
    assert pouring.is_alive()  # there is room for two blocks of twelve
    stream.enlarge_buffers()
    stream.enlarge_buffers()
    assert sink.room == 1
    pouring.join(PATIENCE)
    assert not pouring.is_alive()
    sink.gate.set()
    assert stream.finish() == body


def test_nothing_is_read_for_a_moment_while_the_guest_is_paused(fifo):
    sink = Sink(announce=2 * SMALL)  # it may have been waiting for a block already
    stream = RamPipe(fifo, sink, tuning=SMALL_PIPE)
    stream.enlarge_buffers()
    body = os.urandom(12 * SMALL)
    pour(fifo, body)
    assert not sink.reached.wait(0.3)
    assert stream.finish() == body


def test_a_block_beyond_the_free_room_is_taken_too(fifo):
    sink = Sink()
    stream = RamPipe(fifo, sink, tuning=SMALL_PIPE)
    stream.enlarge_buffers()
    body = os.urandom(3 << 20)
    pouring = in_thread(lambda: pour(fifo, body))
    pouring.join(PATIENCE)
    assert not pouring.is_alive()
    assert stream.finish() == body


def test_a_paused_guest_does_not_wait_for_the_store_whatever_ram_is_left(fifo, tmp_path):
    gate = threading.Event()

    class Stalled(SaveImageWriter):
        def _raw_write(self, data):
            assert gate.wait(PATIENCE)
            super()._raw_write(data)

    writer = Stalled(tmp_path / "out", CompressionSettings(Compression.NONE), trailer=True)
    stream = RamPipe(fifo, writer, tuning=replace(SMALL_PIPE, rest_seconds=0.01))
    ram = images.qemu_stream(40 * SMALL)
    body = images.image(XML, ram, magic=images.UNFINISHED)
    pouring = in_thread(lambda: pour(fifo, body, CLOSING))
    pouring.join(0.3)
    assert pouring.is_alive()
    stream.enlarge_buffers()
    pouring.join(PATIENCE)
    assert not pouring.is_alive()
    gate.set()
    stream.finish()
    assert (tmp_path / "out").read_bytes() == CLOSING + body[len(CLOSING) :]


def test_without_a_larger_pipe_the_stream_continues(fifo, monkeypatch):
    sink = Sink(announce=100)
    stream = RamPipe(fifo, sink, tuning=SMALL_PIPE)
    refused = []

    def refuse(_descriptor, _what, size):
        refused.append(size)
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    stream.enlarge_buffers()
    assert refused == [1 << 20, 1 << 19, 1 << 18, 1 << 17]
    pour(fifo, bytes(100))  # the reader does not wait for more after these
    assert sink.reached.wait(PATIENCE)
    sink.announce(200)
    pour(fifo, bytes(100))
    assert sink.reached.wait(PATIENCE)
    stream.finish()


@pytest.mark.parametrize("end", ["abort", "abandon"])
def test_a_stream_at_rest_ends_at_once(fifo, end):
    stream = RamPipe(fifo, Sink(), tuning=SMALL_PIPE)
    stream.enlarge_buffers()
    pour(fifo, BODY)
    ending = in_thread(getattr(stream, end))
    ending.join(PATIENCE)
    assert not ending.is_alive()
    stream.enlarge_buffers()  # too late, which does no harm


def test_a_stream_that_has_ended_is_not_enlarged(fifo, monkeypatch):
    """Its descriptors may have been reused by now."""
    stream = RamPipe(fifo, Sink())
    stream.abandon()
    touched = []
    monkeypatch.setattr(fcntl, "fcntl", lambda *what: touched.append(what))
    stream.enlarge_buffers()
    assert touched == []


def test_the_limit_is_lifted_when_the_guest_is_paused(fifo):
    sink = Sink(announce=len(BODY))
    stream = RamPipe(fifo, sink, RateLimit(1e-6), PipeTuning(rest_seconds=0.01))
    pour(fifo, BODY)
    assert sink.reached.wait(PATIENCE)
    sink.announce(2 * len(BODY))
    pour(fifo, BODY)
    stream.enlarge_buffers()
    assert sink.reached.wait(PATIENCE)
    stream.finish()


def test_the_limit_of_a_stream_can_be_lifted(fifo):
    sink = Sink(announce=2 * len(BODY))
    stream = RamPipe(fifo, sink, RateLimit(1e-6))
    pour(fifo, BODY)
    pour(fifo, BODY)
    stream.lift_limit()
    assert sink.reached.wait(PATIENCE)
    assert stream.finish() == BODY + BODY
