"""Open what a machine that pulls may copy from this host."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager

from snaporch import default_paths
from snaporch.catalog.records import COPY
from snaporch.context import Context
from snaporch.journal import read_journals
from snaporch.locks import held_by, readers_lock
from snaporch.model import PoolSnapshot
from snaporch.pull.offers import Defined, Offer, make_offers
from snaporch.pull.sender import Output, Sender, ZfsSend
from snaporch.schedule.own_or_copied import without_copies
from snaporch.snapshot.locate_disks import datasets_of


def open_sender(
    context: Context, name: str, allowed: Collection[str] | None, output: Output
) -> Sender:
    """What answers the requests of a machine.

    Args:
        context: the configuration, libvirt and ZFS.
        name: the machine, as authorized_keys names it.
        allowed: names and UUIDs of the guests that it may copy; None for all.
        output: gets the answer.

    Raises:
        SnaporchError: ZFS or libvirt cannot be asked.
    """
    # Before the snapshots: a run that ends meanwhile is found unfinished, which is safe.
    unfinished = {each.facts.run for each in read_journals(context.config.paths.journal)}
    snapshots = _own(context, context.pool.snapshots())
    unfinished |= _locked_runs(snapshots)
    domains = [] if allowed is None else _defined(context)
    offers = make_offers(snapshots, allowed, unfinished, domains)

    def reading(offer: Offer) -> AbstractContextManager[None]:
        runtime = context.config.paths.runtime
        return readers_lock(
            runtime, offer.domain, offer.uuid, alone=False, interrupt=context.interrupt
        )

    return Sender(name, offers, context.pool, context.store, ZfsSend(), reading, output)


def _defined(context: Context) -> list[Defined]:
    return [
        Defined(each.uuid, each.name, datasets_of(context.resolver, each))
        for each in context.hypervisor.domains()
    ]


def _own(context: Context, snapshots: list[PoolSnapshot]) -> list[PoolSnapshot]:
    """The snapshots of this host's guests and of their pages of RAM, without copies."""
    found = without_copies(context, context.hypervisor.domains(), snapshots)
    pages = f"{context.config.ram_pages.dataset}/"
    return [
        each
        for each in found
        if "uuid" in each.properties
        or COPY not in each.properties
        or each.dataset.startswith(pages)
    ]


def _locked_runs(snapshots: Iterable[PoolSnapshot]) -> set[str]:
    """The newest run of each guest whose lock is held: its RAM may be moved into pages."""
    newest = {
        each.properties["uuid"]: each.properties["run"]
        for each in snapshots
        if each.properties.keys() >= {"uuid", "run"}
    }
    locks = default_paths.LOCKS
    return {run for uuid, run in newest.items() if held_by(locks, uuid) is not None}
