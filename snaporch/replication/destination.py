"""The interface of a replica, and its implementation: syncoid sends datasets, rsync sends bundles.

syncoid comes with sanoid. It can resume a broken transfer (``zfs receive -s``) and send from a
bookmark. Two of its options matter: ``--no-sync-snap``, since the guest would not be frozen for
a snapshot that syncoid takes; ``--no-rollback``, since data that only the replica has may be the
last copy.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Protocol

from snaporch.bundle.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES
from snaporch.bundle.store import COPY_NAME, COPYING_SUFFIX, RUN_NAME, copy_name
from snaporch.command_log import LoggedCommand
from snaporch.config import Replica
from snaporch.context import Context
from snaporch.errors import SnaporchError
from snaporch.interrupt import Interrupt
from snaporch.model import PoolSnapshot
from snaporch.remote_host import SSH_OPTIONS, Host, check_installed, ssh_words
from snaporch.replication.stall_detector import STALL_SECONDS, StallDetector
from snaporch.zfs import POLICY_PROPERTY, PREFIX, PoolError
from snaporch.zfs.remote import RemoteZfs

_POLL_SECONDS = 0.2
_END_SECONDS = 10
_NAMED = 5
"""How many snapshots a message names."""
_SEE = "see: docs/how-to/replication.md, 'When a transfer fails'"


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
_BUNDLE_FILE = re.compile(rf"(\d+) (-?\d+) \./({RUN_NAME})/([^/]+)")


class ReplicaError(SnaporchError):
    """A transfer failed; everything that was copied before stays on the replica."""


@dataclass(frozen=True, slots=True)
class BundleCopy:
    """A bundle on a replica."""

    sizes: Mapping[str, int]
    """The bytes of each file."""
    unread: float
    """Seconds since its content was last read and found whole; infinite if that is not known."""


class Destination(Protocol):
    """A replica that snapshots and bundles are copied to."""

    def create(self) -> None:
        """Create what the copies are stored in, unless it exists; for a replica without copies.

        Raises:
            SnaporchError: it cannot be created.
        """

    def snapshots(self, datasets: Sequence[str]) -> list[PoolSnapshot]:
        """The replica's copies of snapshots of these datasets, with this host's dataset names.

        Raises:
            SnaporchError: the listing failed, or does not contain what the copies are stored in. So
                copies that are not listed do not exist.
        """

    def send(self, dataset: str, *, raw: bool) -> None:
        """Copy the snapshots of a dataset that the replica lacks, up to the newest.

        The replica's newest snapshot must still exist on this host.

        Args:
            dataset: a dataset of this host.
            raw: send encrypted blocks as they are.

        Raises:
            ReplicaError: the transfer failed.
            InterruptedRunError: a signal came; the next transfer continues where this one stopped.
        """

    def send_from_bookmark(self, bookmark: str, snapshot: str, *, raw: bool) -> None:
        """Copy one snapshot, from the bookmark of the replica's newest snapshot.

        Raises:
            ReplicaError, InterruptedRunError: as for :meth:`send`.
        """

    def diverged(self, dataset: str, only_there: Sequence[str]) -> ReplicaError:
        """The error for a copy that no stream of this host continues.

        Args:
            dataset: a dataset of this host.
            only_there: the names of the copy's snapshots that are newer than all common ones.
        """

    def mark(self, properties: Mapping[str, Mapping[str, str]]) -> None:
        """Set properties on copies of snapshots; the keys are this host's snapshot names."""

    def set_policies(self, policies: Mapping[str, str]) -> None:
        """Set ``snaporch:policy`` on copies, so that it comes back with them.

        Args:
            policies: by this host's dataset, which the replica has; empty for none.
        """

    def bundles(self, uuid: str) -> dict[str, BundleCopy]:
        """The bundles of a domain that the replica has, by run.

        If the replica crashed while a bundle was replaced, that is finished first.

        Raises:
            SnaporchError: the listing failed, or the directory of all bundles is missing.
        """

    def damaged(self, reference: str, sums: Mapping[str, str]) -> list[str]:
        """Read a bundle on the replica.

        Args:
            reference: ``uuid/run``.
            sums: the SHA-256 of each file.

        Returns:
            The files that are missing, cannot be read or differ. If there is none, the time of the
            reading is recorded on the replica.
        """

    def manifest(self, reference: str) -> str:
        """The text of the manifest of a bundle that the replica has, which may be any text.

        Args:
            reference: ``uuid/run``.
        """

    def store(self, directory: Path, reference: str, sums: Mapping[str, str]) -> list[str]:
        """Copy a bundle; the replica has all of it or none.

        A bundle that is there is replaced when the copy is complete.

        Args:
            directory: the bundle.
            reference: ``uuid/run``.
            sums: the SHA-256 of each file.

        Returns:
            The files that differ from ``sums``; if there are any, the copy was discarded.

        Raises:
            ReplicaError: the transfer failed.
            InterruptedRunError: a signal came.
        """


class ReplicaDestination:
    """:class:`Destination` by syncoid, rsync and ssh."""

    def __init__(self, name: str, replica: Replica, interrupt: Interrupt) -> None:
        self._name = name
        self._replica = replica
        self._interrupt = interrupt
        self._host = Host(replica.host, lambda: interrupt.check(name))
        self._pool = RemoteZfs(self._host)
        self._encrypts: bool | None = None

    def _copy_name(self, name: str) -> str:
        return f"{self._replica.dataset}/{copy_name(name)}"

    def create(self) -> None:
        """See the protocol."""
        self._pool.make(self._replica.dataset)

    def snapshots(self, datasets: Sequence[str]) -> list[PoolSnapshot]:
        """See the protocol."""
        names = {self._copy_name(each): each for each in datasets}
        root = self._replica.dataset
        try:
            found = self._pool.copies(root, list(names))
        except PoolError as error:
            if error.step:
                raise
            create = self._command("zfs", "create", "-p", "-o", "mountpoint=none", root)
            raise ReplicaError(
                f"{self._name}: {root}",
                f"the copies cannot be listed: {error.reason}",
                f"is its pool imported? if the copies are lost: {create}, and all are sent again",
            ) from error
        return [replace(s, dataset=names[s.dataset]) for s in found if s.dataset in names]

    def send(self, dataset: str, *, raw: bool) -> None:
        """See the protocol."""
        replica, copy = self._replica, self._copy_name(dataset)
        limit = [f"--source-bwlimit={replica.rate}M"] if replica.rate else []
        words = [
            "syncoid",
            "--no-sync-snap",
            "--no-rollback",
            "--no-privilege-elevation",
            "--compress=none",  # ZFS sends blocks compressed as they are on the disks
            "--quiet",
            f"--sendoptions={self._send_options(raw=raw)}",
            "--recvoptions=u o readonly=on",
            *(f"--sshoption={option}" for option in SSH_OPTIONS),
            *limit,
            dataset,
            f"{replica.host}:{copy}" if replica.host else copy,
        ]
        status, lines = self._run(words, counted=shutil.which("mbuffer") is not None)
        if status != 0:
            raise ReplicaError(f"{self._name}: {dataset}", _reason(lines), _SEE)

    def send_from_bookmark(self, bookmark: str, snapshot: str, *, raw: bool) -> None:
        """See the protocol.

        syncoid cannot do this: if there is an older common *snapshot*, it begins there, and fails
        because the replica has a newer one.
        """
        dataset = snapshot.partition("@")[0]
        copy = shlex.quote(self._copy_name(dataset))
        asked = f"zfs get -H -o value receive_resume_token {copy}"
        position = self._host.script(asked, what="zfs get").strip()
        if position != "-":
            if self._can_resume(position):
                return  # syncoid does
            self._host.script(f"zfs receive -A {copy}", what="zfs receive -A")
        options = self._send_options(raw=raw)
        send = shlex.join(["zfs", "send", f"-{options}", "-i", bookmark, snapshot])
        receive = shlex.join(self._host.words(f"zfs receive -u -o readonly=on {copy}"))
        rate = self._replica.rate
        limit = f" | mbuffer -q -m 16M -R {rate}M" if rate and shutil.which("mbuffer") else ""
        status, lines = self._run(["sh", "-c", f"{send}{limit} | {receive}"], counted=bool(limit))
        if status != 0:
            raise ReplicaError(f"{self._name}: {snapshot}", _reason(lines), _SEE)

    def _send_options(self, *, raw: bool) -> str:
        """Options of ``zfs send``: blocks as they are on the disks.

        An encrypted dataset cannot receive embedded blocks (``-e``).
        """
        if raw:
            return "w"
        if self._encrypts is None:
            self._encrypts = self._replica.dataset in self._pool.encrypted()
        return "Lc" if self._encrypts else "Lce"

    def _can_resume(self, position: str) -> bool:
        """Whether this host still has the snapshots of a transfer that was interrupted.

        Args:
            position: the copy's ``receive_resume_token``.
        """
        return self._run(["zfs", "send", "-n", "-t", position], counted=False)[0] == 0

    def diverged(self, dataset: str, only_there: Sequence[str]) -> ReplicaError:
        """See the protocol."""
        copy = self._copy_name(dataset)
        names = ", ".join(f"@{each}" for each in only_there[:_NAMED])
        more = f" and {len(only_there) - _NAMED} more" if len(only_there) > _NAMED else ""
        reason = (
            f"{copy} on {self._host.label} has diverged, as after a restore: "
            f"it ends with snapshots that may exist nowhere else ({names}{more})"
        )
        keep = self._command("zfs", "rename", copy, f"{copy}-kept-{only_there[-1]}")
        step = f"keep them: {keep}, and the next replication sends a full copy; or discard them"
        return ReplicaError(
            f"{self._name}: {dataset}", reason, f"{step}: see docs/how-to/replication.md"
        )

    def _command(self, *words: str) -> str:
        """A command on the replica, for an admin on this host."""
        command = shlex.join(words)
        return shlex.join(["ssh", self._replica.host, command]) if self._replica.host else command

    def mark(self, properties: Mapping[str, Mapping[str, str]]) -> None:
        """See the protocol."""
        self._pool.mark(
            {
                self._copy_name(name): {PREFIX + key: value for key, value in values.items()}
                for name, values in properties.items()
            }
        )

    def set_policies(self, policies: Mapping[str, str]) -> None:
        """See the protocol."""
        wanted = {self._copy_name(name): policy for name, policy in policies.items()}
        there = self._pool.policies(list(wanted))
        self._pool.mark(
            {
                copy: {POLICY_PROPERTY: policy}
                for copy, policy in wanted.items()
                if there.get(copy, "") != policy
            }
        )

    def bundles(self, uuid: str) -> dict[str, BundleCopy]:
        """See the protocol."""
        store, directory = self._replica.bundles, shlex.quote(f"{self._replica.bundles}/{uuid}")
        files = "find . -mindepth 2 -maxdepth 2 -type f -exec stat -c '%s %Y %n' {} +"
        settled = f"cd {directory} && {_FINISH_REPLACING} && {files}"
        script = f"cd {shlex.quote(str(store))} && date +%s"
        script += f" && if test -d {directory}; then {settled}; fi"
        now, _, lines = self._host.script(script, what=str(store)).partition("\n")
        if not now.isdecimal():
            raise ReplicaError(f"{self._name}: {store}", "its bundles cannot be listed: no output")
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
        """See the protocol."""
        directory = f"{self._replica.bundles}/{reference}"
        found = self._differing(directory, sums)
        if not found:
            self._host.run("touch", f"{directory}/{COPY_NAME}")
        return found

    def manifest(self, reference: str) -> str:
        """See the protocol."""
        path = shlex.quote(f"{self._replica.bundles}/{reference}/{MANIFEST_NAME}")
        read = f"if test -f {path}; then head -c {MAX_MANIFEST_BYTES} {path}; fi"
        return self._host.script(read, what=MANIFEST_NAME)

    def _differing(self, directory: str, sums: Mapping[str, str]) -> list[str]:
        """The files in a directory whose content does not have this SHA-256."""
        names = shlex.join(sums)
        script = f"cd {shlex.quote(directory)} && {{ nice -n 19 sha256sum -- {names} || true; }}"
        lines = self._host.script(script, what="sha256sum").splitlines()
        found = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        return [name for name, digest in sums.items() if found.get(name) != digest]

    def store(self, directory: Path, reference: str, sums: Mapping[str, str]) -> list[str]:
        """See the protocol."""
        uuid, _, run = reference.partition("/")
        above = f"{self._replica.bundles}/{uuid}"
        partial, final = f"{above}/.{run}{COPYING_SUFFIX}", f"{above}/{run}"
        # Do not make the directory itself: it may be the mount point of a missing file system.
        self._host.script(
            f"umask 077; cd {shlex.quote(str(self._replica.bundles))}"
            f" && mkdir -p {shlex.quote(above)} && command -v rsync"
            f" && cd {shlex.quote(above)} && {_FINISH_REPLACING}",
            what=str(self._replica.bundles),
        )
        self._copy_files(directory, reference, partial)
        if damaged := self._differing(partial, sums):
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
            what="mv",
        )
        return []

    def _copy_files(self, directory: Path, reference: str, partial: str) -> None:
        limit = [f"--bwlimit={self._replica.rate}M"] if self._replica.rate else []
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
        status, lines = self._run([*words, *limit, f"{directory}/", place], counted=True)
        if status != 0:
            reason = next((line for line in lines if "failed" in line), "")
            reason = reason or (lines[0] if lines else f"rsync ended with status {status}")
            raise ReplicaError(f"{self._name}: bundle {reference}", reason)

    def _run(self, command: Sequence[str], *, counted: bool) -> tuple[int, list[str]]:
        """Run a transfer, which may take hours.

        Its output goes to a file. A pipe would be held open by a child that stays: the connection
        that syncoid has ssh keep.

        Args:
            command: the command line.
            counted: all data goes through a process of its own group, such as the mbuffer that
                syncoid puts behind ``zfs send``; so it is ended when no data moves. Otherwise the
                bytes cannot be counted: ``zfs send`` writes in the kernel, and ssh may hand its
                files to a master process of another group.

        Returns:
            The exit status, and the lines of output.
        """
        check_installed(command[0])
        with LoggedCommand(*command) as log, tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,  # a group of its own, which can be ended as a whole
            )
            try:
                status = self._wait(process, StallDetector(process.pid) if counted else None)
            finally:
                _end_group(process)
            log.exited(status)
            output.seek(0)
            text = output.read().decode("utf-8", "replace")
        return status, [line.strip() for line in text.splitlines() if line.strip()]

    def _wait(self, process: subprocess.Popen[bytes], pace: StallDetector | None) -> int:
        while True:
            self._interrupt.check(self._name)
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_SECONDS)
            if pace is not None and pace.is_stalled():
                raise ReplicaError(
                    self._name,
                    f"no data moved for {STALL_SECONDS // 60} minutes, so the transfer was ended",
                    f"see: zpool status, on {self._host.label}",
                )


def open_replica(context: Context, name: str) -> Destination:
    """The replica with this name in the configuration."""
    return ReplicaDestination(name, context.config.replica[name], context.interrupt)


def unavailable_reason(replica: Replica) -> str:
    """Why no transfer to a replica can succeed now; empty if no obstacle is found."""
    host, pool = Host(replica.host), replica.dataset.partition("/")[0]
    try:
        for command in ("syncoid", "rsync"):
            check_installed(command)
        host.run("rsync", "--version")
        host.run("zfs", "list", "-H", "-o", "name", pool)
        host.run("ls", "-d", f"{replica.bundles}/")
    except SnaporchError as error:
        return error.line()
    return ""


def _reason(lines: Sequence[str]) -> str:
    """The reason of a failure, from the output of ``zfs`` and syncoid."""
    reason = next((line for line in lines if line.startswith("cannot ")), "")
    reason = reason or next((line for line in lines if re.match("(CRITICAL|ERROR)", line)), "")
    return reason or (lines[-1] if lines else "syncoid failed without output")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process with its group, unless it has exited.

    Waits for all of them: a receiver that still records its position would block the next transfer.
    """
    if process.poll() is not None:
        return
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        end = time.monotonic() + _END_SECONDS
        while time.monotonic() < end:
            if process.poll() is not None and not _has_members(process.pid):
                return
            time.sleep(_POLL_SECONDS)


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
