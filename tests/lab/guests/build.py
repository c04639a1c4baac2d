"""Builds the probes on the host; the lab has no compiler.

``tests/lab/guests/build [--out DIR] [--only bios,uefi,linux]`` fills
``${XDG_CACHE_HOME:-~/.cache}/snaporch/guests/<hash of the sources>``, or DIR,
with what is not there yet, and prints that folder's name as its last line.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

SOURCES = Path(__file__).parent / "probes"


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="build", description=__doc__)
    parser.add_argument("--out", type=Path, help="fill this folder instead")
    parser.add_argument(
        "--only", default=",".join(BUILDERS), help="kinds, comma-separated"
    )
    options = parser.parse_args()
    out = build(options.out, options.only.split(","))
    print(out)


def build(out: Path | None = None, kinds: list[str] | None = None) -> Path:
    """Builds what is missing; the folder with everything in it."""
    out = out or cache_folder()
    out.mkdir(parents=True, exist_ok=True)
    for kind in kinds or list(BUILDERS):
        BUILDERS[kind](out)
    return out


def cache_folder() -> Path:
    """The folder for the sources as they are now."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.iterdir(), Path(__file__)]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return Path(home) / "snaporch" / "guests" / digest.hexdigest()[:16]


def build_bios(out: Path) -> None:
    """probe.bin and probe-busy.bin: boot sectors."""
    _make(out / "probe.bin", _boot_sector)
    _make(
        out / "probe-busy.bin",
        lambda target: _boot_sector(target, "--defsym", "BUSY=1"),
    )


def _boot_sector(target: Path, *options: str) -> None:
    code = target.with_suffix(".o")
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


BUILDERS: dict[str, Callable[[Path], None]] = {"bios": build_bios}

if __name__ == "__main__":
    main()
