"""Carry out the requests of a host on its append-only replica.

Which requests are accepted is decided by :mod:`snaporch.replication.receive_request`, and which
properties are set by :mod:`snaporch.replication.mark_rules`.
"""

from __future__ import annotations

import os
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from typing import Protocol

from snaporch.errors import RefusedError, UnavailableError
from snaporch.model import PoolSnapshot
from snaporch.replication.mark_rules import decide_marks
from snaporch.replication.receive_limits import LimitedStream
from snaporch.replication.receive_request import Request, Verb
from snaporch.replication.received_bundles import ReceivedBundles
from snaporch.replication.resume_transfer import NO_TOKEN
from snaporch.replication.stream_header import HEADER_BYTES, check_sent, sent_snapshot
from snaporch.zfs import POLICY_PROPERTY, PREFIX, PoolError
from snaporch.zfs.received import Readable
from snaporch.zfs_names import is_dataset, is_snapshot

INHERITED = {"readonly": "on", "mountpoint": "none", "volmode": "none"}
"""What the copies inherit from the dataset above them."""


class AppendableCopies(Protocol):
    """ZFS where copies arrive: they are extended and marked, and never taken back."""

    def values(self, dataset: str, properties: Collection[str]) -> dict[str, str]:
        """The values of properties of ZFS's own."""

    def copies(self, root: str, datasets: Sequence[str]) -> list[PoolSnapshot]:
        """The snapshots of those of the datasets that exist, oldest first."""

    def append(
        self, snapshot: str, header: bytes, rest: Readable, options: Collection[str] = ()
    ) -> None:
        """Receive a snapshot, with further options of ``zfs receive``."""

    def discard_partial(self, dataset: str) -> None:
        """Discard the part of an interrupted transfer."""

    def policies(self, datasets: Sequence[str]) -> dict[str, str]:
        """The policies of datasets."""

    def set_properties(self, names: Sequence[str], properties: Mapping[str, str]) -> None:
        """Set user properties."""

    def clear_properties(self, names: Sequence[str], keys: Sequence[str]) -> None:
        """Remove user properties."""


class Received(AppendableCopies, Protocol):
    """ZFS on the replica; :class:`~snaporch.zfs.received.ReceivedZfs` is the real one."""

    def kernel_release(self) -> str:
        """The version of the kernel's OpenZFS."""

    def permissions(self, dataset: str) -> frozenset[str]:
        """What ``zfs allow`` permits on a dataset."""


class Receiver:
    """Answers requests.

    Args:
        dataset: the copies are directly below it.
        bundles: the directory of the bundles.
        zfs: ZFS on this machine.
        stream: what the host sends with a request.
        now: the seconds since the epoch.
    """

    def __init__(
        self,
        dataset: str,
        bundles: ReceivedBundles,
        zfs: Received,
        stream: LimitedStream,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._now = now
        self._dataset = dataset
        self._bundles = bundles
        self._zfs = zfs
        self._stream = stream
        self._answers: dict[Verb, Callable[[Request], dict[str, object]]] = {
            Verb.CHECK: self._check,
            Verb.SNAPSHOTS: self._snapshots,
            Verb.STATE: self._state,
            Verb.RECEIVE: self._receive,
            Verb.DISCARD: self._discard,
            Verb.MARK: self._mark,
            Verb.POLICIES: self._set_policies,
            Verb.BUNDLES: self._list_bundles,
            Verb.MANIFEST: self._manifest,
            Verb.DAMAGED: self._damaged,
            Verb.BEGUN: self._begun,
            Verb.STORE: self._store,
        }

    def answer(self, request: Request) -> dict[str, object]:
        """Carry out a request.

        Returns:
            The JSON object of the answer.

        Raises:
            SnaporchError: it failed, or was refused.
        """
        return self._answers[request.verb](request)

    def _full_name(self, copy: str) -> str:
        """The name of a copy.

        Raises:
            RefusedError: it is too long for ZFS.
        """
        name = f"{self._dataset}/{copy}"
        if not is_snapshot(copy) or not is_dataset(name):
            raise RefusedError(name, "cannot be the name of a copy")
        return name

    def _check(self, _request: Request) -> dict[str, object]:
        found = self._zfs.values(self._dataset, [*INHERITED, "encryption", "available"])
        wrong = {key: value for key, value in INHERITED.items() if found.get(key) != value}
        if wrong:
            settings = " ".join(f"{key}={value}" for key, value in wrong.items())
            raise UnavailableError(
                self._dataset,
                "copies would inherit other properties than they need",
                f"as root on the replica: zfs set {settings} {shlex.quote(self._dataset)}",
            )
        self._bundles.check()
        free = [int(found["available"]), self._bundles.free_bytes()]
        return {
            "dataset": self._dataset,
            "release": self._zfs.kernel_release(),
            "permissions": sorted(self._zfs.permissions(self._dataset)),
            "root": os.geteuid() == 0,
            "encrypted": found["encryption"] not in ("off", "-"),
            "free": free,
        }

    def _snapshots(self, request: Request) -> dict[str, object]:
        names = [self._full_name(each) for each in request.copies]
        return {
            "snapshots": [
                {
                    "copy": each.dataset.removeprefix(f"{self._dataset}/"),
                    "name": each.name,
                    "guid": each.guid,
                    "createtxg": each.createtxg,
                    "created": each.created.timestamp(),
                    "properties": each.properties,
                }
                for each in self._zfs.copies(self._dataset, names)
                if each.dataset != self._dataset
            ]
        }

    def _state(self, request: Request) -> dict[str, object]:
        name = self._full_name(request.copy)
        try:
            found = self._zfs.values(name, ["written", "receive_resume_token"])
        except PoolError as error:
            if "does not exist" not in error.reason:
                raise
            found = {}
        return {
            "written": found.get("written", ""),
            "token": found.get("receive_resume_token", NO_TOKEN),
        }

    def _receive(self, request: Request) -> dict[str, object]:
        name = self._full_name(request.copy)
        header = self._stream.exactly(HEADER_BYTES)
        sent = sent_snapshot(header)
        full = f"{name}@{sent.name}"
        if sent.is_raw:
            raise RefusedError(
                full,
                "is encrypted: the next raw stream could replace the key of the whole copy",
                "use a replica without append_only for encrypted datasets",
            )
        there = self._zfs.copies(self._dataset, [name])
        check_sent(full, sent, [each for each in there if each.dataset == name], self._now())
        self._zfs.append(full, header, self._stream)
        return {}

    def _discard(self, request: Request) -> dict[str, object]:
        name = self._full_name(request.copy)
        try:
            self._zfs.discard_partial(name)
        except PoolError as error:
            step = f"as root on the replica: zfs receive -A {shlex.quote(name)}"
            raise PoolError(error.thing, error.reason, step) from error
        return {}

    def _mark(self, request: Request) -> dict[str, object]:
        wanted: dict[str, dict[str, Mapping[str, str]]] = defaultdict(dict)
        for full_name, values in (request.marks or {}).items():
            copy, _, name = full_name.partition("@")
            wanted[copy][name] = values
        late = []
        for copy, by_name in wanted.items():
            dataset = self._full_name(copy)
            found = self._zfs.copies(self._dataset, [dataset])
            decision = decide_marks([s for s in found if s.dataset == dataset], by_name)
            for name, values in decision.new.items():
                properties = {PREFIX + key: value for key, value in values.items()}
                self._zfs.set_properties([f"{dataset}@{name}"], properties)
            late += [f"{copy}@{name}" for name in decision.late]
        return {"late": late}

    def _set_policies(self, request: Request) -> dict[str, object]:
        """Set the policies of copies, which may change: see docs/how-to/replication.md."""
        wanted = {self._full_name(each): text for each, text in (request.policies or {}).items()}
        there = self._zfs.policies([*wanted])
        for name, policy in wanted.items():
            if policy and there.get(name, "") != policy:
                self._zfs.set_properties([name], {POLICY_PROPERTY: policy})
            elif not policy and name in there:
                self._zfs.clear_properties([name], [POLICY_PROPERTY])
        return {}

    def _list_bundles(self, request: Request) -> dict[str, object]:
        return {
            "bundles": {
                run: {"sizes": each.sizes, "unread": None if each.unread == inf else each.unread}
                for run, each in self._bundles.bundles(request.uuid).items()
            }
        }

    def _manifest(self, request: Request) -> dict[str, object]:
        return {"text": self._bundles.manifest(request.uuid, request.run)}

    def _damaged(self, request: Request) -> dict[str, object]:
        found = self._bundles.damaged(request.uuid, request.run, request.sums or {})
        return {"damaged": found}

    def _begun(self, request: Request) -> dict[str, object]:
        return {"sizes": self._bundles.begun(request.uuid, request.run)}

    def _store(self, request: Request) -> dict[str, object]:
        found = self._bundles.store(request.uuid, request.run, request.files, self._stream)
        return {"damaged": found}
