import threading

import pytest

from snaporch.bundle.async_writer import _DEPTH, AsyncWriter

TIMEOUT_SECONDS = 60


def test_blocks_are_written_in_order():
    done = []
    writer = AsyncWriter(done.append)
    for number in range(100):
        writer.put(bytes([number]))
    writer.finish()
    assert b"".join(done) == bytes(range(100))


def test_the_caller_may_reuse_its_buffer():
    done = []
    gate = threading.Event()
    writer = AsyncWriter(lambda block: (gate.wait(TIMEOUT_SECONDS), done.append(bytes(block))))
    buffer = bytearray(b"first")
    writer.put(memoryview(buffer))
    buffer[:] = b"other"
    gate.set()
    writer.finish()
    assert done == [b"first"]


def test_the_time_spent_waiting_for_room_is_counted():
    gate = threading.Event()
    writer = AsyncWriter(lambda _block: gate.wait(TIMEOUT_SECONDS))
    for _ in range(_DEPTH):
        writer.put(b"x")
    assert writer.waited == 0.0
    threading.Timer(0.2, gate.set).start()
    for _ in range(2):  # one block more than are written or waiting
        writer.put(b"x")
    writer.finish()
    assert 0.1 < writer.waited < TIMEOUT_SECONDS


def test_enlarging_frees_a_waiting_put_and_later_puts_do_not_wait():
    gate, done = threading.Event(), []
    writer = AsyncWriter(lambda block: (gate.wait(TIMEOUT_SECONDS), done.append(block)))
    full = threading.Thread(
        target=lambda: [writer.put(bytes([number])) for number in range(_DEPTH + 2)]
    )
    full.start()
    while not writer.waited:
        pass
    writer.enlarge()
    full.join(TIMEOUT_SECONDS)
    assert not full.is_alive()
    waited = writer.waited
    for number in range(_DEPTH + 2, 100):
        writer.put(bytes([number]))
    assert writer.waited == waited
    assert not done
    gate.set()
    writer.finish()
    assert b"".join(done) == bytes(range(100))


def test_the_next_call_raises_the_error_of_the_write():
    failed = threading.Event()

    def fail(_block):
        failed.set()
        raise OSError(28, "No space left on device")

    writer = AsyncWriter(fail)
    writer.put(b"x")
    assert failed.wait(TIMEOUT_SECONDS)
    with pytest.raises(OSError, match="No space left"):
        writer.finish()
    with pytest.raises(OSError, match="No space left"):
        writer.put(b"y")


def test_the_queue_is_short_and_stopping_frees_a_waiting_put():
    gate, errors = threading.Event(), []
    taken = []

    def slow(block):
        taken.append(block)
        gate.wait(TIMEOUT_SECONDS)

    writer = AsyncWriter(slow)

    def put_for_ever():
        try:
            for _ in range(1000):
                writer.put(b"x")
        except OSError as error:
            errors.append(str(error))

    thread = threading.Thread(target=put_for_ever, daemon=True)
    thread.start()
    writer.stop()
    thread.join(TIMEOUT_SECONDS)
    assert errors == ["it was aborted"]
    ended = threading.Event()
    writer.on_end(ended.set)
    if taken:
        assert not ended.is_set()
    gate.set()
    assert ended.wait(TIMEOUT_SECONDS)
    assert len(taken) <= 1  # waiting blocks were dropped


def test_on_end_acts_at_once_if_no_block_is_being_written():
    writer = AsyncWriter(lambda _block: None)
    writer.stop()
    writer._thread.join(TIMEOUT_SECONDS)
    ended = []
    writer.on_end(lambda: ended.append(True))
    assert ended == [True]
