"""Send the snapshots that a copy lacks, by ``zfs send``.

Whether a dataset is sent ``raw`` is decided by :mod:`snaporch.replication.replicate` (``_send``)
and, on a source, by :mod:`snaporch.pull.sender`.

Which streams those are is decided by :mod:`snaporch.replication.needed_streams`.

This is the same for each way to reach the copies; :class:`Copies` is what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from snaporch.config import Replica
from snaporch.errors import SnaporchError
from snaporch.model import PoolSnapshot
from snaporch.progress import Progress
from snaporch.remote_host import LIMIT_SECONDS
from snaporch.replication.interface import ReplicaError
from snaporch.replication.needed_streams import RAW, Originals, later, streams
from snaporch.replication.resume_transfer import NO_TOKEN, InterruptedTransfers, PartialCopies
from snaporch.replication.transfer import (
    RateChangedError,
    Transfers,
    buffer_words,
    expected_bytes,
    limits_rate,
    reason_of_failure,
)
from snaporch.zfs import Pool

_NAMED = 5
"""How many snapshots a message names."""
_SEE = "see: docs/how-to/replication.md, 'When a transfer fails'"


class Copies(PartialCopies, Protocol):
    """The copies on a replica, as sending needs them."""

    def copy_name(self, name: str) -> str:
        """The full name on the replica of the copy of this host's dataset or snapshot."""

    def snapshots(self, datasets: Sequence[str]) -> list[PoolSnapshot]:
        """See :class:`~snaporch.replication.interface.Destination`."""

    def is_encrypted(self) -> bool:
        """Whether the dataset that has all copies below it is encrypted.

        Raises:
            SnaporchError: the replica does not answer.
        """

    def receiver(self, dataset: str) -> list[str]:
        """The command that reads a stream and appends it to the copy of a dataset.

        It records its position, so that the next transfer can continue.
        """

    def commands(self, *commands: Sequence[str]) -> str:
        """Commands on the replica, as a text for an admin."""


class StreamSender:
    """Sends what the copies of one replica lack.

    Args:
        name: the replica's name in the configuration.
        replica: its section.
        pool: the pools of this host.
        transfers: run the transfers.
        progress: gets notes.
        label: names the replica's host, for messages.
        copies: the replica's side.
        one_by_one: send each snapshot in a stream of its own.
    """

    def __init__(
        self,
        name: str,
        replica: Replica,
        pool: Pool,
        transfers: Transfers,
        progress: Progress,
        label: str,
        copies: Copies,
        *,
        one_by_one: bool = False,
    ) -> None:
        self._name = name
        self._replica = replica
        self._here = pool
        self._transfers = transfers
        self._label = label
        self._copies = copies
        self._one_by_one = one_by_one
        self._encrypts: bool | None = None
        self._interrupted = InterruptedTransfers(name, transfers, progress, copies, self._transfer)

    def send(self, dataset: str, *, raw: bool, until: int) -> None:
        """See :class:`~snaporch.replication.interface.Destination`.

        When the rate changes, the transfer is ended, and continues where ZFS has recorded it.
        """
        while True:
            with suppress(RateChangedError):
                return self._send(dataset, raw=raw, until=until)

    def _send(self, dataset: str, *, raw: bool, until: int) -> None:
        ours, newest = self._both(dataset, until)
        options = self._send_options(raw=raw)
        if self._interrupted.resume(ours, newest, options):
            ours, newest = self._both(dataset, until)
        for base, snapshot in streams(ours, newest, one_by_one=self._one_by_one):
            all_between = "@" in base and not self._one_by_one
            begin = ["-I" if all_between else "-i", base] if base else []
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
        theirs = self._copies.snapshots([dataset])
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
        copy = self._copies.copy_name(dataset)
        names = _listed([each.name for each in same])
        renames = (
            ("zfs", "rename", f"{copy}@{each.name}", f"{copy}@{each.name}-kept-{each.guid}")
            for each in same
        )
        return ReplicaError(
            f"{self._name}: {dataset}",
            f"{copy} has older snapshots of the same names, which were used again ({names})",
            f"keep them under other names: {self._copies.commands(*renames)}, and replicate again",
        )

    def _transfer(self, dataset: str, words: Sequence[str]) -> None:
        """Run ``zfs send`` here, and what receives it on the replica."""
        receive, size = self._copies.receiver(dataset), self._size(words)
        rate = self._transfers.rate()
        commands = (["zfs", "send", *words], buffer_words(rate), receive)
        limited = rate if limits_rate() else None
        status, lines = self._transfers.run(*commands, through=1, size=size, rate=limited)
        if status != 0:
            step = self._way_out(dataset)
            raise ReplicaError(f"{self._name}: {dataset}", reason_of_failure(lines), step)

    def _size(self, words: Sequence[str]) -> int:
        """The expected bytes of a stream; 0 if ``zfs send`` does not say."""
        _, report = self._transfers.output("zfs", "send", "-nP", *words, limit=LIMIT_SECONDS)
        return expected_bytes(report)

    def _way_out(self, dataset: str) -> str:
        """What to do after a failed transfer, by the state of the copy.

        ZFS receives only what follows the copy's newest snapshot, and the copy must not have been
        changed since; without a snapshot it must not exist. No command here destroys a snapshot.
        """
        copy = self._copies.copy_name(dataset)
        try:
            written, token = self._copies.state(dataset)
            newest = [each.name for each in self._copies.snapshots([dataset])][-1:]
        except SnaporchError:
            return _SEE
        if token != NO_TOKEN:
            discard = self._copies.commands(["zfs", "receive", "-A", copy])
            return f"try again; if this error comes again, discard what arrived: {discard}"
        if written in ("", "0"):
            return _SEE
        if not newest:
            destroy = self._copies.commands(["zfs", "destroy", copy])
            return f"the copy has no snapshot; to send all again: {destroy}"
        rollback = self._copies.commands(["zfs", "rollback", f"{copy}@{newest[0]}"])
        return f"the copy was changed; to discard what follows its newest snapshot: {rollback}"

    def _send_options(self, *, raw: bool) -> str:
        """Options of ``zfs send``: blocks as they are on the disks.

        An encrypted dataset cannot receive embedded blocks (``-e``).
        """
        if raw:
            return RAW
        if self._encrypts is None:
            self._encrypts = self._copies.is_encrypted()
        return "Lc" if self._encrypts else "Lce"

    def diverged(self, dataset: str, only_there: Sequence[str]) -> ReplicaError:
        """See :class:`~snaporch.replication.interface.Destination`."""
        copy = self._copies.copy_name(dataset)
        reason = (
            f"{copy} on {self._label} has diverged, as after a restore or a failover: "
            f"it ends with snapshots that may exist nowhere else ({_listed(only_there)})"
        )
        keep = self._copies.commands(["zfs", "rename", copy, f"{copy}-kept-{only_there[-1]}"])
        step = f"keep them: {keep}, and the next replication sends a full copy; or discard them"
        return ReplicaError(
            f"{self._name}: {dataset}", reason, f"{step}: see docs/how-to/replication.md"
        )


def _listed(names: Sequence[str]) -> str:
    """The names of snapshots, for a message."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(f"@{each}" for each in names[:_NAMED]) + more
