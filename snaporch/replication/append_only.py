"""A replica that only appends: its machine runs ``snaporch receive`` for the requests of this host.

This host has no shell there. What the replica answers is input, as everywhere in this package.
Which permissions of ``zfs allow`` its user needs, and how well they protect, is decided in
:mod:`snaporch.replication.append_only_protection`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from math import inf
from pathlib import Path
from typing import Any

from snaporch.bundle.store import copy_name
from snaporch.config import Replica
from snaporch.interrupt import Interrupt
from snaporch.model import PoolSnapshot, moment_at
from snaporch.progress import Progress
from snaporch.remote_host import JSON_BYTES, LIMIT_SECONDS, CommandError, Host
from snaporch.replication.append_only_protection import weakness
from snaporch.replication.interface import BundleCopy, ReplicaError, readable, seconds_to_read
from snaporch.replication.receive_request import Verb, is_mark, request_command
from snaporch.replication.request_command import MAX_ARGUMENT_BYTES
from snaporch.replication.resume_transfer import CopyState
from snaporch.replication.stream_sender import StreamSender
from snaporch.replication.transfer import (
    RateChangedError,
    Transfers,
    buffer_words,
    limits_rate,
    reason_of_receiver,
)
from snaporch.replication.unsent_files import unsent_files
from snaporch.zfs import PREFIX, Pool

_CHECK_SECONDS = 60
_MAX_FILE_BYTES = 1 << 50
"""As in a request: more cannot be, and would be waited for."""


class Receiving:
    """The replica's machine, which answers requests.

    Args:
        name: the replica's name in the configuration; empty if errors need none.
        replica: its section.
        host: its machine.
    """

    def __init__(self, name: str, replica: Replica, host: Host) -> None:
        self.name = name
        self.replica = replica
        self.host = host

    def ask(self, verb: Verb, limit: float = LIMIT_SECONDS, **values: object) -> dict[str, Any]:
        """Ask for something.

        Args:
            verb: what is asked for.
            limit: seconds.
            values: its values.

        Returns:
            The answer.

        Raises:
            ReplicaError: it was refused or failed, or the answer cannot be read.
            CommandError: the machine cannot be reached, or takes too long.
        """
        command = request_command(verb, values)
        try:
            what = f"snaporch receive: {verb}"
            text = self.host.script(command, what=what, limit=limit, most=JSON_BYTES)
        except CommandError as error:
            if error.step:
                raise
            reason = reason_of_receiver(error.reason.splitlines())
            raise ReplicaError(self._thing, reason) from error
        return self.answer(text.splitlines())

    @property
    def _thing(self) -> str:
        return f"{self.name}: {self.host.label}" if self.name else self.host.label

    def answer(self, lines: Sequence[str]) -> dict[str, Any]:
        """The answer in the output of a request.

        Raises:
            ReplicaError: it has none.
        """
        with readable(self._thing, self.host.label):
            found = json.loads(lines[-1])
            if not isinstance(found, dict):
                raise TypeError(found)
            return found

    def check(self) -> dict[str, Any]:
        """The replica's description of itself.

        Raises:
            SnaporchError: it cannot receive copies, or receives them elsewhere than configured.
        """
        found = self.ask(Verb.CHECK, _CHECK_SECONDS)
        if found.get("dataset") != self.replica.dataset:
            reason = f"it receives below {str(found.get('dataset'))[:80]}, as authorized_keys says"
            step = "configure the same dataset for the replica"
            raise ReplicaError(self._thing, reason, step)
        return found


class AppendOnlyDestination:
    """:class:`~snaporch.replication.interface.Destination` by requests over ssh.

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
        self._progress = progress
        self._host = Host(replica.host, lambda: interrupt.check(name), prelude="")
        self._receiving = Receiving(name, replica, self._host)
        rate = replica.rate_now
        self._transfers = Transfers(name, self._host.label, interrupt, progress, rate)
        self._sender = StreamSender(
            name,
            replica,
            pool,
            self._transfers,
            progress,
            self._host.label,
            self,
            one_by_one=True,  # it refuses packages of streams
        )

    def copy_name(self, name: str) -> str:
        """See :class:`~snaporch.replication.stream_sender.Copies`."""
        return f"{self._replica.dataset}/{copy_name(name)}"

    def create(self) -> None:
        """See :class:`~snaporch.replication.interface.Destination`: only root creates it there."""
        self._receiving.check()

    def snapshots(self, datasets: Sequence[str]) -> list[PoolSnapshot]:
        """See :class:`~snaporch.replication.interface.Destination`."""
        names = {copy_name(each): each for each in datasets}
        found: list[PoolSnapshot] = []
        for some in _parts(dict.fromkeys(names, "")):
            answer = self._receiving.ask(Verb.SNAPSHOTS, copies=[*some])
            with readable(self._name, self._host.label):
                found += [_snapshot(each, names) for each in answer["snapshots"]]
        return found

    def send(self, dataset: str, *, raw: bool, until: int) -> None:
        """See :class:`~snaporch.replication.interface.Destination`.

        A raw stream replaces the key of the whole copy, which then loses its old snapshots, too.
        """
        if raw:
            raise ReplicaError(
                f"{self._name}: {dataset}",
                "is encrypted, and an append-only replica cannot protect the key of its copy",
                "replicate it to a replica without append_only",
            )
        self._sender.send(dataset, raw=raw, until=until)

    def diverged(self, dataset: str, only_there: Sequence[str]) -> ReplicaError:
        """See :class:`~snaporch.replication.interface.Destination`."""
        return self._sender.diverged(dataset, only_there)

    def state(self, dataset: str) -> CopyState:
        """See :class:`~snaporch.replication.stream_sender.Copies`."""
        found = self._receiving.ask(Verb.STATE, copy=copy_name(dataset))
        with readable(self._name, self._host.label):
            return CopyState(_text(found["written"]), _text(found["token"]))

    def is_encrypted(self) -> bool:
        """See :class:`~snaporch.replication.stream_sender.Copies`."""
        found = self._receiving.check()
        with readable(self._name, self._host.label):
            return bool(found["encrypted"])

    def has_encrypted_bundles(self) -> bool:
        """See :class:`~snaporch.replication.interface.Destination`: it is not asked about that."""
        return False

    def free_bytes(self) -> list[int]:
        """See :class:`~snaporch.replication.interface.Destination`."""
        found = self._receiving.check()
        with readable(self._name, self._host.label):
            return [int(each) for each in list(found["free"])]

    def receiver(self, dataset: str) -> list[str]:
        """See :class:`~snaporch.replication.stream_sender.Copies`."""
        return self._host.words(request_command(Verb.RECEIVE, {"copy": copy_name(dataset)}))

    def discard_partial(self, dataset: str) -> None:
        """See :class:`~snaporch.replication.stream_sender.Copies`."""
        self._receiving.ask(Verb.DISCARD, copy=copy_name(dataset))

    def commands(self, *commands: Sequence[str]) -> str:
        """See :class:`~snaporch.replication.stream_sender.Copies`."""
        return f"{' && '.join(map(shlex.join, commands))} (as root on {self._host.label})"

    def mark(self, properties: Mapping[str, Mapping[str, str]]) -> Collection[str]:
        """See :class:`~snaporch.replication.interface.Destination`.

        A mark that has a value keeps it; see ``mark_rules``. An impossible one is left out.
        """
        wanted = {
            copy_name(name): {key: value for key, value in values.items() if is_mark(key, value)}
            for name, values in properties.items()
        }
        late = []
        for some in _parts(wanted):
            answer = self._receiving.ask(Verb.MARK, marks=some)
            with readable(self._name, self._host.label):
                late += [each for each in map(_text, list(answer["late"])) if each in some]
        names = {copy_name(name): name for name in properties}
        for each in late:
            pairs = [f"{PREFIX}{key}={value}" for key, value in wanted[each].items()]
            command = self.commands(["zfs", "set", *pairs, f"{self._replica.dataset}/{each}"])
            text = f"gets no properties any more, since a newer snapshot has its own: {command}"
            self._progress.note(f"{self._name}: {each}", text)
        return [names[each] for each in late]

    def set_policies(self, policies: Mapping[str, str]) -> None:
        """See :class:`~snaporch.replication.interface.Destination`."""
        for some in _parts({copy_name(name): policy for name, policy in policies.items()}):
            self._receiving.ask(Verb.POLICIES, policies=some)

    def bundles(self, uuid: str) -> dict[str, BundleCopy]:
        """See :class:`~snaporch.replication.interface.Destination`."""
        answer = self._receiving.ask(Verb.BUNDLES, uuid=uuid)
        with readable(self._name, self._host.label):
            return {run: _bundle(each) for run, each in dict(answer["bundles"]).items()}

    def damaged(self, reference: str, sums: Mapping[str, str]) -> list[str]:
        """See :class:`~snaporch.replication.interface.Destination`."""
        uuid, _, run = reference.partition("/")
        copy = self.bundles(uuid).get(run, BundleCopy({}, inf))
        limit = seconds_to_read(sum(copy.sizes.values()))
        answer = self._receiving.ask(Verb.DAMAGED, limit, uuid=uuid, run=run, sums=dict(sums))
        return self._names(answer)

    def manifest(self, reference: str) -> str:
        """See :class:`~snaporch.replication.interface.Destination`."""
        uuid, _, run = reference.partition("/")
        answer = self._receiving.ask(Verb.MANIFEST, uuid=uuid, run=run)
        with readable(self._name, self._host.label):
            return _text(answer["text"])

    def store(self, directory: Path, reference: str, sums: Mapping[str, str]) -> list[str]:
        """See :class:`~snaporch.replication.interface.Destination`.

        A bundle that is there is replaced only if the replica finds that it is damaged.
        """
        while True:
            with suppress(RateChangedError):  # then what arrived is not sent again
                return self._store(directory, reference, sums)

    def _store(self, directory: Path, reference: str, sums: Mapping[str, str]) -> list[str]:
        uuid, _, run = reference.partition("/")
        with self._transfers.local_errors():
            present = {path.name: path.stat().st_size for path in directory.iterdir()}
        if missing := [name for name in sums if name not in present]:
            return missing
        begun = self._receiving.ask(Verb.BEGUN, uuid=uuid, run=run)
        with readable(self._name, self._host.label):
            there = _sizes(begun)
        plan = unsent_files({name: present[name] for name in sums}, sums, there)
        described = [
            {"name": e.name, "bytes": e.bytes, "sha256": e.sha256, "offset": e.offset}
            for e in plan.files
        ]
        command = request_command(Verb.STORE, {"uuid": uuid, "run": run, "files": described})
        with ExitStack() as opened, self._transfers.local_errors():
            source = None
            if plan.partial:
                source = opened.enter_context((directory / plan.partial.name).open("rb"))
                source.seek(plan.partial.offset)
            # Without an operand, `cat` reads what it is given: nothing.
            words = ["cat", *(["-"] if source else []), *(str(directory / n) for n in plan.whole)]
            rate = self._transfers.rate()
            status, lines = self._transfers.run(
                words,
                buffer_words(rate),
                self._host.words(command),
                through=1,
                size=plan.bytes,
                source=source,
                rate=rate if limits_rate() else None,
            )
        if status != 0:
            raise ReplicaError(f"{self._name}: bundle {reference}", reason_of_receiver(lines))
        return self._names(self._receiving.answer(lines))

    def _names(self, answer: Mapping[str, Any]) -> list[str]:
        """The damaged files in an answer."""
        with readable(self._name, self._host.label):
            return [_text(name) for name in list(answer["damaged"])]


def check_append_only(replica: Replica, interrupt: Interrupt) -> str:
    """Why an append-only replica is protected less well than it could be; empty if it is not.

    Args:
        replica: its section in the configuration.
        interrupt: a signal ends the question.

    Raises:
        SnaporchError: it cannot receive copies.
        InterruptedRunError: a signal came.
    """
    host = Host(replica.host, lambda: interrupt.check("check"), prelude="")
    found = Receiving("", replica, host).check()
    with readable(replica.host, replica.host):
        permissions = [_text(each) for each in list(found["permissions"])]
        return weakness(_text(found["release"]), permissions, is_root=bool(found["root"]))


def _parts(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Values in parts that a request has room for, in their order."""
    part: dict[str, Any] = {}
    size = 0
    for name, value in values.items():
        length = len(json.dumps({name: value}))
        if part and size + length > MAX_ARGUMENT_BYTES - 100:
            yield part
            part, size = {}, 0
        part[name] = value
        size += length
    if part:
        yield part


def _snapshot(value: Mapping[str, Any], names: Mapping[str, str]) -> PoolSnapshot:
    properties = {_text(key): _text(text) for key, text in dict(value["properties"]).items()}
    return PoolSnapshot(
        dataset=names[value["copy"]],
        name=_text(value["name"]),
        guid=int(value["guid"]),
        createtxg=int(value["createtxg"]),
        created=moment_at(float(value["created"])),
        properties=properties,
    )


def _bundle(value: Mapping[str, Any]) -> BundleCopy:
    unread = inf if value["unread"] is None else float(value["unread"])
    return BundleCopy(_sizes(value), unread)


def _sizes(value: Mapping[str, Any]) -> dict[str, int]:
    sizes = {_text(name): int(size) for name, size in dict(value["sizes"]).items()}
    if any(not 0 <= size <= _MAX_FILE_BYTES for size in sizes.values()):
        raise ValueError(value)
    return sizes


def _text(value: object) -> str:
    """A text whose bytes are known: a lone surrogate must stand for a byte."""
    if not isinstance(value, str):
        raise TypeError(value)
    value.encode("utf-8", "surrogateescape")  # else a UnicodeError, which is a ValueError
    return value
