"""Who hears how policies are carried out: Prometheus, and whoever is to be notified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

from snaporch.config import Config
from snaporch.context import Context
from snaporch.errors import BusyError, SnaporchError
from snaporch.notify.notifier import Notifier, patience
from snaporch.schedule.forecast import Forecast
from snaporch.schedule.subprocesses import CaptureOutcome
from snaporch.status.metrics_exporter import MetricsExporter


class PolicyObservers:
    """A :class:`~snaporch.schedule.observer.PolicyObserver` that tells all of them."""

    def __init__(self, context: Context) -> None:
        self.observer = MetricsExporter()
        self.notifier = Notifier(context.progress)

    def looked(self, context: Context, outlooks: Sequence[Forecast], now: datetime) -> None:
        """Figures for Prometheus; and what was told before and did not come again is over."""
        self.observer.looked(context, outlooks, now)
        self.notifier.looked(context.config)

    def ended(self, config: Config, outcome: CaptureOutcome) -> None:
        """How a run ended."""
        self.notifier.ended(config, outcome)

    def failed(self, config: Config, error: SnaporchError) -> None:
        """What else failed; what was only busy has its turn later."""
        if isinstance(error, BusyError):
            return
        self.notifier.failed(config, error)


@contextmanager
def watchers(context: Context) -> Iterator[PolicyObservers]:
    """Around all the work; at its end, those who are slow to hear have a while."""
    made = PolicyObservers(context)
    try:
        yield made
    finally:
        made.notifier.close(patience(context.config))
