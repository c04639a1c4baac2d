"""How fast RAM gets through the pipe into a bundle, against ``zstd -T0 -1`` on the same bytes.

Figures are ratios of medians within one run; absolute times on a shared machine say little.
"""

import argparse
import os
import random
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from snaporch.bundle.compress import Compression, CompressionSettings
from snaporch.bundle.ram_pipe import RamPipe
from snaporch.bundle.save_image import (
    HEADER_SIZE,
    MAGIC,
    PARTIAL_MAGIC,
    QEMU_MAGIC,
    SaveImageHeader,
    SaveImageWriter,
)

XML = b"<domain/>" * 100
BLOCK = 1 << 20


def header(magic: bytes) -> bytes:
    return SaveImageHeader(magic, 2, len(XML), True, 0, bytes(HEADER_SIZE - 32)).pack()


def memory_like(mib: int) -> bytes:
    """Bytes as a guest's RAM has them: a third zero, a third text and code, a third noise."""
    noise = random.Random(1)
    words = [noise.randbytes(noise.randint(3, 12)) for _ in range(4000)]
    text = b"".join(noise.choices(words, k=BLOCK // 8))[:BLOCK]
    kinds = (bytes(BLOCK), text, noise.randbytes(BLOCK))
    return QEMU_MAGIC + b"".join(kinds[index % 3] for index in range(mib))


def snaporch_round(payload: bytes, directory: Path) -> float:
    began = time.monotonic()
    writer = SaveImageWriter(
        directory / "ram.save", CompressionSettings(Compression.ZSTD, 1), trailer=True
    )
    stream = RamPipe(directory / "pipe", writer)
    feeder = threading.Thread(target=feed, args=(directory / "pipe", payload))
    feeder.start()
    feeder.join()
    stream.finish()
    took = time.monotonic() - began
    (directory / "ram.save").unlink()
    return took


def feed(pipe: Path, payload: bytes) -> None:
    """Write like libvirt: the unfinished image, then the finished header on a second open."""
    with pipe.open("wb", buffering=0) as stream:
        stream.write(header(PARTIAL_MAGIC) + XML)
        for start in range(0, len(payload), BLOCK):
            stream.write(payload[start : start + BLOCK])
    with pipe.open("wb", buffering=0) as stream:
        stream.write(header(MAGIC))


def zstd_round(payload: bytes, directory: Path) -> float:
    target = directory / "rival.zst"
    began = time.monotonic()
    subprocess.run(["zstd", "-q", "-T0", "-1", "-f", "-o", target], input=payload, check=True)
    with target.open("rb") as stream:
        os.fsync(stream.fileno())
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    payload = memory_like(arguments.mib)
    ours, theirs = [], []
    with tempfile.TemporaryDirectory(prefix="snaporch-bench-") as name:
        for _ in range(arguments.rounds):
            theirs.append(zstd_round(payload, Path(name)))
            ours.append(snaporch_round(payload, Path(name)))
    ratio = statistics.median(ours) / statistics.median(theirs)
    print(f"payload                     {arguments.mib} MiB, {arguments.rounds} rounds, medians")
    print(f"zstd -T0 -1 from memory     {statistics.median(theirs):8.2f} s")
    print(f"snaporch through its pipe   {statistics.median(ours):8.2f} s   {ratio:.2f} x")


if __name__ == "__main__":
    main()
