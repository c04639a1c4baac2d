"""A replica, by ``zfs send`` and rsync, over ssh: its datasets; for bundles, ``replica_bundles``.

What a replica answers is input: it is never a part of a command line here, except a resume token
that was checked, see ``streams``. syncoid is not used, because it puts the token into a command of
the local shell, and without its resuming (``--no-resume``) a transfer that breaks begins again.
A copy is never rolled back (``zfs receive -F``): data that only the replica has may be the last.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from snaporch.bundle.store import copy_name
from snaporch.config import Replica
from snaporch.context import Context
from snaporch.errors import SnaporchError
from snaporch.interrupt import Interrupt
from snaporch.model import PoolSnapshot
from snaporch.progress import Progress
from snaporch.remote_host import LIMIT_SECONDS, Host, check_installed
from snaporch.replication.interface import BundleCopy, Destination, ReplicaError, readable
from snaporch.replication.replica_bundles import ReplicaBundles
from snaporch.replication.streams import (
    NO_TOKEN,
    RAW,
    Originals,
    is_token,
    later,
    streams,
    token_refusal,
)
from snaporch.replication.transfer import Transfers, text_lines
from snaporch.zfs import POLICY_PROPERTY, PREFIX, Pool, PoolError
from snaporch.zfs.remote import RemoteZfs, creations

_CHECK_SECONDS = 60
_NAMED = 5
"""How many snapshots a message names."""
_SEE = "see: docs/how-to/replication.md, 'When a transfer fails'"
_OTHER_OBSTACLE = re.compile(
    "incomplete stream|checksum|I/O error|Input/output|busy|space|quota|suspended|key|permission"
)
"""In errors of ``zfs receive`` that a new stream meets, too, or that the same one may not meet."""


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
        self._progress = progress
        self._host = Host(replica.host, lambda: interrupt.check(name))
        self._pool = RemoteZfs(self._host)
        self._transfers = Transfers(name, self._host.label, interrupt, progress)
        self._bundles = ReplicaBundles(name, replica, self._host, self._transfers)
        self._encrypts: bool | None = None

    def _copy_name(self, name: str) -> str:
        return f"{self._replica.dataset}/{copy_name(name)}"

    def create(self) -> None:
        """See :class:`Destination`."""
        self._pool.make(self._replica.dataset)

    def snapshots(self, datasets: Sequence[str]) -> list[PoolSnapshot]:
        """See :class:`Destination`."""
        names = {self._copy_name(each): each for each in datasets}
        root = self._replica.dataset
        try:
            with readable(self._name, self._host.label):
                found = self._pool.copies(root, list(names))
        except PoolError as error:
            if error.step:
                raise
            reason = f"the copies cannot be listed: {error.reason}"
            step = self._way_to_list(error.reason)
            raise ReplicaError(f"{self._name}: {root}", reason, step) from error
        return [replace(s, dataset=names[s.dataset]) for s in found if s.dataset in names]

    def _way_to_list(self, reason: str) -> str:
        """What to do if the copies cannot be listed."""
        root = self._replica.dataset
        if "suspended" not in reason:
            with suppress(PoolError):
                known = [each.name for each in self._pool.datasets()]
                if root.partition("/")[0] not in known:
                    return f"is its pool imported? see: zpool import, on {self._host.label}"
                create = self._commands(*creations(root, known))
                return f"if the copies are lost: {create}, and all are sent again"
        return f"see: zpool status, on {self._host.label}"

    def send(self, dataset: str, *, raw: bool, until: int) -> None:
        """See :class:`Destination`."""
        ours, newest = self._both(dataset, until)
        if self._resume(ours, newest, raw=raw):
            ours, newest = self._both(dataset, until)
        options = self._send_options(raw=raw)
        for base, snapshot in streams(ours, newest):
            begin = ["-I" if "@" in base else "-i", base] if base else []
            self._transfer(dataset, [f"-{options}", *begin, snapshot])

    def _both(self, dataset: str, until: int) -> tuple[Originals, int | None]:
        """What this host has of a dataset, and the GUID of the replica's newest snapshot.

        Args:
            until: the txg of the newest snapshot to copy; later ones are left out.

        Raises:
            ReplicaError: there is nothing to send, or no base.
        """
        pool = self._here
        found = [each for each in pool.snapshots([dataset]) if each.createtxg <= until]
        ours = Originals(dataset, found, pool.bookmarks(dataset))
        theirs = self.snapshots([dataset])
        thing = f"{self._name}: {dataset}"
        if not found:
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
        names = _listed([each.name for each in same])
        renames = (
            ("zfs", "rename", f"{copy}@{each.name}", f"{copy}@{each.name}-kept-{each.guid}")
            for each in same
        )
        return ReplicaError(
            f"{self._name}: {dataset}",
            f"{copy} has older snapshots of the same names, which were used again ({names})",
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
        status, report = self._transfers.output(*check, limit=LIMIT_SECONDS)
        if status != 0:
            return _reason(text_lines(report))
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
        commands, size = (["zfs", "send", *words], buffer, receive), self._size(words)
        status, lines = self._transfers.run(*commands, through=1, size=size)
        if status != 0:
            step = self._way_out(dataset)
            raise ReplicaError(f"{self._name}: {dataset}", _reason(lines), step)

    def _size(self, words: Sequence[str]) -> int:
        """The expected bytes of a stream; 0 if ``zfs send`` does not say."""
        _, report = self._transfers.output("zfs", "send", "-nP", *words, limit=LIMIT_SECONDS)
        sizes = re.findall(r"^size\t([0-9]{1,20})$", report, re.MULTILINE)
        return int(sizes[-1]) if sizes else 0

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
            with readable(self._name, self._host.label):
                self._encrypts = self._replica.dataset in self._pool.encrypted()
        return "Lc" if self._encrypts else "Lce"

    def diverged(self, dataset: str, only_there: Sequence[str]) -> ReplicaError:
        """See :class:`Destination`."""
        copy = self._copy_name(dataset)
        reason = (
            f"{copy} on {self._host.label} has diverged, as after a restore: "
            f"it ends with snapshots that may exist nowhere else ({_listed(only_there)})"
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
        """See :class:`Destination`."""
        self._pool.mark(
            {
                self._copy_name(name): {PREFIX + key: value for key, value in values.items()}
                for name, values in properties.items()
            }
        )

    def set_policies(self, policies: Mapping[str, str]) -> None:
        """See :class:`Destination`."""
        wanted = {self._copy_name(name): policy for name, policy in policies.items()}
        with readable(self._name, self._host.label):
            there = self._pool.policies(list(wanted))
        self._pool.mark(
            {
                copy: {POLICY_PROPERTY: policy}
                for copy, policy in wanted.items()
                if there.get(copy, "") != policy
            }
        )

    def bundles(self, uuid: str) -> dict[str, BundleCopy]:
        """See :class:`Destination`."""
        return self._bundles.bundles(uuid)

    def damaged(self, reference: str, sums: Mapping[str, str]) -> list[str]:
        """See :class:`Destination`."""
        return self._bundles.damaged(reference, sums)

    def manifest(self, reference: str) -> str:
        """See :class:`Destination`."""
        return self._bundles.manifest(reference)

    def store(self, directory: Path, reference: str, sums: Mapping[str, str]) -> list[str]:
        """See :class:`Destination`."""
        return self._bundles.store(directory, reference, sums)


def _listed(names: Sequence[str]) -> str:
    """The names of snapshots, for a message."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(f"@{each}" for each in names[:_NAMED]) + more


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


def _reason(lines: Sequence[str]) -> str:
    """The reason of a failure, from the output of ``zfs`` and ssh."""
    reason = next((line for line in lines if line.startswith("cannot ")), "")
    others = [line for line in lines if not line.startswith(("warning: cannot send", "mbuffer:"))]
    return reason or (others or lines or ["zfs send failed without output"])[-1]


def _is_refusal(reason: str) -> bool:
    """Whether ``zfs receive`` refused a stream, for a reason that another stream may not have."""
    return reason.startswith("cannot receive ") and not _OTHER_OBSTACLE.search(reason)
