import threading

import pytest

from snaporch.bundle.async_writer import _DEPTH, AsyncWriter

PATIENCE = 60


def test_blocks_are_done_in_order():
    done = []
    behind = AsyncWriter(done.append)
    for number in range(100):
        behind.put(bytes([number]))
    behind.finish()
    assert b"".join(done) == bytes(range(100))


def test_a_buffer_may_be_used_again():
    done = []
    gate = threading.Event()
    behind = AsyncWriter(lambda block: (gate.wait(PATIENCE), done.append(bytes(block))))
    buffer = bytearray(b"first")
    behind.put(memoryview(buffer))
    buffer[:] = b"other"
    gate.set()
    behind.finish()
    assert done == [b"first"]


def test_the_time_in_which_there_was_no_room_is_counted():
    gate = threading.Event()
    behind = AsyncWriter(lambda _block: gate.wait(PATIENCE))
    for _ in range(_DEPTH):
        behind.put(b"x")
    assert behind.waited == 0.0
    threading.Timer(0.2, gate.set).start()
    for _ in range(2):  # one more than is being done and waits
        behind.put(b"x")
    behind.finish()
    assert 0.1 < behind.waited < PATIENCE


def test_who_waits_and_who_comes_goes_on_when_there_is_room():
    gate, done = threading.Event(), []
    behind = AsyncWriter(lambda block: (gate.wait(PATIENCE), done.append(block)))
    full = threading.Thread(
        target=lambda: [behind.put(bytes([number])) for number in range(_DEPTH + 2)]
    )
    full.start()
    while not behind.waited:
        pass
    behind.make_room()
    full.join(PATIENCE)
    assert not full.is_alive()
    waited = behind.waited
    for number in range(_DEPTH + 2, 100):
        behind.put(bytes([number]))
    assert behind.waited == waited
    assert not done
    gate.set()
    behind.finish()
    assert b"".join(done) == bytes(range(100))


def test_what_fails_is_told_by_the_next_call():
    failed = threading.Event()

    def fail(_block):
        failed.set()
        raise OSError(28, "No space left on device")

    behind = AsyncWriter(fail)
    behind.put(b"x")
    assert failed.wait(PATIENCE)
    with pytest.raises(OSError, match="No space left"):
        behind.finish()
    with pytest.raises(OSError, match="No space left"):
        behind.put(b"y")


def test_not_more_wait_than_a_few_and_stopping_frees_who_waits():
    gate, errors = threading.Event(), []
    taken = []

    def slow(block):
        taken.append(block)
        gate.wait(PATIENCE)

    behind = AsyncWriter(slow)

    def put_for_ever():
        try:
            for _ in range(1000):
                behind.put(b"x")
        except OSError as error:
            errors.append(str(error))

    thread = threading.Thread(target=put_for_ever, daemon=True)
    thread.start()
    behind.stop()
    thread.join(PATIENCE)
    assert errors == ["it was broken off"]
    ended = threading.Event()
    behind.afterwards(ended.set)
    if taken:
        assert not ended.is_set()
    gate.set()
    assert ended.wait(PATIENCE)
    assert len(taken) <= 1  # what waited was dropped


def test_what_comes_afterwards_comes_at_once_if_nothing_is_under_way():
    behind = AsyncWriter(lambda _block: None)
    behind.stop()
    behind._thread.join(PATIENCE)
    ended = []
    behind.afterwards(lambda: ended.append(True))
    assert ended == [True]
