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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from snaporch.bundle.store import COPY_NAME, COPYING_SUFFIX, RUN_NAME, copy_name
from snaporch.command_log import LoggedCommand
from snaporch.config import Replica
from snaporch.context import Context, Interrupt
from snaporch.errors import SnaporchError
from snaporch.model import PoolSnapshot
from snaporch.remote_host import SSH_OPTIONS, Host, check_installed, ssh_words
from snaporch.replication.stall_detector import STALL_SECONDS, StallDetector
from snaporch.zfs import PREFIX
from snaporch.zfs.remote import RemoteZfs

_POLL_SECONDS = 0.2
_END_SECONDS = 10
_DIVERGED = ("most recent snapshot", "has been modified", "no snapshots matching")


class ReplicaError(SnaporchError):
    """A transfer failed; everything that was copied before stays on the replica."""


class Destination(Protocol):
    """A replica that snapshots and bundles are copied to."""

    def snapshots(self, datasets: Sequence[str]) -> list[PoolSnapshot]:
        """The replica's copies of snapshots of these datasets, with this host's dataset names."""

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

    def mark(self, properties: Mapping[str, Mapping[str, str]]) -> None:
        """Set properties on copies of snapshots; the keys are this host's snapshot names."""

    def bundles(self, uuid: str) -> frozenset[str]:
        """The runs of a domain whose bundles the replica has."""

    def store(self, directory: Path, reference: str) -> None:
        """Copy a bundle; the replica has all of it or none.

        Args:
            directory: the bundle.
            reference: ``uuid/run``.

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
        self._is_made = False

    def _copy_name(self, name: str) -> str:
        return f"{self._replica.dataset}/{copy_name(name)}"

    def snapshots(self, datasets: Sequence[str]) -> list[PoolSnapshot]:
        """See the protocol."""
        names = {self._copy_name(each): each for each in datasets}
        found = self._pool.snapshots(list(names))
        return [replace(each, dataset=names[each.dataset]) for each in found]

    def send(self, dataset: str, *, raw: bool) -> None:
        """See the protocol."""
        replica, copy = self._replica, self._copy_name(dataset)
        if not self._is_made:
            self._pool.make(replica.dataset)
            self._is_made = True
        limit = [f"--source-bwlimit={replica.rate}M"] if replica.rate else []
        words = [
            "syncoid",
            "--no-sync-snap",
            "--no-rollback",
            "--no-privilege-elevation",
            "--compress=none",  # ZFS sends blocks compressed as they are on the disks
            "--quiet",
            f"--sendoptions={'w' if raw else 'Lce'}",
            "--recvoptions=u o readonly=on",
            *(f"--sshoption={option}" for option in SSH_OPTIONS),
            *limit,
            dataset,
            f"{replica.host}:{copy}" if replica.host else copy,
        ]
        status, lines = self._run(words, counted=shutil.which("mbuffer") is not None)
        if status != 0:
            raise ReplicaError(f"{self._name}: {dataset}", *self._explain_failure(dataset, lines))

    def send_from_bookmark(self, bookmark: str, snapshot: str, *, raw: bool) -> None:
        """See the protocol.

        syncoid cannot do this: if there is an older common *snapshot*, it begins there, and fails
        because the replica has a newer one.
        """
        dataset = snapshot.partition("@")[0]
        copy = shlex.quote(self._copy_name(dataset))
        token = f"zfs get -H -o value receive_resume_token {copy}"
        if self._host.script(token, what="zfs get").strip() != "-":
            return  # syncoid resumes an interrupted transfer
        flags = ["-w"] if raw else ["-L", "-c", "-e"]
        send = shlex.join(["zfs", "send", *flags, "-i", bookmark, snapshot])
        receive = shlex.join(self._host.words(f"zfs receive -u -o readonly=on {copy}"))
        rate = self._replica.rate
        limit = f" | mbuffer -q -m 16M -R {rate}M" if rate and shutil.which("mbuffer") else ""
        status, lines = self._run(["sh", "-c", f"{send}{limit} | {receive}"], counted=bool(limit))
        if status != 0:
            raise ReplicaError(f"{self._name}: {snapshot}", *self._explain_failure(dataset, lines))

    def _explain_failure(self, dataset: str, lines: Sequence[str]) -> tuple[str, str]:
        """The reason of a failure, from the output of ``zfs`` and syncoid, and the next step."""
        reason = next((line for line in lines if line.startswith("cannot ")), "")
        reason = reason or next((line for line in lines if re.match("(CRITICAL|ERROR)", line)), "")
        reason = reason or (lines[-1] if lines else "syncoid failed without output")
        if any(words in line for line in lines for words in _DIVERGED):
            step = (
                f"{self._copy_name(dataset)} on {self._host.label} has diverged from this host's "
                "dataset, as after a restore: see docs/replication.md"
            )
            return reason, step
        return reason, ""

    def mark(self, properties: Mapping[str, Mapping[str, str]]) -> None:
        """See the protocol."""
        self._pool.mark(
            {
                self._copy_name(name): {PREFIX + key: value for key, value in values.items()}
                for name, values in properties.items()
            }
        )

    def bundles(self, uuid: str) -> frozenset[str]:
        """See the protocol."""
        directory = shlex.quote(f"{self._replica.bundles}/{uuid}")
        script = f"if test -d {directory}; then ls -1 {directory}; fi"
        lines = self._host.script(script, what="ls").splitlines()
        return frozenset(line for line in lines if re.fullmatch(RUN_NAME, line))

    def store(self, directory: Path, reference: str) -> None:
        """See the protocol."""
        uuid, _, run = reference.partition("/")
        above = f"{self._replica.bundles}/{uuid}"
        partial, final = f"{above}/.{run}{COPYING_SUFFIX}", f"{above}/{run}"
        # Do not make the directory itself: it may be the mount point of a missing file system.
        self._host.script(
            f"umask 077; cd {shlex.quote(str(self._replica.bundles))}"
            f" && mkdir -p {shlex.quote(above)} && command -v rsync",
            what=str(self._replica.bundles),
        )
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
        description = shlex.quote(json.dumps({"dataset": self._replica.dataset}))
        copied, ready, store = map(shlex.quote, (partial, final, above))
        self._host.script(
            f"umask 077; echo {description} >{copied}/{COPY_NAME} && sync -f {copied}"
            f" && mv -T {copied} {ready} && sync -f {store}"
            f" && rm -rf {store}/.*{COPYING_SUFFIX}",  # leftovers of transfers that were abandoned
            what="mv",
        )

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
