"""On a source: carry out the requests of a machine that pulls.

What it may copy is decided by :mod:`snaporch.pull.send_permissions`.

Everything here reads. The only thing that is written is a bookmark for each dataset and machine, of
the snapshot that is sent: the next stream can begin at it when the snapshot was destroyed.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import BinaryIO, Protocol

from snaporch import __version__
from snaporch.bundle.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES
from snaporch.bundle.store import BundleStore
from snaporch.command_log import LoggedCommand
from snaporch.errors import NotFoundError, RefusedError, SnaporchError
from snaporch.model import BundleState, DatasetKind, PoolSnapshot
from snaporch.pull.send_permissions import Offer
from snaporch.pull.send_request import Request, Verb, WantedFile
from snaporch.remote_host import LIMIT_SECONDS
from snaporch.replication.interface import ReplicaError
from snaporch.replication.marks import COPIED, OF_PAGES
from snaporch.replication.needed_streams import RAW, Originals
from snaporch.replication.resume_transfer import NO_TOKEN, token_refusal
from snaporch.replication.transfer import expected_bytes
from snaporch.zfs import Bookmark, Pool, PoolError

_BLOCK = 1 << 20
_ERROR_BYTES = 1 << 13
_END_SECONDS = 10
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Output(Protocol):
    """Where an answer goes, such as :class:`~snaporch.pull.slow_reader_limit.LimitedOutput`."""

    def write(self, data: bytes) -> None:
        """Write all of the data."""


class ZfsSend:
    """``zfs send`` on this host.

    Args:
        zfs: the command.
        limit: seconds that a report may take.
    """

    def __init__(self, zfs: str = "zfs", limit: float = LIMIT_SECONDS) -> None:
        self._zfs = zfs
        self._limit = limit

    def report(self, words: Sequence[str]) -> str:
        """What ``zfs send`` says that it would send.

        Args:
            words: its options, with ``-n`` and ``-P``.

        Raises:
            PoolError: it cannot be sent.
        """
        try:
            done = subprocess.run(
                [self._zfs, "send", *words],
                capture_output=True,
                check=False,
                timeout=self._limit,
                env={**os.environ, "LC_ALL": "C"},
            )
        except subprocess.TimeoutExpired as error:
            reason = f"takes over {self._limit:.0f} s, and was ended"
            raise PoolError("zfs send", reason, "see: zpool status") from error
        if done.returncode != 0:
            raise PoolError("zfs send", _last_line(done.stderr) or f"status {done.returncode}")
        return (done.stdout + done.stderr).decode("utf-8", "replace")

    def send(self, words: Sequence[str], output: Output) -> None:
        """Send a stream.

        Raises:
            PoolError: ZFS did not send all of it.
            ReplicaError: it was not read.
        """
        with LoggedCommand("zfs", "send", *words) as log, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [self._zfs, "send", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                env={**os.environ, "LC_ALL": "C"},
            )
            try:
                with process.stdout as stream:  # type: ignore[union-attr]
                    while block := stream.read(_BLOCK):
                        output.write(block)
                status = process.wait()
            except BaseException:
                process.kill()
                process.wait(_END_SECONDS)
                raise
            log.exited(status)
            if status != 0:
                errors.seek(0)
                said = _last_line(errors.read(_ERROR_BYTES))
                raise PoolError("zfs send", said or f"status {status}")


class Sender:
    """Answers requests.

    Args:
        name: the machine that asks, as authorized_keys names it.
        offers: what it may copy.
        pool: the pools of this host.
        store: the bundle store of this host.
        zfs: sends streams.
        reading: keeps a guest's datasets from being rolled back while they are sent.
        output: gets the answer.
    """

    def __init__(
        self,
        name: str,
        offers: Collection[Offer],
        pool: Pool,
        store: BundleStore,
        zfs: ZfsSend,
        reading: Callable[[Offer], AbstractContextManager[None]],
        output: Output,
    ) -> None:
        self._prefix = f"snaporch-pull-{name}-"
        self._offers = {each.uuid: each for each in offers}
        self._pool = pool
        self._store = store
        self._zfs = zfs
        self._reading = reading
        self._output = output
        self._answers: dict[Verb, Callable[[Request], None]] = {
            Verb.GUESTS: self._guests,
            Verb.SNAPSHOTS: self._snapshots,
            Verb.MANIFEST: self._manifest,
            Verb.STREAM: self._stream,
            Verb.BUNDLE: self._bundle,
        }

    def answer(self, request: Request) -> None:
        """Carry out a request: a line with a JSON object, and what is sent after it.

        Raises:
            SnaporchError: it failed, or was refused.
        """
        self._answers[request.verb](request)

    def _say(self, document: Mapping[str, object]) -> None:
        self._output.write(json.dumps(document).encode() + b"\n")

    def _offer(self, uuid: str) -> Offer:
        if uuid not in self._offers:
            raise NotFoundError(uuid, "no guest of this UUID may be copied")
        return self._offers[uuid]

    def _guests(self, _request: Request) -> None:
        guests = [{"uuid": each.uuid, "domain": each.domain} for each in self._offers.values()]
        self._say({"guests": guests, "version": __version__, "time": time.time()})

    def _snapshots(self, request: Request) -> None:
        offer = self._offer(request.uuid)
        kinds = {each.name: each.kind for each in self._pool.datasets()}
        raw, policies = self._pool.encrypted(), self._pool.policies(sorted(offer.snapshots))
        datasets = [
            {
                "name": name,
                "kind": kinds.get(name, DatasetKind.FILESYSTEM),
                "raw": name in raw,
                "policy": policies.get(name, ""),
                "snapshots": [_described(each) for each in offer.snapshots[name]],
                "bookmarks": [[*each] for each in {*self._pool.bookmarks(name).values()}],
            }
            for name in sorted(offer.snapshots)
        ]
        unmarked = [
            {"run": run, "snapshots": [[each.dataset, each.guid] for each in own]}
            for run, own in sorted(offer.unmarked.items())
        ]
        self._say(
            {
                "datasets": datasets,
                "waiting": offer.waiting,
                "shared": offer.shared,
                "unmarked": unmarked,
            }
        )

    def _reference(self, request: Request) -> str:
        """The bundle that a request names.

        Raises:
            NotFoundError: it is none of the guest's bundles that may be sent.
        """
        reference = f"{request.uuid}/{request.run}"
        if request.run not in self._offer(request.uuid).runs:
            raise NotFoundError(reference, "no bundle of this run may be copied")
        return reference

    def _manifest(self, request: Request) -> None:
        reference = self._reference(request)
        text = b""
        if self._store.state(reference)[0] is BundleState.COMPLETE:
            with ExitStack() as opened:
                text = self._opened(opened, reference, MANIFEST_NAME).read(MAX_MANIFEST_BYTES)
        self._say({"text": text.decode("utf-8", "surrogateescape")})

    def _bundle(self, request: Request) -> None:
        reference = self._reference(request)
        state, manifest = self._store.state(reference)
        if state is not BundleState.COMPLETE or manifest is None:
            raise ReplicaError(reference, "is not whole on the source", "see there: snaporch list")
        known = {MANIFEST_NAME, *(part.name for part in manifest.parts)}
        if unknown := {each.name for each in request.files} - known:
            raise NotFoundError(f"{reference}/{min(unknown)}", "is no file of the bundle")
        with ExitStack() as opened:
            files = [self._open_at(opened, reference, each) for each in request.files]
            sizes = [
                os.fstat(stream.fileno()).st_size - each.offset
                for stream, each in zip(files, request.files, strict=True)
            ]
            self._say({"bytes": sum(sizes)})
            for stream, size in zip(files, sizes, strict=True):
                left = size
                while left:
                    block = stream.read(min(left, _BLOCK))
                    if not block:
                        raise ReplicaError(reference, "a file became shorter", "pull again")
                    self._output.write(block)
                    left -= len(block)

    def _open_at(self, opened: ExitStack, reference: str, wanted: WantedFile) -> BinaryIO:
        stream = self._opened(opened, reference, wanted.name)
        if wanted.offset > os.fstat(stream.fileno()).st_size:
            raise RefusedError(f"{reference}/{wanted.name}", "the offset is behind its end")
        stream.seek(wanted.offset)
        return stream

    def _opened(self, opened: ExitStack, reference: str, name: str) -> BinaryIO:
        """A plain file of a bundle, opened without links."""
        path = self._store.path(reference) / name
        try:
            directory = os.open(path.parent, _DIRECTORY)
            opened.callback(os.close, directory)
            descriptor = os.open(name, _READ, dir_fd=directory)
        except OSError as error:
            reason = error.strerror or "cannot be read"
            raise ReplicaError(f"{reference}/{name}", reason, "see there: snaporch list") from error
        stream = opened.enter_context(os.fdopen(descriptor, "rb"))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ReplicaError(f"{reference}/{name}", "is no plain file")
        return stream

    def _stream(self, request: Request) -> None:
        offer = self._offer(request.uuid)
        own = offer.snapshots.get(request.dataset, ())
        wanted = next((each for each in own if each.guid == request.guid), None)
        if wanted is None:
            thing = f"{request.dataset}@{request.guid}"
            raise NotFoundError(thing, "no snapshot of this GUID may be copied", "pull again")
        bookmarks = self._pool.bookmarks(request.dataset)
        base = self._base(request, own, bookmarks)
        raw = [f"-{RAW}"] if request.dataset in self._pool.encrypted() else []
        with self._reading(offer):
            self._bookmark(wanted, request.base, bookmarks)
            words = [*(raw or ["-Lc"]), *(["-i", base] if base else []), wanted.full_name]
            refusal = ""
            if request.token != NO_TOKEN:
                near = [each for each in own if each.guid in (request.base, request.guid)]
                originals = Originals(request.dataset, near, bookmarks)
                words = [*raw, "-t", request.token]
                refusal = self._token_refusal(words, originals, request.base or None)
            if refusal:
                self._say({"bytes": 0, "refused": refusal})
                return
            size = expected_bytes(self._zfs.report(["-nP", *words]))
            self._say({"bytes": size, "refused": ""})
            self._zfs.send(words, self._output)

    def _base(
        self, request: Request, own: Sequence[PoolSnapshot], bookmarks: Mapping[str, Bookmark]
    ) -> str:
        """The snapshot or bookmark at which a stream begins; empty for a full one."""
        if not request.base:
            return ""
        names = {mark.guid: name for name, mark in bookmarks.items()}
        names |= {each.guid: each.full_name for each in own}
        if request.base not in names:
            thing = f"{request.dataset}@{request.base}"
            raise NotFoundError(thing, "neither this snapshot nor a bookmark of it is there")
        return names[request.base]

    def _token_refusal(self, words: Sequence[str], originals: Originals, base: int | None) -> str:
        try:
            report = self._zfs.report(["-nvP", *words])
        except PoolError as error:
            return error.reason
        return token_refusal(report, originals, base, RAW if f"-{RAW}" in words else "Lc")

    def _bookmark(self, wanted: PoolSnapshot, base: int, bookmarks: Mapping[str, Bookmark]) -> None:
        """Bookmark what is sent; of this machine's other bookmarks, only that of the base stays.

        So their number does not grow, whatever is asked for.
        """
        start = f"{wanted.dataset}#{self._prefix}"
        name = f"{self._prefix}{wanted.guid}"
        own = {each: mark for each, mark in bookmarks.items() if each.startswith(start)}
        try:
            if f"{wanted.dataset}#{name}" not in own:
                self._pool.bookmark(wanted.full_name, name)
            for each, mark in own.items():
                is_number = each.removeprefix(start).isdecimal()
                if is_number and mark.guid not in (wanted.guid, base):
                    self._pool.destroy_bookmark(each)
        except SnaporchError as error:
            raise PoolError(wanted.full_name, f"is not bookmarked: {error.reason}") from error


def _described(snapshot: PoolSnapshot) -> dict[str, object]:
    return {
        "name": snapshot.name,
        "guid": snapshot.guid,
        "createtxg": snapshot.createtxg,
        "created": snapshot.created.timestamp(),
        "properties": {
            key: value for key, value in snapshot.properties.items() if key in (*COPIED, *OF_PAGES)
        },
    }


def _last_line(text: bytes) -> str:
    lines = text.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
