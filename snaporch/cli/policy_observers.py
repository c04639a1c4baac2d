"""The observers of the scheduler: metrics for Prometheus, and notifications."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

from snaporch.config import Config
from snaporch.context import Context
from snaporch.errors import BusyError, SnaporchError
from snaporch.notify.notifier import Notifier, close_seconds
from snaporch.schedule.forecast import Forecast
from snaporch.schedule.subprocesses import SnapshotJobResult
from snaporch.status.metrics_exporter import MetricsExporter


class PolicyObservers:
    """A :class:`~snaporch.schedule.observer.PolicyObserver` that updates metrics and notifies."""

    def __init__(self, context: Context) -> None:
        self.observer = MetricsExporter()
        self.notifier = Notifier(context.progress)

    def forecasts_made(
        self, context: Context, forecasts: Sequence[Forecast], now: datetime
    ) -> None:
        """Update the metrics, and end notified problems that did not occur again."""
        self.observer.forecasts_made(context, forecasts, now)
        self.notifier.forecasts_made(context.config)

    def ended(self, config: Config, outcome: SnapshotJobResult) -> None:
        """Notify of the end of a run."""
        self.notifier.ended(config, outcome)

    def failed(
        self, config: Config, error: SnaporchError, succeeded: datetime | None = None
    ) -> None:
        """Notify of another failure; a busy domain is retried later and no failure.

        Args:
            config: the configuration.
            error: the failure.
            succeeded: when what failed succeeded last, if that is known.
        """
        if isinstance(error, BusyError):
            return
        self.notifier.failed(config, error, succeeded)


@contextmanager
def observing(context: Context) -> Iterator[PolicyObservers]:
    """Observe the work within; at its end, wait a limited time for pending notifications."""
    observers = PolicyObservers(context)
    try:
        yield observers
    finally:
        observers.notifier.close(close_seconds(context.config))
