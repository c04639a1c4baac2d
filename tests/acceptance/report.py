"""The report of what was proven on stock hosts, a section for each suite."""

import json
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

HEAD = """# What was tried on stock hosts

Written by `make acceptance`. It installs the package of this checkout on a stock Debian host: a
virtual machine with Debian's own kernel, ZFS built by `zfs-dkms`, systemd and AppArmor. There it
does what the pages say, with guests that check whether RAM and disks are of one instant.
The machine and its guests run without KVM, unless a section says so; the times are the test's.

A section shows the last report for its suite. A step that is not `passed` was not proven.
"""
WORDS = re.compile(r"[^\w .,:;()'=/+-]")


@dataclass(frozen=True)
class Result:
    """How one step ended: ``passed``, ``failed`` or ``not run``; ``reason`` for the others."""

    title: str
    status: str
    seconds: float = 0
    reason: str = ""


def store(work: Path, results: dict[str, Result]) -> None:
    """Keep the results beside the machine's disks, for a run that goes on with them."""
    text = json.dumps({name: asdict(each) for name, each in results.items()})
    (work / "results.json").write_text(text, "utf-8")


def stored(work: Path) -> dict[str, Result]:
    """Return the kept results; none of a new machine."""
    path = work / "results.json"
    found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return {name: Result(**each) for name, each in found.items()}


def section(suite: str, flavour: str, versions: dict[str, str], results: list[Result]) -> str:
    """Return the section of one suite."""
    lines = [
        f"## Debian {suite}",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {flavour}.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {version} |" for name, version in versions.items()),
        "",
        "| step | result | seconds |",
        "| --- | --- | --- |",
        *(row(each) for each in results),
        "",
    ]
    return "\n".join(lines)


def row(result: Result) -> str:
    """Return the line of one step."""
    reason = f": {WORDS.sub(' ', result.reason)[:160]}" if result.reason else ""
    seconds = f"{result.seconds:.0f}" if result.seconds else ""
    return f"| {result.title} | {result.status}{reason} | {seconds} |"


def write(page: Path, suite: str, text: str) -> None:
    """Replace the suite's section on the page, or add it."""
    parts = re.split(r"(?m)^(?=## )", page.read_text("utf-8")) if page.exists() else []
    others = [part for part in parts[1:] if not part.startswith(f"## Debian {suite}\n")]
    sections = sorted([*(part.rstrip("\n") + "\n" for part in others), text])
    page.write_text("\n".join([HEAD, *sections]), "utf-8")
