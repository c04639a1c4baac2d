"""What the journal of a restore says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from snaporch.journal import ForeignJournal, Journal, JournalError, others_of

KIND = "restore"
HOLD = "snaporch-restore"
"""The tag that keeps the snapshots that are rolled back to from being destroyed meanwhile."""


Written = dict[str, int | str]
"""Of each dataset what tells whether a guest has written: what its files are, or its bytes."""


class RestoreStep(StrEnum):
    """The steps of a restore, in order."""

    SAFETY = "safety"
    """What will be discarded is written to the bundle store, while the guest runs."""
    STOP = "stop"
    """The definition is barred, the guest stopped, the safety copy completed."""
    ROLLBACK = "rollback"
    """One for each dataset; from the first on the only way is forward."""
    FILES = "files"
    """NVRAM and TPM state."""
    RESUME = "resume"
    """From RAM, while the definition is still barred."""
    DEFINE = "define"
    BOOT = "boot"
    """From the disks."""


class Ending(StrEnum):
    """What the guest does when its disks are back."""

    RESUME = "resume"
    BOOT = "boot"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Target:
    """A snapshot to roll back to; its GUID tells it from another of its name."""

    dataset: str
    name: str
    guid: int

    @property
    def full_name(self) -> str:
        """``dataset@name``."""
        return f"{self.dataset}@{self.name}"


@dataclass(frozen=True, slots=True)
class HostFile:
    """A part of the bundle that goes back to its place on the host."""

    copy: str
    place: str
    uid: int | None
    gid: int | None
    mode: int | None


@dataclass(frozen=True, slots=True)
class KeptDataset:
    """What a safety copy has of a dataset, to be put back over the snapshot it was kept from."""

    dataset: str
    streams: tuple[str, ...]
    """Paths of incremental streams, in their order."""
    properties: Mapping[str, Mapping[str, str]]
    """The user properties of the snapshots in the streams, which do not travel in them."""
    bookmarks: Mapping[str, str]
    """Bookmarks, with the snapshots they are made of."""


@dataclass(frozen=True, slots=True)
class RestoreFacts:
    """All that finishing or undoing a restore needs to know."""

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
    """Whether the guest shall run when it was resumed."""
    boot: str
    """Of the emulator that is stopped; empty if the guest was off."""
    ran: bool
    """Whether the guest ran before, and was not paused or off."""
    before: str | None
    """The definition until now; ``None`` for a domain without one."""
    after: str | None
    """The definition from then on."""
    files: tuple[HostFile, ...]
    safety: str
    """The safety copy's directory, or empty."""
    keep_running: bool
    """Whether the RAM of the guest is kept with the safety copy."""
    supersedes: tuple[str, ...]
    """Unfinished restores of the domain that this one takes the place of."""
    kept: tuple[KeptDataset, ...] = ()
    """What is received after the rollbacks; of an undo only."""
    undoes: str = ""
    """The safety copy that is put back, if it is an undo."""
    half_way: bool = False
    """Whether the disks that it found were half rolled back, by one of those it supersedes."""
    whole: str = ""
    """If they were: the directory of the safety copy of the time before, or empty."""

    @property
    def way_back(self) -> str:
        """The directory of the safety copy whose undo leads to whole disks, or empty."""
        return self.whole if self.half_way else self.safety

    @property
    def what(self) -> str:
        """What it is, for a message."""
        return "undo of its restore" if self.undoes else f"restore of @{self.snapshot}"

    @property
    def thing(self) -> str:
        """``DOMAIN@SNAPSHOT``."""
        return f"{self.domain}@{self.snapshot}"

    @property
    def datasets(self) -> tuple[str, ...]:
        """Those that are rolled back."""
        return tuple(target.dataset for target in self.targets)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RestoreFacts:
        """The facts as the first line of a journal has them.

        Raises:
            KeyError, TypeError, ValueError: they are not all there, or not what they should be.
        """
        known = {
            "targets": tuple(Target(**each) for each in value["targets"]),
            "newer": tuple(value["newer"]),
            "ending": Ending(value["ending"]),
            "files": tuple(HostFile(**each) for each in value["files"]),
            "supersedes": tuple(value["supersedes"]),
            "kept": tuple(_kept(each) for each in value.get("kept", ())),
        }
        return cls(**value | known)


def _kept(value: dict[str, Any]) -> KeptDataset:
    return KeptDataset(**value | {"streams": tuple(value["streams"])})


class RestoreJournal(Journal):
    """An open journal of a restore."""

    def __init__(self, directory: Path, facts: RestoreFacts) -> None:
        super().__init__(directory, facts, kind=KIND)

    def failed(self, step: RestoreStep) -> None:
        """It is known that a step which was begun has done nothing."""
        self._write(event="failed", step=step.value)

    def wrote(self, written: Written) -> None:
        """What :func:`written_now` said of each dataset before the guest is resumed."""
        self._write(event="written", datasets=written)


@dataclass(frozen=True, slots=True)
class RestoreProgress:
    """How far a restore came, as its journal has it."""

    begun: frozenset[tuple[RestoreStep, str]]
    ended: frozenset[tuple[RestoreStep, str]]
    """Steps, each with the dataset it was about."""
    written: Mapping[str, int | str] = field(default_factory=dict)
    """What :func:`written_now` said of each dataset when the guest was to be resumed."""

    def has_begun(self, step: RestoreStep) -> bool:
        """Whether a step was begun, on any dataset."""
        return any(each is step for each, _ in self.begun)

    def has_ended(self, step: RestoreStep, of: str = "") -> bool:
        """Whether a step is over."""
        return (step, of) in self.ended


FRESH = RestoreProgress(frozenset(), frozenset())


@dataclass(frozen=True, slots=True)
class OldRestore:
    """A restore that was cut short."""

    path: Path
    facts: RestoreFacts
    progress: RestoreProgress

    @property
    def is_half_way(self) -> bool:
        """Whether the disks are of two instants now."""
        ended = [
            self.progress.has_ended(RestoreStep.ROLLBACK, each) for each in self.facts.datasets
        ]
        return (self.facts.half_way or self.progress.has_begun(RestoreStep.ROLLBACK)) and not all(
            ended
        )


def read(journal: ForeignJournal) -> OldRestore:
    """Understand a journal of a restore.

    Raises:
        JournalError: it says what no restore writes.
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
    return OldRestore(
        journal.path, facts, RestoreProgress(frozenset(begun), frozenset(ended), written)
    )


def unfinished(directory: Path, uuid: str) -> list[OldRestore]:
    """Restores of a domain that were cut short, oldest first.

    Raises:
        JournalError: one cannot be understood.
    """
    return [read(each) for each in others_of(directory, uuid) if each.kind == KIND]
