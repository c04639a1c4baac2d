import os
import threading
import zlib

import pytest
import zstandard

from snaporch.bundle.compress import (
    Compression,
    CompressionSettings,
    choose_compression,
    start_compressor,
)
from snaporch.errors import RefusedError

DATA = [b"QEVM" + bytes(range(256)) * 50, b"", b"x" * 300_000, os.urandom(5000)]


def unpack(method, data):
    if method is Compression.ZSTD:
        return zstandard.ZstdDecompressor().decompressobj().decompress(data)
    return zlib.decompress(data, wbits=31) if method is Compression.GZIP else data


def full(_block):
    raise OSError(28, "No space left on device")


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("method", Compression)
@pytest.mark.parametrize("threads", [0, 1, 2])
def test_output_decompresses_to_the_input(method, threads):
    out = bytearray()
    stream = start_compressor(CompressionSettings(method, 1, threads), out.extend)
    for block in DATA:
        stream.write(block)
    stream.finish()
    assert unpack(method, bytes(out)) == b"".join(DATA)


@pytest.mark.parametrize("method", Compression)
def test_an_empty_stream_can_be_decompressed(method):
    out = bytearray()
    start_compressor(CompressionSettings(method), out.extend).finish()
    assert unpack(method, bytes(out)) == b""


@pytest.mark.parametrize("method", [Compression.ZSTD, Compression.GZIP])
def test_the_level_matters(method):
    def packed(level):
        out = bytearray()
        stream = start_compressor(CompressionSettings(method, level, 1), out.extend)
        for number in range(20_000):
            stream.write(b"%d some words which come again, " % (number * number % 9973))
        stream.finish()
        return len(out)

    assert packed(9) < packed(1)
    if method is Compression.ZSTD:
        assert packed(1) < packed(-7)


@pytest.mark.parametrize("level", [-7, 0, 19])
def test_a_zstd_level_is_not_used_for_gzip_and_is_no_error(level):
    out = bytearray()
    stream = start_compressor(CompressionSettings(Compression.GZIP, level), out.extend)
    stream.write(b"x" * 1000)
    stream.finish()
    assert unpack(Compression.GZIP, bytes(out)) == b"x" * 1000


def test_a_zstd_stream_carries_a_checksum():
    out = bytearray()
    stream = start_compressor(CompressionSettings(Compression.ZSTD), out.extend)
    stream.write(b"x" * 1000)
    stream.finish()
    assert zstandard.get_frame_parameters(bytes(out)).has_checksum


@pytest.mark.parametrize("method", Compression)
def test_a_full_disk_is_reported_as_a_full_disk(method):
    stream = start_compressor(CompressionSettings(method), full)

    def write_much():
        for _ in range(200):
            stream.write(os.urandom(100_000))
        stream.finish()

    with pytest.raises(OSError, match="No space left on device"):
        write_much()
    stream.abandon()


def test_a_killed_pigz_is_an_error():
    stream = start_compressor(CompressionSettings(Compression.GZIP), lambda _block: None)
    stream._process.kill()
    stream._process.wait()
    with pytest.raises(OSError, match="pigz failed with status -9"):
        stream.finish()


@pytest.mark.parametrize("end", ["finish", "abandon"])
def test_pigz_leaves_no_process_thread_or_open_file(end):
    files, threads = open_files(), threading.active_count()
    stream = start_compressor(CompressionSettings(Compression.GZIP), lambda _block: None)
    stream.write(b"QEVM" * 1000)
    getattr(stream, end)()
    assert stream._process.returncode is not None
    assert threading.active_count() == threads
    assert open_files() == files


def test_the_numbers_are_libvirts():
    assert {method.value: method.image_format for method in Compression} == {
        "none": 0,
        "gzip": 1,
        "zstd": 5,
    }


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Makes these programs the only ones of the host."""

    def install(programs):
        for name in programs:
            (tmp_path / name).touch(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return install


@pytest.mark.parametrize(
    ("programs", "reads_zstd", "chosen"),
    [
        ({"zstd", "pigz"}, True, Compression.ZSTD),
        ({"zstd", "pigz"}, False, Compression.GZIP),
        ({"pigz"}, True, Compression.GZIP),
        ({"zstd"}, False, Compression.NONE),
        (set(), True, Compression.NONE),
    ],
)
def test_auto_is_the_best_that_this_host_can_decompress(installed, programs, reads_zstd, chosen):
    installed(programs)
    assert choose_compression("auto", reads_zstd=reads_zstd) is chosen


@pytest.mark.parametrize(
    ("wanted", "programs", "reads_zstd", "step"),
    [
        ("zstd", {"zstd"}, False, "libvirt 10.4"),
        ("zstd", {"pigz"}, True, "apt install zstd"),
        ("gzip", {"zstd"}, True, "apt install pigz"),
    ],
)
def test_a_compression_that_the_host_cannot_decompress_is_refused(
    installed, wanted, programs, reads_zstd, step
):
    installed(programs)
    with pytest.raises(RefusedError, match=step):
        choose_compression(wanted, reads_zstd=reads_zstd)


@pytest.mark.parametrize("wanted", ["none", "gzip", "zstd"])
def test_a_compression_that_the_host_can_decompress_is_used(installed, wanted):
    installed(["zstd", "pigz"])
    assert choose_compression(wanted, reads_zstd=True) == wanted
