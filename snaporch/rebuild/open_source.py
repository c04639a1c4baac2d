"""Open the replica that guests are brought back from."""

from __future__ import annotations

from snaporch.context import Context
from snaporch.errors import NotFoundError
from snaporch.rebuild.local_datasets import Local, LocalDatasets
from snaporch.rebuild.replica_source import ReplicaSource, Source


def open_source(context: Context, name: str) -> tuple[Source, Local]:
    """The replica with this name in the configuration, and the datasets of this host.

    Raises:
        NotFoundError: there is no such replica.
        RefusedError: this host may not read from it.
    """
    replica = context.config.replica.get(name)
    if replica is None:
        known = ", ".join(context.config.replica) or "none is configured"
        raise NotFoundError(name, f"no such replica ({known})", "see docs/how-to/replication.md")
    source = ReplicaSource(name, replica, context.interrupt, context.progress)
    return source, LocalDatasets(context.pool, context.interrupt)
