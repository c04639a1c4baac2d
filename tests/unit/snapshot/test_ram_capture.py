import os
import threading

import pytest
from fakes import images

from snaporch.bundle.compress import Compression, CompressionSettings
from snaporch.bundle.save_image import SaveImageError
from snaporch.snapshot.ram_capture import RamCapture
from snaporch.waiting_times import RamTimes

PLAIN = CompressionSettings(Compression.NONE)
PATIENCE = 60


@pytest.fixture
def capture(tmp_path):
    return capture_in(tmp_path)


def capture_in(directory, times=None):
    times = times or RamTimes(tick=0.01)
    return RamCapture(directory, directory / "ram.pipe", directory / "ram.raw", PLAIN, times)


def nothing(_stored):
    pass


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def test_ram_in_a_file_is_compressed_afterwards_and_the_raw_file_removed(capture, tmp_path):
    assert not capture.streams
    capture.target.write_bytes(images.image())
    part = capture.seal(nothing)
    assert (part.name, part.compression, part.payload_bytes) == ("ram.save", "none", 5000)
    assert capture.compressed_bytes == 5000
    assert names(tmp_path) == ["ram.save"]


def test_a_raw_file_that_is_no_image_leaves_no_compressed_one(capture, tmp_path):
    capture.target.write_bytes(b"\0" * 200)
    with pytest.raises(SaveImageError):
        capture.seal(nothing)
    assert names(tmp_path) == []


def test_the_raw_file_has_no_name_while_it_is_compressed(tmp_path, ram_store):
    """A later run of the domain uses the same name."""
    capture = capture_in(tmp_path)
    capture.target.write_bytes(images.image())
    sealing = threading.Thread(target=capture.seal, args=(nothing,), daemon=True)
    sealing.start()
    assert ram_store.reached.wait(PATIENCE)
    assert names(tmp_path) == ["ram.save"]
    ram_store.gate.set()
    sealing.join(PATIENCE)
    assert not sealing.is_alive()


def test_ram_by_pipe(capture, tmp_path):
    capture.open_stream()
    assert capture.streams
    assert capture.target == tmp_path / "ram.pipe"
    with capture.target.open("wb") as pipe:
        pipe.write(images.piped())
    assert capture.seal(nothing).bytes == len(images.image())
    assert names(tmp_path) == ["ram.save"]


def test_after_an_abandoned_pipe_ram_can_be_saved_to_a_file(capture, tmp_path):
    capture.open_stream()
    capture.abandon()
    assert not capture.streams
    assert capture.failure is None
    assert names(tmp_path) == []
    capture.target.write_bytes(images.image())
    assert capture.seal(nothing).payload_bytes == 5000


def test_a_pipe_that_cannot_be_made_leaves_nothing(capture, tmp_path):
    capture.target.touch()
    (tmp_path / "ram.pipe").touch()
    with pytest.raises(FileExistsError):
        capture.open_stream()
    assert "ram.save" not in names(tmp_path)


@pytest.mark.parametrize(("label", "name"), [(1, "gzip"), (2, "bzip2"), (3, "xz"), (9, "9")])
def test_the_compression_that_libvirt_used_is_recorded(capture, label, name):
    capture.target.write_bytes(images.image(payload=b"packed" * 9, compression=label))
    assert capture.seal(nothing).compression == name


def poured(capture, way):
    if way == "stream":
        capture.open_stream()
        capture.target.write_bytes(images.piped())
    else:
        capture.target.write_bytes(images.image())


@pytest.mark.parametrize("way", ["stream", "file"])
def test_sealing_can_be_aborted_while_the_store_hangs(tmp_path, ram_store, way):
    times = RamTimes(tick=0.01, abort=0.1)
    capture = capture_in(tmp_path, times)
    poured(capture, way)
    seen = []

    def tick(stored):
        assert ram_store.reached.wait(PATIENCE)
        seen.append(stored)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture.seal(tick)
    assert seen[1] == seen[2] > 92  # the first was read before the store hung
    capture.abandon()  # and does not wait


def test_syncing_is_not_aborted(capture, monkeypatch):
    """However long it takes: writing much data cannot be distinguished from a hanging store."""
    poured(capture, "stream")
    synced, looks = threading.Event(), []
    monkeypatch.setattr(os, "fsync", lambda _: synced.wait(PATIENCE))
    threading.Timer(0.3, synced.set).start()

    def tick(moved):
        looks.append(moved)
        assert not capture._writer.syncing

    assert capture.seal(tick).payload_bytes == 5000
    assert len(looks) < 10


def test_a_header_that_cannot_be_stored_does_not_block_the_writer(capture, ram_store):
    """QEMU would hang in its write to the pipe."""
    ram_store.taken = -1
    capture.open_stream()
    capture.target.write_bytes(images.piped())
    ending = threading.Thread(target=capture.abandon, daemon=True)
    ending.start()
    ending.join(10)
    assert not ending.is_alive()


@pytest.mark.parametrize("way", ["stream", "file"])
def test_a_store_that_recovers_after_the_abort_leaves_no_file(capture, tmp_path, ram_store, way):
    poured(capture, way)

    def tick(_stored):
        assert ram_store.reached.wait(PATIENCE)
        threading.Timer(0.1, ram_store.gate.set).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture.seal(tick)
    capture.abandon()
    assert "ram.save" not in names(tmp_path)


# -- files beside RAM ---------------------------------------------------------------------------
