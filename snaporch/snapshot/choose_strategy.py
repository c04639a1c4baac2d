"""Choose the strategy of a run: the requested one, or the best that is possible and allowed.

Overlays are avoided (``avoid_overlays``) if this QEMU may corrupt what is written to them
(``risks_overlays`` in :mod:`snaporch.known_faults`), or if another program snapshots the disks
(:mod:`snaporch.catalog.unfrozen_snapshots`). :mod:`snaporch.snapshot.plan` finds both out. Blockers
are found by :mod:`snaporch.hypervisor.definition_blockers` and
:mod:`snaporch.snapshot.storage_blockers`.

:func:`lower_level` decides whether a run that cannot reach its level fails, or takes a lower one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from snaporch.config import DomainSettings
from snaporch.errors import RefusedError
from snaporch.hypervisor import Blocker
from snaporch.model import Domain, DomainState, Level, Strategy


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """A strategy, and the reason if its level is lower than the requested one."""

    strategy: Strategy
    downgrade: str = ""


def choose_strategy(
    domain: Domain,
    settings: DomainSettings,
    blockers: Sequence[Blocker],
    level: str | None = None,
    *,
    at_once: bool = True,
    avoid_overlays: bool = False,
) -> StrategyChoice:
    """Choose the strategy for a domain.

    Args:
        domain: the domain as it is now.
        settings: its configuration.
        blockers: the reasons that rule out strategies.
        level: overrides the configured level.
        at_once: the run takes the snapshots, and need not wait for another program.
        avoid_overlays: the emulator could corrupt what the guest writes to an overlay, or another
            program could snapshot the disks while overlays are committed.

    Raises:
        RefusedError: the level is not possible and no lower one is allowed; names every reason.
    """
    if not domain.active:
        return StrategyChoice(Strategy.OFF)
    wanted = level or settings.level
    if wanted == "off":
        raise RefusedError(
            domain.name, "it runs, and its level is off: it is snapshotted only while it is off"
        )
    asked = Level.RAM if wanted == "auto" else Level(wanted)
    short = avoid_overlays or at_once
    found = _first_free(_ways(domain, settings, asked, short=short), blockers)
    if found is not None:
        return StrategyChoice(found)
    reasons = _reasons(_ways(domain, settings, asked, short=short), blockers)
    if (lower := lower_level(settings, asked)) is not None:
        found = _first_free(_ways(domain, settings, lower, short=short), blockers)
        if found is not None:
            return StrategyChoice(found, f"no {asked} snapshot ({reasons}): taking {lower} instead")
    step = _first_step(_ways(domain, settings, asked, short=short), blockers)
    raise RefusedError(domain.name, f"no {asked} snapshot is possible: {reasons}", step)


def may_take_overlays(domain: Domain, settings: DomainSettings, level: str | None = None) -> bool:
    """Whether overlays are a candidate for the domain, before any blocker is considered."""
    if not domain.active or (level or settings.level) not in ("auto", Level.RAM):
        return False
    return Strategy.OVERLAY in _ways(domain, settings, Level.RAM, short=True)


def lower_level(settings: DomainSettings, level: Level) -> Level | None:
    """The level to take if ``level`` cannot be reached, as ``quiesced`` if no agent answers.

    It is known when the run is planned (a blocker), or when the guest cannot be frozen.

    Returns: the level of ``on_unavailable``; ``None`` if that is ``fail``, or not lower: then the
        run fails.
    """
    if settings.on_unavailable == "fail":
        return None
    lower = Level(settings.on_unavailable)
    return lower if is_lower(lower, level) else None


def is_lower(level: Level, than: Level) -> bool:
    """Whether ``level`` is less consistent than another."""
    order = list(Level)
    return order.index(level) > order.index(than)


def _ways(domain: Domain, settings: DomainSettings, level: Level, *, short: bool) -> list[Strategy]:
    """Return the strategies for a level, the preferred one first."""
    if level is not Level.RAM:
        return [Strategy(level.value)]
    if domain.state is DomainState.PAUSED:
        return [Strategy.MANUAL]
    if settings.ram_strategy != "auto":
        return [Strategy(settings.ram_strategy)]
    ways = [Strategy.MANUAL, Strategy.OVERLAY]
    return ways if short else ways[::-1]


def _first_free(ways: Iterable[Strategy], blockers: Sequence[Blocker]) -> Strategy | None:
    blocked = {strategy for blocker in blockers for strategy in blocker.strategies}
    return next((way for way in ways if way not in blocked), None)


def _against(ways: Sequence[Strategy], blockers: Sequence[Blocker]) -> list[Blocker]:
    return [blocker for blocker in blockers if blocker.strategies & set(ways)]


def _reasons(ways: Sequence[Strategy], blockers: Sequence[Blocker]) -> str:
    return "; ".join(blocker.reason for blocker in _against(ways, blockers))


def _first_step(ways: Sequence[Strategy], blockers: Sequence[Blocker]) -> str:
    return next((blocker.step for blocker in _against(ways, blockers)), "")
