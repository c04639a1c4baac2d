"""The interface through which notifications and metrics hear how policies are carried out."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from snaporch.config import Config
from snaporch.context import Context
from snaporch.errors import SnaporchError
from snaporch.schedule.forecast import Forecast
from snaporch.schedule.subprocesses import SnapshotJobResult


class PolicyObserver(Protocol):
    """Hears how policies are carried out. No method may raise, or take long."""

    def forecasts_made(
        self, context: Context, forecasts: Sequence[Forecast], now: datetime
    ) -> None:
        """The scheduler has made new forecasts."""

    def ended(self, config: Config, outcome: SnapshotJobResult) -> None:
        """A run ended, and its guest was released."""

    def failed(self, config: Config, error: SnaporchError) -> None:
        """Something other than a run failed, such as a forecast or a deletion."""
