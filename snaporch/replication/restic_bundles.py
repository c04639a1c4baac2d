"""The bundles in a repository of restic: listed, and read."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from snaporch.bundle.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, MAX_MANIFESTS_BYTES
from snaporch.replication.interface import BundleCopy, seconds_to_read
from snaporch.replication.restic import ResticRepository
from snaporch.replication.restic_records import BundleRecord


class ResticBundles:
    """The bundles in a repository.

    Args:
        repository: the repository.
    """

    def __init__(self, repository: ResticRepository) -> None:
        self._repository = repository

    def record(self, reference: str) -> BundleRecord | None:
        """The record of a bundle, if the repository has all of it.

        Args:
            reference: ``uuid/run``.
        """
        return self._repository.contents().bundles.get(reference)

    def bundles(self, uuid: str) -> dict[str, BundleCopy]:
        """The bundles of a domain, by run."""
        found = self._repository.contents().bundles
        return {
            reference.partition("/")[2]: record.copy
            for reference, record in found.items()
            if reference.startswith(f"{uuid}/")
        }

    def file(self, record: BundleRecord, name: str) -> list[str]:
        """The command line that prints a file of a bundle."""
        if record.directory:
            return self._repository.dump(record.directory, f"{record.place}/{name}")
        latest = self._repository.dump("latest", f"{record.place}/{name}")
        return [*latest, "--tag", f"upload={record.upload}"]

    def text(self, record: BundleRecord, name: str, limit: int) -> str:
        """The text of a small file of a bundle; empty if it is damaged or too long.

        Args:
            record: of the bundle.
            name: of the file.
            limit: the most bytes that are read.

        Raises:
            ReplicaError: the repository does not answer.
        """
        return self._read(record, name, f"head -c {limit}") or ""

    def manifest(self, reference: str) -> str:
        """The text of the manifest of a bundle, which may be any text."""
        record = self.record(reference)
        return "" if record is None else self.text(record, MANIFEST_NAME, MAX_MANIFEST_BYTES)

    def newest_manifests(self) -> dict[str, str]:
        """The text of the newest manifest of each domain, by ``uuid/run``; any text, or none.

        The smallest ones are read first, up to :data:`MAX_MANIFESTS_BYTES` of all.
        """
        bundles = self._repository.contents().bundles
        newest = {each.partition("/")[0]: each for each in sorted(bundles)}
        sizes = {each: bundles[each].files.get(MANIFEST_NAME, (0, ""))[0] for each in bundles}
        found, left = {}, MAX_MANIFESTS_BYTES
        for reference in sorted(newest.values(), key=lambda each: (sizes[each], each)):
            is_read = sizes[reference] <= min(left, MAX_MANIFEST_BYTES)
            found[reference] = self.manifest(reference) if is_read else ""
            left -= max(sizes[reference], len(found[reference]))
        return found

    def damaged(self, reference: str, sums: Mapping[str, str]) -> list[str]:
        """Read a bundle; return the files that are missing, cannot be read or differ."""
        record = self.record(reference)
        return list(sums) if record is None else self.differing(record, sums)

    def differing(self, record: BundleRecord, sums: Mapping[str, str]) -> list[str]:
        """The files of a bundle that do not have this SHA-256, by reading all of them."""
        found = []
        for name, digest in sums.items():
            size = record.files.get(name, (0, ""))[0]
            text = self._read(record, name, "sha256sum", limit=seconds_to_read(size))
            if text is None or text.partition(" ")[0] != digest:
                found.append(name)
        return found

    def _read(
        self, record: BundleRecord, name: str, reader: str, *, limit: float | None = None
    ) -> str | None:
        """What a command prints of a file, which restic is asked for twice.

        Args:
            record: of the bundle.
            name: of the file.
            reader: the command.
            limit: seconds.

        Returns:
            None if restic cannot read the file, although the repository answers: it is damaged.

        Raises:
            ReplicaError: the repository does not answer.
        """
        dump = shlex.join(self.file(record, name))
        counted = f"{{ {{ {dump}; echo $? >&3; }} | {reader} >&5; }} 3>&1"
        script = f"exec 5>&1; status=$({counted}); echo; echo $status"
        for _ in range(2):
            text = self._repository.host.script(script, what=f"restic dump {name}", limit=limit)
            printed, _, status = text.removesuffix("\n").rpartition("\n")
            if status == "0":
                return printed
            self._repository.check_answers()
        return None
