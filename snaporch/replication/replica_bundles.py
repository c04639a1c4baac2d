"""The bundles in a replica's directory: listed, read, and replaced so that one is whole always.

Which bundles are sent or read again is decided by :mod:`snaporch.replication.bundle_copies`.
"""

from __future__ import annotations

import json
import re
import shlex
from base64 import b64decode
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from pathlib import Path

from snaporch.bundle.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, MAX_MANIFESTS_BYTES
from snaporch.bundle.store import COPY_NAME, COPYING_SUFFIX, RUN_NAME, UUID_NAME
from snaporch.config import Replica
from snaporch.remote_host import Host, ssh_words
from snaporch.replication.interface import BundleCopy, ReplicaError, readable, seconds_to_read
from snaporch.replication.transfer import RateChangedError, Transfers

_FORMER_SUFFIX = ".former"
"""Suffix of the directory of a bundle that is being replaced."""
_FINISH_REPLACING = (
    f"for former in .*{_FORMER_SUFFIX}; do"
    ' test -d "$former" || continue;'
    f' run=${{former#.}}; run=${{run%{_FORMER_SUFFIX}}}; new=".$run{COPYING_SUFFIX}";'
    f' test -e "$new/{COPY_NAME}" || new="$former";'
    ' { test -e "$run" || mv -T "$new" "$run"; } && sync -f . && rm -rf "$former" || exit 1;'
    " done"
)
"""A script for the directory of a domain's bundles: finishes what a crash interrupted.

A bundle was being replaced if its former directory is still there. If none has its name, the new
one gets it, which was synced before the former one lost the name.
"""
_NEWEST_MANIFESTS = (
    "for domain in *; do"
    ' case "$domain" in *[!0-9a-f-]*) continue;; esac;'
    f' run=$(ls -1 "$domain" 2>/dev/null | grep -xE "{RUN_NAME}" | LC_ALL=C sort | tail -n 1);'
    ' test -n "$run" && test -d "$domain/$run" || continue;'
    f' size=$(stat -L -c %s "$domain/$run/{MANIFEST_NAME}" 2>/dev/null || echo 0);'
    ' echo "$size $domain/$run"; done | LC_ALL=C sort -n | {'
    f" left={MAX_MANIFESTS_BYTES};"
    ' while read -r size place; do printf "%s " "$place";'
    f' if test -f "$place/{MANIFEST_NAME}" && test "$size" -le {MAX_MANIFEST_BYTES}'
    ' && test "$size" -le "$left"; then left=$((left - size));'
    f' head -c "$size" "$place/{MANIFEST_NAME}" | base64 -w 0; fi; echo; done; }}'
)
"""A script for the directory of all bundles: a line for each domain. Names of runs sort by time.

The smallest manifests come first: large ones, which no guest has, keep no other from being read.
"""
_MISSING = "missing"
_MANIFEST_LINE = re.compile(f"({UUID_NAME}/{RUN_NAME}) ([A-Za-z0-9+/=]*)")
_BUNDLE_FILE = re.compile(rf"(\d+) (-?\d+) \./({RUN_NAME})/([^/]+)")


class ReplicaBundles:
    """The bundles in a replica's directory.

    Args:
        name: the replica's name in the configuration.
        replica: its section.
        host: its machine.
        transfers: run its transfers.
    """

    def __init__(self, name: str, replica: Replica, host: Host, transfers: Transfers) -> None:
        self._name = name
        self._replica = replica
        self._host = host
        self._transfers = transfers

    def bundles(self, uuid: str) -> dict[str, BundleCopy]:
        """See :class:`~snaporch.replication.interface.Destination`."""
        store, directory = self._replica.bundles, shlex.quote(f"{self._replica.bundles}/{uuid}")
        files = "find . -mindepth 2 -maxdepth 2 -type f -exec stat -c '%s %Y %n' {} +"
        settled = f"cd {directory} && {_FINISH_REPLACING} && {files}"
        listing = f"date +%s && if test -d {directory}; then {settled}; fi"
        now, _, lines = self._in_store(listing).partition("\n")
        if not now.isdecimal():
            raise ReplicaError(f"{self._name}: {store}", "its bundles cannot be listed: no output")
        with readable(self._name, self._host.label):
            return self._bundle_copies(now, lines)

    def _in_store(self, script: str) -> str:
        """Run a script in the directory of all bundles; return its standard output.

        Raises:
            ReplicaError: the directory does not exist.
        """
        store = str(self._replica.bundles)
        place = shlex.quote(store)
        checked = f"test -d {place} || {{ echo {_MISSING}; exit; }}; cd {place} && {script}"
        output = self._host.script(checked, what=store)
        if output == f"{_MISSING}\n":
            raise ReplicaError(
                f"{self._name}: {store}",
                f"does not exist on {self._host.label}",
                f"mount its file system there; a new replica needs it, too: mkdir -m 700 {place}",
            )
        return output

    @staticmethod
    def _bundle_copies(now: str, lines: str) -> dict[str, BundleCopy]:
        """The bundles in a listing.

        Args:
            now: the time of the replica's clock.
            lines: size, time of writing and path of each file.
        """
        sizes: dict[str, dict[str, int]] = defaultdict(dict)
        ages = {}
        for line in lines.splitlines():
            if match := _BUNDLE_FILE.fullmatch(line):
                size, changed, run, name = match.groups()
                sizes[run][name] = int(size)
                if name == COPY_NAME and int(changed) <= int(now):
                    ages[run] = int(now) - int(changed)
        return {run: BundleCopy(found, ages.get(run, inf)) for run, found in sizes.items()}

    def damaged(self, reference: str, sums: Mapping[str, str]) -> list[str]:
        """See :class:`~snaporch.replication.interface.Destination`."""
        directory = f"{self._replica.bundles}/{reference}"
        with readable(self._name, self._host.label):
            limit = seconds_to_read(int(self._host.run("du", "-sb", directory).split()[0]))
        found = self._differing(directory, sums, limit)
        if not found:
            self._host.run("touch", f"{directory}/{COPY_NAME}")
        return found

    def manifest(self, reference: str) -> str:
        """See :class:`~snaporch.replication.interface.Destination`."""
        path = shlex.quote(f"{self._replica.bundles}/{reference}/{MANIFEST_NAME}")
        read = f"if test -f {path}; then head -c {MAX_MANIFEST_BYTES} {path}; fi"
        return self._host.script(read, what=MANIFEST_NAME)

    def newest_manifests(self) -> dict[str, str]:
        """The text of the newest manifest of each domain, by ``uuid/run``.

        It is empty without a manifest, and for those over :data:`MAX_MANIFEST_BYTES` or
        :data:`MAX_MANIFESTS_BYTES`.

        Raises:
            ReplicaError: the directory does not exist.
        """
        found = {}
        for line in self._in_store(_NEWEST_MANIFESTS).splitlines():
            if match := _MANIFEST_LINE.fullmatch(line):
                with readable(self._name, self._host.label):
                    text = b64decode(match[2], validate=True)
                found[match[1]] = text.decode("utf-8", "surrogateescape")
        return found

    def _differing(self, directory: str, sums: Mapping[str, str], limit: float) -> list[str]:
        """The files in a directory whose content does not have this SHA-256.

        Args:
            limit: seconds.
        """
        names = shlex.join(sums)
        script = f"cd {shlex.quote(directory)} && {{ nice -n 19 sha256sum -- {names} || true; }}"
        lines = self._host.script(script, what="sha256sum", limit=limit).splitlines()
        found = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        return [name for name, digest in sums.items() if found.get(name) != digest]

    def store(self, directory: Path, reference: str, sums: Mapping[str, str]) -> list[str]:
        """See :class:`~snaporch.replication.interface.Destination`."""
        uuid, _, run = reference.partition("/")
        above = f"{self._replica.bundles}/{uuid}"
        partial, final = f"{above}/.{run}{COPYING_SUFFIX}", f"{above}/{run}"
        # Do not make the directory itself: it may be the mount point of a missing file system.
        self._in_store(
            f"umask 077 && mkdir -p {shlex.quote(above)} && command -v rsync"
            f" && cd {shlex.quote(above)} && {_FINISH_REPLACING}"
        )
        with self._transfers.local_errors():
            size = sum(path.stat().st_size for path in directory.iterdir())
        self._copy_files(directory, reference, partial, size)
        limit = seconds_to_read(size)
        if damaged := self._differing(partial, sums, limit):
            # Not kept: rsync would not copy a file again that has the right size and time.
            self._host.run("rm", "-rf", partial)
            return damaged
        description = shlex.quote(json.dumps({"dataset": self._replica.dataset}))
        copied, ready, store = map(shlex.quote, (partial, final, above))
        former = shlex.quote(f"{above}/.{run}{_FORMER_SUFFIX}")
        self._host.script(
            f"umask 077; echo {description} >{copied}/{COPY_NAME} && sync -f {copied}"
            f" && if test -e {ready}; then rm -rf {former} && mv -T {ready} {former}; fi"
            f" && mv -T {copied} {ready} && sync -f {store}"
            # leftovers of transfers that were abandoned: of each, the former bundle has its name
            f" && rm -rf {former} {store}/.*{COPYING_SUFFIX}",
            what="sync",
            limit=limit,
        )
        return []

    def _copy_files(self, directory: Path, reference: str, partial: str, size: int) -> None:
        while True:
            with suppress(RateChangedError):  # then the files that arrived are not sent again
                return self._run_rsync(directory, reference, partial, size)

    def _run_rsync(self, directory: Path, reference: str, partial: str, size: int) -> None:
        rate = self._transfers.rate()
        limit = [f"--bwlimit={rate}M"] if rate else []
        place = f"{self._replica.host}:{partial}/" if self._replica.host else f"{partial}/"
        words = [
            "rsync",
            "-rlptgo",
            "--numeric-ids",
            "--inplace",
            "--delete",
            "-e",
            shlex.join(ssh_words()),
        ]
        words += [*limit, f"{directory}/", place]
        status, lines = self._transfers.run(words, through=0, size=size, rate=rate)
        if status != 0:
            reason = next((line for line in lines if "failed" in line), "")
            reason = reason or (lines[0] if lines else f"rsync ended with status {status}")
            raise ReplicaError(f"{self._name}: bundle {reference}", reason)
