"""What all fakes share: a log of their acts, and places where a test can intervene."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

Hook = Callable[[], None]


class KilledError(BaseException):
    """The process was killed here."""


@dataclass
class Hooks:
    """``log`` has every act in order; ``at`` holds what to call at a named place.

    A hook that raises makes the operation fail there; see :func:`failing`.
    """

    log: list[str] = field(default_factory=list)
    at: dict[str, Hook] = field(default_factory=dict)
    killed: bool = False
    """The process was killed: it reaches nothing any more."""

    def kill(self) -> None:
        """End the process here."""
        self.killed = True
        raise KilledError

    def revive(self) -> None:
        """From here on another process acts."""
        self.killed = False
        self.at = {place: hook for place, hook in self.at.items() if hook != self.kill}

    def act(self, place: str, *about: str) -> None:
        """Log an act, then call the test's hooks for the place, and for the whole line."""
        if self.killed:
            raise KilledError
        line = " ".join([place, *about])
        self.log.append(line)
        self.reach(place)
        if line != place:
            self.reach(line)

    def reach(self, place: str) -> None:
        """Call the test's hook at a place that is not an act."""
        if self.killed:
            raise KilledError
        if hook := self.at.get(place):
            hook()

    def acts(self) -> list[str]:
        """The first word of every line of the log."""
        return [line.split(" ", 1)[0] for line in self.log]


def failing(error: BaseException) -> Hook:
    """A hook that raises ``error``, every time."""

    def fail() -> None:
        raise error

    return fail


def failing_once(error: BaseException) -> Hook:
    """A hook that raises ``error`` the first time it is reached."""
    left = [error]

    def fail() -> None:
        if left:
            raise left.pop()

    return fail


def no_room_for_pages(monkeypatch: pytest.MonkeyPatch, times: float = math.inf) -> None:
    """Let writes into the page file find no room, so many times."""
    real, left = os.pwrite, times

    def full(descriptor: int, data: bytes, place: int) -> int:
        nonlocal left
        if left and Path(os.readlink(f"/proc/self/fd/{descriptor}")).name == "pages":
            left -= 1
            raise OSError(errno.ENOSPC, "No space left on device", "/tank/ram/pages")
        return real(descriptor, data, place)

    monkeypatch.setattr(os, "pwrite", full)
