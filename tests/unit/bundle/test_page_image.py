"""A save image is split into a page file and the rest, and built from them."""

import gzip
import hashlib
import os

import pytest
import zstandard
from fakes import images, streams
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snaporch.bundle.compress import Compression, CompressionSettings
from snaporch.bundle.manifest import PagesEntry
from snaporch.bundle.page_file import CHUNK, PageFile, page_sum
from snaporch.bundle.page_image import PageDamageError, build_image, check_image, split_image
from snaporch.bundle.qemu_stream import StreamError
from snaporch.bundle.save_image import SaveImageError
from snaporch.bundle.save_image_copy import read_preface

XML = b"<domain><name>web</name></domain>\0"
PLAIN = CompressionSettings(Compression.NONE)


def nothing(_done):
    """Ignore the progress."""


def write_image(path, stream, compression=0):
    packed = {0: bytes, 1: gzip.compress, 5: zstandard.ZstdCompressor().compress}[compression]
    path.write_bytes(images.image(XML, packed(stream), compression=compression))
    return path


def taken_apart(tmp_path, stream=None, compression=0, name="1"):
    stream = streams.guest_stream() if stream is None else stream
    image = write_image(tmp_path / f"image{name}", stream, compression)
    parts = split_image(image, tmp_path / f"rest{name}", tmp_path / "pages", nothing)
    entry = PagesEntry(
        dataset="tank/ram/u",
        name="s",
        guid=1,
        createtxg=1,
        bytes=parts.page_file_bytes,
        sha256=parts.page_sum,
        split=parts.split,
        stored_bytes=0,
    )
    return parts, entry


def put_together(tmp_path, entry, how=PLAIN, **options):
    target = tmp_path / "made"
    build_image(tmp_path / "rest1", entry, tmp_path / "pages", target, how, nothing, **options)
    return target


@pytest.mark.parametrize("compression", [0, 1, 5])
def test_splitting_and_building_gives_the_same_image(tmp_path, compression):
    stream = streams.guest_stream()
    _, entry = taken_apart(tmp_path, stream, compression)
    made = put_together(tmp_path, entry)
    preface = read_preface(made)
    assert preface.xml == XML.rstrip(b"\0").decode()
    assert read_preface(tmp_path / "rest1").header.compression == 0  # it is stored unchanged
    payload = made.read_bytes()[preface.end :]
    assert payload.endswith(b"\x04the devices' state\x00\x06")
    again = write_image(tmp_path / "again", payload)
    second = split_image(again, tmp_path / "rest2", tmp_path / "pages2", nothing)
    assert (second.page_sum, second.split) == (entry.sha256, entry.split)
    assert (tmp_path / "rest2").read_bytes() == (tmp_path / "rest1").read_bytes()


def test_the_built_image_is_compressed_as_requested(tmp_path):
    _, entry = taken_apart(tmp_path)
    made = put_together(tmp_path, entry, CompressionSettings(Compression.ZSTD))
    preface = read_preface(made)
    assert preface.header.compression == 5
    stream = zstandard.ZstdDecompressor().decompressobj()
    assert stream.decompress(made.read_bytes()[preface.end :]).startswith(b"QEVM")


def test_with_other_xml(tmp_path):
    _, entry = taken_apart(tmp_path)
    made = put_together(tmp_path, entry, xml="<domain><name>longer than before</name></domain>")
    assert read_preface(made).xml == "<domain><name>longer than before</name></domain>"
    assert made.read_bytes()[read_preface(made).end :].startswith(b"QEVM")


def test_only_changed_pages_are_written(tmp_path):
    first, _ = taken_apart(tmp_path)
    assert first.changed_bytes > 40 * 4096
    same, _ = taken_apart(tmp_path, name="2")
    assert same.changed_bytes == 0
    changed = streams.guest_stream(seed=3, changed=(5, 6, 40))
    third, _ = taken_apart(tmp_path, changed, name="3")
    assert third.changed_bytes == 3 * 4096


def test_an_incomplete_page_file_is_completed(tmp_path):
    parts, entry = taken_apart(tmp_path)
    pages = tmp_path / "pages"
    whole = pages.read_bytes()
    pages.write_bytes(whole[:70_000] + bytes(1000) + b"x" * 9000)
    repaired, _ = taken_apart(tmp_path, name="2")
    assert repaired.page_sum == parts.page_sum == entry.sha256
    assert pages.read_bytes() == whole


def test_the_page_file_is_private(tmp_path):
    taken_apart(tmp_path)
    assert (tmp_path / "pages").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "rest1").stat().st_mode & 0o777 == 0o600


def test_a_link_in_place_of_the_page_file_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"precious")
    (tmp_path / "pages").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        taken_apart(tmp_path)
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"


def test_unknown_data_at_the_beginning_is_never_restored(tmp_path):
    """It would be missing in the stream."""
    _, entry = taken_apart(tmp_path)
    rest = tmp_path / "rest1"
    raw = rest.read_bytes()
    rest.write_bytes(raw[: entry.split] + b"?" + raw[entry.split :])
    with pytest.raises(SaveImageError, match="unknown data before its pages"):
        put_together(tmp_path, entry.model_copy(update={"split": entry.split + 1}))


@pytest.mark.parametrize("place", [0, 5000, 200_000, (1 << 20) + 8000])
def test_a_flipped_byte_of_the_page_file_is_never_restored(tmp_path, place):
    _, entry = taken_apart(tmp_path)
    with (tmp_path / "pages").open("r+b") as pages:
        pages.seek(place)
        byte = pages.read(1)[0]
        pages.seek(place)
        pages.write(bytes([byte ^ 0x10]))
    with pytest.raises(PageDamageError, match="damaged"):
        put_together(tmp_path, entry)
    assert not (tmp_path / "made").exists()


def test_a_page_file_of_another_length_is_never_restored(tmp_path):
    _, entry = taken_apart(tmp_path)
    with (tmp_path / "pages").open("ab") as pages:
        pages.write(b"\0")
    with pytest.raises(PageDamageError, match="bytes"):
        put_together(tmp_path, entry)


@pytest.mark.parametrize("split", [1, 40, 150, 1 << 30])
def test_a_wrong_split_is_an_error(tmp_path, split):
    _, entry = taken_apart(tmp_path)
    with pytest.raises((SaveImageError, StreamError)):
        put_together(tmp_path, replace_entry(entry, split=split))
    assert not (tmp_path / "made").exists()


def replace_entry(entry, **fields):
    return entry.model_copy(update=fields)


def test_every_cut_of_the_rest_is_an_error_in_words(tmp_path):
    _, entry = taken_apart(tmp_path)
    whole = (tmp_path / "rest1").read_bytes()
    for end in (*range(0, entry.split, 7), entry.split):
        (tmp_path / "rest1").write_bytes(whole[:end])
        with pytest.raises((SaveImageError, StreamError)):
            put_together(tmp_path, entry)


@pytest.mark.parametrize("compression", [1, 5])
def test_a_damaged_payload_is_a_readable_error(tmp_path, compression):
    image = write_image(tmp_path / "image1", streams.guest_stream(), compression)
    whole = image.read_bytes()
    begin = read_preface(image).end
    for place in (begin, begin + 40, -20, -2):
        broken = bytearray(whole)
        broken[place] ^= 0xFF
        image.write_bytes(broken)
        with pytest.raises(SaveImageError, match=r"image1: cannot be decompressed"):
            split_image(image, tmp_path / "rest", tmp_path / "pages", nothing)
    image.write_bytes(whole[:-30])
    with pytest.raises((SaveImageError, StreamError)):
        split_image(image, tmp_path / "rest", tmp_path / "pages", nothing)


@pytest.mark.parametrize("compression", [1, 5])
def test_an_image_that_was_compressed_in_pieces_is_read_whole(tmp_path, compression):
    """As several programs do that use all cores."""
    stream = streams.guest_stream()
    pack = {1: gzip.compress, 5: zstandard.ZstdCompressor().compress}[compression]
    image = tmp_path / "image1"
    payload = pack(stream[:9000]) + pack(stream[9000:])
    image.write_bytes(images.image(XML, payload, compression=compression))
    split_image(image, tmp_path / "rest1", tmp_path / "pages", nothing)
    _, entry = taken_apart(tmp_path, stream, name="2")
    assert (tmp_path / "rest1").read_bytes() == (tmp_path / "rest2").read_bytes()
    assert page_sum(tmp_path / "pages", nothing) == (entry.bytes, entry.sha256)


def test_images_compressed_by_libvirt_itself_are_refused(tmp_path):
    image = tmp_path / "image"
    image.write_bytes(images.image(XML, b"something", compression=3))
    with pytest.raises(StreamError, match="by libvirt"):
        split_image(image, tmp_path / "rest", tmp_path / "pages", nothing)


def test_the_tick_can_stop_it(tmp_path):
    image = write_image(tmp_path / "image", streams.guest_stream())

    def stop(_done):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        split_image(image, tmp_path / "rest", tmp_path / "pages", stop)
    assert not (tmp_path / "rest").exists()


def test_progress_is_reported_for_the_whole_page_file(tmp_path):
    _, entry = taken_apart(tmp_path, streams.stream({b"pc.ram": 600}, [every_page(600), []]))
    progress = []
    check_image(tmp_path / "rest1", entry, tmp_path / "pages", progress.append)
    assert progress == [CHUNK, 2 * CHUNK, entry.bytes]


def every_page(count):
    return [(b"pc.ram", number, b"x" * streams.PAGE) for number in range(count)]


def test_a_page_file_that_was_written_is_open_no_more(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    taken_apart(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_checksum_is_as_documented(tmp_path):
    path = tmp_path / "pages"
    chunks = [b"a" * CHUNK, bytes(CHUNK), b"b" * 4096]
    path.write_bytes(b"".join(chunks))
    expected = hashlib.sha256()
    for number, chunk in ((0, chunks[0]), (2, chunks[2].ljust(CHUNK, b"\0"))):
        expected.update(number.to_bytes(8, "big") + hashlib.sha256(chunk).digest())
    assert page_sum(path, nothing) == (2 * CHUNK + 4096, expected.hexdigest())


def test_a_smaller_guest_makes_the_page_file_smaller(tmp_path):
    (tmp_path / "pages").write_bytes(b"x" * (4 << 20))
    parts, _ = taken_apart(tmp_path)
    assert (tmp_path / "pages").stat().st_size == parts.page_file_bytes < 4 << 20


def test_pages_at_the_end_of_a_run_are_written(tmp_path):
    pages = PageFile(tmp_path / "pages", 3 * 4096, nothing)
    pages.put(0, bytes(4096) + b"x" * 4096 + b"y" * 4096)
    assert pages.written == 2 * 4096
    pages.close()
    assert (tmp_path / "pages").read_bytes() == bytes(4096) + b"x" * 4096 + b"y" * 4096


LAYOUTS = st.lists(st.lists(st.integers(1, 600), min_size=1, max_size=4), min_size=2, max_size=5)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layouts=LAYOUTS)
def test_every_image_comes_back_whatever_layout_was_there_before(tmp_path_factory, layouts):
    """Memory grows and shrinks, block by block, between images that share a page file."""
    place = tmp_path_factory.mktemp("layouts")
    for number, sizes in enumerate(layouts):
        blocks = {b"block%d" % n: pages for n, pages in enumerate(sizes)}
        content = bytes([number + 1]) * streams.PAGE
        pages = [[(name, n, content) for name, count in blocks.items() for n in range(count)], []]
        _, entry = taken_apart(place, streams.stream(blocks, pages), name=str(number))
        made = place / f"made{number}"
        build_image(place / f"rest{number}", entry, place / "pages", made, PLAIN, nothing)
        stream = made.read_bytes()[read_preface(made).end :]
        assert streams.contents(stream)[0] == streams.memory_of(blocks, pages)
        raw = (place / "pages").read_bytes()
        assert raw.count(bytes([number + 1])) == sum(sizes) * streams.PAGE
        assert len(raw) - raw.count(0) == sum(sizes) * streams.PAGE


def test_data_between_blocks_of_another_layout_is_no_damage(tmp_path):
    """A page file may contain bytes of an earlier layout there."""
    _, entry = taken_apart(tmp_path)
    with (tmp_path / "pages").open("r+b") as pages:
        pages.seek(64 * streams.PAGE)
        pages.write(b"of an earlier layout")
    size, digest = page_sum(tmp_path / "pages", nothing)
    made = put_together(tmp_path, replace_entry(entry, bytes=size, sha256=digest))
    stream = made.read_bytes()[read_preface(made).end :]
    assert streams.contents(stream) == streams.contents(streams.guest_stream())
