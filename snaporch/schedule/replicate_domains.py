"""Replicate named domains, or all, to named replicas or to those of the domains' policies."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial

from snaporch.catalog.records import all_records
from snaporch.config.transfer_window import ALWAYS
from snaporch.context import Context
from snaporch.errors import InterruptedRunError, NotFoundError, RefusedError, SnaporchError
from snaporch.journal import read_journals
from snaporch.locks import REPLICATION
from snaporch.model import Domain, Level, SnapshotRecord
from snaporch.replication.interface import Destination, find_replica
from snaporch.replication.replicate import ReplicationResult, replicate
from snaporch.schedule.failed_attempts import COMPLETED, REPLICATIONS, STOPPED, record_attempt
from snaporch.schedule.forecast import replicas_of
from snaporch.schedule.own_or_copied import without_copies
from snaporch.schedule.policy_assignment import assign

_FRESH_SECONDS = 60
"""How old the list of snapshots may be for the next domain: the one before may take hours."""


@dataclass(frozen=True, slots=True)
class ReplicationTarget:
    """A domain and the names of the replicas that its snapshots are copied to."""

    domain: Domain
    replicas: tuple[str, ...]
    is_named: bool
    """The caller named the domain: it is an error if it has no snapshots."""


def choose_targets(
    context: Context, domains: Sequence[str], replicas: Sequence[str]
) -> list[ReplicationTarget]:
    """Decide which domains are copied to which replicas.

    Args:
        domains: names or UUIDs; all of libvirt's domains if empty.
        replicas: names; those of each domain's policies if empty.

    Raises:
        NotFoundError: there is no such domain or replica.
        RefusedError: no replica is named, and a named domain has no policy that replicates, or no
            domain has.
    """
    for name in replicas:
        find_replica(context.config, name)
    hypervisor = context.hypervisor
    chosen = [hypervisor.domain(name) for name in domains] or hypervisor.domains()
    properties = {} if replicas else context.pool.policy_view().policies
    targets = []
    for domain in chosen:
        names = replicas or replicas_of(context.config, assign(context, domain, properties))
        targets.append(ReplicationTarget(domain, tuple(names), is_named=bool(domains)))
        if domains and not names:
            step = "name a replica: --to NAME"
            raise RefusedError(domain.name, "none of its policies replicates", step)
    if targets and not any(target.replicas for target in targets):
        # a success would be taken for a copy, above all by cron
        step = "name a replica (--to NAME), or give a policy replicate = [NAME]"
        raise RefusedError("--all", "no policy of any domain replicates", step)
    return targets


def replicate_domains(
    context: Context,
    targets: Sequence[ReplicationTarget],
    opened: Callable[[Context, str], Destination],
    *,
    recheck: bool,
) -> Iterator[tuple[str, str, ReplicationResult | SnaporchError]]:
    """Copy the snapshots of each target; the caller holds the host's replication lock.

    Windows have no effect: what is started by hand runs at once, and with ``rate``.

    Args:
        targets: see :func:`choose_targets`.
        opened: opens a replica by its name.
        recheck: check all snapshots, also those that are marked as replicated.

    Yields:
        The domain's name, the replica's name, and the result or the error.

    Raises:
        InterruptedRunError: a signal came; what had arrived stays.
    """
    context = _without_windows(context, {name for each in targets for name in each.replicas})
    destinations = cache(partial(opened, context))
    domains = [target.domain for target in targets]
    records, read = _finished_records(context, domains), context.clock.monotonic()
    for target in targets:
        if context.clock.monotonic() > read + _FRESH_SECONDS:
            records, read = _finished_records(context, domains), context.clock.monotonic()
        for name in target.replicas if target.is_named or records[target.domain.uuid] else ():
            context.interrupt.check(REPLICATION)
            domain = target.domain
            if not records[domain.uuid]:
                step = f"take one: snaporch snapshot {shlex.quote(domain.name)}"
                yield domain.name, name, NotFoundError(domain.name, "has no snapshots", step)
                continue
            key = f"{domain.uuid}/{name}"
            try:
                shipped = replicate(
                    context, records[domain.uuid], name, destinations(name), recheck=recheck
                )
            except InterruptedRunError:
                raise
            except SnaporchError as error:
                record_attempt(context, key, error.line(), REPLICATIONS)
                yield domain.name, name, error
                continue
            record_attempt(context, key, None, REPLICATIONS)
            record_attempt(context, key, None, STOPPED)
            record_attempt(context, key, "", COMPLETED)
            yield domain.name, name, shipped


def _finished_records(
    context: Context, domains: Sequence[Domain]
) -> Mapping[str, list[SnapshotRecord]]:
    """The snapshots of each domain, by its UUID, oldest first; none of a run under way."""
    under_way = {journal.facts.run for journal in read_journals(context.config.paths.journal)}
    found: dict[str, list[SnapshotRecord]] = defaultdict(list)
    snapshots = without_copies(context, domains, context.pool.snapshots())
    for record in all_records(context.store, snapshots):
        if record.run not in under_way and record.level is not Level.TORN:
            found[record.uuid].append(record)
    return found


def _without_windows(context: Context, names: Collection[str]) -> Context:
    """The context with replicas that have no window, and a note for each that has one now."""
    replicas = dict(context.config.replica)
    for name in names:
        window = replicas[name].window
        if not window.is_open(datetime.now(UTC)):
            context.progress.note(name, f"its window ({window}) is closed; by hand it has none")
        changes = {"window": ALWAYS, "rate_outside": None}
        replicas[name] = replicas[name].model_copy(update=changes)
    return replace(context, config=context.config.model_copy(update={"replica": replicas}))
