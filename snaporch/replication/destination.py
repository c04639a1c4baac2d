"""A replica, by ``zfs send`` and rsync, over ssh: its datasets; for bundles, ``replica_bundles``.

What a replica answers is input: it is never a part of a command line here, except a resume token
that was checked, see ``streams``. syncoid is not used, because it puts the token into a command of
the local shell, and without its resuming (``--no-resume``) a transfer that breaks begins again.
A copy is never rolled back (``zfs receive -F``): data that only the replica has may be the last.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from snaporch.bundle.age import check_recipients
from snaporch.bundle.store import copy_name
from snaporch.config import AnyReplica, Replica, ResticReplica
from snaporch.context import Context
from snaporch.errors import InterruptedRunError, SnaporchError
from snaporch.interrupt import Interrupt
from snaporch.model import PoolSnapshot
from snaporch.progress import Progress
from snaporch.remote_host import CommandError, Host, check_installed
from snaporch.replication.append_only import AppendOnlyDestination, check_append_only
from snaporch.replication.interface import BundleCopy, Destination, ReplicaError, readable
from snaporch.replication.replica_bundles import ReplicaBundles
from snaporch.replication.restic import ResticRepository, repository_problem
from snaporch.replication.restic_destination import ResticDestination
from snaporch.replication.resume_transfer import NO_TOKEN, CopyState
from snaporch.replication.stall_detector import StallDetector
from snaporch.replication.stream_sender import StreamSender
from snaporch.replication.transfer import Transfers
from snaporch.zfs import POLICY_PROPERTY, PREFIX, Pool, PoolError
from snaporch.zfs.remote import RemoteZfs, creations

_CHECK_SECONDS = 60


class ReplicaDestination:
    """:class:`Destination` by ``zfs send``, rsync and ssh.

    Args:
        name: the replica's name in the configuration.
        replica: its section.
        pool: the pools of this host.
        interrupt: a signal ends a transfer.
        progress: gets notes.
        watch: see :class:`~snaporch.replication.transfer.Transfers`.
    """

    def __init__(
        self,
        name: str,
        replica: Replica,
        pool: Pool,
        interrupt: Interrupt,
        progress: Progress,
        *,
        watch: Callable[[int], StallDetector] = StallDetector,
    ) -> None:
        self._name = name
        self._replica = replica
        self._host = Host(replica.host, lambda: interrupt.check(name))
        self._pool = RemoteZfs(self._host)
        self._transfers = Transfers(
            name, self._host.label, interrupt, progress, replica.rate_now, watch=watch
        )
        self._bundles = ReplicaBundles(name, replica, self._host, self._transfers)
        self._sender = StreamSender(
            name, replica, pool, self._transfers, progress, self._host.label, self
        )

    def copy_name(self, name: str) -> str:
        """See :class:`~snaporch.replication.stream_sender.Copies`."""
        return f"{self._replica.dataset}/{copy_name(name)}"

    def create(self) -> None:
        """See :class:`Destination`."""
        self._pool.make(self._replica.dataset)

    def snapshots(self, datasets: Sequence[str]) -> list[PoolSnapshot]:
        """See :class:`Destination`."""
        names = {self.copy_name(each): each for each in datasets}
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
                create = self.commands(*creations(root, known))
                return f"if the copies are lost: {create}, and all are sent again"
        return f"see: zpool status, on {self._host.label}"

    def send(self, dataset: str, *, raw: bool, until: int) -> None:
        """See :class:`Destination`."""
        self._sender.send(dataset, raw=raw, until=until)

    def diverged(self, dataset: str, only_there: Sequence[str]) -> ReplicaError:
        """See :class:`Destination`."""
        return self._sender.diverged(dataset, only_there)

    def state(self, dataset: str) -> CopyState:
        """See :class:`~snaporch.replication.stream_sender.Copies`."""
        kinds = ("-H", "-p", "-d", "1", "-t", "filesystem,volume")
        columns = "name,written,receive_resume_token"
        text = self._host.run("zfs", "list", *kinds, "-o", columns, self._replica.dataset)
        start = f"{self.copy_name(dataset)}\t"
        found = (line.removeprefix(start) for line in text.split("\n") if line.startswith(start))
        written, _, token = next(found, f"\t{NO_TOKEN}").partition("\t")
        return CopyState(written, token)

    def is_encrypted(self) -> bool:
        """See :class:`~snaporch.replication.stream_sender.Copies`."""
        with readable(self._name, self._host.label):
            return self._replica.dataset in self._pool.encrypted()

    def has_encrypted_bundles(self) -> bool:
        """See :class:`Destination`."""
        return has_encrypted_bundles(self._replica, self._host)

    def free_bytes(self) -> list[int]:
        """See :class:`Destination`."""
        root, bundles = self._replica.dataset, str(self._replica.bundles)
        available = self._host.run("zfs", "get", "-Hp", "-o", "value", "available", root)
        place = self._host.run("df", "--output=avail", "-B1", bundles)
        with readable(self._name, self._host.label):
            return [int(available), int(place.split()[-1])]

    def receiver(self, dataset: str) -> list[str]:
        """See :class:`~snaporch.replication.stream_sender.Copies`."""
        options = ("-s", "-u", "-o", "readonly=on")
        return self._host.command("zfs", "receive", *options, self.copy_name(dataset))

    def discard_partial(self, dataset: str) -> None:
        """See :class:`~snaporch.replication.stream_sender.Copies`."""
        self._host.run("zfs", "receive", "-A", self.copy_name(dataset))

    def commands(self, *commands: Sequence[str]) -> str:
        """See :class:`~snaporch.replication.stream_sender.Copies`."""
        script = " && ".join(map(shlex.join, commands))
        return shlex.join(["ssh", self._replica.host, script]) if self._replica.host else script

    def mark(self, properties: Mapping[str, Mapping[str, str]]) -> Collection[str]:
        """See :class:`Destination`."""
        self._pool.mark(
            {
                self.copy_name(name): {PREFIX + key: value for key, value in values.items()}
                for name, values in properties.items()
            }
        )
        return ()

    def set_policies(self, policies: Mapping[str, str]) -> None:
        """See :class:`Destination`."""
        wanted = {self.copy_name(name): policy for name, policy in policies.items()}
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


def open_replica(context: Context, name: str) -> Destination:
    """The replica with this name in the configuration."""
    replica, progress = context.config.replica[name], context.progress
    if isinstance(replica, ResticReplica):
        repository = ResticRepository(name, replica, context.interrupt, progress)
        return ResticDestination(repository, context.pool)
    kind = AppendOnlyDestination if replica.append_only else ReplicaDestination
    return kind(name, replica, context.pool, context.interrupt, progress)


def unavailable_reason(
    replica: AnyReplica,
    interrupt: Interrupt,
    open_host: Callable[[str, Callable[[], None]], Host] = Host,
) -> str:
    """Why no transfer to a replica can succeed now; empty if no obstacle is found.

    Args:
        replica: its section.
        interrupt: a signal ends the question.
        open_host: returns the machine with a name; see :class:`~snaporch.remote_host.Host`.

    Raises:
        InterruptedRunError: a signal came.
    """
    if isinstance(replica, ResticReplica):
        return repository_problem(replica, interrupt)
    host = open_host(replica.host, lambda: interrupt.check("check"))
    pool = replica.dataset.partition("/")[0]
    try:
        if replica.encrypt_to:
            check_recipients(replica.encrypt_to)
        if replica.append_only:
            check_append_only(replica, interrupt)
            return ""
        check_installed("rsync")
        host.run("rsync", "--version", limit=_CHECK_SECONDS)
        host.run("zfs", "list", "-H", "-o", "name", pool, limit=_CHECK_SECONDS)
        host.run("ls", "-d", f"{replica.bundles}/", limit=_CHECK_SECONDS)
    except InterruptedRunError:
        raise
    except SnaporchError as error:
        return error.line()
    return ""


def has_encrypted_bundles(replica: Replica, host: Host) -> bool:
    """Whether a replica's bundles are on an encrypted dataset.

    Args:
        replica: its section; it is not append-only.
        host: its machine.

    Raises:
        CommandError, UnavailableError: the machine cannot be reached.
    """
    return _is_encrypted(host, str(replica.bundles))


def has_encrypted_copies(replica: Replica, host: Host) -> bool:
    """Whether the dataset of a replica's copies is encrypted, or will be when it is created.

    Args:
        replica: its section; it is not append-only.
        host: its machine.

    Raises:
        CommandError, UnavailableError: the machine cannot be reached.
    """
    name = replica.dataset
    return _is_encrypted(host, name) or (
        "/" in name and _is_encrypted(host, name.rpartition("/")[0])
    )


def _is_encrypted(host: Host, name: str) -> bool:
    words = ("zfs", "get", "-H", "-o", "value", "encryption", name)
    try:
        found = host.run(*words, limit=_CHECK_SECONDS).strip()
    except CommandError:
        host.run("true", limit=_CHECK_SECONDS)  # else its path is of another file system
        return False
    return found.startswith("aes-")


def weakness_of(replica: AnyReplica, interrupt: Interrupt) -> str:
    """Why an append-only replica is protected less than it could be.

    Empty if it is not, if it does not answer, and for other replicas.

    Raises:
        InterruptedRunError: a signal came.
    """
    if isinstance(replica, Replica) and replica.append_only:
        try:
            return check_append_only(replica, interrupt)
        except InterruptedRunError:
            raise
        except SnaporchError:
            return ""
    return ""
