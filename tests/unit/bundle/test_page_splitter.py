"""A compressor that splits QEMU's stream into a page file and a rest."""

import errno
import threading
import time

import pytest
from fakes import streams

from snaporch.bundle.page_file import SETTLE_BYTES, PageFile
from snaporch.bundle.page_splitter import PageSplitter
from snaporch.bundle.qemu_stream import StreamError

PATIENCE = 60
STREAM = streams.guest_stream()


@pytest.fixture
def pages(tmp_path):
    return tmp_path / "pages"


@pytest.fixture
def made(pages):
    emitted = bytearray()
    splitter = PageSplitter(pages, emitted.extend, lambda: None)
    yield splitter, emitted
    splitter.abandon()


@pytest.mark.parametrize("size", [1, 92, 5000, 1 << 20])
def test_the_output_is_the_stream_without_its_pages(made, pages, size):
    splitter, emitted = made
    for start in range(0, len(STREAM), size):
        splitter.write(memoryview(STREAM)[start : start + size])
    splitter.finish()
    assert bytes(emitted) == splitter.found.head + splitter.found.tail
    assert len(emitted) < 300
    assert pages.stat().st_size == splitter.found.page_file_bytes
    assert splitter.moved_bytes > 0


def test_a_block_may_be_reused_by_its_writer(made):
    splitter, _ = made
    block = bytearray(STREAM)
    splitter.write(block)
    block[:] = bytes(len(block))
    splitter.finish()


def test_an_unknown_stream_is_an_error(made):
    splitter, emitted = made
    splitter.write(b"QEVN" + STREAM[4:])
    with pytest.raises(StreamError, match="not a stream"):
        splitter.finish()
    assert emitted == b""


def test_a_stream_that_ends_too_early_is_an_error(made):
    splitter, emitted = made
    splitter.write(STREAM[:-100])
    with pytest.raises(StreamError):
        splitter.finish()
    assert emitted == b""


def test_a_page_file_that_another_writer_has_is_an_error(made, pages):
    """The writer may hang in a pool, and write its pages later."""
    splitter, _ = made
    other = PageFile(pages, 4096, lambda _done: None)
    splitter.write(STREAM)
    with pytest.raises(BlockingIOError):
        splitter.finish()
    other.close()


def test_a_writer_that_waits_for_room_is_released(pages):
    """A full page pool, or an abort, must not hold up libvirt."""
    began, go_on = threading.Event(), threading.Event()
    failures = []

    def settle():
        began.set()
        go_on.wait(PATIENCE)
        raise OSError(errno.ENOSPC, "No space left on device")

    def feed():
        try:
            while True:
                splitter.write(bytes(1 << 20))
        except OSError as error:
            failures.append(error)

    splitter = PageSplitter(pages, lambda _data: None, settle)
    blocks = {b"pc.ram": (SETTLE_BYTES >> 12) + 600}
    page = bytes([1]) * 4096
    records = [(b"pc.ram", number, page) for number in range(blocks[b"pc.ram"])]
    splitter.write(streams.stream(blocks, [records, []]))
    assert began.wait(PATIENCE)
    feeding = threading.Thread(target=feed, daemon=True)
    feeding.start()
    splitter.abandon()
    feeding.join(PATIENCE)
    assert not feeding.is_alive()
    go_on.set()
    assert [str(each) for each in failures] == ["it was aborted"]


def test_after_it_was_abandoned_it_takes_nothing(made):
    splitter, _ = made
    splitter.abandon()
    with pytest.raises(OSError, match="aborted"):
        splitter.write(STREAM)


def test_a_rest_while_the_guest_is_paused_ends_with_the_stream(made):
    splitter, emitted = made
    splitter.enlarge()
    splitter.write(STREAM)
    assert emitted == b""
    splitter.finish()
    assert emitted


def test_a_guest_that_stays_paused_does_not_hold_up_the_stream(made):
    """It is said again and again that it is paused, as long as it is."""
    splitter, _ = made
    began = time.monotonic()
    for byte in STREAM[:2000]:
        splitter.enlarge()
        splitter.write(bytes([byte]))
    while splitter._blocks.qsize() and time.monotonic() < began + PATIENCE:
        splitter.enlarge()
        time.sleep(0.05)
    assert splitter._blocks.qsize() == 0
