"""A volume with partitions, whose device others can claim."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from fakes.world import World


class ClaimedVolume:
    """The node and the directory in sysfs of a volume.

    The kernel refuses an exclusive open of a claimed device, which a file cannot imitate.
    """

    def __init__(self, world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._node = world.resolver.volume_link(name)
        self._node.parent.mkdir(parents=True)
        self._node.touch()
        self._place = world.resolver.sysfs_of(os.stat(self._node).st_rdev)
        self._holders = self._place / "holders"
        self._holders.mkdir(parents=True)
        (self._place / "dev").write_text("230:0\n")
        real = os.open

        def refuse(path: str | Path, flags: int, *more: int, **how: int) -> int:
            if flags & os.O_EXCL and path == self._node and any(self._holders.iterdir()):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
            return real(path, flags, *more, **how)

        monkeypatch.setattr(os, "open", refuse)

    def claim(self, holder: str) -> None:
        """Have a device of the host claim it."""
        (self._holders / holder).touch()

    def release(self) -> None:
        """End all claims."""
        for each in self._holders.iterdir():
            each.unlink()

    def divide(self, *numbers: int) -> None:
        """Divide it into these partitions."""
        for part in self._place.glob("zd0p*"):
            shutil.rmtree(part)
        for number in numbers:
            (self._place / f"zd0p{number}").mkdir()
            (self._place / f"zd0p{number}" / "partition").write_text(f"{number}\n")
