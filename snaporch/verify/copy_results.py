"""The results of verifying copies on replicas, as this host has recorded them.

They are in files of this host, and not on the copies: ``status`` asks no replica, and an
append-only replica changes no property. There is one file for each replica and domain.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from snaporch.bundle.store import UUID_NAME
from snaporch.errors import UnavailableError
from snaporch.model import iso, moment_of
from snaporch.private_files import private_directory, replace_private, store_errors
from snaporch.verify.copy_decision import PassedBefore, Source

DIRECTORY = "copies"
"""Below ``paths.schedule``."""


_KEPT = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class CopyListing:
    """The copies that a replica has, or that this host knows of."""

    keys: Collection[str]
    """Of all copies on the replica, and of all records of this host."""
    domains: Collection[str]
    """The UUIDs of the domains that have copies on the replica."""
    is_complete: bool
    """The replica lists copies that are not named, too."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """The last result of verifying a copy."""

    replica: str
    domain: str
    uuid: str
    run: str
    snapshot: str
    at: datetime
    passed: bool
    source: Source
    """What it was compared with."""
    reason: str = ""
    """What is wrong with it; empty if it passed."""
    before: PassedBefore | None = None
    """The last verification that passed, which may be this one."""
    absent: datetime | None = None
    """Since when the replica does not list it, and this host has no record of it; was reported."""

    @property
    def full_name(self) -> str:
        """``DOMAIN@SNAPSHOT``."""
        return f"{self.domain}@{self.snapshot}"

    @property
    def key(self) -> str:
        """As :attr:`~snaporch.verify.copy_decision.Copy.key`."""
        return f"{self.uuid}/{self.run}@{self.snapshot}"

    def as_json(self) -> dict[str, object]:
        """The documented JSON object (``docs/reference/json.md``)."""
        return {
            "replica": self.replica,
            "domain": self.domain,
            "uuid": self.uuid,
            "snapshot": self.snapshot,
            "run": self.run,
            "at": iso(self.at),
            "passed": self.passed,
            "compared_with": self.source.value,
            "failure": self.reason or None,
        }


class CopyResults:
    """The results in a directory.

    Args:
        schedule: the directory ``paths.schedule``.
    """

    def __init__(self, schedule: Path) -> None:
        self._root = schedule / DIRECTORY

    def of_domain(self, replica: str, uuid: str) -> dict[str, CopyResult]:
        """The results of a domain's copies on a replica, by key.

        Raises:
            UnavailableError: they cannot be read.
        """
        path = self._path(replica, uuid)
        step = f"to verify its copies from scratch, delete it: {shlex.join(['rm', str(path)])}"
        try:
            document = json.loads(path.read_bytes())
            found = [_result(replica, uuid, each) for each in document]
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise UnavailableError(str(path), error.strerror or "cannot be read", step) from error
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            reason = "the results of verifying copies in it cannot be read"
            raise UnavailableError(str(path), reason, step) from error
        return {each.key: each for each in found}

    def all(self, replicas: Iterable[str]) -> tuple[list[CopyResult], list[UnavailableError]]:
        """The results of all copies on these replicas, by domain, the oldest first.

        Returns:
            Those that can be read, without the copies that are not there any more, and why others
            cannot.
        """
        found: list[CopyResult] = []
        errors = []
        for replica in replicas:
            try:
                uuids = self.domains(replica)
            except UnavailableError as error:
                errors.append(error)
                continue
            for uuid in uuids:
                try:
                    results = self.of_domain(replica, uuid).values()
                    found += [each for each in results if each.absent is None]
                except UnavailableError as error:
                    errors.append(error)
        return sorted(found, key=lambda each: (each.replica, each.domain, each.at)), errors

    def domains(self, replica: str) -> list[str]:
        """The UUIDs of the domains that have results.

        Raises:
            UnavailableError: they cannot be listed.
        """
        directory = self._root / replica
        with store_errors(directory), suppress(FileNotFoundError):
            paths = sorted(path for path in directory.iterdir() if path.suffix == ".json")
            return [path.stem for path in paths if re.fullmatch(UUID_NAME, path.stem)]
        return []

    def record(self, result: CopyResult) -> None:
        """Record a result, in place of the former one of the same copy.

        Raises:
            UnavailableError: it cannot be written.
        """
        known = self.of_domain(result.replica, result.uuid)
        self._write(result.replica, result.uuid, [*(known | {result.key: result}).values()])

    def sort_out(
        self, replica: str, listing: CopyListing, now: datetime
    ) -> tuple[list[tuple[CopyResult, bool]], list[UnavailableError]]:
        """Mark the results of copies that the replica has not any more; forget them a month later.

        A listing may lack a copy by mistake. If it comes back, it is compared with its result.

        Args:
            replica: its name in the configuration.
            listing: what there is.
            now: the time.

        Returns:
            Results to report, and whether the copy is known to be gone: once those of copies that
            failed, or that are gone with all others of their domain; and each time those of copies
            that failed, and that cannot be listed. Then why files could not be written.

        Raises:
            UnavailableError: the results cannot be listed.
        """
        found: list[tuple[CopyResult, bool]] = []
        errors = []
        for uuid in self.domains(replica):
            try:
                known = self.of_domain(replica, uuid)
            except UnavailableError:  # which is reported with each of its copies, and by status
                continue
            left: dict[str, CopyResult] = {}
            has_any = uuid in listing.domains
            is_hidden = not has_any and not listing.is_complete
            for key, result in known.items():
                if key in listing.keys:
                    left[key] = replace(result, absent=None)
                elif is_hidden:
                    left[key] = result
                    found += [] if result.passed else [(result, False)]
                elif result.absent is None:
                    left[key] = replace(result, absent=now)
                    found += [(result, True)] if not result.passed or not has_any else []
                elif now - result.absent < _KEPT:
                    left[key] = result
            try:
                if left != known:
                    self._replace(replica, uuid, left.values())
            except UnavailableError as error:  # what others have marked must be reported now
                errors.append(error)
        return found, errors

    def _replace(self, replica: str, uuid: str, left: Collection[CopyResult]) -> None:
        if left:
            self._write(replica, uuid, left)
            return
        with store_errors(self._root):
            self._path(replica, uuid).unlink(missing_ok=True)

    def _path(self, replica: str, uuid: str) -> Path:
        return self._root / replica / f"{uuid}.json"

    def _write(self, replica: str, uuid: str, results: Iterable[CopyResult]) -> None:
        path = self._path(replica, uuid)
        data = json.dumps([_document(each) for each in results], indent=1).encode()
        with store_errors(path.parent):
            for directory in (self._root.parent, self._root, path.parent):
                private_directory(directory)
            replace_private(path, data)


def _document(result: CopyResult) -> dict[str, object]:
    found = result.as_json()
    if (before := result.before) is not None:
        found["before"] = [
            iso(before.at),
            before.manifest,
            before.has_pages,
            before.without_ram,
        ]
    if result.absent is not None:
        found["absent"] = iso(result.absent)
    return found


def _result(replica: str, uuid: str, document: dict[str, object]) -> CopyResult:
    at = moment_of(str(document["at"]))
    if at is None or document["uuid"] != uuid:
        raise ValueError(document["at"])
    return CopyResult(
        replica,
        domain=str(document["domain"]),
        uuid=uuid,
        run=str(document["run"]),
        snapshot=str(document["snapshot"]),
        at=at,
        passed=document["passed"] is True,
        source=Source(str(document["compared_with"])),
        reason=str(document["failure"] or ""),
        before=_before(document.get("before")),
        absent=moment_of(str(document.get("absent", ""))),
    )


def _before(value: object) -> PassedBefore | None:
    if not isinstance(value, list):
        return None
    at, manifest, has_pages, without_ram = value
    moment = moment_of(str(at))
    if moment is None:
        return None
    return PassedBefore(moment, str(manifest), bool(has_pages), str(without_ram))
