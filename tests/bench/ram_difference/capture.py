#!/usr/bin/env python3
"""Migration streams of a guest that changes a known part of its memory between them."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "lab"))

from guests.initramfs import _Cpio  # noqa: E402

MEMORY_MIB, FILLED_MIB = 1024, 640
PERCENT = (1, 10, 50)
POLL_SECONDS = 0.05


def initrd(work: Path) -> Path:
    """An initrd with only the dirtier, as process 1."""
    program = work / "dirtier"
    source = HERE / "dirtier.c"
    subprocess.run(["gcc", "-D_GNU_SOURCE", "-O2", "-static", "-o", program, source], check=True)
    archive = _Cpio()
    archive.add("dev", 0o040755)
    archive.add("dev/console", 0o020600, device=(5, 1))
    archive.add("init", 0o100755, program.read_bytes())
    path = work / "initrd"
    path.write_bytes(archive.finish())
    return path


class Guest:
    """QEMU with a monitor and a console."""

    def __init__(self, work: Path, kernel: Path) -> None:
        sockets = work / "qmp", work / "console"
        for path in sockets:
            path.unlink(missing_ok=True)
        words = ["qemu-system-x86_64", "-accel", "tcg", "-machine", "pc", "-cpu", "qemu64"]
        words += ["-m", str(MEMORY_MIB), "-display", "none", "-nodefaults", "-vga", "std"]
        words += ["-kernel", str(kernel), "-initrd", str(initrd(work))]
        words += ["-append", f"console=ttyS0 quiet fill_mib={FILLED_MIB}"]
        words += ["-qmp", f"unix:{sockets[0]},server=on,wait=off"]
        words += ["-serial", f"unix:{sockets[1]},server=on,wait=off"]
        self.process = subprocess.Popen(words)
        self._monitor = connected(sockets[0]).makefile("rw")
        self._console = connected(sockets[1])
        self._said = b""
        self._monitor.readline()
        self.command("qmp_capabilities")

    def command(self, name: str, **arguments: object) -> dict:
        self._monitor.write(json.dumps({"execute": name, "arguments": arguments}) + "\n")
        self._monitor.flush()
        while True:
            answer = json.loads(self._monitor.readline())
            if "return" in answer:
                return answer["return"]
            if "error" in answer:
                raise SystemExit(f"{name}: {answer['error']['desc']}")

    def wait(self, word: bytes) -> None:
        while word not in self._said:
            self._said += self._console.recv(65536)
        self._said = self._said.partition(word)[2]

    def dirty(self, percent: int) -> None:
        pages = FILLED_MIB * 256 * percent // 100
        self._console.sendall(f"{pages} {percent}\n".encode())
        self.wait(b"DONE")

    def save(self, path: Path) -> None:
        self.command("migrate", uri=f"exec:cat > {path}")
        while (state := self.command("query-migrate")["status"]) != "completed":
            if state == "failed":
                raise SystemExit(f"{path}: the migration failed")
            time.sleep(POLL_SECONDS)
        self.command("cont")


def connected(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    while True:
        try:
            made.connect(str(path))
        except OSError:
            time.sleep(POLL_SECONDS)
        else:
            return made


def main() -> None:
    work = Path(sys.argv[1]).resolve()
    work.mkdir(exist_ok=True)
    build = HERE.parents[1] / "lab" / "guests" / "build"
    folder = subprocess.run([build], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    guest = Guest(work, Path(folder) / "vmlinux")
    try:
        guest.wait(b"FILLED")
        guest.command("migrate-set-parameters", **{"max-bandwidth": 1 << 40})
        guest.save(work / "s0.qevm")
        for number, percent in enumerate(PERCENT, 1):
            guest.dirty(percent)
            guest.save(work / f"s{number}.qevm")
    finally:
        guest.process.terminate()
        guest.process.wait()


if __name__ == "__main__":
    main()
