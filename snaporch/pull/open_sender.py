"""On a source: open the sender with what :mod:`snaporch.pull.send_permissions` lets it send."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager

from snaporch import default_paths
from snaporch.bundle.store import BundleStore
from snaporch.catalog.records import COPY, run_members
from snaporch.catalog.renamed_datasets import by_guid
from snaporch.context import Context
from snaporch.journal import read_journals
from snaporch.locks import held_by, readers_lock
from snaporch.model import PoolSnapshot
from snaporch.pull.send_permissions import Defined, Offer, UnmarkedRun, make_offers
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
    unmarked = find_unmarked_runs(context.store, snapshots)
    unfinished |= _locked_runs(snapshots, unmarked)
    domains = [] if allowed is None else _defined(context)
    offers = make_offers(snapshots, allowed, unfinished, domains, unmarked)

    def reading(offer: Offer) -> AbstractContextManager[None]:
        return readers_lock(
            default_paths.LOCKS, offer.domain, offer.uuid, alone=False, interrupt=context.interrupt
        )

    return Sender(name, offers, context.pool, context.store, ZfsSend(), reading, output)


def find_unmarked_runs(store: BundleStore, snapshots: Sequence[PoolSnapshot]) -> list[UnmarkedRun]:
    """The runs whose ZFS snapshots have the marks of others, by the manifests of their bundles.

    Args:
        store: has the bundles.
        snapshots: those of this host.

    Raises:
        UnavailableError: the store cannot be read.
    """
    marks = [each.properties for each in snapshots]
    marked = {f"{each['uuid']}/{each['run']}" for each in marks if each.keys() >= {"uuid", "run"}}
    with_guid = by_guid(snapshots)
    found = []
    for reference in store.references():
        if reference in marked:
            continue
        _, manifest = store.state(reference)
        if manifest is None or reference != f"{manifest.uuid}/{manifest.run}":
            continue
        near = [e for guid in {e.guid for e in manifest.snapshots} for e in with_guid[guid]]
        if members := run_members(manifest, manifest.run, near):
            run = UnmarkedRun(manifest.uuid, manifest.domain, manifest.run, tuple(members))
            found.append(run)
    return found


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


def _locked_runs(snapshots: Iterable[PoolSnapshot], unmarked: Iterable[UnmarkedRun]) -> set[str]:
    """The newest run of each guest whose lock is held: its RAM may be moved into pages."""
    taken = [
        (each.created, each.properties["uuid"], each.properties["run"])
        for each in snapshots
        if each.properties.keys() >= {"uuid", "run"}
    ]
    taken += [(each.created, each.uuid, each.run) for each in unmarked]
    newest = {uuid: run for _, uuid, run in sorted(taken, key=lambda each: each[0])}
    locks = default_paths.LOCKS
    return {run for uuid, run in newest.items() if held_by(locks, uuid) is not None}
