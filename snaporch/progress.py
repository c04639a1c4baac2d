"""How the lower rooms say what they do, without knowing who listens."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A listener. None of its methods may raise: a closed terminal must not end a run."""

    def step(self, subject: str, text: str) -> None:
        """Something began or was done."""

    def note(self, subject: str, text: str) -> None:
        """Something the user should know."""

    def amount(self, subject: str, done: int, total: int) -> None:
        """Bytes moved of bytes expected."""
