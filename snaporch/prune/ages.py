"""How long things have been seen in the store, by a count that no setting of the clock can move.

Every prune adds to each age what has passed since the last one, by the time since boot. Only what
passed over a reboot is told by the clock alone, which may be wrong: of that no more than a day.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from snaporch.bundle.store import replace_private, sync_directory

AGES_NAME = "ages.json"
"""The file of the store that holds the ages."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOST_OVER_A_REBOOT = 86_400.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What the host's clocks show, in seconds."""

    boot: str
    """The kernel's id of this boot."""
    uptime: float
    """Since boot, sleep included: nobody can set it."""
    clock: float
    """Since 1970, as somebody has set it."""

    @classmethod
    def now(cls) -> Reading:
        """What they show now."""
        return cls(
            _BOOT_ID.read_text().strip(), time.clock_gettime(time.CLOCK_BOOTTIME), time.time()
        )

    def since(self, last: Reading) -> float:
        """Seconds that have passed for certain; over a reboot a day may be the clock's fault."""
        if self.boot == last.boot:
            return max(0.0, self.uptime - last.uptime)
        most = self.uptime + _MOST_OVER_A_REBOOT
        return min(max(self.clock - last.clock, self.uptime), most)


class Ages:
    """The ages of what has been seen in the store at ``root``."""

    def __init__(self, root: Path, reading: Reading) -> None:
        self._root = root
        self._reading = reading
        self._seconds = _read(root / AGES_NAME, reading)

    def of(self, path: Path) -> timedelta:
        """How long it has been seen; nothing when it is seen for the first time."""
        return timedelta(seconds=self._seconds.get(self._key(path), 0.0))

    def write(self, paths: Iterable[Path]) -> None:
        """Remember the ages of these, and of nothing else.

        Raises:
            OSError: the file cannot be written; the ages are what they were at the last prune.
        """
        seconds = {self._key(path): self.of(path).total_seconds() for path in paths}
        path = self._root / AGES_NAME
        if not seconds and not path.exists():
            return
        document = {"read": asdict(self._reading), "seconds": seconds}
        try:
            replace_private(path, json.dumps(document, indent=1).encode())
        except (FileExistsError, FileNotFoundError):
            return  # another prune writes the same at this moment
        sync_directory(self._root)

    def _key(self, path: Path) -> str:
        return str(path.relative_to(self._root))


def _read(path: Path, reading: Reading) -> dict[str, float]:
    """The ages as they are now; none from a file that cannot be understood: they begin again."""
    try:
        document = json.loads(path.read_bytes())
        passed = reading.since(Reading(**document["read"]))
        return {str(key): float(age) + passed for key, age in document["seconds"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
