"""The interface by which the lower packages report their progress."""

from __future__ import annotations

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
