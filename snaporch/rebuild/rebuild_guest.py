"""Rebuild one guest: its data, what surrounds it, the restore, and what is set afterwards.

What prevents it is checked by :mod:`snaporch.rebuild.plan_guest`.

The fence of a guest that comes back is removed when all of its data is here and the restore's own
bar holds: at no moment can anything but the restore start it. Directly before, the replica is asked
once more whether the guest has ended there.

The guest's lock is held for all of it. What is set afterwards may fail without the guest: then the
same command sets it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from snaporch.bundle.age import Identity
from snaporch.catalog.records import ENDED
from snaporch.context import Context
from snaporch.errors import InterruptedRunError, RefusedError, SnaporchError
from snaporch.rebuild.bring_back import bring_back, guest_lock, policies_of, set_policies
from snaporch.rebuild.local_datasets import Local
from snaporch.rebuild.plan import RebuildPlan
from snaporch.rebuild.replica_source import Source
from snaporch.rebuild.stages import Stage, set_stage
from snaporch.rebuild.surroundings import Surroundings, attempt, define_objects, set_autostart
from snaporch.restore.confirm_and_restore import RestoreRequest, restore_under_lock
from snaporch.restore.host_requirements import MissingObjectError
from snaporch.restore.run import Restored
from snaporch.zfs import PREFIX


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The result of a rebuild whose data came back."""

    restored: Restored | None
    """None if the guest was not to be restored, or that failed."""
    notes: tuple[str, ...]
    """What did not come back, and is not needed to run the guest."""
    failures: list[SnaporchError] = field(default_factory=list)


def rebuild_guest(
    context: Context,
    source: Source,
    local: Local,
    plan: RebuildPlan,
    surroundings: Surroundings,
    runs: Sequence[str],
    policies: Mapping[str, str],
    *,
    plan_again: Callable[[], RebuildPlan],
    cold: bool,
    restores: bool,
    accepted: tuple[str, ...] = (),
    identity: Identity | None = None,
) -> Rebuilt:
    """Rebuild a guest.

    Args:
        context: of this host.
        source: the replica.
        local: the datasets and networks of this host.
        plan: what comes back.
        surroundings: what of its surroundings comes back.
        runs: those whose bundles come.
        policies: of the datasets, as they were shown.
        plan_again: makes the plan under the lock, of what the replica has by then: since it was
            shown, the guest may have come back, or may run there again.
        cold: the guest boots from its disks.
        restores: otherwise only data comes back, and nothing is defined.
        accepted: what the guest may have of this host, although it comes from another one.
        identity: decrypts bundles.

    Raises:
        SnaporchError: the data did not come back; the same call continues.
        RefusedError: something else would come back than was shown.
    """
    with guest_lock(context, plan):
        if plan_again() != plan:
            reason = "is no longer as it was shown"
            raise RefusedError(plan.thing, reason, "run this command again, and read what it shows")
        left_out = bring_back(context, source, local, plan, runs, surroundings.settings, identity)
        notes = (*surroundings.refused, *left_out)
        if not restores:
            set_policies(context, policies)
            set_stage(context, plan, None)
            return Rebuilt(None, (*notes, *_not_defined(surroundings)))
        failures = define_objects(context, surroundings)
        name = f"{plan.manifest.uuid}@{plan.name}"
        request = RestoreRequest(name, cold=cold, accepted=accepted)
        fences = replace(context.fences, lifted=plan.manifest.uuid)
        lift = partial(_lift_fence, context, plan, plan_again)
        try:
            restored = restore_under_lock(
                replace(context, fences=fences), request, plan.manifest.run, lift
            )
        except InterruptedRunError:
            raise
        except MissingObjectError as error:
            step = f"{error.step}; then run the same rebuild again"
            again = RefusedError(error.thing, error.reason, step)
            return Rebuilt(None, notes, [*failures, again])
        except SnaporchError as error:
            return Rebuilt(None, notes, [*failures, error])
        set_stage(context, plan, Stage.FINISH)
        return Rebuilt(restored, notes, [*failures, *_finish(context, plan, policies)])


def _lift_fence(context: Context, plan: RebuildPlan, plan_again: Callable[[], RebuildPlan]) -> None:
    """Remove the fence of a guest that cannot be started, and the marks of its former ends here.

    Raises:
        RefusedError: it may run where the copies come from.
    """
    if context.fences.find(plan.manifest.uuid) is None:
        return
    plan_again()
    own = context.pool.snapshots([each.dataset for each in plan.incoming])
    ended = [each.full_name for each in own if ENDED in each.properties]
    context.pool.clear_properties(ended, [PREFIX + ENDED])
    context.fences.remove(plan.manifest.uuid)


def finish(context: Context, source: Source, plan: RebuildPlan) -> list[SnaporchError]:
    """Set policies and autostart of a guest that was rebuilt before.

    Returns:
        What failed; the same call tries it again.
    """
    with guest_lock(context, plan):
        return _finish(context, plan, policies_of(source, plan))


def _finish(
    context: Context, plan: RebuildPlan, policies: Mapping[str, str]
) -> list[SnaporchError]:
    failures: list[SnaporchError] = []
    attempt(failures, partial(set_policies, context, policies))
    attempt(failures, partial(set_autostart, context, plan.manifest))
    if not failures:
        attempt(failures, partial(set_stage, context, plan, None))
    return failures


def _not_defined(surroundings: Surroundings) -> list[str]:
    """What is not set because only data comes back."""
    objects = [f"network {made.name}" for made, _ in surroundings.networks]
    objects += [f"storage pool {made.name}" for made, _ in surroundings.pools]
    found = [f"{each} was not defined, because of --no-restore" for each in objects]
    boots = "it started at boot, and does not here, because of --no-restore: virsh autostart"
    return [*found, *([boots] if surroundings.starts_at_boot else [])]
