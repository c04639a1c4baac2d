"""The interface by which the lower packages report their progress, also from several threads."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Protocol


class Progress(Protocol):
    """Receives progress. Its methods must not raise: a closed terminal must not end a run."""

    def step(self, subject: str, text: str) -> None:
        """Report a step that began or ended.

        Args:
            subject: the domain or object that the step is about.
        """

    def note(self, subject: str, text: str) -> None:
        """Report something that the user should know; shown also with ``--quiet``."""

    def amount(self, subject: str, done: int, total: int) -> None:
        """Report ``done`` of ``total`` expected bytes."""


@dataclass
class LockedProgress:
    """Passes the progress of several threads to one listener, one call at a time."""

    listener: Progress
    _lock: threading.Lock = field(default_factory=threading.Lock, kw_only=True)

    def step(self, subject: str, text: str) -> None:
        """Pass on a step."""
        with self._lock:
            self.listener.step(subject, text)

    def note(self, subject: str, text: str) -> None:
        """Pass on a warning."""
        with self._lock:
            self.listener.note(subject, text)

    def amount(self, subject: str, done: int, total: int) -> None:
        """Pass nothing on: the bars of several threads would replace each other."""
