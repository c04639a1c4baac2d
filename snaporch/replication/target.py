"""What a replica must be able to do, and how: syncoid sends datasets, rsync sends bundles.

syncoid is sanoid's own and knows how to go on after a broken transfer (``zfs receive -s``), and
from a bookmark. Of its options: ``--no-sync-snap``, for a snapshot of syncoid's own making would be
of a guest that nobody held; ``--no-rollback``, for what the replica has and we have not may be the
last there is of it.
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

from snaporch.bundle.store import COPY_NAME, COPYING, RUN_NAME, copy_of
from snaporch.command_log import LoggedCommand
from snaporch.config import Replica
from snaporch.context import Interrupt
from snaporch.errors import SnaporchError
from snaporch.model import PoolSnapshot
from snaporch.remote_host import SSH_OPTIONS, Host, needed, ssh
from snaporch.replication.stall_detector import STILL_SECONDS, StallDetector
from snaporch.zfs import PREFIX
from snaporch.zfs.remote import RemoteZfs

_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 10
_MODIFIED = ("most recent snapshot", "has been modified", "no snapshots matching")


class ReplicaError(SnaporchError):
    """Something could not be copied; what was copied before is there."""


class Destination(Protocol):
    """A replica, as far as copying to it goes."""

    def snapshots(self, datasets: Sequence[str]) -> list[PoolSnapshot]:
        """What it has of these datasets of ours; datasets are named as here."""

    def send(self, dataset: str, *, raw: bool) -> None:
        """Copy the snapshots of a dataset that it lacks, up to the newest.

        The newest it has must still be here.

        Raises:
            ReplicaError: it failed.
            InterruptedRunError: a signal came; what arrived stays, the rest goes on next time.
        """

    def go_on(self, bookmark: str, snapshot: str, *, raw: bool) -> None:
        """Copy one snapshot, from the bookmark of what is the newest there.

        Raises:
            ReplicaError, InterruptedRunError: as for :meth:`send`.
        """

    def mark(self, properties: Mapping[str, Mapping[str, str]]) -> None:
        """Set properties on its copies of snapshots, which are named as here."""

    def bundles(self, uuid: str) -> frozenset[str]:
        """The runs of a domain whose bundles it has."""

    def store(self, directory: Path, reference: str) -> None:
        """Copy a bundle; it has all of it or none.

        Raises:
            ReplicaError: it failed.
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

    def _there(self, name: str) -> str:
        return f"{self._replica.dataset}/{copy_of(name)}"

    def snapshots(self, datasets: Sequence[str]) -> list[PoolSnapshot]:
        """See the protocol."""
        names = {self._there(each): each for each in datasets}
        found = self._pool.snapshots(list(names))
        return [replace(each, dataset=names[each.dataset]) for each in found]

    def send(self, dataset: str, *, raw: bool) -> None:
        """See the protocol."""
        replica = self._replica
        if not self._is_made:
            self._pool.make(replica.dataset)
            self._is_made = True
        limit = [f"--source-bwlimit={replica.rate}M"] if replica.rate else []
        words = [
            "syncoid",
            "--no-sync-snap",
            "--no-rollback",
            "--no-privilege-elevation",
            "--compress=none",  # blocks travel as they lie on the disks
            "--quiet",
            f"--sendoptions={'w' if raw else 'Lce'}",
            "--recvoptions=u o readonly=on",
            *(f"--sshoption={option}" for option in SSH_OPTIONS),
            *limit,
            dataset,
            f"{replica.host}:{self._there(dataset)}" if replica.host else self._there(dataset),
        ]
        status, lines = self._run(words, counted=shutil.which("mbuffer") is not None)
        if status != 0:
            raise ReplicaError(f"{self._name}: {dataset}", *self._explained(dataset, lines))

    def go_on(self, bookmark: str, snapshot: str, *, raw: bool) -> None:
        """See the protocol.

        syncoid would begin at the newest *snapshot* that both have, if there is an older one, and
        fail, for the replica has a newer one.
        """
        dataset = snapshot.partition("@")[0]
        copy = shlex.quote(self._there(dataset))
        token = f"zfs get -H -o value receive_resume_token {copy}"
        if self._host.script(token, what="zfs get").strip() != "-":
            return  # syncoid knows how to finish that
        flags = ["-w"] if raw else ["-L", "-c", "-e"]
        send = shlex.join(["zfs", "send", *flags, "-i", bookmark, snapshot])
        receive = shlex.join(self._host.words(f"zfs receive -u -o readonly=on {copy}"))
        rate = self._replica.rate
        limit = f" | mbuffer -q -m 16M -R {rate}M" if rate and shutil.which("mbuffer") else ""
        status, lines = self._run(["sh", "-c", f"{send}{limit} | {receive}"], counted=bool(limit))
        if status != 0:
            raise ReplicaError(f"{self._name}: {snapshot}", *self._explained(dataset, lines))

    def _explained(self, dataset: str, lines: Sequence[str]) -> tuple[str, str]:
        """Why syncoid failed, by what ``zfs`` said, and what to do."""
        said = next((line for line in lines if line.startswith("cannot ")), "")
        said = said or next((line for line in lines if re.match("(CRITICAL|ERROR)", line)), "")
        reason = said or (lines[-1] if lines else "syncoid failed without a word")
        if any(words in line for line in lines for words in _MODIFIED):
            step = (
                f"{self._there(dataset)} on {self._host.label} has gone another way than this "
                "host's, as after a restore: see docs/replication.md"
            )
            return reason, step
        return reason, ""

    def mark(self, properties: Mapping[str, Mapping[str, str]]) -> None:
        """See the protocol."""
        self._pool.mark(
            {
                self._there(name): {PREFIX + key: value for key, value in values.items()}
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
        partial, final = f"{above}/.{run}{COPYING}", f"{above}/{run}"
        # Never the directory itself: it may be the place of a file system that is not mounted.
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
            shlex.join(ssh()),
        ]
        status, lines = self._run([*words, *limit, f"{directory}/", place], counted=True)
        if status != 0:
            reason = next((line for line in lines if "failed" in line), "")
            reason = reason or (lines[0] if lines else f"rsync ended with status {status}")
            raise ReplicaError(f"{self._name}: bundle {reference}", reason)
        said = shlex.quote(json.dumps({"dataset": self._replica.dataset}))
        copied, ready, store = map(shlex.quote, (partial, final, above))
        self._host.script(
            f"umask 077; echo {said} >{copied}/{COPY_NAME} && sync -f {copied}"
            f" && mv -T {copied} {ready} && sync -f {store}"
            f" && rm -rf {store}/.*{COPYING}",  # of others that were given up
            what="mv",
        )

    def _run(self, command: Sequence[str], *, counted: bool) -> tuple[int, list[str]]:
        """Run what may take hours: its exit status and its lines.

        ``counted`` says that all it moves goes through a process of its own, such as the mbuffer
        that syncoid puts behind ``zfs send``, which writes in the kernel; ssh may have handed its
        files on to a master of another group. Then it is ended when it stands still.

        What it prints goes to a file, not a pipe, which a child that stays (the connection that
        syncoid has ssh keep) would hold open.
        """
        needed(command[0])
        with LoggedCommand(*command) as log, tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,  # so that all that it starts can be ended with it
            )
            try:
                status = self._wait(process, StallDetector(process.pid) if counted else None)
            finally:
                _end(process)
            log.exited(status)
            output.seek(0)
            text = output.read().decode("utf-8", "replace")
        return status, [line.strip() for line in text.splitlines() if line.strip()]

    def _wait(self, process: subprocess.Popen[bytes], pace: StallDetector | None) -> int:
        while True:
            self._interrupt.check(self._name)
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_SECONDS)
            if pace is not None and pace.stands_still():
                raise ReplicaError(
                    self._name,
                    f"nothing moved for {STILL_SECONDS // 60} minutes, so the transfer was ended",
                    f"see: zpool status, on {self._host.label}",
                )


def why_not(replica: Replica) -> str:
    """Why nothing could be copied to a replica now, as far as can be seen; empty if nothing is."""
    host, pool = Host(replica.host), replica.dataset.partition("/")[0]
    try:
        for command in ("syncoid", "rsync"):
            needed(command)
        host.run("rsync", "--version")
        host.run("zfs", "list", "-H", "-o", "name", pool)
        host.run("ls", "-d", f"{replica.bundles}/")
    except SnaporchError as error:
        return error.line()
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with all it started, unless it has ended.

    A stream's other end that still writes down where it got to keeps a next one from going on.
    """
    if process.poll() is not None:
        return
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        end = time.monotonic() + _PATIENCE_SECONDS
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
