"""What a run works with, made once per command."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from snaporch.bundle.store import BundleStore
from snaporch.config import Config
from snaporch.errors import InterruptedRunError
from snaporch.hypervisor import Hypervisor
from snaporch.progress import Progress
from snaporch.zfs import Pool

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Interrupt:
    """A signal that asked us to stop; looked at where stopping is safe."""

    signum: int | None = None

    @contextmanager
    def watching(self) -> Iterator[Interrupt]:
        """Take SIGINT, SIGTERM and SIGHUP until the end; one that nohup ignores stays so.

        Ctrl-Z is ignored meanwhile, by what this process starts too: a run that is stopped leaves
        its guest frozen, or on overlays that grow.
        """
        wanted = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        previous = {number: signal.signal(number, self._take) for number in wanted}
        previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _take(self, signum: int, _frame: FrameType | None) -> None:
        self.signum = signum

    def check(self, thing: str) -> None:
        """Raise when a signal came.

        Raises:
            InterruptedRunError: it did.
        """
        if self.signum is not None:
            name = signal.Signals(self.signum).name
            raise InterruptedRunError(thing, f"stopped by {name}", self.signum)


@dataclass
class Context:
    """Configuration, the real parts (or their fakes) and who listens."""

    config: Config
    hypervisor: Hypervisor
    pool: Pool
    progress: Progress
    interrupt: Interrupt = field(default_factory=Interrupt)
    config_path: Path | None = None
    """The configuration's file, for processes that are to work with the same one."""
    finishers: Mapping[str, Callable[[Context, Any, bool], list[str]]] = field(default_factory=dict)
    """Who finishes runs of other kinds than snapshots, by the kind in their journal: called with
    the journal, and whether only to say what would be done. See
    :mod:`snaporch.recovery.other_kinds`."""
    strangers: Callable[[Sequence[str]], str] = lambda _datasets: ""
    """By what others are configured to snapshot datasets without holding their guests still, in
    words; empty if by nothing. See :mod:`snaporch.catalog.other_takers`."""
    held: Callable[[Sequence[str]], frozenset[str]] = lambda _datasets: frozenset()
    """Those of datasets that sanoid snapshots only while a hook of ours holds their guests still,
    by its configuration."""

    @property
    def store(self) -> BundleStore:
        """The bundle store of the configuration."""
        return BundleStore(self.config.paths.bundles)
