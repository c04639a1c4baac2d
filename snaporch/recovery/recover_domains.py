"""What ``snaporch recover`` does for each domain: find the unfinished runs, and recover them.

One run is recovered by :mod:`snaporch.recovery.recover_runs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from snaporch import default_paths
from snaporch.context import Context
from snaporch.errors import AttentionError
from snaporch.journal import UnreadableJournal, list_journals, other_journals_of
from snaporch.locks import RECOVERING, domain_lock
from snaporch.recovery.decision import UserDecision
from snaporch.recovery.recover_runs import QUARANTINE_STEP, preview, recover
from snaporch.recovery.result import Effect, RecoveryResult


@dataclass(frozen=True, slots=True)
class RecoverRequest:
    """The options of ``snaporch recover``."""

    wait: int = 0
    """Seconds to wait for a domain's lock."""
    dry_run: bool = False
    autostart: bool = False
    """Start the guests that libvirt starts at boot and could not start."""
    take: UserDecision | None = None
    """Which image the admin chose for undecided disks."""


def unfinished(
    context: Context, domain: str | None = None
) -> tuple[dict[str, str], list[AttentionError]]:
    """Find the domains with unfinished runs.

    Args:
        domain: only this one, by name or UUID; all when ``None``.

    Returns: names by UUID, and an error for each journal that cannot be read.

    Raises:
        NotFoundError: there is no such domain.
    """
    names: dict[str, str] = {}
    errors: list[AttentionError] = []
    for journal in list_journals(context.config.paths.journal, sweep=False):
        if isinstance(journal, UnreadableJournal):
            error = journal.error
            errors.append(AttentionError(error.thing, error.reason, error.step))
        else:
            names[journal.uuid] = journal.domain
    if domain is not None:
        names = {uuid: name for uuid, name in names.items() if domain in (uuid, name)}
        if not names:
            context.hypervisor.domain(domain)  # a misspelt name is an error
    return names, errors


def recover_domain(
    context: Context, uuid: str, name: str, request: RecoverRequest
) -> Iterator[RecoveryResult]:
    """Recover one domain's unfinished runs under its lock; yields each result.

    Raises:
        SnaporchError: a run could not be recovered, or a guest could not be started.
    """
    with domain_lock(
        default_paths.LOCKS,
        name,
        uuid,
        RECOVERING,
        wait=request.wait,
        interrupt=context.interrupt,
        can_wait=True,
    ):
        # the recovery of a restore leaves its guest in the state that the restore asked for
        may_start = request.autostart and not other_journals_of(context.config.paths.journal, uuid)
        yield from (preview if request.dry_run else recover)(context, uuid, request.take)
        if may_start and not request.dry_run and _start_at_boot(context, uuid):
            yield Effect.STARTED.of()


def needs_attention(name: str, result: RecoveryResult) -> AttentionError | None:
    """The error to report for a result that leaves work for the admin, if it does."""
    if result.effect is not Effect.QUARANTINED:
        return None
    reason = "the overlay in quarantine has writes that its base may lack"
    return AttentionError(name, reason, QUARANTINE_STEP)


def _start_at_boot(context: Context, uuid: str) -> bool:
    """Start a guest that libvirt starts at boot, and that the libvirt hook kept off."""
    domain = context.hypervisor.find(uuid)
    if domain is None or domain.active or not context.hypervisor.starts_at_boot(uuid):
        return False
    if context.fences.find(uuid) is not None:
        return False
    context.hypervisor.start(uuid, paused=False)
    return True
