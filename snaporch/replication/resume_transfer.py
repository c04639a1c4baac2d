"""Continue an interrupted transfer by its resume token, unless the token must not be used.

A replica is another machine, so its answers are input. A resume token names a dataset, a snapshot
and flags, and ``zfs send -t`` sends whatever it names, also an encrypted dataset in clear
(https://github.com/openzfs/zfs/issues/14153). So a token is used only if it continues a stream that
this host would send now: :func:`token_refusal` decides that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from snaporch.progress import Progress
from snaporch.remote_host import LIMIT_SECONDS
from snaporch.replication.interface import ReplicaError
from snaporch.replication.needed_streams import RAW, Originals, later
from snaporch.replication.transfer import Transfers, reason_of_failure, text_lines

NO_TOKEN = "-"  # noqa: S105 - what ZFS prints for a property without a value
_TOKEN = re.compile(r"1-[0-9a-f]{1,16}-[0-9a-f]{1,4}-([0-9a-f]{2}){1,4096}")
"""The second number is a size that libzfs allocates."""
_HEADER = ["resume token contents:", "nvlist version: 0"]
_PAIR = re.compile(r"\t(?:(\w+) = (0x[0-9a-f]{1,16}|1)|(toname) = (.+))")
_REQUIRED = {"object", "offset", "bytes", "toguid", "toname"}
_FLAGS = {"largeblockok": "L", "compressok": "c", "embedok": "e", "rawok": "w"}
"""The option of ``zfs send`` that sets each flag."""
_OTHER_OBSTACLE = re.compile(
    "incomplete stream|checksum|I/O error|Input/output|busy|space|quota|suspended|key|permission"
)
"""In errors of ``zfs receive`` that a new stream meets, too, or that the same one may not meet."""


class CopyState(NamedTuple):
    """What a copy has besides its snapshots."""

    written: str
    """The bytes written since its newest snapshot; empty if there is no copy."""
    token: str
    """Its resume token; :data:`NO_TOKEN` without one."""


class PartialCopies(Protocol):
    """The copies on a replica, of which some arrived in part."""

    def state(self, dataset: str) -> CopyState:
        """The state of the copy of a dataset.

        Raises:
            SnaporchError: the replica does not answer.
        """

    def discard_partial(self, dataset: str) -> None:
        """Discard the part of a snapshot that arrived by an interrupted transfer.

        Raises:
            SnaporchError: the replica does not answer, or does not permit it.
        """


class InterruptedTransfers:
    """Continues interrupted transfers to the copies of one replica.

    Args:
        name: the replica's name in the configuration.
        transfers: run commands.
        progress: gets notes.
        copies: the replica's side.
        transfer: runs ``zfs send`` with these options for the copy of a dataset; its error is that
            of ``zfs receive``.
    """

    def __init__(
        self,
        name: str,
        transfers: Transfers,
        progress: Progress,
        copies: PartialCopies,
        transfer: Callable[[str, Sequence[str]], None],
    ) -> None:
        self._name = name
        self._transfers = transfers
        self._progress = progress
        self._copies = copies
        self._transfer = transfer

    def resume(
        self, ours: Originals, newest: int | None, options: str, *, refusal: str = ""
    ) -> bool:
        """Continue the transfer that was interrupted, if this host would send that stream now.

        Otherwise, or if the replica refuses that twice, what arrived of it is discarded: this host
        still has all of it.

        Args:
            ours: what this host has of the dataset.
            newest: as for :func:`~snaporch.replication.needed_streams.streams`.
            options: the options of ``zfs send`` for a new stream.
            refusal: why the replica has refused it before.

        Returns:
            Whether a snapshot has arrived.

        Raises:
            SnaporchError: the replica does not answer, or the transfer failed again.
        """
        _, token = self._copies.state(ours.dataset)
        if token == NO_TOKEN:
            return False
        words = [f"-{RAW}"] if RAW in options else []  # whatever the token says
        reason = self._refusal(ours, newest, token, words, options)
        if not reason:
            try:
                self._transfer(ours.dataset, [*words, "-t", token])
            except ReplicaError as error:
                if not is_refusal(error.reason):
                    raise
                if not refusal:
                    return self.resume(ours, newest, options, refusal=error.reason)
                reason = f"the replica refuses to continue it: {error.reason}"
            else:
                return True
        text = f"an interrupted transfer is not continued, but begins again: {reason}"
        self._progress.note(f"{self._name}: {ours.dataset}", text)
        self._copies.discard_partial(ours.dataset)
        return False

    def _refusal(
        self, ours: Originals, newest: int | None, token: str, words: Sequence[str], options: str
    ) -> str:
        """Why a token must not be used; empty if it may be."""
        if not is_token(token):
            return "its token has no valid form"
        check = ["zfs", "send", "-nvP", *words, "-t", token]
        status, report = self._transfers.output(*check, limit=LIMIT_SECONDS)
        if status != 0:
            return reason_of_failure(text_lines(report))
        return token_refusal(report, ours, newest, options)


def is_token(text: str) -> bool:
    """Whether a text has the form of a resume token."""
    return _TOKEN.fullmatch(text) is not None


def token_refusal(report: str, ours: Originals, newest: int | None, options: str) -> str:
    """Why a token must not be used; empty if it may be.

    Args:
        report: the contents, as ``zfs send -nvP -t`` prints them. The token's text is in it as it
            is, with any line breaks: a line that is not expected, or comes twice, is a refusal.
        ours: what this host has of the dataset.
        newest: as for :func:`~snaporch.replication.needed_streams.streams`.
        options: the options of ``zfs send`` for a new stream.
    """
    lines = report.split("\n")
    values = _values(lines[2:-3])
    if lines[:2] != _HEADER or values is None or not values.keys() >= _REQUIRED:
        return "its token has unknown contents"
    kind, *names = lines[-3].split("\t")
    wanted = {each.guid: each.full_name for each in later(ours, newest)}
    if values["toname"].partition("@")[0] != ours.dataset:
        return "its token names another dataset"
    if names[-2:-1] != [wanted.get(int(values["toguid"], 16))]:
        return "its token names a snapshot that is not to be sent"
    base = int(values.get("fromguid", "0"), 16)
    if (kind, base in ours.births) not in (("full", False), ("incremental", True)):
        return "its token names an unknown base"
    flags = {option for name, option in _FLAGS.items() if name in values}
    if RAW in options:
        return "" if RAW in flags else "its token is not for a raw stream"
    return "its token is for a stream with other options" if flags - set(options) else ""


def _values(lines: Iterable[str]) -> dict[str, str] | None:
    """The values of a token by name; None if a line is not of a known form, or comes twice."""
    values: dict[str, str] = {}
    for line in lines:
        match = _PAIR.fullmatch(line)
        name, value = (match[1] or match[3], match[2] or match[4]) if match else ("", "")
        if name not in {*_REQUIRED, "fromguid", *_FLAGS} or name in values:
            return None
        values[name] = value
    return values


def is_refusal(reason: str) -> bool:
    """Whether ``zfs receive`` refused a stream, for a reason that another stream may not have."""
    return reason.startswith("cannot receive ") and not _OTHER_OBSTACLE.search(reason)
