"""Open the replica that guests are brought back from.

It is read by :mod:`snaporch.rebuild.replica_source` or :mod:`snaporch.rebuild.restic_source`.
"""

from __future__ import annotations

from pydantic import ValidationError

from snaporch.config import Replica, ResticReplica
from snaporch.context import Context
from snaporch.errors import UsageError
from snaporch.rebuild.local_datasets import Local, LocalDatasets
from snaporch.rebuild.replica_source import ReplicaSource, Source
from snaporch.rebuild.restic_source import ResticSource
from snaporch.replication.interface import find_replica
from snaporch.replication.restic import ResticRepository


def open_source(context: Context, name: str, host: str = "") -> tuple[Source, Local]:
    """The replica or pulled source with this name in the configuration, and this host's datasets.

    Args:
        context: has the configuration.
        name: of the replica, or of a source whose copies are on this machine.
        host: reads from this host, as ssh knows it, instead of the configured one.

    Raises:
        NotFoundError: there is no such replica.
        RefusedError: this host may not read from it.
        UsageError: the host's name is invalid.
    """
    pulled = context.config.source.get(name)
    replica = pulled.as_replica() if pulled else find_replica(context.config, name)
    local = LocalDatasets(context.pool, context.interrupt)
    if isinstance(replica, ResticReplica):
        if host:
            raise UsageError("--host", f"replica {name} is a repository of restic")
        repository = ResticRepository(name, replica, context.interrupt, context.progress)
        return ResticSource(repository), local
    if host:
        try:
            changes = {"host": host, "append_only": False}
            replica = Replica.model_validate(replica.model_dump() | changes)
        except ValidationError as error:
            raise UsageError(repr(host), "is no host as ssh knows it") from error
    source = ReplicaSource(name, replica, context.interrupt, context.progress)
    return source, local
