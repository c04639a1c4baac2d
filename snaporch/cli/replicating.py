"""Copying one domain after the other, and telling of it, behind ``snaporch replicate``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from snaporch.catalog.records import all_records
from snaporch.cli.outcomes import Outcomes
from snaporch.cli.watching import PolicyObservers, watchers
from snaporch.context import Context
from snaporch.errors import (
    BusyError,
    InterruptedRunError,
    NotFoundError,
    RefusedError,
    SnaporchError,
    one_line,
)
from snaporch.journal import read_journals
from snaporch.locks import domain_lock
from snaporch.model import Domain, Level, SnapshotRecord
from snaporch.replication.replicate import Shipped, ship
from snaporch.replication.target import Destination, ReplicaDestination
from snaporch.schedule.failures import REPLICATIONS, remember_try
from snaporch.schedule.forecast import replicas_of
from snaporch.schedule.policy_assignment import assign
from snaporch.schedule.run_replications import replicate_due
from snaporch.systemd.low_priority import lower_priority

REPLICATION = "replication"


def open_replica(context: Context, name: str) -> Destination:
    """The replica of that name."""
    return ReplicaDestination(name, context.config.replica[name], context.interrupt)


def replicate_several(
    context: Context,
    domains: Sequence[str],
    *,
    replicas: Sequence[str],
    anew: bool,
    json: bool,
) -> int:
    """Copy the snapshots of the domains named, or of all; the first failure's exit code.

    Raises:
        NotFoundError: there is no such domain or replica.
        RefusedError: nothing says where to.
        BusyError: another replication is under way on this host.
    """
    for name in replicas:
        if name not in context.config.replica:
            known = ", ".join(context.config.replica) or "none is configured"
            raise NotFoundError(name, f"no such replica ({known})", "see docs/replication.md")
    hypervisor = context.hypervisor
    chosen = [hypervisor.domain(name) for name in domains] or hypervisor.domains()
    properties = {} if replicas else context.pool.survey().policies
    wanted = [(each, list(replicas) or _of_policies(context, each, properties)) for each in chosen]
    for domain, names in wanted:
        if domains and not names:
            step = "name a replica: --to NAME"
            raise RefusedError(domain.name, "none of its policies replicates", step)
    told = ReplicationReport(json=json)
    with alone(context):
        records = _finished(context)
        for domain, names in wanted:
            for name in names if domains or records[domain.uuid] else ():
                context.interrupt.check(REPLICATION)
                outcome = _ship(context, domain, records[domain.uuid], name, anew=anew)
                told.tell(domain.name, name, outcome)
    told.print_documents()
    return told.code


def _of_policies(context: Context, domain: Domain, properties: Mapping[str, str]) -> list[str]:
    return list(replicas_of(context.config, assign(context, domain, properties)))


def _finished(context: Context) -> Mapping[str, list[SnapshotRecord]]:
    """Every domain's snapshots whose run is over, oldest first, by UUID."""
    under_way = {journal.facts.run for journal in read_journals(context.config.paths.journal)}
    found: dict[str, list[SnapshotRecord]] = defaultdict(list)
    for record in all_records(context.store, context.pool.snapshots()):
        if record.run not in under_way and record.level is not Level.TORN:
            found[record.uuid].append(record)
    return found


def _ship(
    context: Context, domain: Domain, records: Sequence[SnapshotRecord], name: str, *, anew: bool
) -> Shipped | SnaporchError:
    if not records:
        step = f"take one: snaporch snapshot {domain.name}"
        return NotFoundError(domain.name, "has no snapshots", step)
    try:
        shipped = ship(context, records, name, open_replica(context, name), anew=anew)
    except InterruptedRunError:
        raise
    except SnaporchError as error:
        return error
    remember_try(context, f"{domain.uuid}/{name}", None, REPLICATIONS)
    return shipped


def replicate_what_is_due(context: Context, *, json: bool) -> int:
    """Copy what policies have due; the first failure's exit code."""
    with watchers(context) as watching:
        told = tell_due_replications(context, watching, json=json)
    told.print_documents()
    return told.code


def tell_due_replications(
    context: Context, watching: PolicyObservers, *, json: bool
) -> ReplicationReport:
    """Copy what policies have due; nothing while another replication is under way.

    Whoever is to be notified of failures is.
    """
    told = ReplicationReport(json=json)
    try:
        with alone(context):
            for sent in replicate_due(context, open_replica):
                told.tell(sent.shipment.domain, sent.shipment.replica, sent.outcome)
                if isinstance(sent.outcome, SnaporchError):
                    watching.failed(context.config, sent.outcome)
    except BusyError as error:
        context.progress.note(error.thing, f"{error.reason}: what is due has to wait")
    return told


@contextmanager
def alone(context: Context) -> Iterator[None]:
    """One replication at a time on a host, behind everything else on it.

    Raises:
        BusyError: another one is under way.
    """
    runtime, what = context.config.paths.runtime, REPLICATION
    with domain_lock(runtime, what, what, "replicate", wait=0, interrupt=context.interrupt):
        lower_priority("replicate")
        yield


class ReplicationReport(Outcomes):
    """Copies."""

    def tell(self, domain: str, replica: str, outcome: Shipped | SnaporchError) -> None:
        """Print one."""
        if isinstance(outcome, SnaporchError):
            self.fail(outcome)
            return
        names = [record.snapshot for record in outcome.arrived]
        left = [record.snapshot for record in outcome.missing]
        self.add(
            {"domain": domain, "replica": replica, "arrived": names, "incomplete": left},
            _line(domain, replica, outcome),
        )


def _line(domain: str, replica: str, outcome: Shipped) -> str:
    count = len(outcome.arrived)
    text = f"{count} snapshot{'' if count == 1 else 's'} replicated" if count else "up to date"
    if count:
        text += f", up to @{outcome.arrived[-1].snapshot}"
    if outcome.missing:
        text += f"; {len(outcome.missing)} without their bundles, which are not whole here"
    return one_line(f"{domain}  {replica}  {text}")
