"""Bringing a guest back to its base images, whatever happened.

The same code ends a run that failed and mends one that was killed. It goes by what it sees: live
and inactive XML, block jobs, the domain's state, the files. The journal's facts only say which
overlays and snapshots were the run's own.
"""

from __future__ import annotations

from pathlib import Path

from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_fixed

from snaporch.errors import AttentionError, SnaporchError
from snaporch.hypervisor import OverlayDisk
from snaporch.model import Domain, DomainState
from snaporch.run import overlays
from snaporch.run.context import Context
from snaporch.run.journal import Facts, read_journals

_JOB_SECONDS = 120
_JOB_POLL = 0.2
_OURS = ("snapshot", "dump", "save")
"""libvirt's names for the job of an external snapshot with memory."""


def settle(context: Context, facts: Facts, *, keep_snapshots: bool) -> list[str]:
    """Undo what a run left; what was done, in words.

    Args:
        keep_snapshots: the run had taken all its ZFS snapshots: they stay, as level ``crash``.

    Raises:
        AttentionError: safety cannot be proven; everything was kept.
    """
    try:
        done = _settle_guest(context, facts)
        remove_unused(context, facts)
    except AttentionError:
        raise
    except (SnaporchError, OSError) as error:
        raise AttentionError(
            facts.domain,
            f"could not be brought back to its base images ({error})",
            f"nothing was removed; mend the cause and run: snaporch recover {facts.uuid}",
        ) from error
    if not keep_snapshots:
        done += _destroy_snapshots(context, facts)
    context.store.discard_partial(facts.uuid, facts.run)
    Path(facts.ram_pipe).unlink(missing_ok=True)
    return done


def _settle_guest(context: Context, facts: Facts) -> list[str]:
    hypervisor = context.hypervisor
    domain = hypervisor.find(facts.uuid)
    if domain is None:
        return _settle_gone(facts)
    if not domain.active:
        return _settle_off(context, domain, facts)
    _end_job(context, facts)
    done = []
    if facts.was is DomainState.RUNNING and hypervisor.paused_by(facts.uuid) not in (None, "user"):
        hypervisor.resume(facts.uuid)
        done.append("resumed the guest")
    live, _ = hypervisor.sources(facts.uuid)
    switched = [disk for disk in facts.overlays if (live or {}).get(disk.target) == disk.overlay]
    if switched:
        hypervisor.commit(facts.uuid, switched, lambda: None)
        done.append("committed " + ", ".join(disk.target for disk in switched))
    hypervisor.rebase_inactive(facts.uuid, facts.overlays)
    return done


def _end_job(context: Context, facts: Facts) -> None:
    """Wait until libvirt has given up a snapshot of ours; another's job is not ours to abort."""

    def busy() -> str | None:
        job = context.hypervisor.busy_with(facts.uuid)
        if job is not None and job.startswith(_OURS):
            context.hypervisor.abort_job(facts.uuid)
        return job

    patience = Retrying(
        stop=stop_after_delay(_JOB_SECONDS),
        wait=wait_fixed(_JOB_POLL),
        retry=retry_if_result(lambda job: job is not None),
    )
    try:
        patience(busy)
    except RetryError as error:
        raise AttentionError(
            facts.domain,
            f"libvirt is still busy with it ({error.last_attempt.result()})",
            f"when that has ended, run: snaporch recover {facts.uuid}",
        ) from error


def _settle_off(context: Context, domain: Domain, facts: Facts) -> list[str]:
    """The emulator is gone: an overlay that the definition names holds the guest's last writes."""
    _, inactive = context.hypervisor.sources(domain.uuid)
    switched = [
        disk for disk in facts.overlays if (inactive or {}).get(disk.target) == disk.overlay
    ]
    for disk in switched:
        overlays.commit_offline(disk)
    context.hypervisor.rebase_inactive(domain.uuid, facts.overlays)
    return ["committed offline " + ", ".join(disk.target for disk in switched)] if switched else []


def _settle_gone(facts: Facts) -> list[str]:
    written = [disk for disk in facts.overlays if _written(disk)]
    if written:
        raise AttentionError(
            facts.domain,
            "the domain is gone, and overlays hold its last writes: "
            + ", ".join(disk.overlay for disk in written),
            "commit each with `qemu-img commit`, or delete it if you do not want them",
        )
    return []


def _written(disk: OverlayDisk) -> bool:
    return Path(disk.overlay).exists() and overlays.holds_writes(Path(disk.overlay))


def remove_unused(context: Context, facts: Facts) -> None:
    """Remove the run's overlays after seeing that neither live nor inactive XML names one.

    Raises:
        AttentionError: one is still in use.
    """
    used = set[str]()
    for xml in context.hypervisor.sources(facts.uuid):
        used.update((xml or {}).values())
    still = [disk.overlay for disk in facts.overlays if disk.overlay in used]
    if still:
        raise AttentionError(
            facts.domain,
            f"still uses {', '.join(still)}",
            f"nothing was removed; run: snaporch recover {facts.uuid}",
        )
    overlays.remove(Path(facts.overlay_dir), facts.overlays)


def _destroy_snapshots(context: Context, facts: Facts) -> list[str]:
    """Snapshots that carry this run's mark; pool by pool, as they were taken."""
    marked = own_snapshots(context, facts)
    pools: dict[str, list[str]] = {}
    for name in marked:
        pools.setdefault(name.split("/", 1)[0].split("@", 1)[0], []).append(name)
    for names in pools.values():
        context.pool.destroy_snapshots(names)
    return [f"destroyed {name}" for name in marked]


def own_snapshots(context: Context, facts: Facts) -> list[str]:
    """Full names of the snapshots that this run took."""
    return [
        found.full_name
        for found in context.pool.snapshots(facts.datasets)
        if found.name == facts.snapshot and found.properties.get("run") == facts.run
    ]


def recover(context: Context, uuid: str | None = None) -> list[str]:
    """Settle the runs that were killed; the caller holds the lock of the domain ``uuid``.

    Raises:
        AttentionError: one cannot be settled.
    """
    done: list[str] = []
    for journal in read_journals(context.config.paths.journal):
        facts = journal.facts
        if uuid is not None and facts.uuid != uuid:
            continue
        taken = len(own_snapshots(context, facts)) == len(facts.datasets)
        texts = settle(context, facts, keep_snapshots=taken)
        done.extend(f"{facts.domain}: {text}" for text in texts)
        journal.path.unlink()
        done.append(f"{facts.domain}: settled the run {facts.run}, which had been cut short")
    return done
