"""The scenes: every strategy, every point at which a guest is in another state, every act.

What is left out, and where a run ends otherwise than acts of that kind have it end, is said here.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from snaporch.model import Strategy

SMALL, LARGE, TALKER = "small", "large", "talker"
"""Guests."""


class Act(StrEnum):
    """What another program does to the guest."""

    SHUTDOWN = "shutdown"
    RESET = "reset"
    RESTART = "destroy-and-start"
    SUSPEND = "suspend"
    MANAGED_SAVE = "managedsave"
    JOB_ABORT = "domjobabort"
    SNAPSHOT = "snapshot"
    BACKUP = "backup"
    BLOCK_COPY = "blockcopy"
    PLUG = "hot-plug"
    UNPLUG = "unplug"
    RESIZE = "resize"
    DEFINE = "define"
    FREEZE = "freeze"
    LOCK = "image-lock"
    LIBVIRTD = "libvirtd-restart"


class Point(StrEnum):
    """Where the run is stopped meanwhile, in the form of ``stopping.py``."""

    PLANNED = "before:prepare"
    PREPARED = "before:freeze"
    SAVING = "during:ram"
    FROZEN = "after:freeze"
    SNAPSHOTTED = "after:pool-snapshot"
    PIVOTING = "ahead:pivoting"
    RELEASED = "before:seal"
    """From here on the guest is not needed any more."""


_RAM = (Strategy.OVERLAY, Strategy.MANUAL)
_STILL = (Strategy.MANUAL, Strategy.PAUSED)
_HELD = frozenset(Strategy) - {Strategy.CRASH, Strategy.OFF}
_WINDOW = (Point.FROZEN, Point.SNAPSHOTTED)
_ALL = frozenset(Strategy)
_EVER = frozenset(Point)
_ANY = frozenset(Act)
_ITS_OWN = {Act.SNAPSHOT, Act.BACKUP, Act.BLOCK_COPY}
"""Jobs and images of other programs on a disk."""


@dataclass(frozen=True, order=True)
class Case:
    """One act at one point of one run."""

    strategy: Strategy
    point: Point
    act: Act

    def __str__(self) -> str:
        return f"{self.strategy}/{self.point}/{self.act}"


@dataclass(frozen=True)
class Rows:
    """Cases that have something in common."""

    strategies: Collection[Strategy]
    points: Collection[Point]
    acts: Collection[Act]
    why: str

    def __contains__(self, case: Case) -> bool:
        chosen = case.strategy in self.strategies and case.point in self.points
        return chosen and case.act in self.acts

    def __str__(self) -> str:
        chosen = ((self.strategies, _ALL), (self.points, _EVER), (self.acts, _ANY))
        return " / ".join("any" if some == whole else _list(some) for some, whole in chosen)


def _list(some: Collection[str]) -> str:
    return ", ".join(sorted(some))


LEFT_OUT = (
    Rows(_ALL - {*_RAM}, {Point.SAVING}, _ANY, "no RAM is saved"),
    Rows(_ALL - {Strategy.OVERLAY}, {Point.PIVOTING}, _ANY, "nothing is committed"),
    Rows({Strategy.CRASH, Strategy.OFF}, {Point.FROZEN}, _ANY, "nothing is frozen"),
    Rows(_ALL, _EVER - {Point.SAVING}, {Act.JOB_ABORT}, "there is no job"),
    Rows(
        _RAM,
        {Point.SAVING},
        _ANY - {Act.SHUTDOWN, Act.RESTART, Act.SUSPEND, Act.JOB_ABORT, Act.LIBVIRTD},
        "libvirt has it wait until RAM is saved",
    ),
    Rows(
        {Strategy.OVERLAY},
        {Point.PIVOTING},
        {*_ITS_OWN, Act.MANAGED_SAVE, Act.UNPLUG, Act.RESIZE},
        "libvirt refuses it beside a block job",
    ),
    Rows(
        {Strategy.OFF},
        _EVER,
        _ANY - {Act.RESTART, Act.PLUG, Act.UNPLUG, Act.DEFINE, Act.LOCK, Act.LIBVIRTD},
        "it is done to a guest that runs",
    ),
    Rows(
        {Strategy.MANUAL},
        _WINDOW,
        {Act.MANAGED_SAVE, Act.BACKUP, Act.BLOCK_COPY, Act.RESIZE},
        "QEMU refuses it, for its images are inactive once RAM is saved",
    ),
    Rows(_STILL, _WINDOW, {Act.SUSPEND}, "it is paused, and libvirt knows of one pause only"),
    Rows(_RAM, _EVER, {Act.FREEZE}, "the test's guest with an agent has too much RAM for the lab"),
    Rows({Strategy.PAUSED}, _WINDOW, {Act.FREEZE}, "no agent answers in a paused guest"),
    Rows({Strategy.QUIESCED}, _WINDOW, {Act.FREEZE}, "it is frozen"),
    Rows(
        _ALL - {Strategy.OFF, Strategy.MANUAL}, _EVER, {Act.LOCK}, "the guest's QEMU has the locks"
    ),
    Rows({Strategy.MANUAL}, _EVER - {*_WINDOW}, {Act.LOCK}, "the guest's QEMU has the locks"),
)
"""Combinations that there are not, and why."""

_UNFIT = {
    Act.SHUTDOWN,
    Act.RESTART,
    Act.MANAGED_SAVE,
    Act.SNAPSHOT,
    Act.PLUG,
    Act.UNPLUG,
    Act.DEFINE,
}
"""After which the guest is not what was planned."""

_ENDED = {Act.SHUTDOWN, Act.RESTART, Act.MANAGED_SAVE}
"""After which there is no emulator, or another."""
ENDS = (
    (Rows(_ALL, {Point.PLANNED}, {Act.LIBVIRTD}, "as it comes"), (0, 5, 7, 8)),
    (Rows(_ALL, {Point.SAVING}, {Act.LIBVIRTD}, "undone"), (8, 9)),
    (Rows(_ALL, _EVER, {Act.LIBVIRTD}, "as it comes"), (0, 8, 9)),
    (Rows(_ALL, {Point.PLANNED}, _UNFIT | {Act.SUSPEND}, "refused"), (5,)),
    (Rows(_RAM, {Point.PLANNED}, {Act.BACKUP}, "refused"), (5,)),
    (Rows({Strategy.QUIESCED}, {Point.PLANNED}, {Act.FREEZE}, "refused"), (5,)),
    (Rows({Strategy.QUIESCED}, {Point.PLANNED}, {Act.RESET}, "its agent may be back"), (0, 5)),
    (Rows({Strategy.QUIESCED}, _WINDOW, {Act.RESET, Act.SUSPEND}, "no agent thaws it yet"), (9,)),
    (Rows({Strategy.QUIESCED}, _WINDOW, {Act.MANAGED_SAVE}, "saved frozen"), (9,)),
    (Rows({Strategy.OVERLAY}, _WINDOW, _ITS_OWN, "for a human to end"), (9,)),
    (Rows({Strategy.OVERLAY}, _WINDOW, {Act.UNPLUG}, "AppArmor denies it its bases then"), (9,)),
    (Rows({Strategy.OVERLAY}, {Point.PIVOTING}, _ENDED, "may be for a human to decide"), (8, 9)),
    (Rows(_ALL, {Point.PREPARED, Point.FROZEN}, _UNFIT, "undone"), (8,)),
    (Rows({Strategy.QUIESCED}, {Point.PREPARED}, {Act.RESET, Act.FREEZE}, "undone"), (8,)),
    (Rows(_HELD, {Point.PREPARED}, {Act.SUSPEND}, "undone"), (8,)),
    (Rows(_RAM, {Point.PLANNED, Point.PREPARED}, _ITS_OWN, "no RAM beside a job"), (8,)),
    (Rows(_ALL, {Point.SAVING}, _ENDED | {Act.JOB_ABORT}, "undone"), (8,)),
    (Rows(_STILL, {Point.SNAPSHOTTED}, {Act.RESTART}, "it runs again, as it should"), (0,)),
    (Rows(_HELD, {Point.SNAPSHOTTED}, _ENDED, "nothing to release"), (8,)),
)
"""With which exit status a run ends; the first that holds the case. All others end with 0."""


def cases() -> list[Case]:
    """All that there are, those of one guest together."""
    kept = [case for case in _combinations() if not any(case in rows for rows in LEFT_OUT)]
    return sorted(kept, key=guest_for)


def _combinations() -> list[Case]:
    return [Case(way, point, act) for way in Strategy for point in Point for act in Act]


def void() -> list[Rows]:
    """Rows without a case."""
    return [
        rows
        for some, rest in ((LEFT_OUT, _combinations()), ([rows for rows, _ in ENDS], cases()))
        for rows in some
        if not any(case in rows for case in rest)
    ]


def guest_for(case: Case) -> str:
    """The guest that it takes: with an agent, or with more RAM than the pipes between us hold."""
    if case.strategy is Strategy.QUIESCED or case.act is Act.FREEZE:
        return TALKER
    return LARGE if case.point is Point.SAVING else SMALL


def statuses(case: Case) -> tuple[int, ...]:
    """The exit statuses that are allowed."""
    return next((found for rows, found in ENDS if case in rows), (0,))
