"""On the machine that pulls: a source, asked by ssh. What it answers is input.

How long a request may take is set in :mod:`snaporch.remote_host`, how long a stream may be silent
in :mod:`snaporch.replication.stall_detector`, how slow it may be in
:mod:`snaporch.replication.receive_limits`.

Its lists are checked by :mod:`snaporch.pull.source_listing`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import IO, Any, NamedTuple

from snaporch.bundle.rate_limit import RateLimit
from snaporch.config import Source
from snaporch.errors import InterruptedRunError, SnaporchError
from snaporch.interrupt import Interrupt
from snaporch.model import PoolSnapshot
from snaporch.progress import Progress
from snaporch.pull.send_request import Verb, request_command
from snaporch.pull.source_listing import (
    OfferedGuest,
    SourceAnswer,
    parse_answer,
    parse_guest,
    parse_guests,
)
from snaporch.remote_host import JSON_BYTES, LIMIT_SECONDS, CommandError, Host
from snaporch.replication.interface import ReplicaError, readable
from snaporch.replication.receive_limits import SLOWEST, LimitedStream
from snaporch.replication.remote_output import remote_output
from snaporch.replication.stall_detector import STALL_SECONDS
from snaporch.replication.transfer import reason_of_receiver
from snaporch.replication.unsent_files import UnsentFiles

_MAX_LINE = 1 << 16
_CHECK_SECONDS = 60
_MAX_BYTES = 1 << 50
_ALL_SECONDS = 4 * STALL_SECONDS
"""How long all requests together may wait, beyond the time for what they brought: so a source that
answers each as late as it may does not keep the others waiting for ever."""


class Incoming(NamedTuple):
    """A stream that comes from a source."""

    stream: LimitedStream
    refused: str
    """Why the source does not continue the interrupted stream; empty if it sends."""


class PullSource:
    """Asks a source.

    Args:
        name: the source's name in the configuration.
        source: its section.
        interrupt: a signal ends a transfer.
        progress: gets the bytes.
        host: the machine.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        interrupt: Interrupt,
        progress: Progress,
        host: Host | None = None,
    ) -> None:
        self._name = name
        self._source = source
        self._interrupt = interrupt
        self._progress = progress
        self._rate = (rate := source.rate_now()), RateLimit(rate)
        self._waited = 0.0
        self._received = 0
        self._host = host or Host(source.host, lambda: interrupt.check(name), prelude="")

    def guests(self) -> dict[str, str]:
        """The names of the guests that the source sends, by UUID.

        Raises:
            SnaporchError: it does not answer, or its answer is refused.
        """
        with self._checked(self._name):
            return parse_guests(self._ask(Verb.GUESTS))

    def about(self) -> SourceAnswer:
        """What the source says of itself.

        Raises:
            SnaporchError: it does not answer, or its answer is refused.
        """
        with self._checked(self._name):
            return parse_answer(self._ask(Verb.GUESTS))

    def has_shell(self) -> bool:
        """Whether the source carries out a command other than a request, so its key may do more."""
        try:
            self._host.script("true", what="true", limit=LIMIT_SECONDS)
        except CommandError:
            return False
        return True

    def guest(self, uuid: str, domain: str) -> OfferedGuest:
        """What the source has of a guest.

        Raises:
            SnaporchError: it does not answer, or its answer is refused.
        """
        with self._checked(f"{self._name}: {domain}"):
            answer = self._ask(Verb.SNAPSHOTS, uuid=uuid)
            return parse_guest(uuid, domain, answer, self._source.dataset, time.time())

    def manifest(self, reference: str) -> bytes:
        """The manifest of a bundle, which may be anything; empty if the bundle is not whole there.

        Args:
            reference: ``uuid/run``.
        """
        uuid, _, run = reference.partition("/")
        with self._checked(f"{self._name}: {reference}"):
            text = self._ask(Verb.MANIFEST, uuid=uuid, run=run)["text"]
            if not isinstance(text, str):
                raise TypeError(text)
            return text.encode("utf-8", "surrogateescape")

    @contextmanager
    def stream(
        self, uuid: str, snapshot: PoolSnapshot, base: int, token: str
    ) -> Iterator[Incoming]:
        """The stream of a snapshot.

        Args:
            uuid: of the guest.
            snapshot: on the source.
            base: the GUID of the copy's newest snapshot; 0 for a full stream.
            token: continues an interrupted stream.

        Raises:
            ReplicaError: the source does not send all of it.
        """
        values = {
            "uuid": uuid,
            "dataset": snapshot.dataset,
            "guid": snapshot.guid,
            "base": base,
            "token": token,
        }
        thing = f"{self._name}: {snapshot.full_name}"
        with self._reading(Verb.STREAM, values, thing) as (stream, first):
            with readable(thing, self._host.label):
                refused = first["refused"]
                if not isinstance(refused, str):
                    raise TypeError(refused)
            yield Incoming(stream, refused)

    @contextmanager
    def bundle(self, reference: str, unsent: UnsentFiles) -> Iterator[LimitedStream]:
        """The files of a bundle, those that have not arrived, from their offsets on.

        Raises:
            ReplicaError: the source does not send all of it.
        """
        uuid, _, run = reference.partition("/")
        files = [
            {"name": each.name, "offset": each.offset}
            for each in unsent.files
            if each.offset < each.bytes
        ]
        thing = f"{self._name}: bundle {reference}"
        values = {"uuid": uuid, "run": run, "files": files}
        with self._reading(Verb.BUNDLE, values, thing) as (stream, _):
            yield stream

    def _refuse_if_slow(self, thing: str) -> None:
        if self._waited > _ALL_SECONDS + self._received / SLOWEST:
            reason = f"the source has let this pull wait for {self._waited / 3600:.1f} hours"
            raise ReplicaError(thing, reason, "pull again; it continues")

    def _ask(self, verb: Verb, **values: object) -> dict[str, Any]:
        self._refuse_if_slow(self._name)
        command = request_command(verb, values)
        start = time.monotonic()
        try:
            what = f"snaporch send: {verb}"
            text = self._host.script(command, what=what, limit=LIMIT_SECONDS, most=JSON_BYTES)
        except CommandError as error:
            if error.step:
                raise
            reason = reason_of_receiver(error.reason.splitlines())
            raise ReplicaError(f"{self._name}: {self._host.label}", reason) from error
        finally:
            self._waited += time.monotonic() - start
        found = json.loads(text)
        if not isinstance(found, dict):
            raise TypeError(found)
        return found

    @contextmanager
    def _checked(self, thing: str) -> Iterator[None]:
        """Name the source in what is refused, and refuse an answer that cannot be read."""
        try:
            with readable(thing, self._host.label):
                yield
        except (CommandError, InterruptedRunError, ReplicaError):
            raise
        except SnaporchError as error:
            raise ReplicaError(f"{self._name}: {error.thing}", error.reason, error.step) from error

    @contextmanager
    def _reading(
        self, verb: Verb, values: Mapping[str, object], thing: str
    ) -> Iterator[tuple[LimitedStream, dict[str, Any]]]:
        """What the source sends, and the JSON object of its first line."""
        self._refuse_if_slow(thing)
        command = request_command(verb, values)
        with remote_output(self._host, command, thing, self._interrupt) as output:
            first = self._first_line(output, thing)
            with readable(thing, self._host.label):
                size = first["bytes"]
                if type(size) is not int or not 0 <= size <= _MAX_BYTES:
                    raise ValueError(size)
            limited = self._limited(output, size)
            try:
                yield limited, first
            finally:
                self._count(limited)

    def _first_line(self, output: IO[bytes], thing: str) -> dict[str, Any]:
        limit = _CHECK_SECONDS + LIMIT_SECONDS
        limited = LimitedStream(output, self._check, seconds=limit, slowest=inf)
        line = b""
        try:
            while not line.endswith(b"\n") and len(line) < _MAX_LINE and (byte := limited.read(1)):
                line += byte
        finally:
            self._count(limited)
        if not line:
            raise ReplicaError(thing, "the source sent nothing")
        with readable(thing, self._host.label):
            found = json.loads(line)
            if not isinstance(found, dict):
                raise TypeError(found)
            return found

    def _count(self, stream: LimitedStream) -> None:
        self._waited += stream.waited
        self._received += stream.done

    def _check(self) -> None:
        self._interrupt.check(self._name)

    def _limited(self, output: IO[bytes], size: int) -> LimitedStream:
        passed = 0

        def report(done: int) -> None:
            nonlocal passed
            if (rate := self._source.rate_now()) != self._rate[0]:
                self._rate = rate, RateLimit(rate)
            self._rate[1].spend(done - passed)
            passed = done
            if size:
                self._progress.amount(self._name, done, size)

        return LimitedStream(output, self._check, report, STALL_SECONDS, SLOWEST)
