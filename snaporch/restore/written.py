"""Whether a guest has written to its disks since they were rolled back."""

from __future__ import annotations

from snaporch.restore.journal import RestoreFacts
from snaporch.restore.plan import SAFETY_PREFIX
from snaporch.run.context import Context

_PROBE = f"{SAFETY_PREFIX}probe-"


def written_now(context: Context, facts: RestoreFacts, *, probing: bool = True) -> dict[str, int]:
    """Bytes that each dataset has got since its snapshot, if that is still there.

    Not all of them are the guest's: a rollback itself leaves some, as does mounting.

    Args:
        probing: take a snapshot for a moment, which has ZFS write out what it holds in memory.
            Without, the figures are some seconds old.

    Raises:
        PoolError: ZFS does not say.
    """
    pool = context.pool
    probes = [f"{target.dataset}@{_PROBE}{facts.run}" for target in facts.targets]
    for probe in probes if probing else ():
        pool.destroy_snapshots([probe])  # of a restore that was killed just here
        pool.snapshot([probe], {})
        pool.destroy_snapshots([probe])
    there = {each.full_name for each in pool.snapshots(list(facts.datasets))}
    names = [target.full_name for target in facts.targets if target.full_name in there]
    return {name.partition("@")[0]: pool.written_since(name) for name in names}
