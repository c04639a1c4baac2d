"""Builds the probes on the host; the lab has no compiler.

``tests/lab/guests/build [--out DIR] [--only bios,uefi,linux] [--also database]`` fills
``${XDG_CACHE_HOME:-~/.cache}/snaporch/guests/<hash of the sources>``, or DIR,
with what is not there yet, and prints that folder's name as its last line.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from guests import initramfs

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parents[2] / "guest"
SOURCES = HERE / "probes"
# Tools, and files, with the Debian package each comes from.
TOOLS = {
    "as": "binutils",
    "gcc": "gcc",
    "/usr/include/stdio.h": "libc6-dev",
    "mformat": "mtools",
    "zstd": "zstd",
    "/sbin/mkfs.ext4": "e2fsprogs",
    "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring",
}
KEEP_DAYS = 14
_DIGITS = 16
ROOT = [] if os.geteuid() == 0 else ["sudo"]


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="build", description=__doc__)
    parser.add_argument("--out", type=Path, help="fill this folder instead")
    parser.add_argument("--only", default=",".join(USUAL), help="kinds, comma-separated")
    parser.add_argument("--also", action="append", default=[], help="a kind that few tests need")
    options = parser.parse_args()
    out = build(options.out, [*options.only.split(","), *options.also])
    print(out)


def build(out: Path | None = None, kinds: list[str] | None = None) -> Path:
    """Build what is missing; the folder with everything in it."""
    out = out or cache_folder()
    cache_root().mkdir(parents=True, exist_ok=True)
    with (cache_root() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        forget_old()
        out.mkdir(parents=True, exist_ok=True)
        os.utime(out)
        ensure_tools()
        for kind in kinds or USUAL:
            BUILDERS[kind](out)
    return out


def forget_old() -> None:
    """Remove what no build asked for in the last days."""
    for folder in cache_root().glob("[0-9a-f]" * _DIGITS):
        if time.time() - folder.stat().st_mtime > KEEP_DAYS * 86400:
            shutil.rmtree(folder)


def cache_folder() -> Path:
    """The folder for the sources as they are now."""
    digest = hashlib.sha256()
    names = ("build.py", "build-database", "fetch-packages", "initramfs.py")
    recipe = [HERE / name for name in names]
    for source in sorted([*SOURCES.iterdir(), *SCRIPTS.iterdir(), *recipe]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return cache_root() / digest.hexdigest()[:_DIGITS]


def cache_root() -> Path:
    """The folder for everything kept between builds."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "snaporch" / "guests"


def ensure_tools() -> None:
    """Installs the Debian packages whose tools are not there."""
    packages = sorted({package for tool, package in TOOLS.items() if not _present(tool)})
    if packages:
        print(f"guests: installing {' '.join(packages)}", file=sys.stderr)
        apt = [*ROOT, "apt-get", "-q", "-o", "DPkg::Lock::Timeout=600"]
        run(*apt, "update")
        run(*apt, "install", "-y", "--no-install-recommends", *packages)


def _present(tool: str) -> bool:
    return Path(tool).exists() or shutil.which(tool) is not None


def build_bios(out: Path) -> None:
    """probe.bin, probe-load.bin and probe-busy.bin: boot sectors."""
    _make(out / "probe.bin", _boot_sector)
    _make(out / "probe-load.bin", lambda target: _boot_sector(target, "LOAD"))
    _make(out / "probe-busy.bin", lambda target: _boot_sector(target, "LOAD", "BUSY"))


def _boot_sector(target: Path, *symbols: str) -> None:
    code = target.with_suffix(".o")
    options = [f"--defsym={symbol}=1" for symbol in symbols]
    run("as", "--32", *options, "-o", code, SOURCES / "probe.S")
    run(
        "ld",
        "-m",
        "elf_i386",
        "-Ttext",
        "0x7c00",
        "--oformat",
        "binary",
        "-o",
        target,
        code,
    )


def build_uefi(out: Path) -> None:
    """probe-efi.img and probe-efi-busy.img: ESPs with the UEFI application."""
    _make(out / "probe-efi.img", _esp)
    _make(out / "probe-efi-busy.img", lambda target: _esp(target, "-DBUSY=1"))


def _esp(target: Path, *options: str) -> None:
    code, linked, program = (target.with_suffix(suffix) for suffix in (".o", ".elf", ".efi"))
    run("gcc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wconversion", "-Werror",
        "-ffreestanding", "-fpic", "-fvisibility=hidden", "-mno-red-zone",
        "-fno-stack-protector", "-fno-asynchronous-unwind-tables",
        "-fno-tree-loop-distribute-patterns", "-fcf-protection=none",
        *options, "-c", "-o", code, SOURCES / "probe_efi.c")  # fmt: skip
    # All code is relative to itself, so a program linked to one address is
    # position-independent, and needs no relocation when the firmware loads it.
    run("ld", "-nostdlib", "--build-id=none", "-z", "noexecstack",
        "-z", "max-page-size=4096", "-Ttext=0x1000", "-e", "efi_main",
        "-o", linked, code)  # fmt: skip
    run("objcopy", "-O", "efi-app-x86_64",
        "--set-section-flags", ".bss=alloc,load,contents,data",
        "-j", ".text", "-j", ".rodata", "-j", ".data", "-j", ".bss",
        "-j", ".reloc", linked, program)  # fmt: skip
    # 1 MiB of FAT12; eight reserved sectors, of which FAT itself uses one.
    run("mformat", "-C", "-i", target, "-T", "2048", "-h", "16", "-s", "32",
        "-R", "8", "-c", "4", "-r", "1", "::")  # fmt: skip
    run("mmd", "-i", target, "::/EFI", "::/EFI/BOOT")
    run("mcopy", "-i", target, program, "::/EFI/BOOT/BOOTX64.EFI")


def build_linux(out: Path) -> None:
    """vmlinux, initrd and linux-disk.img; packages are kept for other hashes."""
    made = [out / "vmlinux", out / "initrd", out / "linux-disk.img"]
    if all(path.exists() for path in made):
        return
    packages = cache_root() / "packages"
    root = packages / "root"
    if not root.exists():
        packages.mkdir(parents=True, exist_ok=True)
        run(HERE / "fetch-packages", packages)
        print("guests: Debian's cloud kernel and agent fetched", file=sys.stderr)
    _make(made[0], lambda target: _write(target, initramfs.kernel(root)))
    _make(made[1], lambda target: _initrd(target, root))
    _make(made[2], lambda target: _write(target, initramfs.disk(target.parent)))


def _initrd(target: Path, root: Path) -> None:
    init = target.parent / "init"
    run("gcc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wconversion", "-Werror",
        "-static", "-pthread", "-o", init, SOURCES / "linux_init.c")  # fmt: skip
    _write(target, initramfs.initramfs(root, init))


def build_database(out: Path) -> None:
    """database.img: the disk of a Debian with PostgreSQL and MariaDB, which "linux" boots."""
    build_linux(out)
    _make(out / "database.img", lambda image: run(HERE / "build-database", image, image.parent))


def _write(target: Path, content: bytes) -> None:
    target.write_bytes(content)


def _make(target: Path, maker: Callable[[Path], None]) -> None:
    """Has ``maker`` write a file, unless it is there; whole or not at all."""
    if target.exists():
        return
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        made = Path(work) / target.name
        maker(made)
        made.replace(target)
    print(f"guests: {target.name}", file=sys.stderr)


def run(*command: str | Path) -> None:
    """Runs a command. Ends the program with what it said if it fails."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        words = " ".join(map(str, command))
        sys.exit(f"guests: {words}\n{done.stdout}")


BUILDERS: dict[str, Callable[[Path], None]] = {
    "bios": build_bios,
    "uefi": build_uefi,
    "linux": build_linux,
    "database": build_database,
}
USUAL = ["bios", "uefi", "linux"]
"""The database takes minutes and hundreds of megabytes: for its own tests only."""

if __name__ == "__main__":
    main()
