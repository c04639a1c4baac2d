"""The serial log of a guest, and what the probe's lines in it say."""

import re
from dataclasses import dataclass, field
from pathlib import Path

_LINE = re.compile(
    rb"N (?P<count>[0-9a-f]{8})"
    rb"|COLD disk=(?P<disk>[0-9a-f]{2}) last=(?P<last>[0-9a-f]{8})"
    rb"|(?P<bad>BAD .*)"
    rb"|NVRAM (?P<nvram>[0-9a-f]{8})"
    rb"|NVSET (?P<nvset>[0-9a-f]{8})"
    rb"|FILE (?P<file>[0-9a-f]{8})"
    rb"|GAP (?P<gap>[0-9]+)"
)


@dataclass
class Report:
    """What the probe printed in a stretch of the log.

    cold has one dictionary for every cold boot, disk index to the count found
    on it (0: none). bad has the lines as printed. nvram are the values the
    UEFI probe found at cold boots, nvset those it set. files are the counts
    the Linux probe found in its file at cold boots, gaps are milliseconds.
    """

    counts: list[int] = field(default_factory=list)
    cold: list[dict[int, int]] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    nvram: list[int] = field(default_factory=list)
    nvset: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)


def parse(text: bytes) -> Report:
    """Reads complete lines; anything that is not the probe's is passed over.

    That covers what firmware or a kernel prints, an unfinished last line, and
    the rest of a line which the guest was printing when it was frozen: a
    restored guest goes on in the middle of it.
    """
    report = Report()
    for line in text.split(b"\n")[:-1]:
        match = _LINE.fullmatch(line.rstrip(b"\r"))
        if match is not None:
            _add(report, match)
    return report


def _add(report: Report, match: re.Match[bytes]) -> None:
    value = match[match.lastgroup or 0]
    match match.lastgroup:
        case "count":
            report.counts.append(int(value, 16))
        case "last":
            disk = int(match["disk"], 16)
            if disk == 0 or not report.cold:
                report.cold.append({})
            report.cold[-1][disk] = int(value, 16)
        case "bad":
            report.bad.append(value.decode("ascii", "replace"))
        case "nvram":
            report.nvram.append(int(value, 16))
        case "nvset":
            report.nvset.append(int(value, 16))
        case "file":
            report.files.append(int(value, 16))
        case "gap":
            report.gaps.append(int(value))


class Log:
    """A serial log file, read from marks (byte offsets) on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mark(self) -> int:
        """The present end of the log."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def since(self, mark: int) -> bytes:
        """All that was logged after the mark.

        Raises RuntimeError if the log got shorter: virtlogd rolls logs over
        at 2 MiB (``stdio_handler = "file"`` in qemu.conf avoids that).
        """
        try:
            with self.path.open("rb") as log:
                size = log.seek(0, 2)
                if size < mark:
                    raise RuntimeError(f"{self.path} was truncated")
                log.seek(mark)
                return log.read()
        except FileNotFoundError:
            return b""

    def report(self, mark: int = 0) -> Report:
        """What the probe printed since the mark."""
        return parse(self.since(mark))

    def tail(self, lines: int = 15) -> str:
        """The last lines, for error messages."""
        text = self.since(0).decode("ascii", "replace")
        return "\n".join(text.splitlines()[-lines:])
