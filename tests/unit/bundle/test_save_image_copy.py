import errno
import os
import struct

import pytest
from fakes import images
from hypothesis import given
from hypothesis import strategies as st

from snaporch.bundle.save_image import HEADER_SIZE, SaveImageError, read_header
from snaporch.bundle.save_image_copy import copy_with_xml, read_preface

XML = "<domain type='kvm'><name>web</name></domain>"
COOKIE = b"<cookie><cpu/></cookie>"


def image(xml=XML, cookie=COOKIE, pad=100, payload=None, **header):
    """An image as libvirt writes it: XML, cookie, room to edit."""
    text = xml.encode() + b"\0"
    data = text + (cookie + b"\0" if cookie else b"") + bytes(pad)
    raw = bytearray(images.image(data, payload, **header))
    struct.pack_into("<I", raw, 32, len(text) if cookie else 0)
    return bytes(raw)


def payload_of(path):
    return path.read_bytes()[read_preface(path).end :]


@pytest.fixture
def origin(tmp_path):
    path = tmp_path / "ram.save"
    path.write_bytes(image())
    return path


def test_the_preface_is_read(origin):
    preface = read_preface(origin)
    assert (preface.xml, preface.cookie) == (XML, COOKIE)
    assert preface.end == HEADER_SIZE + preface.header.data_length


def test_an_image_without_a_cookie(origin):
    origin.write_bytes(image(cookie=b""))
    assert read_preface(origin).cookie == b""


@given(xml=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_a_copy_has_other_xml_and_the_same_ram(xml, tmp_path_factory):
    """Whether it fits into the room that libvirt left, or not."""
    directory = tmp_path_factory.mktemp("copy")
    origin, copy = directory / "a", directory / "b"
    payload = images.qemu_stream(3000)
    origin.write_bytes(image(payload=payload, pad=10, compression=5, running=0))
    copy_with_xml(origin, copy, xml)
    preface = read_preface(copy)
    assert (preface.xml, preface.cookie) == (xml, COOKIE)
    assert payload_of(copy) == payload
    assert (preface.header.compression, preface.header.was_running) == (5, False)


def test_xml_that_fits_keeps_the_payloads_offset(origin, tmp_path):
    copy_with_xml(origin, tmp_path / "copy", XML + " " * 99)
    assert read_preface(tmp_path / "copy").end == read_preface(origin).end


def test_xml_that_does_not_fit_moves_the_payload(origin, tmp_path):
    payload = payload_of(origin)
    copy_with_xml(origin, tmp_path / "copy", XML + " " * 5000)
    assert read_preface(tmp_path / "copy").end > read_preface(origin).end
    assert payload_of(tmp_path / "copy") == payload


def test_the_original_stays_as_it_is(origin, tmp_path):
    before = origin.read_bytes()
    copy_with_xml(origin, tmp_path / "copy", "<domain/>")
    assert origin.read_bytes() == before
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP])
def test_where_blocks_cannot_be_shared_they_are_copied(origin, tmp_path, monkeypatch, code):
    def refuse(*_arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    copy_with_xml(origin, tmp_path / "copy", "<domain/>")
    assert payload_of(tmp_path / "copy") == images.qemu_stream()


def test_an_interrupted_copy_cannot_be_restored(origin, tmp_path, monkeypatch):
    written = os.pwrite

    def full(descriptor, data, offset):
        if bytes(data[:16]) == images.FINISHED:
            raise OSError(errno.ENOSPC, "full")
        return written(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="full"):
        copy_with_xml(origin, tmp_path / "copy", "<domain/>")
    with pytest.raises(SaveImageError, match="unfinished"):
        read_header(tmp_path / "copy")


def test_an_existing_file_is_not_overwritten(origin, tmp_path):
    (tmp_path / "copy").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        copy_with_xml(origin, tmp_path / "copy", "<domain/>")
    assert (tmp_path / "copy").read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (image(magic=images.UNFINISHED), "unfinished"),
        (image()[: HEADER_SIZE + 20], "ends inside its XML"),
        (images.image(b"<domain/>"), "has no end"),
        (b"short", "inside its header"),
    ],
)
def test_a_file_that_is_not_an_image_is_refused(tmp_path, raw, reason):
    path = tmp_path / "ram.save"
    path.write_bytes(raw)
    with pytest.raises(SaveImageError, match=reason):
        copy_with_xml(path, tmp_path / "copy", "<domain/>")
    assert not (tmp_path / "copy").exists()


def test_a_cookie_that_cannot_be_there_is_refused(tmp_path):
    raw = bytearray(image())
    struct.pack_into("<I", raw, 32, 1 << 30)
    path = tmp_path / "ram.save"
    path.write_bytes(bytes(raw))
    with pytest.raises(SaveImageError, match="ends inside its XML"):
        read_preface(path)
