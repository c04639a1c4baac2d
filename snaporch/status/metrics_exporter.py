"""Keeps Prometheus metrics current while policies are carried out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from snaporch.config import MetricsOptions
from snaporch.config.monitoring import listen_at
from snaporch.context import Context
from snaporch.errors import SnaporchError
from snaporch.schedule.forecast import Forecast
from snaporch.status.collect import collect_status
from snaporch.status.metrics import as_text, registry
from snaporch.status.metrics_textfile import write_textfile
from snaporch.status.model import Problem, Status
from snaporch.status.problems import find_problems

_ME = "metrics"


class MetricsExporter:
    """Holds the metrics of the last forecasts; an error is printed as a note and ignored."""

    def __init__(
        self,
        collect_status: Callable[[Context, Sequence[Forecast], datetime], Status] = collect_status,
    ) -> None:
        self._collect_status = collect_status
        self._current: tuple[Status, Sequence[Problem]] | None = None
        self._served = False

    def forecasts_made(
        self, context: Context, forecasts: Sequence[Forecast], now: datetime
    ) -> None:
        """Update the metrics, and write the textfile if one is configured."""
        textfile = context.config.metrics.textfile
        if not (textfile or self._served):
            return
        try:
            status = self._collect_status(context, forecasts, now)
            problems = find_problems(status, context.config.status)
            self._current = (status, problems)
            if textfile:
                write_textfile(Path(textfile), as_text(status, problems))
        except (SnaporchError, OSError) as error:
            text = error.line() if isinstance(error, SnaporchError) else str(error)
            context.progress.note(_ME, text)

    @contextmanager
    def serving(self, context: Context, metrics: MetricsOptions) -> Iterator[None]:
        """Serve the metrics over HTTP inside the block, if that is configured."""
        if not metrics.listen:
            yield
            return
        address, port = listen_at(metrics.listen)
        try:
            figures = registry(lambda: self._current)
            from prometheus_client import start_http_server

            server, thread = start_http_server(port, address, registry=figures)
        except (SnaporchError, OSError) as error:
            text = error.line() if isinstance(error, SnaporchError) else error.strerror
            context.progress.note(_ME, f"metrics are not served at {metrics.listen}: {text}")
            yield
            return
        self._served = True
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
