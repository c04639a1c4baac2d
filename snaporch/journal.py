"""The journal of one run: what is about to happen, on stable storage before it happens.

One JSON object per line. The first holds the facts of the run; every step has a ``begin`` line and,
when it is over, an ``end`` line. A journal is removed when its run left nothing to do; one that is
still there belongs to a run that goes on or that was killed.

Runs of another kind than a snapshot's (restores) keep theirs in the same directory and form, with a
``kind`` in the first line; what they say is known only to who wrote them.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from snaporch.bundle.store import explained_store, private_directory, sync_directory
from snaporch.command_log import set_fields
from snaporch.errors import SnaporchError
from snaporch.hypervisor import CommitStage, OverlayDisk, Told
from snaporch.model import DomainState, Level, Owner, Strategy

FORMAT = 1
_SNAPSHOT = "snapshot"
_LATER = "use the snaporch that wrote it"


class Step(StrEnum):
    """The steps of a run, in order."""

    PREPARE = "prepare"
    FREEZE = "freeze"
    POOL_SNAPSHOT = "pool-snapshot"
    RELEASE = "release"
    SEAL = "seal"
    RECORD = "record"


class Note(StrEnum):
    """What a run notes besides its steps."""

    SUSPENDED = "suspended"
    """The run is about to suspend the guest: it is not paused by its owner's wish."""
    RESUMED = "resumed"
    """The guest runs again: a later pause is somebody else's."""
    HELD = "held"
    """Somebody else suspended the guest while its RAM was saved: it stays so."""
    FREEZING = "freezing"
    """The agent is about to be asked: file systems may be frozen, whatever it answers."""
    PIVOTING = "pivoting"
    """The bases have caught up with the guest, and it is about to be switched back to them."""
    PIVOTED = "pivoted"
    """None is being switched any more, and both definitions say where each disk is."""
    COMMITTED = "committed"
    """All overlays have been committed, and both definitions name the bases."""
    SAVING = "saving"
    """The step in which RAM is saved has begun and not ended. Follows from the steps."""
    LET_GO = "let-go"
    """The guest is neither paused nor frozen by the run any more, whatever else was noted; also
    follows from the steps."""


_ENDS = {Note.RESUMED: Note.SUSPENDED, Note.PIVOTED: Note.PIVOTING}
_HOLDING = frozenset({Note.SUSPENDED, Note.FREEZING})
"""Notes of a guest that may stand still."""

_STANDING_STILL = {
    ("end", Step.FREEZE),
    ("begin", Step.POOL_SNAPSHOT),
    ("end", Step.POOL_SNAPSHOT),
    ("begin", Step.RELEASE),
}
"""Lines for which a guest that stands still does not wait until they are on stable storage.

They are for the guardian and for who looks, and outlive the process. After a power loss the guest
is gone too, and settling goes by facts, notes and what is.
"""
_STAGES = {
    CommitStage.PIVOTING: Note.PIVOTING,
    CommitStage.PIVOTED: Note.PIVOTED,
    CommitStage.SUSPENDING: Note.SUSPENDED,
    CommitStage.RESUMED: Note.RESUMED,
}


def noting(note: Callable[[Note], None]) -> Told:
    """What a commit tells, as notes."""

    def told(stage: CommitStage) -> None:
        if stage in _STAGES:
            note(_STAGES[stage])

    return told


def _take(notes: set[Note], line: Mapping[str, Any]) -> None:
    """What a line changes of the notes that hold.

    Some end what another says. A guest that was let go is nothing any more, until it comes to stand
    still all the same: what was asked for before may have been done later.
    """
    event, what = line["event"], line.get("step") or line.get("note", "")
    if what in _ENDS:
        notes.discard(_ENDS[Note(what)])
    elif (event, what) in (("note", Note.LET_GO), ("end", Step.RELEASE)):
        notes.discard(Note.SAVING)
        notes.add(Note.LET_GO)
    elif event == "note":
        notes.add(Note(what))
        if what in _HOLDING:
            notes.discard(Note.LET_GO)
    elif (event, what) == ("begin", Step.FREEZE):
        notes.add(Note.SAVING)
    elif (event, what) == ("end", Step.FREEZE):
        notes -= {Note.SAVING, Note.LET_GO}


class JournalError(SnaporchError):
    """A journal cannot be read."""


class AnyFacts(Protocol):
    """What the facts of every kind of run have: a dataclass that JSON can hold."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def run(self) -> str:
        """Names the journal."""

    @property
    def domain(self) -> str:
        """The domain's name."""

    @property
    def uuid(self) -> str:
        """The domain's UUID."""

    @property
    def snapshot(self) -> str:
        """The snapshot's name, behind its ``@``."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """All that finishing or undoing a run needs to know."""

    run: str
    domain: str
    uuid: str
    was: DomainState
    boot: str
    strategy: Strategy
    snapshot: str
    datasets: tuple[str, ...]
    overlay_dir: str
    overlays: tuple[OverlayDisk, ...]
    ram_pipe: str
    overlay_max_mib: int = 0
    overlay_floor_mib: int = 0
    awaited: bool = False
    """Somebody else takes the snapshots: they are not the run's to destroy."""
    window_seconds: int = 0
    """How long the window may stay open for that."""
    group: str = ""
    """The mark of the consistency group's snapshots, until they have the run's own."""
    downtime_ms: int = 0
    """The emulator's limit for the last of RAM while the run saves it; 0 to leave it alone."""
    own_downtime_ms: int = 0
    """The one it had, and is to have again."""
    emulator: Owner | None = None
    """The user and group the emulator runs as, if libvirt tells."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RunFacts:
        """The facts as the first line of a journal has them.

        Raises:
            KeyError, TypeError, ValueError: they are not all there, or not what they should be.
        """
        known: dict[str, Any] = {
            "was": DomainState(value["was"]),
            "strategy": Strategy(value["strategy"]),
            "datasets": tuple(value["datasets"]),
            "overlays": tuple(OverlayDisk.from_json(disk) for disk in value["overlays"]),
        }
        if emulator := value.get("emulator"):
            known["emulator"] = Owner(**emulator)
        return cls(**value | known)


class Journal:
    """An open journal."""

    def __init__(self, directory: Path, facts: AnyFacts, *, kind: str = _SNAPSHOT) -> None:
        self.path = directory / f"{facts.run}.jsonl"
        self.notes: set[Note] = set()
        set_fields(DOMAIN=facts.domain, RUN=facts.run, SNAPSHOT=facts.snapshot, STEP="")
        with explained_store(directory):
            private_directory(directory)
            if self.path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self.path))
            fresh = self.path.with_suffix(".new")
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(fresh, flags, 0o600)
            self._write(event="open", format=FORMAT, kind=kind, facts=asdict(facts))
            fresh.rename(self.path)  # whoever reads journals sees a whole first line or none
            sync_directory(directory)

    @classmethod
    def reopen(cls, path: Path) -> Self:
        """Go on with the journal of a run that was cut short."""
        journal = cls.__new__(cls)
        journal.path, journal.notes = path, set()
        set_fields(RUN=path.stem)
        with explained_store(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.write(descriptor, b"\n")  # what was cut short is a line of its own
        journal._descriptor = descriptor  # noqa: SLF001 - its own
        return journal

    @contextmanager
    def step(self, step: StrEnum, of: str = "") -> Iterator[None]:
        """Around one step; a step that raises gets no ``end``.

        Args:
            of: what the step is about, where it is taken several times.
        """
        about = {"of": of} if of else {}
        set_fields(STEP=step.value)
        self._write(event="begin", step=step.value, **about)
        yield
        self._write(event="end", step=step.value, **about)

    def note(self, note: Note) -> None:
        """Something that settling has to know and cannot see."""
        self._write(event="note", note=note.value)

    def all_notes(self) -> set[Note]:
        """The notes that hold, with those of the run's guardian; its own if it cannot be read.

        What could not be written any more was not begun; what had been done then counts.
        """
        with suppress(OSError):
            there = read_journal(self.path)
            if isinstance(there, SnapshotJournal):
                return set(there.notes) | (self.notes & {Note.HELD, Note.COMMITTED})
        return self.notes

    def _write(self, **fields: Any) -> None:
        _take(self.notes, fields)
        line = json.dumps({"at": datetime.now(UTC).isoformat(), **fields}) + "\n"
        view = memoryview(line.encode())
        while view:  # a full disk may take a part of it, and refuses the rest
            view = view[os.write(self._descriptor, view) :]
        if (fields["event"], fields.get("step")) not in _STANDING_STILL:
            os.fdatasync(self._descriptor)

    def close(self, *, settled: bool) -> None:
        """Close it; remove it when nothing is left to do."""
        os.close(self._descriptor)
        if settled:
            forget(self.path)


def let_go_mark(journal: Path) -> Path:
    """The file by which the guardian says that it has let the guest of a run go."""
    return journal.with_suffix(".let-go")


def forget(journal: Path) -> None:
    """Remove a journal whose run left nothing to do, and the guardian's mark."""
    let_go_mark(journal).unlink(missing_ok=True)
    journal.unlink()


def append_note(journal: Path, note: Note) -> None:
    """Note something in the journal of a run that is being settled, if it has one."""
    append_line(journal, event="note", note=note)


def append_line(journal: Path, **fields: Any) -> None:
    """Write to the journal of a run that somebody else keeps open, or nobody; if it has one."""
    if journal.exists():
        line = json.dumps({"at": datetime.now(UTC).isoformat(), **fields})
        with journal.open("ab") as stream:
            stream.write(b"\n" + line.encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())


@dataclass(frozen=True, slots=True)
class SnapshotJournal:
    """A journal found on disk."""

    path: Path
    facts: RunFacts
    ended: frozenset[Step]
    notes: frozenset[Note]

    @property
    def uuid(self) -> str:
        """The domain's UUID."""
        return self.facts.uuid

    @property
    def domain(self) -> str:
        """The domain's name."""
        return self.facts.domain

    @property
    def held(self) -> bool:
        """Whether the run may have left the guest paused or frozen."""
        if self.facts.was is not DomainState.RUNNING or self.notes & {Note.LET_GO, Note.HELD}:
            return False
        if self.notes & {Note.SUSPENDED, Note.FREEZING}:
            return True
        if Note.SAVING in self.notes:
            return self.facts.strategy.level is Level.RAM
        return self.facts.strategy is Strategy.MANUAL and Step.FREEZE in self.ended


@dataclass(frozen=True, slots=True)
class ForeignJournal:
    """A journal of another kind of run; see :mod:`snaporch.recovery.other_kinds`."""

    path: Path
    kind: str
    uuid: str
    domain: str
    lines: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class UnreadableJournal:
    """A journal that a later snaporch wrote, or that says what no snaporch writes."""

    path: Path
    uuid: str | None
    """The domain it seems to be about."""
    error: JournalError


def read_journals(directory: Path, *, sweep: bool = False) -> list[SnapshotJournal]:
    """Every journal in ``directory`` that can be read, oldest first; see :func:`list_journals`."""
    return [
        each for each in list_journals(directory, sweep=sweep) if isinstance(each, SnapshotJournal)
    ]


def journals_of(directory: Path, uuid: str, *, sweep: bool = False) -> list[SnapshotJournal]:
    """The journals about one domain.

    Raises:
        JournalError: one of them cannot be understood, so nobody knows what its run left.
    """
    found = []
    for each in list_journals(directory, sweep=sweep):
        if isinstance(each, SnapshotJournal):
            found += [each] if each.facts.uuid == uuid else []
        elif isinstance(each, UnreadableJournal) and each.uuid == uuid:
            raise each.error
    return found


def others_of(directory: Path, uuid: str) -> list[ForeignJournal]:
    """The journals of other kinds about one domain, oldest first."""
    found = list_journals(directory, sweep=False)
    return [each for each in found if isinstance(each, ForeignJournal) and each.uuid == uuid]


def list_journals(
    directory: Path, *, sweep: bool
) -> list[SnapshotJournal | ForeignJournal | UnreadableJournal]:
    """Every journal in ``directory``, oldest first.

    A line cut short by a crash counts as not written. A journal without a whole line belongs to a
    run that had not touched anything yet, and with ``sweep`` is removed.
    """
    if not directory.is_dir():
        return []
    found: list[SnapshotJournal | ForeignJournal | UnreadableJournal] = []
    with explained_store(directory):
        names = sorted(os.listdir(directory))
    for path in (directory / name for name in names if name.endswith(".jsonl")):
        with explained_store(path):
            journal = read_journal(path)
        if journal is not None:
            found.append(journal)
        elif sweep:
            path.unlink(missing_ok=True)
    return found


def read_journal(path: Path) -> SnapshotJournal | ForeignJournal | UnreadableJournal | None:
    """One journal; ``None`` for one that is gone, or has no whole line.

    Raises:
        OSError: it cannot be read.
    """
    lines = _whole_lines(path)
    return _parse(path, lines) if lines else None


def _parse(path: Path, lines: list[Any]) -> SnapshotJournal | ForeignJournal | UnreadableJournal:
    try:
        if lines[0]["format"] != FORMAT:
            reason = f"has format {lines[0]['format']}, known is {FORMAT}"
            return UnreadableJournal(path, _uuid(lines[0]), JournalError(str(path), reason, _LATER))
        if (kind := str(lines[0].get("kind", _SNAPSHOT))) != _SNAPSHOT:
            facts = lines[0]["facts"]
            return ForeignJournal(path, kind, facts["uuid"], facts["domain"], tuple(lines))
        notes: set[Note] = set()
        for line in lines:
            _take(notes, line)
        return SnapshotJournal(
            path,
            RunFacts.from_json(lines[0]["facts"]),
            frozenset(Step(line["step"]) for line in lines if line["event"] == "end"),
            frozenset(notes),
        )
    except (KeyError, TypeError, ValueError) as error:
        strange = JournalError(str(path), f"cannot be understood ({error!r})", _LATER)
        return UnreadableJournal(path, _uuid(lines[0]), strange)


def _uuid(first: Any) -> str | None:
    try:
        return str(first["facts"]["uuid"])
    except (KeyError, TypeError):
        return None


def _whole_lines(path: Path) -> list[Any]:
    lines: list[Any] = []
    try:
        raw = path.read_bytes()
    except FileNotFoundError:  # its run has just ended
        return lines
    for text in raw.split(b"\n"):
        with suppress(ValueError):
            lines.append(json.loads(text))
    return lines
