"""A guest that a failover has ended here comes back: proof that it has ended there, and increments.

Its fence is lifted only for its last snapshot there, which was marked when it had ended there.
Only what is newer than the datasets of this host has to come. Encrypted copies come whole: a raw
increment into the dataset that the copy came from can corrupt it, and no version of OpenZFS is
known to be safe (openzfs#10523, #16351).
"""

from __future__ import annotations

import shlex
from dataclasses import replace

from snaporch.catalog.records import ENDED, ENDED_HERE
from snaporch.errors import RefusedError
from snaporch.fence import Fence
from snaporch.rebuild.local_checks import move_away
from snaporch.rebuild.local_datasets import Local
from snaporch.rebuild.plan import Copies, Incoming, RebuildPlan
from snaporch.replication.resume_transfer import NO_TOKEN


def plan_on_fenced(local: Local, plan: RebuildPlan, copies: Copies, fence: Fence) -> RebuildPlan:
    """The plan for a guest with a fence: only increments come where that is possible.

    Args:
        local: the datasets of this host.
        plan: as for a guest that this host has lost.
        copies: what the replica has.
        fence: the guest's.

    Raises:
        RefusedError: it may run elsewhere, or a dataset here has data that is not there.
    """
    if reason := doubt(plan, copies, fence):
        raise RefusedError(plan.thing, f"{fence.reason}; {reason}", fence.step)
    incoming = tuple(_on_base(local, each, copies, fence) for each in plan.incoming)
    return replace(plan, incoming=incoming)


def doubt(plan: RebuildPlan, copies: Copies, fence: Fence) -> str:
    """Why it is not proven that the guest has ended where the copies come from; empty if it is.

    Args:
        plan: with the snapshot that would come back.
        copies: what the replica has.
        fence: of the guest here.
    """
    for each in plan.incoming:
        last = each.snapshots[-1]
        newest = copies[each.copy][-1]
        if each.is_pages:
            continue
        if last.properties.get(ENDED) != ENDED_HERE:
            return f"@{plan.name} is not its last snapshot there: fail it over there"
        if newest.guid != last.guid:
            return f"{each.copy}@{newest.name} on the replica is newer than @{plan.name}"
    if plan.manifest.run == fence.run or plan.manifest.created <= fence.moment:
        return f"@{plan.name} is older than its fence, so it has not ended there since"
    return ""


def _on_base(local: Local, each: Incoming, copies: Copies, fence: Fence) -> Incoming:
    """The dataset with the snapshot of this host on which its increment begins, if it exists.

    Whether the dataset was written to since then is checked by :mod:`snaporch.rebuild.bring_back`,
    before anything is received.

    Raises:
        RefusedError: the increment is not possible.
    """
    state = local.state(each.dataset)
    if not state.exists or not state.snapshots:
        return each
    wanted = each.snapshots[-1]
    before = [e for e in state.snapshots if e.guid != wanted.guid]
    has_come = len(before) < len(state.snapshots)
    # Also if the clocks of both hosts differ: what came back came after the fence.
    seen = [number for number, e in enumerate(state.snapshots) if fence.has_seen(e)]
    since = state.snapshots[seen[-1] + 1 :] if seen else state.snapshots
    if has_come and wanted.guid not in {e.guid for e in since}:
        then = state.snapshots[seen[-1]].name
        reason = f"@{wanted.name} is not newer here than @{then}, its fence's"
        raise RefusedError(each.dataset, reason, fence.step)
    if has_come:  # a restore, or another program, may have taken newer snapshots here by now
        unmarked = {e.guid for e in state.snapshots if "run" not in e.properties}
        came = tuple(e for e in each.snapshots if e.guid in unmarked or e.guid == wanted.guid)
        return replace(each, snapshots=came, base=wanted.name)
    again = _all_of_it(each)
    there = {e.guid: e.name for e in copies[each.copy]}
    base = next((e for e in reversed(before) if e.guid in there), None)
    if base is None:
        raise RefusedError(each.dataset, "exists, and has no snapshot that the replica has", again)
    if each.raw:
        reason = "is encrypted, and an increment into it could corrupt it (openzfs#16351)"
        raise RefusedError(each.dataset, reason, again)
    if state.token == NO_TOKEN and base != before[-1]:
        reason = f"has newer snapshots than @{base.name}, the newest one that the replica has, too"
        raise RefusedError(each.dataset, reason, way_back(each, base.full_name))
    return replace(each, snapshots=(wanted,), base=there[base.guid])


def way_back(each: Incoming, base: str) -> str:
    """What to do with a dataset that was changed after the snapshot ``base`` of it."""
    back = shlex.join(["zfs", "rollback", "-r", base])
    return f"to discard what was changed here since then: {back}; {_all_of_it(each)}"


def _all_of_it(each: Incoming) -> str:
    away = move_away(each.dataset, each.kind)
    return f"to have all of it sent: {away}, and run this command again"
