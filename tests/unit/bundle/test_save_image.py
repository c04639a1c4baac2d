import gc
import hashlib
import os
import threading
import weakref
import zlib

import pytest
import zstandard
from fakes import images
from hypothesis import given
from hypothesis import strategies as st

from snaporch.bundle.compress import Compression, CompressionSettings
from snaporch.bundle.save_image import (
    HEADER_SIZE,
    SaveImageError,
    SaveImageHeader,
    SaveImageWriter,
    read_header,
)

PATIENCE = 20
PLAIN = CompressionSettings(Compression.NONE)
XML = b"<domain type='kvm'><name>web</name></domain>\0\0\0cookie\0"


def write_blocks(path, blocks, how=PLAIN, *, trailer):
    writer = SaveImageWriter(path, how, trailer=trailer)
    try:
        for block in blocks:
            writer.write(block)
        return writer.finish()
    except BaseException:
        writer.abandon()
        raise


def write(path, source, how=PLAIN, *, trailer, block=1 << 16):
    blocks = [source[start : start + block] for start in range(0, len(source), block)]
    return write_blocks(path, blocks, how, trailer=trailer)


def cut(source, sizes):
    """Blocks of these sizes, and the rest in one."""
    blocks = []
    for size in sizes:
        blocks.append(source[:size])
        source = source[size:]
    return [*blocks, source]


def payload_of(path):
    """The decompressed payload of a stored image, by its own header."""
    raw = path.read_bytes()
    header = SaveImageHeader.parse(raw, "stored")
    body = raw[HEADER_SIZE + header.data_length :]
    if header.compression == 5:
        return zstandard.ZstdDecompressor().decompressobj().decompress(body)
    return zlib.decompress(body, wbits=31) if header.compression == 1 else body


# -- header -------------------------------------------------------------------------------------


@given(
    st.binary(min_size=60, max_size=60),
    st.integers(0, 64 << 20),
    st.booleans(),
    st.integers(0, 6),
    st.sampled_from([images.FINISHED, images.UNFINISHED]),
)
def test_a_header_survives_parsing_and_packing(rest, length, running, compression, magic):
    raw = images.header(magic, data_length=length, running=running, compression=compression)
    raw = raw[:32] + rest
    header = SaveImageHeader.parse(raw, "x")
    assert header.pack() == raw
    assert (header.data_length, header.was_running) == (length, running)


def test_bytes_behind_a_header_are_not_part_of_it():
    assert SaveImageHeader.parse(images.image(), "x").pack() == images.image()[:HEADER_SIZE]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "ends after 0 bytes"),
        (images.header()[:91], "ends after 91 bytes, inside its header"),
        (images.header(b"LibvirtQemudBoot"), "is not a libvirt save image"),
        (b"\x7fELF" + bytes(88), "is not a libvirt save image"),
        (images.header(version=3), "has save image version 3, expected 2"),
        (images.header(version=2 << 24), "version"),
    ],
    ids=["nothing", "short", "magic", "elf", "version", "byte-order"],
)
def test_a_foreign_header_is_refused(raw, message):
    with pytest.raises(SaveImageError, match=message):
        SaveImageHeader.parse(raw, "x")


def test_an_absurd_length_is_not_blamed_on_the_version():
    with pytest.raises(SaveImageError) as caught:
        SaveImageHeader.parse(images.header(data_length=(64 << 20) + 1), "x")
    assert "version 2, expected 2" not in str(caught.value)


# -- writing ------------------------------------------------------------------------------------


@given(data=st.data())
def test_the_image_is_right_however_it_is_cut_into_blocks(tmp_path_factory, data):
    trailer = data.draw(st.booleans(), "trailer")
    method = data.draw(st.sampled_from([Compression.NONE, Compression.ZSTD]), "method")
    xml = data.draw(st.binary(max_size=300), "xml")
    stream = b"QEVM" + data.draw(st.binary(max_size=600), "stream")
    running = data.draw(st.integers(0, 1), "running")
    make = images.piped if trailer else images.image
    source = make(xml, stream, running=running)
    path = tmp_path_factory.mktemp("image") / "ram.save"
    blocks = cut(source, data.draw(st.lists(st.integers(1, 300), max_size=30), "block sizes"))
    result = write_blocks(path, blocks, CompressionSettings(method, 1, 1), trailer=trailer)

    stored = path.read_bytes()
    header = read_header(path)
    assert (header.data_length, header.was_running) == (len(xml), bool(running))
    assert header.compression == result.image_format == method.image_format
    assert header.rest == images.header()[32:]
    assert stored[HEADER_SIZE : HEADER_SIZE + len(xml)] == xml
    assert payload_of(path) == stream
    assert result.payload_bytes == len(stream)
    assert result.stored_bytes == len(stored)
    assert result.sha256 == hashlib.sha256(stored).hexdigest()


@pytest.mark.parametrize("method", Compression)
@pytest.mark.parametrize("trailer", [True, False])
@pytest.mark.parametrize("block", [1, 91, 92, 93, 4096])
def test_blocks_around_the_edges(tmp_path, method, trailer, block):
    make = images.piped if trailer else images.image
    path = tmp_path / "ram.save"
    how = CompressionSettings(method, 1, 1)
    result = write(path, make(XML), how, trailer=trailer, block=block)
    assert payload_of(path) == images.qemu_stream()
    assert result.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_until_it_is_finished_libvirt_would_refuse_the_file(tmp_path, monkeypatch):
    path = tmp_path / "ram.save"
    before_its_header: list[bytes] = []

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        with pytest.raises(SaveImageError, match="unfinished"):
            read_header(path)
        before_its_header.append(path.read_bytes())
        return os_pwrite(descriptor, data, offset)

    os_pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", pwrite)
    writer = SaveImageWriter(path, PLAIN, trailer=True)
    writer.write(images.piped(XML))
    writer.finish()
    (unfinished,) = before_its_header
    finished = path.read_bytes()
    assert (unfinished[:16], finished[:16]) == (images.UNFINISHED, images.FINISHED)
    assert unfinished[HEADER_SIZE:] == finished[HEADER_SIZE:]


def test_it_is_on_stable_storage_with_its_header(tmp_path, to_disk):
    write(tmp_path / "ram.save", images.piped(XML), trailer=True)
    assert to_disk == ["ram.save written", "ram.save"]


def test_the_file_is_private_and_never_someone_elses(tmp_path):
    path = tmp_path / "ram.save"
    write(path, images.image(), trailer=False)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        SaveImageWriter(path, PLAIN, trailer=False)


def test_progress_counts_the_stream_and_not_the_header(tmp_path):
    writer = SaveImageWriter(tmp_path / "ram.save", PLAIN, trailer=False)
    writer.write(images.image(XML, images.qemu_stream(1000)))
    assert writer.payload_bytes == 1000
    writer.abandon()


# -- images that are refused --------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 91, 92, 92 + len(XML), 92 + len(XML) + 3])
@pytest.mark.parametrize("trailer", [True, False])
def test_an_image_cut_before_its_payload_is_refused(tmp_path, length, trailer):
    make = images.piped if trailer else images.image
    with pytest.raises(SaveImageError, match="ends after"):
        write(tmp_path / "ram.save", make(XML)[:length], trailer=trailer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", [1, 91, 92, 93, 3000])
def test_a_stream_without_its_closing_header_is_refused(tmp_path, missing):
    with pytest.raises(SaveImageError, match="did not finish it"):
        write(tmp_path / "ram.save", images.piped(XML)[:-missing], trailer=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "closing",
    [
        images.header(images.UNFINISHED, data_length=len(XML)),
        images.header(data_length=len(XML) + 1),
        images.header(data_length=len(XML), running=0),
        images.header(data_length=len(XML), compression=5),
        images.header(data_length=len(XML))[:-1] + b"?",
    ],
    ids=["unfinished", "length", "running", "compression", "rest"],
)
def test_a_closing_header_of_another_image_is_refused(tmp_path, closing):
    source = images.image(XML, magic=images.UNFINISHED) + closing
    with pytest.raises(SaveImageError, match="did not finish it"):
        write(tmp_path / "ram.save", source, trailer=True)


def test_a_file_that_libvirt_did_not_finish_is_refused(tmp_path):
    source = images.image(XML, magic=images.UNFINISHED)
    with pytest.raises(SaveImageError, match="did not finish it"):
        write(tmp_path / "ram.save", source, trailer=False)


def test_a_foreign_magic_is_refused_as_soon_as_it_is_seen(tmp_path):
    writer = SaveImageWriter(tmp_path / "ram.save", PLAIN, trailer=True)
    with pytest.raises(SaveImageError, match="is not a libvirt save image"):
        writer.write(b"\0" * 92)
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("compression", [0, 6])
def test_a_payload_that_is_no_qemu_stream_is_refused(tmp_path, compression):
    source = images.image(XML, b"\0" * 100, compression=compression)
    with pytest.raises(SaveImageError, match="is not a QEMU stream"):
        write(tmp_path / "ram.save", source, trailer=False)


# -- payloads that libvirt compressed -----------------------------------------------------------


def test_a_plain_stream_labelled_sparse_is_stored_as_plain(tmp_path):
    path = tmp_path / "ram.save"
    source = images.piped(XML, compression=6)
    result = write(path, source, CompressionSettings(Compression.ZSTD), trailer=True)
    assert result.image_format == 5
    assert payload_of(path) == images.qemu_stream()


@pytest.mark.parametrize("compression", [1, 2, 3, 4, 5])
def test_a_payload_that_libvirt_compressed_is_kept_as_it_is(tmp_path, compression):
    path = tmp_path / "ram.save"
    packed = b"\x1f\x8b some other packing" * 20
    source = images.piped(XML, packed, compression=compression)
    result = write(path, source, CompressionSettings(Compression.ZSTD), trailer=True)
    assert result.image_format == read_header(path).compression == compression
    assert path.read_bytes() == images.image(XML, packed, compression=compression)


def test_a_plain_stream_labelled_compressed_is_stored_as_plain(tmp_path):
    path = tmp_path / "ram.save"
    write(path, images.image(XML, compression=1), PLAIN, trailer=False)
    assert read_header(path).compression == 0
    assert payload_of(path) == images.qemu_stream()


# -- when it cannot be stored -------------------------------------------------------------------


@pytest.mark.parametrize("method", Compression)
def test_an_abandoned_image_is_removed(tmp_path, method):
    writer = SaveImageWriter(tmp_path / "ram.save", CompressionSettings(method), trailer=True)
    writer.write(images.piped(XML)[:3000])
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", ["finish", "abandon"])
def test_the_compressors_memory_is_not_kept(tmp_path, end):
    """A process that takes several snapshots must not wait for the garbage collector."""
    writer = SaveImageWriter(
        tmp_path / "ram.save", CompressionSettings(Compression.ZSTD), trailer=False
    )
    gc.disable()
    try:
        writer.write(images.image())
        kept = weakref.ref(writer._compressor)
        getattr(writer, end)()
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("method", Compression)
def test_a_write_error_is_reported_and_leaves_nothing(tmp_path, method):
    writer = SaveImageWriter(tmp_path / "ram.save", CompressionSettings(method), trailer=True)
    writer._file.close()
    writer._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - closed by abandon

    def all_of_it():
        writer.write(images.piped(XML))
        writer.finish()

    with pytest.raises(OSError, match="No space left"):
        all_of_it()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_continued(tmp_path):
    path = tmp_path / "ram.save"
    writer = SaveImageWriter(path, PLAIN, trailer=False)
    real = writer._file

    class Short:
        def write(self, data):
            return real.write(data[:7])

        def __getattr__(self, name):
            return getattr(real, name)

    writer._file = Short()
    writer.write(images.image(XML))
    result = writer.finish()
    assert path.read_bytes() == images.image(XML)
    assert result.stored_bytes == len(images.image(XML))


def test_the_header_of_a_missing_or_short_file(tmp_path):
    (tmp_path / "short").write_bytes(b"Libvirt")
    with pytest.raises(SaveImageError, match="ends after 7 bytes"):
        read_header(tmp_path / "short")
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "missing")


def test_abort_while_the_compressor_is_started(tmp_path):
    """No other thread can stop it yet, and the first write to it could block for ever."""
    acts = []

    class Stalled:
        def write(self, block):
            acts.append("write")

        def abandon(self):
            acts.append("abandon")

    def start(how, sink):
        writer.abort()
        return Stalled()

    writer = SaveImageWriter(tmp_path / "ram", PLAIN, trailer=False, start=start)
    with pytest.raises(SaveImageError, match="aborted"):
        writer.write(images.image(XML))
    assert acts == ["abandon"]
    writer.abandon()


def test_it_progresses_while_it_reads_or_writes(tmp_path):
    writer = SaveImageWriter(
        tmp_path / "ram.save", CompressionSettings(Compression.ZSTD, 3), trailer=False
    )
    assert (writer.level, writer.waited_for_store, writer.moved_bytes) == (3, 0.0, 0)
    seen = []
    for block in cut(images.image(XML, b"QEVM" + bytes(5000)), [4000, 1000]):
        writer.write(block)
        seen.append(writer.moved_bytes)
    made = writer.finish()
    seen.append(writer.moved_bytes)
    assert seen == sorted(seen)
    assert seen[-1] == made.payload_bytes + made.stored_bytes


class StalledStore(SaveImageWriter):
    """Stores nothing until it is allowed to."""

    def __init__(self, path):
        self.allowed = threading.Event()
        super().__init__(path, PLAIN, trailer=False)

    def _raw_write(self, data):
        self.allowed.wait(PATIENCE)
        super()._raw_write(data)


@pytest.mark.parametrize("already", [False, True])
def test_the_queue_is_enlarged_before_or_after_storing_begins(tmp_path, already):
    """Also before the first block is stored."""
    image = images.image(XML, b"QEVM" + bytes(50_000))
    writer = StalledStore(tmp_path / "ram.save")

    def pour():
        for block in cut(image, [1000] * 40):
            writer.write(block)

    pouring = threading.Thread(target=pour, daemon=True)
    if already:
        pouring.start()
        pouring.join(0.3)
        assert pouring.is_alive(), "the queue is full"
    writer.enlarge_buffers()
    if not already:
        pouring.start()
    pouring.join(PATIENCE / 2)
    assert not pouring.is_alive(), "it waits for the store"
    writer.allowed.set()
    writer.finish()
    assert (tmp_path / "ram.save").read_bytes() == image


def test_a_file_that_was_removed_meanwhile_can_be_abandoned(tmp_path):
    writer = SaveImageWriter(tmp_path / "ram.save", PLAIN, trailer=False)
    (tmp_path / "ram.save").unlink()
    writer.abandon()
