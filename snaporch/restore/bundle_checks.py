"""Whether the bundle that a restore needs is undamaged: all of it is read and compared.

This is the one check that :mod:`snaporch.restore.plan` does not make, because it takes long. Which
parts are damaged is found by ``damage_of`` in :mod:`snaporch.bundle.store`. That the bundle is
complete, and may be resumed, is checked by :mod:`snaporch.restore.ram_checks`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from snaporch.bundle.manifest import Manifest, Role
from snaporch.bundle.save_image import read_header
from snaporch.bundle.store import damage_of
from snaporch.context import Context
from snaporch.errors import RefusedError, SnaporchError
from snaporch.restore.definition_checks import check_ram_definition
from snaporch.restore.disk_checks import check_named
from snaporch.restore.plan_model import RestorePlan

_PUT_BACK = (Role.INACTIVE_XML, Role.NVRAM, Role.TPM)


def check_bundle(
    context: Context, plan: RestorePlan, *, despite_damage: bool = False
) -> RestorePlan:
    """Read the whole bundle and compare it with its manifest, before anything is changed.

    Args:
        despite_damage: a damaged part may stay on the host as it is now.

    Returns: the plan, with the damaged parts, which are not put back.

    Raises:
        RefusedError: a part that the restore needs is damaged.
    """
    if plan.manifest is None or plan.record.bundle is None:
        return plan
    context.progress.step(plan.record.domain, "checking the bundle's SHA-256")
    on_read = partial(context.progress.amount, plan.record.domain)
    damages = damage_of(Path(plan.record.bundle), on_read)
    try:
        if plan.ram is not None:
            for damage in damages.values():
                raise damage
            _check_ram(plan, Path(plan.record.bundle), plan.manifest)
    except SnaporchError as error:
        raise RefusedError(error.thing, error.reason, "boot from the disks with --cold") from error
    wanted = {part.name for part in plan.parts if part.role in _PUT_BACK}
    if (needed := sorted(wanted & damages.keys())) and not despite_damage:
        damage = damages[needed[0]]
        raise RefusedError(
            damage.thing,
            damage.reason,
            "to restore the disks all the same, and leave this part as it is on the host: "
            "--despite-damage",
        )
    for damage in damages.values():
        context.progress.note(plan.record.domain, f"{damage}; it is not put back")
    for name, why in plan.unfit.items():
        context.progress.note(plan.record.domain, f"{why.reason}; its {name} stays as it is")
    checked = replace(plan, damaged=frozenset(damages))
    current = plan.domain.inactive_xml if plan.domain else None
    if plan.boot and current is None and checked.text(Role.INACTIVE_XML) is None:
        raise RefusedError(
            plan.record.domain, "the definition in its bundle is damaged", "define it by hand first"
        )
    if plan.ram is None and plan.domain is not None and checked.text(Role.INACTIVE_XML) is None:
        check_named(plan.thing, plan.manifest, plan.domain)
    return checked


def _check_ram(plan: RestorePlan, directory: Path, manifest: Manifest) -> None:
    assert plan.ram is not None
    read_header(plan.ram)
    if not plan.undoes:  # a safety copy never was on another host
        check_ram_definition(plan.thing, directory, manifest)
