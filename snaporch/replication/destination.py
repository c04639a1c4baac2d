"""The interface of a replica, and its implementation: ``zfs send`` and rsync, over ssh.

What a replica answers is input: it is never a part of a command line here, except a resume token
that was checked, see ``streams``. syncoid is not used, because it puts the token into a command of
the local shell, and without its resuming (``--no-resume``) a transfer that breaks begins again.
A copy is never rolled back (``zfs receive -F``): data that only the replica has may be the last.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import IO, Protocol

from snaporch.bundle.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES
from snaporch.bundle.store import COPY_NAME, COPYING_SUFFIX, RUN_NAME, copy_name
from snaporch.command_log import LoggedCommand
from snaporch.config import Replica
from snaporch.context import Context
from snaporch.errors import SnaporchError
from snaporch.interrupt import Interrupt
from snaporch.model import PoolSnapshot
from snaporch.progress import Progress
from snaporch.remote_host import LIMIT_SECONDS, Host, check_installed, ssh_words
from snaporch.replication.pipeline import Pipeline
from snaporch.replication.stall_detector import STALL_SECONDS, StallDetector
from snaporch.replication.streams import (
    NO_TOKEN,
    RAW,
    Originals,
    is_token,
    later,
    streams,
    token_refusal,
)
from snaporch.zfs import POLICY_PROPERTY, PREFIX, Pool, PoolError
from snaporch.zfs.remote import ROOT_OPTIONS, RemoteZfs

_POLL_SECONDS = 0.2
_END_SECONDS = 10
_OUTPUT_BYTES = 1 << 20
_MAX_OUTPUT_BYTES = 1 << 24
"""What a transfer may print at most: ``zfs send`` prints a line for each snapshot that is gone."""
_SLOWEST = 1 << 20
"""Bytes per second that a replica reads or writes at least, beside other work."""
_CHECK_SECONDS = 60
_NAMED = 5
"""How many snapshots a message names."""
_SEE = "see: docs/how-to/replication.md, 'When a transfer fails'"


_OTHER_OBSTACLE = re.compile("incomplete stream|busy|space|quota|suspended|key|permission")
"""In errors of ``zfs receive`` that a new stream meets, too, or that the same one may not meet."""
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

        This host must have the replica's newest snapshot, or a bookmark of it.

        Args:
            dataset: a dataset of this host.
            raw: send encrypted blocks as they are.

        Raises:
            ReplicaError: the transfer failed.
            InterruptedRunError: a signal came; the next transfer continues where this one stopped.
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
    """:class:`Destination` by ``zfs send``, rsync and ssh.

    Args:
        name: the replica's name in the configuration.
        replica: its section.
        pool: the pools of this host.
        interrupt: a signal ends a transfer.
        progress: gets notes.
    """

    def __init__(
        self, name: str, replica: Replica, pool: Pool, interrupt: Interrupt, progress: Progress
    ) -> None:
        self._name = name
        self._replica = replica
        self._here = pool
        self._interrupt = interrupt
        self._progress = progress
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
            with self._reading():
                found = self._pool.copies(root, list(names))
        except PoolError as error:
            if error.step:
                raise
            create = self._command("zfs", "create", "-p", *ROOT_OPTIONS, root)
            step = f"is its pool imported? if the copies are lost: {create}, and all are sent again"
            if "suspended" in error.reason:
                step = f"see: zpool status, on {self._host.label}"
            reason = f"the copies cannot be listed: {error.reason}"
            raise ReplicaError(f"{self._name}: {root}", reason, step) from error
        return [replace(s, dataset=names[s.dataset]) for s in found if s.dataset in names]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Read an answer of the replica, which may be anything."""
        try:
            yield
        except (ArithmeticError, LookupError, ValueError) as error:
            step = f"see: zfs list, on {self._host.label}"
            raise ReplicaError(self._name, "its answer cannot be read", step) from error

    def send(self, dataset: str, *, raw: bool) -> None:
        """See the protocol."""
        ours, newest = self._both(dataset)
        if self._resume(ours, newest, raw=raw):
            ours, newest = self._both(dataset)
        options = self._send_options(raw=raw)
        for base, snapshot in streams(ours, newest):
            begin = ["-I" if "@" in base else "-i", base] if base else []
            self._transfer(dataset, [f"-{options}", *begin, snapshot])

    def _both(self, dataset: str) -> tuple[Originals, int | None]:
        """What this host has of a dataset, and the GUID of the replica's newest snapshot.

        Raises:
            ReplicaError: there is nothing to send, or no base.
        """
        pool = self._here
        ours = Originals(dataset, pool.snapshots([dataset]), pool.bookmarks(dataset))
        theirs = self.snapshots([dataset])
        thing = f"{self._name}: {dataset}"
        if not ours.snapshots:
            raise ReplicaError(thing, "has no snapshots")
        if theirs and theirs[-1].guid not in ours.births:
            reason = f"this host has neither {theirs[-1].full_name} nor a bookmark of it"
            raise ReplicaError(thing, reason, _SEE)
        newest = theirs[-1].guid if theirs else None
        names = {each.name for each in later(ours, newest)}
        if same := [each for each in theirs if each.name in names]:
            raise self._used_again(dataset, same)
        return ours, newest

    def _used_again(self, dataset: str, same: Sequence[PoolSnapshot]) -> ReplicaError:
        """The error for snapshots of a copy whose names newer snapshots of this host have.

        ZFS receives no second snapshot of a name. A renamed one keeps its GUID.
        """
        copy = self._copy_name(dataset)
        names = ", ".join(f"@{each.name}" for each in same[:_NAMED])
        more = f" and {len(same) - _NAMED} more" if len(same) > _NAMED else ""
        renames = (
            ("zfs", "rename", f"{copy}@{each.name}", f"{copy}@{each.name}-kept-{each.guid}")
            for each in same
        )
        return ReplicaError(
            f"{self._name}: {dataset}",
            f"{copy} has older snapshots of the same names, which were used again ({names}{more})",
            f"keep them under other names: {self._commands(*renames)}, and replicate again",
        )

    def _resume(self, ours: Originals, newest: int | None, *, raw: bool, refusal: str = "") -> bool:
        """Continue the transfer that was interrupted, if this host would send that stream now.

        Otherwise, or if the replica refuses that twice, what arrived of it is discarded: this host
        still has all of it.

        Args:
            refusal: why the replica has refused it before.

        Returns:
            Whether a snapshot has arrived.
        """
        _, token = self._state(ours.dataset)
        if token == NO_TOKEN:
            return False
        words = ["-w"] if raw else []  # whatever the token says
        reason = self._token_refusal(ours, newest, token, words)
        if not reason:
            try:
                self._transfer(ours.dataset, [*words, "-t", token])
            except ReplicaError as error:
                if not _is_refusal(error.reason):
                    raise
                if not refusal:
                    return self._resume(ours, newest, raw=raw, refusal=error.reason)
                reason = f"the replica refuses to continue it: {error.reason}"
            else:
                return True
        text = f"an interrupted transfer is not continued, but begins again: {reason}"
        self._progress.note(f"{self._name}: {ours.dataset}", text)
        self._host.run("zfs", "receive", "-A", self._copy_name(ours.dataset))
        return False

    def _token_refusal(
        self, ours: Originals, newest: int | None, token: str, words: Sequence[str]
    ) -> str:
        """Why a token must not be used; empty if it may be."""
        if not is_token(token):
            return "its token has no valid form"
        check = ["zfs", "send", "-nvP", *words, "-t", token]
        status, report = self._output(check, counted=False)
        if status != 0:
            return _reason(_lines(report))
        return token_refusal(report, ours, newest, self._send_options(raw=bool(words)))

    def _state(self, dataset: str) -> tuple[str, str]:
        """The bytes written to a copy since its newest snapshot, and its resume token.

        Empty, and no token, if there is no copy.
        """
        kinds = ("-H", "-p", "-d", "1", "-t", "filesystem,volume")
        columns = "name,written,receive_resume_token"
        text = self._host.run("zfs", "list", *kinds, "-o", columns, self._replica.dataset)
        start = f"{self._copy_name(dataset)}\t"
        found = (line.removeprefix(start) for line in text.split("\n") if line.startswith(start))
        written, _, token = next(found, f"\t{NO_TOKEN}").partition("\t")
        return written, token

    def _transfer(self, dataset: str, words: Sequence[str]) -> None:
        """Run ``zfs send`` here and ``zfs receive`` on the replica.

        With ``-s`` the replica records its position, so that the next transfer can continue.
        """
        options = ("-s", "-u", "-o", "readonly=on")
        receive = self._host.command("zfs", "receive", *options, self._copy_name(dataset))
        rate = ["-R", f"{self._replica.rate}M"] if self._replica.rate else []
        buffered = shutil.which("mbuffer") is not None
        # Without a command between them, only the kernel would count what they move.
        buffer = ["mbuffer", "-q", "-s", "128k", "-m", "16M", *rate] if buffered else ["cat"]
        status, lines = self._run(["zfs", "send", *words], buffer, receive, counted=True)
        if status != 0:
            step = self._way_out(dataset)
            raise ReplicaError(f"{self._name}: {dataset}", _reason(lines), step)

    def _way_out(self, dataset: str) -> str:
        """What to do after a failed transfer, by the state of the copy.

        ZFS receives only what follows the copy's newest snapshot, and the copy must not have been
        changed since; without a snapshot it must not exist. No command here destroys a snapshot.
        """
        copy = self._copy_name(dataset)
        try:
            written, token = self._state(dataset)
            newest = [each.name for each in self.snapshots([dataset])][-1:]
        except SnaporchError:
            return _SEE
        if token != NO_TOKEN:
            discard = self._command("zfs", "receive", "-A", copy)
            return f"try again; if this error comes again, discard what arrived: {discard}"
        if written in ("", "0"):
            return _SEE
        if not newest:
            destroy = self._command("zfs", "destroy", copy)
            return f"the copy has no snapshot; to send all again: {destroy}"
        rollback = self._command("zfs", "rollback", f"{copy}@{newest[0]}")
        return f"the copy was changed; to discard what follows its newest snapshot: {rollback}"

    def _send_options(self, *, raw: bool) -> str:
        """Options of ``zfs send``: blocks as they are on the disks.

        An encrypted dataset cannot receive embedded blocks (``-e``).
        """
        if raw:
            return RAW
        if self._encrypts is None:
            with self._reading():
                self._encrypts = self._replica.dataset in self._pool.encrypted()
        return "Lc" if self._encrypts else "Lce"

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
        return self._commands(words)

    def _commands(self, *commands: Sequence[str]) -> str:
        """Commands on the replica, as one command line for an admin on this host."""
        script = " && ".join(map(shlex.join, commands))
        return shlex.join(["ssh", self._replica.host, script]) if self._replica.host else script

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
        with self._reading():
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
        with self._reading():
            return self._bundle_copies(now, lines)

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
        """See the protocol."""
        directory = f"{self._replica.bundles}/{reference}"
        with self._reading():
            limit = _limit(int(self._host.run("du", "-sb", directory).split()[0]))
        found = self._differing(directory, sums, limit)
        if not found:
            self._host.run("touch", f"{directory}/{COPY_NAME}")
        return found

    def manifest(self, reference: str) -> str:
        """See the protocol."""
        path = shlex.quote(f"{self._replica.bundles}/{reference}/{MANIFEST_NAME}")
        read = f"if test -f {path}; then head -c {MAX_MANIFEST_BYTES} {path}; fi"
        return self._host.script(read, what=MANIFEST_NAME)

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
        with self._local_errors():
            limit = _limit(sum(path.stat().st_size for path in directory.iterdir()))
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

    def _run(self, *commands: Sequence[str], counted: bool) -> tuple[int, list[str]]:
        """See :meth:`_output`; returns the lines of output."""
        status, text = self._output(*commands, counted=counted)
        return status, _lines(text)

    def _output(self, *commands: Sequence[str], counted: bool) -> tuple[int, str]:
        """Run a transfer, which may take hours.

        Its output goes to a file: a pipe would be held open by a child that stays.

        Args:
            commands: each gets the output of the one before it.
            counted: end it when no data moves. All data must go through a process such as mbuffer:
                what ``zfs send`` writes in the kernel is not counted.

        Returns:
            The exit status, and the output.
        """
        for command in commands:
            check_installed(command[0])
        words = [word for command in commands for word in ("|", *command)][1:]
        with self._local_errors(), LoggedCommand(*words) as log, tempfile.TemporaryFile() as output:
            process = Pipeline(commands, output)
            try:
                pace = StallDetector(process.pid) if counted else None
                status = self._wait(process, output, pace)
            finally:
                _end_group(process)
            log.exited(status)
            output.seek(0)
            return status, output.read(_OUTPUT_BYTES).decode("utf-8", "replace")

    @contextmanager
    def _local_errors(self) -> Iterator[None]:
        """Turn an error of this host, such as a full directory for temporary files, into ours."""
        try:
            yield
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise ReplicaError(self._name, f"{error.strerror or error}{where}") from error

    def _wait(self, process: Pipeline, output: IO[bytes], pace: StallDetector | None) -> int:
        while True:
            self._interrupt.check(self._name)
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_SECONDS)
            if os.fstat(output.fileno()).st_size > _MAX_OUTPUT_BYTES:
                reason = f"a transfer prints over {_MAX_OUTPUT_BYTES >> 20} MiB, and was ended"
                raise ReplicaError(self._name, reason)
            if pace is not None and pace.is_stalled():
                raise ReplicaError(
                    self._name,
                    f"no data moved for {STALL_SECONDS // 60} minutes, so the transfer was ended",
                    f"see: zpool status, on {self._host.label}",
                )


def open_replica(context: Context, name: str) -> Destination:
    """The replica with this name in the configuration."""
    replica, progress = context.config.replica[name], context.progress
    return ReplicaDestination(name, replica, context.pool, context.interrupt, progress)


def unavailable_reason(replica: Replica) -> str:
    """Why no transfer to a replica can succeed now; empty if no obstacle is found."""
    host, pool = Host(replica.host), replica.dataset.partition("/")[0]
    try:
        check_installed("rsync")
        host.run("rsync", "--version", limit=_CHECK_SECONDS)
        host.run("zfs", "list", "-H", "-o", "name", pool, limit=_CHECK_SECONDS)
        host.run("ls", "-d", f"{replica.bundles}/", limit=_CHECK_SECONDS)
    except SnaporchError as error:
        return error.line()
    return ""


def _limit(size: int) -> float:
    """The seconds within which a replica must have read, or synced, so many bytes."""
    return LIMIT_SECONDS + size / _SLOWEST


def _reason(lines: Sequence[str]) -> str:
    """The reason of a failure, from the output of ``zfs`` and ssh."""
    reason = next((line for line in lines if line.startswith("cannot ")), "")
    others = [line for line in lines if not line.startswith(("warning: cannot send", "mbuffer:"))]
    return reason or (others or lines or ["zfs send failed without output"])[-1]


def _is_refusal(reason: str) -> bool:
    """Whether ``zfs receive`` refused a stream, for a reason that another stream may not have."""
    return reason.startswith("cannot receive ") and not _OTHER_OBSTACLE.search(reason)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _end_group(process: Pipeline) -> None:
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
