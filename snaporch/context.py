"""The configuration, libvirt, ZFS and the signals of one command."""

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
    """The signal that asked the command to stop; checked where stopping is safe."""

    signum: int | None = None

    @contextmanager
    def watching(self) -> Iterator[Interrupt]:
        """Handle SIGINT, SIGTERM and SIGHUP in the block; signals that nohup ignores stay ignored.

        Ctrl-Z is ignored meanwhile, also by child processes: a stopped run leaves its guest frozen,
        or on overlays that grow.
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
        """Raise if a signal came.

        Args:
            thing: the subject of the error, such as the domain's name.

        Raises:
            InterruptedRunError: a signal came.
        """
        if self.signum is not None:
            name = signal.Signals(self.signum).name
            raise InterruptedRunError(thing, f"stopped by {name}", self.signum)


@dataclass
class Context:
    """The configuration, libvirt and ZFS (or their fakes), and the progress display."""

    config: Config
    hypervisor: Hypervisor
    pool: Pool
    progress: Progress
    interrupt: Interrupt = field(default_factory=Interrupt)
    config_path: Path | None = None
    """The configuration's file, for child processes."""
    finishers: Mapping[str, Callable[[Context, Any, bool], list[str]]] = field(default_factory=dict)
    """Functions that finish runs of other kinds, by the kind in their journal. They are called with
    the context, the journal and ``dry_run``. See :mod:`snaporch.recovery.other_kinds`."""
    strangers: Callable[[Sequence[str]], str] = lambda _datasets: ""
    """Names the programs that are configured to snapshot datasets without freezing their guests;
    empty if there is none. See :mod:`snaporch.catalog.other_takers`."""
    held: Callable[[Sequence[str]], frozenset[str]] = lambda _datasets: frozenset()
    """The datasets that sanoid, by its configuration, snapshots only while a snaporch hook holds
    their guests frozen."""

    @property
    def store(self) -> BundleStore:
        """The bundle store of the configuration."""
        return BundleStore(self.config.paths.bundles)
