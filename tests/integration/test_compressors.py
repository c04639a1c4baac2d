"""The real zstd and pigz decompress snaporch's output, called as libvirt calls them."""

import os
import subprocess

import pytest
from fakes import images

from snaporch.bundle.compress import Compression, CompressionSettings
from snaporch.bundle.save_image import SaveImageWriter, read_header

PROGRAMS = {Compression.ZSTD: ["zstd", "-dc"], Compression.GZIP: ["pigz", "-dc"]}
XML = b"<domain/>\0"


@pytest.mark.parametrize("method", PROGRAMS)
@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("size", [4, 1000, 9 << 20])
def test_the_program_libvirt_would_call_undoes_it(tmp_path, method, threads, size):
    payload = b"QEVM" + os.urandom(size // 2) + bytes(size // 2)
    path = tmp_path / "ram.save"
    writer = SaveImageWriter(path, CompressionSettings(method, 1, threads), trailer=False)
    writer.write(images.image(XML, payload))
    writer.finish()
    with path.open("rb") as stream:
        # libvirt passes its descriptor, positioned behind header and XML
        stream.seek(92 + read_header(path).data_length)
        done = subprocess.run(
            PROGRAMS[method], stdin=stream, capture_output=True, check=True, timeout=60
        )
    assert done.stdout == payload


@pytest.mark.parametrize("method", PROGRAMS)
def test_a_torn_payload_is_noticed_by_the_program(tmp_path, method):
    path = tmp_path / "ram.save"
    writer = SaveImageWriter(path, CompressionSettings(method), trailer=False)
    writer.write(images.image(XML, b"QEVM" + os.urandom(100_000)))
    writer.finish()
    torn = path.read_bytes()[92 + len(XML) : -20]
    done = subprocess.run(PROGRAMS[method], input=torn, capture_output=True, check=False)
    assert done.returncode != 0
