"""Make the RAM image to resume a guest from, before the restore stops the guest."""

from __future__ import annotations

import secrets
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from snaporch.bundle.manifest import Part, Role
from snaporch.context import Context
from snaporch.errors import RefusedError, RunFailedError, UnavailableError
from snaporch.restore.plain_image import make_plain, resumes_plain
from snaporch.restore.plan_model import RestorePlan
from snaporch.restore.ram_from_pages import IMAGE_NAME, make_image
from snaporch.restore.safety_copy import safety_copy_bytes
from snaporch.restore.source import IncompleteError
from snaporch.zfs import PoolError


def with_ram_image(
    context: Context, plan: RestorePlan, *, safety: bool, alone: bool
) -> tuple[RestorePlan, str]:
    """Return the plan with the RAM image to resume from, and the name of the restore's run.

    It is made while the guest still runs, from pages or to spare the guest the decompressing. It
    lies in a partial bundle that the end of the restore or the next prune deletes.

    Args:
        safety: a safety copy of the disks will take room in the store.
        alone: no other RAM image will, be it of this guest as it is now or of its group.

    Raises:
        RefusedError, RunFailedError: the image cannot be made; nothing was touched.
    """
    run = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
    part = plan.manifest.part(Role.RAM) if plan.manifest is not None and plan.ram else None
    if part is None or plan.ram is None or plan.record.bundle is None:
        return plan, run
    uuid, thing = plan.record.uuid, plan.record.domain
    plain = alone and _pays_plain(context, plan, part, safety=safety)
    if plan.pages is None and not plain:
        return plan, run
    try:
        place = context.store.create(uuid, run).directory
    except UnavailableError:
        if plan.pages is not None:
            raise
        return plan, run
    image = place / IMAGE_NAME
    try:
        if plan.pages is not None:
            make_image(context, thing, Path(plan.record.bundle), part, image, plain=plain)
        elif not make_plain(context, thing, plan.ram, part, image):
            context.store.discard_partial(uuid, run)
            return plan, run
    except BaseException as error:
        context.store.discard_partial(uuid, run)
        if isinstance(error, IncompleteError):
            raise unusable_ram_error(error) from error
        if isinstance(error, OSError):
            raise RunFailedError(
                plan.thing, f"its RAM image could not be rebuilt ({error}); nothing was touched"
            ) from error
        raise
    return replace(plan, ram=image), run


def _pays_plain(context: Context, plan: RestorePlan, part: Part, *, safety: bool) -> bool:
    """Whether the image should be decompressed; nothing from elsewhere is put into the store."""
    if plan.domain is None or not plan.domain.active:
        return False  # it does not wait less for a plain image
    if plan.pages is None and context.store.root not in Path(plan.record.bundle or "").parents:
        return False
    try:
        needed = safety_copy_bytes(context.pool, plan.snapshots) if safety else 0
    except PoolError:
        return False
    return resumes_plain(context, part, needed)


def unusable_ram_error(error: IncompleteError) -> RefusedError:
    """Return the error for RAM that lacks pages or their file system."""
    step = error.step or "boot from the disks with --cold"
    return RefusedError(error.thing, error.reason, step)
