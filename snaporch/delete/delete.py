"""Delete snapshots as retention does: the ZFS snapshots pool by pool, then the bundles.

An interrupted delete can be repeated: what is left of a snapshot is still found by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from snaporch import default_paths
from snaporch.catalog.run_snapshots import by_pool
from snaporch.context import Context
from snaporch.delete.plan import (
    DeleteItem,
    DeletePlan,
    DeleteRequest,
    check_again,
    make_delete_plan,
)
from snaporch.errors import InterruptedRunError, RefusedError, SnaporchError
from snaporch.locks import DELETING, domain_lock, replication_lock_name
from snaporch.prune.decision import ItemKind, PruneAction, PruneDecision
from snaporch.prune.prune import PruneResult, prune
from snaporch.zfs import PoolError


@dataclass(frozen=True, slots=True)
class Deletion:
    """One snapshot that was deleted, or would be."""

    item: DeleteItem
    bundle: PruneDecision | None
    """What was done with its bundle; ``None`` if it has none."""

    def as_json(self) -> dict[str, object]:
        """The documented JSON object."""
        return {
            "domain": self.item.domain,
            "uuid": self.item.uuid,
            "snapshot": self.item.snapshot,
            "run": self.item.run,
            "zfs_snapshots": list(self.item.zfs_names),
            "bundle": self.bundle.as_json() if self.bundle else None,
        }


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """What was deleted, or would be."""

    deleted: tuple[Deletion, ...]
    pool_bytes: int
    """The bytes that are free in the pools by the ZFS snapshots of disks."""
    pruned: PruneResult
    failures: tuple[SnaporchError, ...] = ()

    @property
    def freed(self) -> int:
        """All bytes that are freed at once."""
        return self.pool_bytes + self.pruned.freed

    @property
    def trashed(self) -> int:
        """The bytes of the bundles in the trash, which prune deletes later."""
        return sum(each.found.bytes for each in self.pruned.of(PruneAction.TRASH))

    def as_json(self, *, dry_run: bool) -> dict[str, object]:
        """The documented JSON object."""
        return {
            "dry_run": dry_run,
            "freed_bytes": self.freed,
            "trashed_bytes": self.trashed,
            "snapshots": [each.as_json() for each in self.deleted],
        }


def preview_delete(context: Context, plan: DeletePlan) -> DeleteResult:
    """What carrying out a plan would delete and free, or why it is refused; only reads.

    Raises:
        PoolError, RefusedError, UnavailableError: ZFS or the store cannot be read.
    """
    if plan.refusals:
        return _refused(plan)
    names = [name for item in plan.items for name in item.zfs_names]
    references = {item.reference for item in plan.items}
    pruned = prune(context.config, context.pool, only=references, dry_run=True, without=names)
    freed = context.pool.reclaimable(names) if names else 0
    return DeleteResult(_deletions(plan.items, pruned), freed, pruned)


def delete(
    context: Context,
    request: DeleteRequest,
    *,
    confirm: Callable[[DeletePlan], None] | None,
    wait: int | None,
) -> DeleteResult:
    """Delete snapshots; all are checked before the first is deleted.

    A failure on one does not stop the others. A signal does, between two snapshots.

    Args:
        context: the configuration and ZFS.
        request: what to delete.
        confirm: shows the plan to the user, and raises unless the user agrees. It is called without
            a lock. ``None``: do not ask.
        wait: seconds to wait for each domain's lock; ``None`` for the domain's configured time.

    Raises:
        SnaporchError: as :func:`make_delete_plan`; nothing was changed.
    """
    plan = make_delete_plan(context, request)
    if plan.refusals:
        return _refused(plan)
    if confirm is not None:
        confirm(plan)
    work = _Work(context, plan, also_newest=request.also_newest)
    for uuid, domain in {item.uuid: item.domain for item in plan.items}.items():
        if context.interrupt.signum is not None:
            break
        try:
            with _locks(context, domain, uuid, wait):
                work.delete_domain(uuid)
        except InterruptedRunError:
            break
        except SnaporchError as error:
            work.failures.append(error)
    gone = {item.reference for item in work.done}
    pruned = prune(context.config, context.pool, only=gone) if gone else PruneResult()
    deleted = _deletions(work.done, pruned)
    failures = (*work.failures, *pruned.failures, *pruned.undecided_items, *_unchanged(deleted))
    return DeleteResult(deleted, work.freed, pruned, failures)


def _refused(plan: DeletePlan) -> DeleteResult:
    return DeleteResult((), 0, PruneResult(), plan.refusals)


class _Work:
    """The ZFS snapshots that are destroyed so far."""

    def __init__(self, context: Context, plan: DeletePlan, *, also_newest: bool) -> None:
        self._context = context
        self._plan = plan
        self._also_newest = also_newest
        self.done: list[DeleteItem] = []
        self.freed = 0
        self.failures: list[SnaporchError] = []

    def delete_domain(self, uuid: str) -> None:
        """Destroy the ZFS snapshots of one domain's items, under its locks.

        Raises:
            RefusedError: one must not be deleted any more; none of them was destroyed.
        """
        context = self._context
        for item in check_again(context, self._plan, uuid, also_newest=self._also_newest):
            if context.interrupt.signum is not None:
                return
            try:
                for names in by_pool(item.zfs_names):
                    freed = context.pool.reclaimable(names)
                    context.pool.destroy_snapshots(names)
                    self.freed += freed
            except PoolError as error:
                self.failures.append(error)
                continue
            self.done.append(item)


@contextmanager
def _locks(context: Context, domain: str, uuid: str, wait: int | None) -> Iterator[None]:
    """Exclude other runs on the domain, and the replication of its snapshots.

    Raises:
        BusyError: another run works on it.
    """
    longest = context.config.settings(domain, uuid).wait if wait is None else wait
    with ExitStack() as stack:
        for name in (uuid, replication_lock_name(uuid)):
            lock = domain_lock(
                default_paths.LOCKS,
                domain,
                name,
                DELETING,
                wait=longest,
                interrupt=context.interrupt,
                can_wait=True,
            )
            stack.enter_context(lock)
        yield


def _deletions(items: Sequence[DeleteItem], pruned: PruneResult) -> tuple[Deletion, ...]:
    bundles = {
        f"{each.found.uuid}/{each.found.name}": each
        for each in pruned.decisions
        if each.found.kind is ItemKind.BUNDLE
    }
    found = (Deletion(item, bundles.get(item.reference)) for item in items)
    return tuple(each for each in found if each.item.zfs_names or each.bundle)


def _unchanged(deleted: Sequence[Deletion]) -> Iterator[RefusedError]:
    """An error for each item of which only a bundle was left, which stays."""
    for each in deleted:
        bundle = each.bundle
        if bundle is not None and bundle.action is PruneAction.KEEP and not each.item.zfs_names:
            yield RefusedError(each.item.name, f"its bundle stays: {bundle.reason}")
