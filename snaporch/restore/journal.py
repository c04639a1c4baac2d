"""The journal of a restore: its facts and its steps, as they are written and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from snaporch.journal import (
    Journal,
    JournalError,
    OtherJournal,
    UnreadableJournal,
    list_journals,
    other_journals_of,
)
from snaporch.private_files import replace_private, store_errors, sync_directory

KIND = "restore"
HOLD = "snaporch-restore"
"""The tag of the ``zfs hold`` on the snapshots that are rolled back to."""


Written = dict[str, int | str]
"""For each dataset a checksum of its files, or its bytes; see :mod:`.written_since_rollback`."""


class RestoreStep(StrEnum):
    """The steps of a restore, in order."""

    SAFETY = "safety"
    """What will be discarded is written to the bundle store, while the guest runs."""
    STOP = "stop"
    """The definition is barred from starting, the guest is stopped, the safety copy completed."""
    ROLLBACK = "rollback"
    """One for each dataset. Once the first has begun, the restore can only be finished."""
    FILES = "files"
    """NVRAM and TPM state are put back."""
    RESUME = "resume"
    """The guest is resumed from RAM, while the definition is still barred."""
    DEFINE = "define"
    BOOT = "boot"
    """The guest is booted from its disks."""


class Ending(StrEnum):
    """How the restore leaves the guest when its disks are back."""

    RESUME = "resume"
    BOOT = "boot"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Target:
    """A snapshot to roll back to; the GUID distinguishes it from another of the same name."""

    dataset: str
    name: str
    guid: int

    @property
    def full_name(self) -> str:
        """``dataset@name``."""
        return f"{self.dataset}@{self.name}"


@dataclass(frozen=True, slots=True)
class HostFile:
    """A file of the bundle, and the path on the host where it is put back."""

    copy: str
    place: str
    uid: int | None
    gid: int | None
    mode: int | None


@dataclass(frozen=True, slots=True)
class KeptDataset:
    """The data of one dataset in a safety copy; it is received over the copy's base snapshot."""

    dataset: str
    streams: tuple[str, ...]
    """Paths of incremental streams, in the order in which they are received."""
    properties: Mapping[str, Mapping[str, str]]
    """User properties of the snapshots in the streams; the streams do not contain them."""
    bookmarks: Mapping[str, str]
    """Bookmarks, each with the snapshot that it is made from."""


@dataclass(frozen=True, slots=True)
class RestoreFacts:
    """Everything that is needed to finish or undo a restore."""

    run: str
    domain: str
    uuid: str
    snapshot: str
    targets: tuple[Target, ...]
    newer: tuple[str, ...]
    """Snapshots and bookmarks that may be destroyed."""
    ending: Ending
    ram: str
    """The image to resume from, or empty."""
    running: bool
    """Whether the guest runs after it was resumed, and is not left paused."""
    boot: str
    """:attr:`Domain.boot` of the emulator that is stopped; empty if the guest was off."""
    ran: bool
    """Whether the guest ran before, and was not paused or off."""
    before: str | None
    """The definition before the restore; ``None`` for a domain without one."""
    after: str | None
    """The definition after the restore."""
    files: tuple[HostFile, ...]
    safety: str
    """The safety copy's directory, or empty."""
    keep_running: bool
    """Whether the RAM of the guest is kept with the safety copy."""
    supersedes: tuple[str, ...]
    """The runs of unfinished restores of the domain that this one replaces."""
    kept: tuple[KeptDataset, ...] = ()
    """In an undo: the data that is received after the rollbacks."""
    undoes: str = ""
    """In an undo: the name of the safety copy that is put back."""
    half_way: bool = False
    """Whether only some disks were rolled back, by a replaced restore, when this one began."""
    whole: str = ""
    """If so: the directory of the safety copy made before that restore, or empty."""
    accepted: tuple[str, ...] = ()
    """What a snapshot that came from another host may name of this one."""
    together: str = ""
    """If other guests are restored with it: the name that these restores have in common."""
    was_stopped: bool = False
    """Whether an earlier restore, which was undone, has stopped the guest."""

    @property
    def way_back(self) -> str:
        """The directory of the safety copy that brings back disks of one instant, or empty."""
        return self.whole if self.half_way else self.safety

    @property
    def what(self) -> str:
        """The restore or the undo, as messages name it."""
        return "undo of its restore" if self.undoes else f"restore of @{self.snapshot}"

    @property
    def thing(self) -> str:
        """``DOMAIN@SNAPSHOT``."""
        return f"{self.domain}@{self.snapshot}"

    @property
    def datasets(self) -> tuple[str, ...]:
        """The datasets that are rolled back."""
        return tuple(target.dataset for target in self.targets)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RestoreFacts:
        """Read the facts from the first line of a journal.

        Raises:
            KeyError, TypeError, ValueError: a fact is missing, unknown or of the wrong type.
        """
        known = {
            "targets": tuple(Target(**each) for each in value["targets"]),
            "newer": tuple(value["newer"]),
            "ending": Ending(value["ending"]),
            "files": tuple(HostFile(**each) for each in value["files"]),
            "supersedes": tuple(value["supersedes"]),
            "kept": tuple(_kept(each) for each in value.get("kept", ())),
            "accepted": tuple(value.get("accepted", ())),
        }
        return cls(**value | known)


def _kept(value: dict[str, Any]) -> KeptDataset:
    return KeptDataset(**value | {"streams": tuple(value["streams"])})


def mark_of_all_off(directory: Path, together: str) -> Path:
    """The file that exists once all guests that are restored together are off.

    From then on recovery finishes each restore; before it undoes each. It is one file, because
    a line in each journal would let one restore be finished and another be undone.

    Args:
        directory: of the journals.
        together: see :attr:`RestoreFacts.together`.
    """
    return directory / f"{together}.off"


def forget_all_off(directory: Path, together: str) -> None:
    """Remove that file when no journal needs it any more.

    Raises:
        JournalError: a journal cannot be read; the file stays.
    """
    found = list_journals(directory, sweep=False)
    restores = [each for each in found if isinstance(each, OtherJournal) and each.kind == KIND]
    unknown = any(isinstance(each, UnreadableJournal) for each in found)
    needed = unknown or any(read(each).facts.together == together for each in restores)
    if not needed:
        mark_of_all_off(directory, together).unlink(missing_ok=True)


def note_all_off(directory: Path, together: str) -> None:
    """Make that file, on stable storage.

    Raises:
        SnaporchError: it could not be made, and is not there.
    """
    mark = mark_of_all_off(directory, together)
    with store_errors(directory):
        try:
            replace_private(mark, b"")
            sync_directory(directory)
        except OSError:
            mark.unlink(missing_ok=True)
            raise


class RestoreJournal(Journal):
    """An open journal of a restore."""

    def __init__(self, directory: Path, facts: RestoreFacts) -> None:
        super().__init__(directory, facts, kind=KIND)

    def failed(self, step: RestoreStep) -> None:
        """Record that a step was begun and has changed nothing."""
        self._write(event="failed", step=step.value)

    def wrote(self, written: Written) -> None:
        """Record what :func:`written_now` returned, before the guest is resumed."""
        self._write(event="written", datasets=written)


@dataclass(frozen=True, slots=True)
class RestoreProgress:
    """How far a restore came, according to its journal."""

    begun: frozenset[tuple[RestoreStep, str]]
    ended: frozenset[tuple[RestoreStep, str]]
    """Steps, each with its dataset; empty for a step that has none."""
    written: Mapping[str, int | str] = field(default_factory=dict)
    """What :func:`written_now` returned before the guest was resumed."""

    def has_begun(self, step: RestoreStep) -> bool:
        """Whether a step was begun, on any dataset."""
        return any(each is step for each, _ in self.begun)

    def has_ended(self, step: RestoreStep, of: str = "") -> bool:
        """Whether a step has ended.

        Args:
            of: the dataset; empty for a step that has none.
        """
        return (step, of) in self.ended


FRESH = RestoreProgress(frozenset(), frozenset())


@dataclass(frozen=True, slots=True)
class InterruptedRestore:
    """A restore that was interrupted."""

    path: Path
    facts: RestoreFacts
    progress: RestoreProgress

    @property
    def may_be_undone(self) -> bool:
        """Whether guests that are restored together with this one may not be off yet."""
        together = self.facts.together
        return bool(together) and not mark_of_all_off(self.path.parent, together).exists()

    @property
    def has_stopped_in_vain(self) -> bool:
        """Whether a guest that ran is off, should this restore be undone and the guest be off."""
        begun = bool(self.facts.boot) and self.progress.has_begun(RestoreStep.STOP)
        return bool(self.facts.together) and (begun or self.facts.was_stopped)

    @property
    def is_half_way(self) -> bool:
        """Whether some datasets were rolled back and others were not."""
        ended = [
            self.progress.has_ended(RestoreStep.ROLLBACK, each) for each in self.facts.datasets
        ]
        return (self.facts.half_way or self.progress.has_begun(RestoreStep.ROLLBACK)) and not all(
            ended
        )


def read(journal: OtherJournal) -> InterruptedRestore:
    """Read the journal of a restore.

    Raises:
        JournalError: it has an entry that no restore of this version writes.
    """
    begun: set[tuple[RestoreStep, str]] = set()
    ended: set[tuple[RestoreStep, str]] = set()
    written: Written = {}
    try:
        facts = RestoreFacts.from_json(journal.lines[0]["facts"])
        for line in journal.lines[1:]:
            if line["event"] == "written":
                written = dict(line["datasets"])
                continue
            place = (RestoreStep(line["step"]), str(line.get("of", "")))
            if line["event"] == "begin":
                begun.add(place)
            elif line["event"] == "end":
                ended.add(place)
            else:
                begun.discard(place)
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(
            str(journal.path), f"cannot be understood ({error!r})", "use the snaporch that wrote it"
        ) from error
    return InterruptedRestore(
        journal.path, facts, RestoreProgress(frozenset(begun), frozenset(ended), written)
    )


def unfinished(directory: Path, uuid: str) -> list[InterruptedRestore]:
    """Return the interrupted restores of a domain, oldest first.

    Raises:
        JournalError: a journal cannot be read.
    """
    return [read(each) for each in other_journals_of(directory, uuid) if each.kind == KIND]
