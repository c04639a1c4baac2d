"""The journal of one run: it records each action on stable storage before the action begins.

One JSON object per line. The first holds the facts of the run. Every step has a ``begin`` line and,
when it has ended, an ``end`` line. A journal is removed when its run left nothing to do. So a
journal that exists belongs to a run that is alive or was killed.

Runs of other kinds (restores) keep their journals in the same directory and form, with a ``kind``
in the first line; only the package of that kind reads the other lines.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from snaporch.command_log import set_fields
from snaporch.errors import SnaporchError
from snaporch.hypervisor import CommitStage, OnCommitStage, OverlayDisk
from snaporch.model import DomainState, Level, Owner, Strategy
from snaporch.private_files import private_directory, store_errors, sync_directory

FORMAT = 2
_SNAPSHOT = "snapshot"
_LATER = "use the snaporch that wrote it"
_PAGE = "see docs/how-to/recovery.md"


class Step(StrEnum):
    """The steps of a run, in order."""

    PREPARE = "prepare"
    FREEZE = "freeze"
    POOL_SNAPSHOT = "pool-snapshot"
    RELEASE = "release"
    SEAL = "seal"
    RECORD = "record"


class Note(StrEnum):
    """Notes that a run writes besides its steps."""

    SUSPENDED = "suspended"
    """The run is about to suspend the guest, so a pause is not its owner's."""
    RESUMED = "resumed"
    """The guest runs again, so a later pause is not the run's."""
    HELD = "held"
    """The owner suspended the guest while its RAM was saved: it stays suspended."""
    ENDING = "ending"
    """The run is about to fence the guest and end it: its guardian leaves it paused from now on."""
    FREEZING = "freezing"
    """The run is about to ask the agent for a freeze; whatever it answers, file systems may be
    frozen."""
    PIVOTING = "pivoting"
    """The bases have caught up with the guest, and its disks are about to be pivoted to them."""
    PIVOTED = "pivoted"
    """No pivot is under way, and both definitions name each disk's image."""
    COMMITTED = "committed"
    """All overlays have been committed, and both definitions name the bases."""
    SAVING = "saving"
    """The step that saves RAM has begun and not ended; derived from the steps."""
    RELEASED = "released"
    """The run released the guest, whatever else was noted; also derived from the steps."""
    DAMAGED = "damaged"
    """A line of the journal cannot be read, so a note may be lost; derived."""


_ENDS = {Note.RESUMED: Note.SUSPENDED, Note.PIVOTED: Note.PIVOTING}
_HOLDING = frozenset({Note.SUSPENDED, Note.FREEZING})
"""Notes of a guest that may be paused or frozen."""

_PAUSING = (Strategy.OVERLAY, Strategy.MANUAL, Strategy.PAUSED)
"""Strategies that may pause the guest."""

_WHILE_FROZEN = {
    ("end", Step.FREEZE),
    ("begin", Step.POOL_SNAPSHOT),
    ("end", Step.POOL_SNAPSHOT),
    ("begin", Step.RELEASE),
}
"""Lines written while the guest is frozen: the run does not wait until they are on stable storage.

They outlive the process, for the guardian and for recovery. After a power loss the guest does not
run either, and recovery uses facts, notes and the observed state.
"""
_STAGES = {
    CommitStage.PIVOTING: Note.PIVOTING,
    CommitStage.PIVOTED: Note.PIVOTED,
    CommitStage.SUSPENDING: Note.SUSPENDED,
    CommitStage.RESUMED: Note.RESUMED,
}


def note_stages(note: Callable[[Note], None]) -> OnCommitStage:
    """A callback for a commit that writes its stages as notes."""

    def on_stage(stage: CommitStage) -> None:
        if stage in _STAGES:
            note(_STAGES[stage])

    return on_stage


def _take(notes: set[Note], line: Mapping[str, Any]) -> None:
    """Apply one line to the set of notes that hold.

    Some notes end others. After ``released`` the guest is not held, until a later line shows a
    hold: libvirt or the agent may carry out an earlier request later.
    """
    event, what = line["event"], line.get("step") or line.get("note", "")
    if what in _ENDS:
        notes.discard(_ENDS[Note(what)])
    elif (event, what) in (("note", Note.RELEASED), ("end", Step.RELEASE)):
        notes.discard(Note.SAVING)
        notes.add(Note.RELEASED)
    elif event == "note":
        notes.add(Note(what))
        if what in _HOLDING:
            notes.discard(Note.RELEASED)
    elif (event, what) == ("begin", Step.FREEZE):
        notes.add(Note.SAVING)
    elif (event, what) == ("end", Step.FREEZE):
        notes -= {Note.SAVING, Note.RELEASED}


def explains_no_pause(facts: RunFacts, notes: Collection[Note]) -> bool:
    """Whether a guest that is paused may have been paused by the run or by its owner.

    The run notes each suspend first. But a damaged journal may have lost that note.
    """
    if facts.was is not DomainState.RUNNING or facts.strategy not in _PAUSING:
        return False
    return Note.DAMAGED in notes and not {Note.RELEASED, Note.HELD} & set(notes)


class JournalError(SnaporchError):
    """A journal cannot be read."""


class AnyFacts(Protocol):
    """The facts of a run of any kind: a dataclass whose fields JSON can represent."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def run(self) -> str:
        """The run's ID, which names the journal."""

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
    """The data that finishing or undoing a run needs."""

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
    taken_by_other_program: bool = False
    """Another program takes the snapshots: the run must not destroy them."""
    window_seconds: int = 0
    """How many seconds the guest may be held for that program."""
    group: str = ""
    """The mark of the consistency group's snapshots, until they have the run's own mark."""
    downtime_ms: int = 0
    """The downtime limit in ms that the run sets while it saves RAM; 0 to leave it unchanged."""
    own_downtime_ms: int = 0
    """The emulator's limit before, which is restored, in ms."""
    emulator: Owner | None = None
    """The user and group that the emulator runs as, if libvirt reports them."""
    vcpu_quotas: Mapping[str, str] = field(default_factory=dict)
    """The quotas of its vCPUs before, by control group; empty if the run leaves them unchanged."""
    slowing_seconds: int = 0
    """How long the run may reduce them, from the beginning of its freeze."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RunFacts:
        """The facts from the first line of a journal.

        Raises:
            KeyError, TypeError, ValueError: a field is missing, unknown or malformed.
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
        with store_errors(directory):
            private_directory(directory)
            if self.path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self.path))
            fresh = self.path.with_suffix(".new")
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(fresh, flags, 0o600)
            self._size, self._line_is_open = 0, False
            self._write(event="open", format=FORMAT, kind=kind, facts=asdict(facts))
            fresh.rename(self.path)  # readers see a complete first line or no journal
            sync_directory(directory)

    @classmethod
    def reopen(cls, path: Path) -> Self:
        """Open the journal of an interrupted run to continue it."""
        journal = cls.__new__(cls)
        journal.path, journal.notes = path, set()
        set_fields(RUN=path.stem)
        with store_errors(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        # an incomplete line there becomes a line of its own
        journal._descriptor, journal._line_is_open, journal._size = descriptor, True, 0  # noqa: SLF001 - its own
        return journal

    @contextmanager
    def step(self, step: StrEnum, of: str = "") -> Iterator[None]:
        """Record one step's begin and end; a step that raises gets no ``end``.

        Args:
            of: the subject of a step that is taken several times.
        """
        about = {"of": of} if of else {}
        set_fields(STEP=step.value)
        self._write(event="begin", step=step.value, **about)
        yield
        self._write(event="end", step=step.value, **about)

    def note(self, note: Note) -> None:
        """Write a note: state that recovery needs and cannot observe."""
        self._write(event="note", note=note.value)

    def all_notes(self) -> set[Note]:
        """The notes that hold, the guardian's included; only this process's if the file is damaged.

        A note that could not be written stands for an action that was not begun. ``held`` and
        ``committed`` are written after the fact, so they count anyway.
        """
        with suppress(OSError):
            there = read_journal(self.path)
            if isinstance(there, SnapshotJournal) and self.path.stat().st_size >= self._size:
                return set(there.notes) | (self.notes & {Note.HELD, Note.COMMITTED})
        return self.notes

    def _write(self, **fields: Any) -> None:
        _take(self.notes, fields)
        line = json.dumps({"at": datetime.now(UTC).isoformat(), **fields}) + "\n"
        # the rest of a line that a full disk refused must not damage this one
        line = "\n" + line if self._line_is_open else line
        self._line_is_open = True
        _write_all(self._descriptor, line)
        self._line_is_open = False
        self._size += len(line)
        if (fields["event"], fields.get("step")) not in _WHILE_FROZEN:
            os.fdatasync(self._descriptor)

    def close(self, *, settled: bool) -> None:
        """Close the journal.

        Args:
            settled: nothing is left to do: remove the journal.
        """
        os.close(self._descriptor)
        if settled:
            forget(self.path)


def release_mark(journal: Path) -> Path:
    """The path of the mark that the guardian writes when it releases the run's guest."""
    return journal.with_suffix(".released")


def forget(journal: Path) -> None:
    """Remove the journal of a run that left nothing to do, and the guardian's mark."""
    release_mark(journal).unlink(missing_ok=True)
    journal.unlink()


def append_note(journal: Path, note: Note) -> None:
    """Write a note to the journal of a run that is being recovered, if the journal exists."""
    append_line(journal, event="note", note=note)


def append_line(journal: Path, **fields: Any) -> None:
    """Append a line to a journal that another process may have open, if the journal exists."""
    if journal.exists():
        line = json.dumps({"at": datetime.now(UTC).isoformat(), **fields})
        descriptor = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            _write_all(descriptor, f"\n{line}\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, text: str) -> None:
    view = memoryview(text.encode())
    while view:  # a full disk may accept a part and refuse the rest
        view = view[os.write(descriptor, view) :]


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
        if self.facts.was is not DomainState.RUNNING or self.notes & {Note.RELEASED, Note.HELD}:
            return False
        if self.notes & {Note.SUSPENDED, Note.FREEZING}:
            return True
        if Note.SAVING in self.notes:
            return self.facts.strategy.level is Level.RAM
        return self.facts.strategy is Strategy.MANUAL and Step.FREEZE in self.ended


@dataclass(frozen=True, slots=True)
class OtherJournal:
    """A journal of another kind of run, see :mod:`snaporch.recovery.finishers`."""

    path: Path
    kind: str
    uuid: str
    domain: str
    lines: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class UnreadableJournal:
    """A journal that a later snaporch wrote, or that is malformed."""

    path: Path
    uuid: str | None
    """The UUID of its domain, if that can be read."""
    error: JournalError


def read_journals(directory: Path, *, sweep: bool = False) -> list[SnapshotJournal]:
    """The readable snapshot journals in ``directory``, oldest first; see :func:`list_journals`."""
    return [
        each for each in list_journals(directory, sweep=sweep) if isinstance(each, SnapshotJournal)
    ]


def journals_of(directory: Path, uuid: str, *, sweep: bool = False) -> list[SnapshotJournal]:
    """One domain's snapshot journals, oldest first.

    Raises:
        JournalError: one of the domain's journals cannot be read, so its run cannot be recovered.
    """
    found = []
    for each in list_journals(directory, sweep=sweep):
        if isinstance(each, SnapshotJournal):
            found += [each] if each.facts.uuid == uuid else []
        elif isinstance(each, UnreadableJournal) and each.uuid == uuid:
            raise each.error
    return found


def other_journals_of(directory: Path, uuid: str) -> list[OtherJournal]:
    """One domain's journals of other kinds, oldest first."""
    found = list_journals(directory, sweep=False)
    return [each for each in found if isinstance(each, OtherJournal) and each.uuid == uuid]


def list_journals(
    directory: Path, *, sweep: bool
) -> list[SnapshotJournal | OtherJournal | UnreadableJournal]:
    """Every journal in ``directory``, oldest first.

    An incomplete line counts as not written. A journal without a complete line belongs to a run
    that had not touched anything yet.

    Args:
        sweep: remove journals without a complete line.
    """
    if not directory.is_dir():
        return []
    found: list[SnapshotJournal | OtherJournal | UnreadableJournal] = []
    with store_errors(directory):
        names = sorted(os.listdir(directory))
    for path in (directory / name for name in names if name.endswith(".jsonl")):
        with store_errors(path):
            journal = read_journal(path)
        if journal is not None:
            found.append(journal)
        elif sweep:
            path.unlink(missing_ok=True)
    return found


def read_journal(path: Path) -> SnapshotJournal | OtherJournal | UnreadableJournal | None:
    """Read one journal; ``None`` if it does not exist or has no complete line.

    Raises:
        OSError: it cannot be read.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:  # its run has ended meanwhile
        return None
    lines, has_damage = _parsable_lines(raw)
    if lines:
        return _parse(path, lines, {Note.DAMAGED} if has_damage else set())
    if b"\n" not in raw:
        return None
    damaged = JournalError(str(path), "cannot be read (no line of it is JSON)", _PAGE)
    return UnreadableJournal(path, None, damaged)


def _parse(
    path: Path, lines: list[Any], notes: set[Note]
) -> SnapshotJournal | OtherJournal | UnreadableJournal:
    try:
        if lines[0]["format"] != FORMAT:
            reason = f"has format {lines[0]['format']}, expected {FORMAT}"
            return UnreadableJournal(path, _uuid(lines[0]), JournalError(str(path), reason, _LATER))
        if (kind := str(lines[0].get("kind", _SNAPSHOT))) != _SNAPSHOT:
            facts = lines[0]["facts"]
            return OtherJournal(path, kind, facts["uuid"], facts["domain"], tuple(lines))
        for line in lines:
            _take(notes, line)
        facts = RunFacts.from_json(lines[0]["facts"])
        ended = frozenset(Step(line["step"]) for line in lines if line["event"] == "end")
        if (
            facts.strategy is Strategy.PAUSED
            and Step.FREEZE in ended
            and Note.RELEASED not in notes
        ):
            notes.add(Note.SUSPENDED)  # also if that line was lost
        return SnapshotJournal(path, facts, ended, frozenset(notes))
    except (KeyError, TypeError, ValueError) as error:
        strange = JournalError(str(path), f"cannot be read ({error!r})", _LATER)
        return UnreadableJournal(path, _uuid(lines[0]), strange)


def _uuid(first: Any) -> str | None:
    try:
        return str(first["facts"]["uuid"])
    except (KeyError, TypeError):
        return None


def _parsable_lines(raw: bytes) -> tuple[list[Any], bool]:
    """The lines that are JSON, and whether others are complete and not empty."""
    lines: list[Any] = []
    damaged = False
    *complete, rest = raw.split(b"\n")
    for text in filter(None, complete):
        try:
            lines.append(json.loads(text))
        except ValueError:
            damaged = True
    with suppress(ValueError):
        lines.append(json.loads(rest))
    return lines, damaged
