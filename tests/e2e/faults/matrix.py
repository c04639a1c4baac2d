"""The cases: every strategy, every point of a run, every fault that applies there.

Generated from ``Step`` and ``Strategy`` themselves, so that a new one cannot be forgotten.
"""

import os
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from typing import TypeVar

from snaporch.journal import Note, Step
from snaporch.model import Strategy

T = TypeVar("T")


class Moment(StrEnum):
    """Where a run is stopped at a step."""

    AHEAD = "ahead"
    """The previous step has ended; nothing of this one was written yet."""
    BEFORE = "before"
    """The journal says that the step begins; nothing was done."""
    AFTER = "after"
    """All was done; the journal does not say so."""
    PAST = "past"
    """The journal says that the step is over."""


class Fault(StrEnum):
    """What happens at that point."""

    RUN_KILLED = "run-killed"
    """SIGKILL of snaporch, with no guardian: ``snaporch recover`` recovers the run."""
    GUARDED_RUN_KILLED = "guarded-run-killed"
    """SIGKILL of snaporch: the guardian recovers the run."""
    EMULATOR_KILLED = "emulator-killed"
    """SIGKILL of QEMU: the run continues and ends by itself."""
    BOTH_KILLED = "both-killed"
    """SIGKILL of QEMU and of snaporch, with no guardian."""
    LIBVIRTD_RESTARTED = "libvirtd-restarted"
    """The run continues and ends by itself."""
    LIBVIRTD_KILLED = "libvirtd-killed"
    """SIGKILL of libvirtd and of snaporch, with no guardian; libvirtd is started again."""
    POWER_LOST = "power-lost"
    """SIGKILL of the whole machine, then a boot from the same disks."""


_NOTES = {
    Strategy.OVERLAY: (Note.PIVOTING, Note.COMMITTED),
    Strategy.PAUSED: (Note.SUSPENDED,),
    Strategy.QUIESCED: (Note.FREEZING,),
}
"""What a strategy notes in the middle of a step of an ordinary run."""
_RARE = {
    *(Note.DAMAGED, Note.RESUMED, Note.PIVOTED, Note.HELD, Note.RELEASED, Note.SAVING),
    Note.ENDING,
}
"""Notes of commits that a guest outruns (``test_fault_windows.py``) or that fail for one disk of
several (``test_fault_shortages.py``); of what others do meanwhile (``test_release.py``); of a
failover (``test_failover.py``); and those that follow from the steps or from damage.
"""
_ON_THE_EMULATOR = (Fault.EMULATOR_KILLED, Fault.BOTH_KILLED)


@dataclass(frozen=True, order=True)
class Case:
    """One fault at one point of one run."""

    strategy: Strategy
    step: Step | Note
    moment: Moment
    fault: Fault

    @property
    def may_quarantine(self) -> bool:
        """Whether an overlay may be quarantined.

        The guest is on its bases and wrote to them, only the note is missing: without an emulator
        to ask, its overlay looks as if it held writes of its own.
        """
        unseen = (self.step, self.moment) == (Note.COMMITTED, Moment.AHEAD)
        return unseen and self.fault in (*_ON_THE_EMULATOR, Fault.POWER_LOST)

    @property
    def may_be_undecided(self) -> bool:
        """Whether the admin may be asked which image is the newer one.

        The guest is about to be switched back to its base. Without an emulator to ask, a run
        cannot find out whether it was.
        """
        if self.step is not Note.PIVOTING:
            return False
        if self.moment is Moment.AHEAD:  # the run goes on, notes it, and finds no emulator
            return self.fault is Fault.EMULATOR_KILLED
        return self.fault in (*_ON_THE_EMULATOR, Fault.POWER_LOST)

    @property
    def tears(self) -> bool:
        """Whether a snapshot that another program takes there is torn: a commit is under way.

        When the run notes that it was, it is over.
        """
        return self.step is Note.PIVOTING

    @property
    def resumes(self) -> bool:
        """Whether a snapshot that it leaves with its RAM is resumed, and not only checked.

        One in eight.
        """
        return in_eight(self)

    @property
    def point(self) -> str:
        """The point, in the form of ``stopping.py``."""
        return f"{self.moment}:{self.step}"

    def __str__(self) -> str:
        return f"{self.strategy}/{self.point}/{self.fault}"


def in_eight(case: object) -> bool:
    """One case in eight, by its text: the same ones each time."""
    return zlib.crc32(str(case).encode()) % 8 == 0


def parse(text: str) -> Case:
    """The case whose text this is."""
    strategy, point, fault = text.split("/")
    moment, step = point.split(":")
    place = Step(step) if step in list(Step) else Note(step)
    return Case(Strategy(strategy), place, Moment(moment), Fault(fault))


def points(strategy: Strategy) -> Iterator[tuple[Step | Note, Moment]]:
    """Every point of a run; ``PAST`` one step is ``AHEAD`` of the next."""
    for step in Step:
        yield step, Moment.AHEAD
        yield step, Moment.BEFORE
        yield step, Moment.AFTER
    yield list(Step)[-1], Moment.PAST
    for note in _NOTES.get(strategy, ()):
        yield note, Moment.AHEAD
        yield note, Moment.PAST


def all_cases() -> list[Case]:
    """The whole matrix."""
    return [
        Case(strategy, step, moment, fault)
        for strategy in Strategy
        for step, moment in points(strategy)
        for fault in Fault
        if _applies(strategy, fault)
    ]


def _applies(strategy: Strategy, fault: Fault) -> bool:
    if strategy is Strategy.OFF:
        return fault not in (*_ON_THE_EMULATOR, Fault.GUARDED_RUN_KILLED)
    if strategy is Strategy.CRASH:
        return fault is not Fault.GUARDED_RUN_KILLED  # it freezes nothing and has no guardian
    return True


def in_lab() -> list[Case]:
    """The cases that happen inside one lab."""
    return [case for case in all_cases() if case.fault is not Fault.POWER_LOST]


def power_losses() -> list[Case]:
    """The cases that end a lab."""
    return [case for case in all_cases() if case.fault is Fault.POWER_LOST]


def sample(cases: list[T], wanted: str, size: int) -> list[T]:
    """Some of ``cases`` in order.

    Args:
        wanted: ``all``, ``SEED/SIZE``, or nothing for ``size`` of today; consecutive seeds take
            consecutive shares of the shuffled cases, so that all have their turn. Anything else
            takes the cases whose text holds one of these words, separated by commas.
    """
    if wanted == "all":
        return cases
    seed = date.today().toordinal()  # noqa: DTZ011 - any day will do
    numbers = wanted.split("/")
    if len(numbers) == 2 and all(number.isdigit() for number in numbers):
        seed, size = int(numbers[0]), int(numbers[1])
    elif wanted:
        return [case for case in cases if any(word in str(case) for word in wanted.split(","))]
    shuffled = random.Random(0).sample(cases, len(cases))
    begin = seed * size
    chosen = {shuffled[(begin + number) % len(cases)] for number in range(min(size, len(cases)))}
    print(f"faults: {len(chosen)} of {len(cases)} cases; again with FAULTS_SAMPLE={seed}/{size}")
    return [case for case in cases if case in chosen]


def wanted() -> str:
    """The sample that the environment asks for."""
    return os.environ.get("FAULTS_SAMPLE", "")


def forgotten_notes() -> set[Note]:
    """Notes that the tables above do not have: a new note has to be added there."""
    return set(Note) - _RARE - {note for notes in _NOTES.values() for note in notes}
