"""The clock of a guest's pause: when it starts, when it stops, and the parts between.

It starts when libvirt reports that the guest is suspended, or earlier if QEMU's downtime says so
(``DomainEvents.paused_since`` in ``events.py``). It stops in one of two ways:

- libvirt resumes the guest itself (``overlay``): when it reports that (``_short_pause`` in
  ``memory_snapshot.py``).
- the guest stays paused for its snapshots (``manual``): ``release`` in
  ``snapshot/strategies/base.py`` resumes it, and calls :meth:`Pause.over` when it runs again.

``paused`` and ``quiesced`` start it themselves, in their ``freeze``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime

from snaporch.model import PauseParts


@dataclass(frozen=True, slots=True)
class Pause:
    """How long the guest was paused, according to libvirt's events."""

    began: datetime | None
    milliseconds: float
    since: float | None = None
    """``time.monotonic()`` at its beginning, if the guest is still paused."""
    parts: PauseParts = field(default_factory=PauseParts)
    asked_for: bool = False
    """Another program suspended the guest while its RAM was saved."""

    def over(self, released: float, now: float) -> Pause:
        """The pause when it has ended.

        Args:
            released: when the release of the guest began, as ``time.monotonic()``.
            now: when the guest ran again, as ``time.monotonic()``.
        """
        if self.since is None:
            return self
        still = self.since + ((self.parts.downtime or 0.0) + (self.parts.switch or 0.0)) / 1000
        parts = replace(
            self.parts, snapshot=milliseconds(released - still), resume=milliseconds(now - released)
        )
        return replace(self, milliseconds=milliseconds(now - self.since), parts=parts)


def milliseconds(seconds: float) -> float:
    """Seconds as milliseconds, rounded to a tenth, and never negative."""
    return max(round(seconds * 1000, 1), 0.0)
