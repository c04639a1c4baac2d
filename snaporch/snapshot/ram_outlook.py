"""What is known of saving the RAM of guests before it is saved: for ``snapshot --dry-run``.

The forecast itself is made by :mod:`snaporch.snapshot.ram_forecast`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from snaporch.context import Context
from snaporch.errors import SnaporchError
from snaporch.model import DomainState, Level
from snaporch.snapshot.plan import Plan
from snaporch.snapshot.ram_forecast import RamForecast, RamSaveFacts, forecast_save
from snaporch.snapshot.strategies.ram_limits import PASSES, effective_rate
from snaporch.snapshot.strategies.vcpu_brake import steps

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class RamOutlook:
    """What is known of saving a guest's RAM."""

    ram_bytes: int
    """In use now."""
    changed: int | None
    """MiB of RAM that the guest changes a second; ``None`` if that could not be measured."""
    speed: float | None
    """MiB a second, as of its last RAM snapshot; ``None`` without one."""
    forecast: RamForecast | None
    """``None`` if one of the two is not known."""

    def as_json(self) -> dict[str, object]:
        """For ``--json``."""
        found = self.forecast
        return {
            "bytes": self.ram_bytes,
            "changed_mib": self.changed,
            "saved_mib": None if self.speed is None else round(self.speed, 1),
            "outcome": found.outcome.value if found else None,
            "seconds": round(found.seconds, 1) if found else None,
            "cpu_percent": found.percent if found else None,
        }


def ram_outlooks(context: Context, plans: Sequence[Plan]) -> dict[str, RamOutlook]:
    """Measure for a second how fast guests change their RAM, and forecast how saving it ends.

    Returns: by UUID, of the plans that save RAM of a running guest. A guest that has ended is
        missing.
    """
    running = [plan for plan in plans if _saves_ram(plan)]
    changed = context.hypervisor.dirty_rates([plan.facts.uuid for plan in running])
    found = {}
    for plan in running:
        with suppress(SnaporchError):
            found[plan.facts.uuid] = _outlook(context, plan, changed.get(plan.facts.uuid))
    return found


def _saves_ram(plan: Plan) -> bool:
    return plan.level is Level.RAM and plan.domain.state is DomainState.RUNNING


def _outlook(context: Context, plan: Plan, changed: int | None) -> RamOutlook:
    used = context.hypervisor.ram_in_use(plan.facts.uuid)
    speed = context.store.last_save_speed(plan.facts.uuid)
    mib_a_second = None if speed is None else speed / _MIB
    if changed is None or not mib_a_second or not used:
        return RamOutlook(used, changed, mib_a_second, None)
    settings = plan.settings
    facts = RamSaveFacts(
        ram=used / _MIB,
        changed=changed,
        speed=mib_a_second,
        rate=effective_rate(settings, used),
        rate_passes=PASSES,
        steps=tuple(steps(settings.vcpu_floor)) if plan.facts.vcpu_quotas else (),
        time_budget=settings.ram_time_budget,
        budget=settings.ram_budget_mib,
        aborts=settings.on_ram_budget == "abort",
    )
    return RamOutlook(used, changed, mib_a_second, forecast_save(facts))
