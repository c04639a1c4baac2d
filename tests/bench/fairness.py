#!/usr/bin/env -S python3 -P
"""How long ``virsh list`` and ``snaporch list`` take while four bundles are sealed.

Once with the sealing processes beside them, as they would be without a slice, and once with each in
``snaporch.slice``, where snaporch puts itself. Run it with ``tests/lab/run --systemd``; what counts
are the ratios to a host on which nothing is sealed.
"""

import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ram_writer import MAGIC, XML, header, memory_like

from snaporch.bundle.compress import Compression, CompressionSettings
from snaporch.bundle.save_image import SaveImageWriter
from snaporch.systemd.low_priority import lower_priority

ROUNDS = 15
SEALING = 4
IMAGE_MIB = 16
PATIENCE = 60
_STORE = "/tank"
BLOCK = 1 << 20
COMMANDS = (("virsh", "list", "--all"), ("snaporch", "list"))


def seal(image: Path, directory: Path, *, behind: bool) -> None:
    """Seal the same image repeatedly until killed; prints a line when it begins."""
    if behind:
        lower_priority("seal")
        wait_for_slice()
    print("sealing", flush=True)
    while True:
        target = directory / "ram.save"
        writer = SaveImageWriter(target, CompressionSettings(Compression.ZSTD, 3), trailer=False)
        with image.open("rb") as stream:
            while block := stream.read(BLOCK):
                writer.write(block)
        writer.finish()
        target.unlink()


def wait_for_slice() -> None:
    """Wait until systemd has moved the process."""
    end = time.monotonic() + PATIENCE
    while "/snaporch.slice/" not in Path("/proc/self/cgroup").read_text():
        if time.monotonic() > end:
            sys.exit("fairness: systemd did not move a sealing process to snaporch.slice")
        time.sleep(0.05)


@contextmanager
def sealing(directory: Path, how: str) -> Iterator[None]:
    processes = []
    image = directory / "ram.raw"
    try:
        for number in range(SEALING if how != "nothing" else 0):
            place = directory / f"{how}-{number}"
            place.mkdir()
            words = [sys.executable, "-P", __file__, how, str(image), str(place)]
            processes.append(subprocess.Popen(words, stdout=subprocess.PIPE))
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"sealing\n"
        yield
        assert all(process.poll() is None for process in processes), "sealing ended by itself"
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


def seconds(command: tuple[str, ...]) -> float:
    began = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    return time.monotonic() - began


def measure(directory: Path, how: str) -> dict[str, list[float]]:
    with sealing(directory, how):
        return {" ".join(c): sorted(seconds(c) for _ in range(ROUNDS)) for c in COMMANDS}


def main() -> None:
    if len(sys.argv) > 1:
        how, image, directory = sys.argv[1:]
        seal(Path(image), Path(directory), behind=how == "slice")
    with tempfile.TemporaryDirectory(dir=_STORE) as name:
        directory = Path(name)
        (directory / "ram.raw").write_bytes(header(MAGIC) + XML + memory_like(IMAGE_MIB))
        figures = {how: measure(directory, how) for how in ("nothing", "beside", "slice")}
    print(f"{SEALING} bundles sealed, {ROUNDS} rounds; seconds, and ratios of medians")
    print(f"{'command':18} {'sealing':10} {'median':>8} {'max':>8} {'ratio':>8}")
    for command in figures["nothing"]:
        idle = statistics.median(figures["nothing"][command])
        for how, each in figures.items():
            median = statistics.median(each[command])
            shown = f"{median:8.2f} {each[command][-1]:8.2f} {median / idle:8.1f}"
            print(f"{command:18} {how:10} {shown}")


if __name__ == "__main__":
    main()
