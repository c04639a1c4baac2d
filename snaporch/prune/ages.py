"""How long items have been in the store, counted so that setting the clock changes nothing.

Every prune adds to each age the time since the last prune, by the time since boot. Across a reboot
only the clock can be used; it may be wrong, so at most one day is counted beyond the uptime.

After which age something is deleted is decided in :mod:`snaporch.prune.decision`; an unfinished
bundle is deleted at any age.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from snaporch.private_files import replace_private, sync_directory

AGES_NAME = "ages.json"
"""The file of the store that holds the ages."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MAX_SECONDS_OVER_A_REBOOT = 86_400.0


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The host's clocks, in seconds."""

    boot: str
    """The kernel's id of this boot."""
    uptime: float
    """Since boot, sleep included; it cannot be set."""
    clock: float
    """Since 1970; it can be set."""

    @classmethod
    def now(cls) -> ClockReading:
        """Read the clocks."""
        return cls(
            _BOOT_ID.read_text().strip(), time.clock_gettime(time.CLOCK_BOOTTIME), time.time()
        )

    def since(self, last: ClockReading) -> float:
        """Seconds since the ``last`` reading; across a reboot up to a day of them may be wrong."""
        if self.boot == last.boot:
            return max(0.0, self.uptime - last.uptime)
        most = self.uptime + _MAX_SECONDS_OVER_A_REBOOT
        return min(max(self.clock - last.clock, self.uptime), most)


class Ages:
    """The ages of the items in the store at ``root``."""

    def __init__(self, root: Path, reading: ClockReading) -> None:
        self._root = root
        self._reading = reading
        self._seconds = _read(root / AGES_NAME, reading)

    def of(self, path: Path) -> timedelta:
        """The age of an item; zero when it is seen for the first time."""
        return timedelta(seconds=self._seconds.get(self._key(path), 0.0))

    def write(self, paths: Iterable[Path]) -> None:
        """Write the ages of these items; all other ages are forgotten.

        Raises:
            OSError: the file cannot be written; it still has the ages of the last prune.
        """
        seconds = {self._key(path): self.of(path).total_seconds() for path in paths}
        path = self._root / AGES_NAME
        if not seconds and not path.exists():
            return
        document = {"read": asdict(self._reading), "seconds": seconds}
        try:
            replace_private(path, json.dumps(document, indent=1).encode())
        except (FileExistsError, FileNotFoundError):
            return  # another prune writes the same ages at this moment
        sync_directory(self._root)

    def _key(self, path: Path) -> str:
        return str(path.relative_to(self._root))


def _read(path: Path, reading: ClockReading) -> dict[str, float]:
    """The ages, up to now; empty if the file cannot be read: then they begin at zero."""
    try:
        document = json.loads(path.read_bytes())
        passed = reading.since(ClockReading(**document["read"]))
        return {str(key): float(age) + passed for key, age in document["seconds"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
