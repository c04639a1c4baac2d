"""ZFS by the ``zfs`` command: all listings, and the fallback where libzfs_core is not available.

It is chosen by :mod:`snaporch.zfs.open_pool`. Of its commands only ``zpool sync`` has a limit of
time. Those on another machine have one (:mod:`snaporch.remote_host`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Self, TypeVar

from snaporch.command_log import LoggedCommand
from snaporch.default_paths import HOST
from snaporch.errors import UnavailableError
from snaporch.model import (
    Dataset,
    DatasetKind,
    PolicyView,
    PoolSnapshot,
    SnapshotListing,
    moment_at,
)
from snaporch.zfs.interface import (
    POLICY_PROPERTY,
    PREFIX,
    Bookmark,
    DatasetListing,
    InUseError,
    MountedError,
    PoolError,
)
from snaporch.zfs.mount_users import BlockingMount, blocking_mounts
from snaporch.zfs.parity import ParityGroup, parity_group
from snaporch.zfs.property_listing import COLUMNS, Listing
from snaporch.zfs.send_stream import END, second_record
from snaporch.zfs.snapshot_mount import mounted_snapshot

_T = TypeVar("_T")
PROPERTIES = (
    "run",
    "level",
    "bundle",
    "uuid",
    "verified",
    "verified-here",
    "retention",
    "group",
    "ram",
    "ram-pools",
    "replicated",
    "dropped",
    "torn",
    "domain",
    "unchanged",
    "copy",
    "kept",
    "note",
    "ended",
)
"""The ``snaporch:`` user properties of snapshots."""

_BIRTH = ("guid", "createtxg", "creation")
_OWN = tuple(PREFIX + key for key in PROPERTIES)

_ARG_BYTES = 100_000
"""Keeps a command line well below the kernel's limit (execve(2), ARG_MAX)."""


_MAX_ASHIFT = 16
"""OpenZFS's (``ASHIFT_MAX``)."""
_SYNC_SECONDS = 60.0
_HOLD_COLUMNS = 3
_VOLUME_OPEN_SECONDS = 10
"""How long udev may have a volume open that was written to, to read what is on it."""
_TICK_SECONDS = 0.2
_MAX_KEYS = 200
"""Property names, which can be long, are passed as one argument (execve(2), MAX_ARG_STRLEN)."""


Done = subprocess.CompletedProcess[bytes]


class ZfsCommand:
    """:class:`~snaporch.zfs.interface.Pool` by running ``zfs``."""

    def __init__(self, executable: str, run: Callable[..., Done] = subprocess.run) -> None:
        self._zfs = executable
        self._run_program = run

    @classmethod
    def open(cls, dev: Path = HOST.dev, more: str = "/usr/sbin:/sbin") -> Self:
        """Find ``zfs`` and check that its kernel module is loaded and accessible.

        Args:
            dev: the directory of devices.
            more: where the command is searched for besides ``PATH``, separated by colons.

        Raises:
            UnavailableError: no command, no module, or no permission.
        """
        executable = shutil.which("zfs") or shutil.which("zfs", path=more)
        if executable is None:
            raise UnavailableError(
                "zfs", "the command is not installed", "apt install zfsutils-linux"
            )
        device = dev / "zfs"
        if not os.path.exists(device):
            raise UnavailableError("zfs", "the kernel module is not loaded", "modprobe zfs")
        if not os.access(device, os.R_OK | os.W_OK):
            raise UnavailableError(str(device), "permission denied", "run snaporch as root")
        return cls(executable)

    @property
    def _zpool(self) -> str:
        return os.path.join(os.path.dirname(self._zfs), "zpool")

    def _run(self, *arguments: str) -> str:
        return self._call(self._zfs, arguments)

    def _call(self, program: str, arguments: Sequence[str], seconds: float | None = None) -> str:
        name = os.path.basename(program)
        with LoggedCommand(name, *arguments):
            return self._output(name, program, arguments, seconds)

    def _output(
        self, name: str, program: str, arguments: Sequence[str], seconds: float | None
    ) -> str:
        try:
            done = self._run_program(
                [program, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                process_group=0,  # a terminal's Ctrl-C must not kill a command under way
                env={**os.environ, "LC_ALL": "C"},
                timeout=seconds,
            )
        except OSError as error:
            raise PoolError(program, f"cannot be run: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise PoolError(f"{name} {arguments[0]}", f"takes over {seconds:.0f} s") from error
        if done.returncode != 0:
            reason = done.stderr.decode("utf-8", "replace").strip()
            raise PoolError(f"{name} {arguments[0]}", reason or f"exit status {done.returncode}")
        return done.stdout.decode("utf-8", "surrogateescape")

    def sync(self, datasets: Collection[str]) -> None:
        pools = sorted({dataset.partition("/")[0] for dataset in datasets})
        self._call(self._zpool, ["sync", *pools], _SYNC_SECONDS)

    def datasets(self) -> list[Dataset]:
        lines = self._run("list", "-Hp", "-t", "filesystem,volume", "-o", "name,type").splitlines()
        pairs = (line.split("\t") for line in lines)
        return [Dataset(name, DatasetKind(kind)) for name, kind in pairs]

    def encrypted(self) -> frozenset[str]:
        listing = ["list", "-Hp", "-t", "filesystem,volume", "-o", "name,encryption"]
        pairs = (line.split("\t") for line in self._run(*listing).splitlines())
        return frozenset(name for name, cipher in pairs if cipher not in ("off", "-"))

    def policy_view(self) -> PolicyView:
        listing = Listing((*_BIRTH, "userrefs", "clones"), (POLICY_PROPERTY, *_OWN))
        found: list[PoolSnapshot] = []
        pinned: dict[str, str] = {}
        policies: dict[str, str] = {}
        for name, values in self._listed(listing, "-t", "filesystem,volume,snapshot"):
            if "@" not in name:
                if POLICY_PROPERTY in values:
                    policies[name] = values[POLICY_PROPERTY]
                continue
            found.append(_snapshot(name, values))
            if reason := _pin(values.get("userrefs", ""), values.get("clones", "")):
                pinned[name] = reason
        return PolicyView(tuple(sorted(found, key=_age)), pinned, policies)

    def snapshots(self, datasets: Sequence[str] | None = None) -> list[PoolSnapshot]:
        if datasets is None:
            return self._snapshots()
        try:
            return self._snapshots("-d", "1", names=datasets) if datasets else []
        except PoolError:
            present = {dataset.name for dataset in self.datasets()}
            if present.issuperset(datasets):
                raise
            return self.snapshots([name for name in datasets if name in present])

    def snapshot_listing(self) -> SnapshotListing:
        listing = ("list", "-Hp", "-t", "filesystem,volume,snapshot", "-o", "name,guid")
        pairs = [line.split("\t") for line in self._run(*listing).splitlines()]
        pools = frozenset(name for name, _ in pairs if "/" not in name and "@" not in name)
        if not pools:
            raise PoolError("zfs list", "lists nothing", "is a pool imported? see `zpool list`")
        snapshots: dict[int, tuple[str, ...]] = {}
        for name, guid in pairs:
            if "@" in name:
                snapshots[int(guid)] = (*snapshots.get(int(guid), ()), name)
        return SnapshotListing(pools, snapshots)

    def _snapshots(
        self, *options: str, names: Sequence[str] = (), root: str | None = None
    ) -> list[PoolSnapshot]:
        """Listed snapshots; with ``root``, that dataset must be listed, too."""
        kinds = "snapshot" if root is None else "filesystem,volume,snapshot"
        found = dict(self._listed(Listing(_BIRTH, _OWN), "-t", kinds, *options, names=names))
        if root is not None and root not in found:
            raise PoolError("zfs get", f"{root} is not in its output")
        snapshots = (_snapshot(name, values) for name, values in found.items() if "@" in name)
        return sorted(snapshots, key=_age)

    def _listed(
        self,
        listing: Listing,
        *options: str,
        names: Sequence[str] = (),
        sources: Collection[str] = (),
    ) -> Iterator[tuple[str, dict[str, str]]]:
        words = ("get", "-Hp", *options, "-o", COLUMNS, listing.properties, *names)
        return listing.read(self._run(*words), sources)

    def snapshot(self, names: Sequence[str], properties: Mapping[str, str]) -> None:
        self._run("snapshot", *_options(properties), *names)

    def destroy_snapshots(self, names: Sequence[str]) -> None:
        with self._explained(names):
            self._destroy_snapshots(names)

    def blocking_mounts(self, names: Collection[str] | None = None) -> list[BlockingMount]:
        return blocking_mounts(names)

    @contextmanager
    def _explained(self, names: Sequence[str]) -> Iterator[None]:
        """If destroying fails because of a mount: name the program that has it, in the error."""
        try:
            yield
        except PoolError as error:
            found = self.blocking_mounts(names)
            if not found:
                raise
            mounts = ", ".join(f"{each.name} is mounted by {each.program}" for each in found)
            step = (
                "it can be destroyed after the unmount; see docs/reference/hosts.md, "
                "mount namespaces"
            )
            raise MountedError(error.thing, mounts, step) from error

    def _destroy_snapshots(self, names: Sequence[str]) -> None:
        present = self._present(names)
        existing = [name for name in names if name in present]
        held = self.holds_of(existing)
        blocked = [name for name in existing if held[name]] + list(self.clones(existing))
        if blocked:
            raise InUseError(", ".join(sorted(blocked)), "held or cloned, not destroyed")
        for name in existing:
            self._run("destroy", name)

    def reclaimable(self, names: Sequence[str]) -> int:
        of_dataset: dict[str, list[str]] = {}
        for name in names:
            dataset, _, snapshot = name.partition("@")
            of_dataset.setdefault(dataset, []).append(snapshot)
        total = 0
        for dataset, snapshots in of_dataset.items():
            for chunk in _chunks(snapshots):
                total += self._reclaimable(f"{dataset}@{','.join(chunk)}")
        return total

    def _reclaimable(self, snapshots: str) -> int:
        """What ``zfs destroy`` would free of ``dataset@a,b``; it changes nothing (``-n``)."""
        rows = [row.split("\t") for row in self._run("destroy", "-nvp", snapshots).splitlines()]
        for row in rows:
            if row[0] == "reclaim" and row[-1].isdecimal():
                return int(row[-1])
        raise PoolError("zfs destroy -nvp", f"gives no number for {snapshots}")

    def clear_properties(self, names: Sequence[str], keys: Sequence[str]) -> None:
        for key in keys:
            for chunk in _chunks(names):
                self._run("inherit", key, *chunk)

    def set_properties(self, names: Sequence[str], properties: Mapping[str, str]) -> None:
        pairs = ["=".join(pair) for pair in properties.items()]
        for chunk in _chunks(names):
            self._run("set", *pairs, *chunk)

    def hold(self, names: Sequence[str], tag: str) -> None:
        present = self._present(names)
        missing = [name for name in names if name not in present]
        if missing:
            raise PoolError(", ".join(missing), "no such snapshot")
        self._run("hold", tag, *names)

    def _present(self, names: Sequence[str]) -> set[str]:
        datasets = sorted({name.split("@")[0] for name in names})
        return {snapshot.full_name for snapshot in self.snapshots(datasets)}

    def release(self, names: Sequence[str], tag: str) -> None:
        for name, tags in self.holds_of(names).items():
            if tag in tags:
                self._run("release", tag, name)

    def holds_of(self, names: Sequence[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {name: [] for name in names}
        for chunk in _chunks(names):
            rows = (line.split("\t") for line in self._run("holds", "-H", *chunk).split("\n"))
            for row in rows:
                if len(row) == _HOLD_COLUMNS and row[0] in found:
                    found[row[0]].append(row[1])
        return found

    def clone(self, origin: str, dataset: str, properties: Mapping[str, str] | None = None) -> None:
        self._run("clone", *_options(properties or {}), origin, dataset)

    def local_properties(
        self, names: Sequence[str], datasets: Sequence[str] = ()
    ) -> dict[str, dict[str, str]]:
        listing, kinds = Listing((), names), ("-t", "filesystem,volume")
        found = self._listed(listing, *kinds, names=datasets, sources=("local",))
        return {name: values for name, values in found if values}

    def native_properties(
        self, names: Sequence[str], datasets: Sequence[str]
    ) -> dict[str, dict[str, str]]:
        listing, found = Listing(names, ()), dict[str, dict[str, str]]()
        for chunk in _chunks(datasets):
            found |= dict(self._listed(listing, names=chunk))
        return found

    def sector_bytes(self, pool: str) -> int:
        words = ("get", "-Hp", "-o", "value", "ashift", pool, "all-vdevs")
        try:
            values = self._call(self._zpool, words).split()
        except PoolError:
            return 0
        shifts = [int(each) for each in values if each.isdecimal()]
        return 1 << max(shifts) if any(shifts) and max(shifts) <= _MAX_ASHIFT else 0

    def parity_groups(self, pool: str) -> tuple[ParityGroup, ...]:
        words = ("get", "-Hp", "-o", "name,value", "numchildren", pool, "all-vdevs")
        try:
            lines = self._call(self._zpool, words).splitlines()
        except PoolError:
            return ()
        rows = (line.partition("\t") for line in lines)
        found = (parity_group(name, value) for name, _, value in rows)
        return tuple(each for each in found if each is not None)

    def policies(self, datasets: Sequence[str]) -> dict[str, str]:
        listing = Listing((), [POLICY_PROPERTY])
        found = self._listed(listing, "-t", "filesystem,volume", names=datasets) if datasets else ()
        return {name: values[POLICY_PROPERTY] for name, values in found if values}

    def mountpoints(self) -> dict[str, str]:
        listing = self._run("list", "-Hp", "-t", "filesystem", "-o", "name,canmount,mountpoint")
        rows = (line.split("\t", 2) for line in listing.split("\n") if line)
        return {row[0]: row[-1] for row in rows if row[1] == "on" and row[-1].startswith("/")}

    def encryption_roots(self, datasets: Sequence[str]) -> dict[str, str]:
        return dict(self._values("encryptionroot", datasets))

    def origins(self, datasets: Sequence[str]) -> dict[str, str]:
        return dict(self._values("origin", datasets))

    def _values(self, key: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """The values of a property of ZFS's own, by name, where it has one."""
        for chunk in _chunks(names):
            for line in self._run("get", "-Hp", "-o", "name,value", key, *chunk).splitlines():
                name, value = line.split("\t")
                if value not in ("", "-"):
                    yield name, value

    def sizes(self, snapshots: Sequence[str]) -> dict[str, tuple[int, int]]:
        found = {}
        for chunk in _chunks(snapshots):
            listing = self._run("list", "-Hp", "-o", "name,used,referenced", *chunk)
            for line in listing.splitlines():
                name, used, referenced = line.split("\t")
                found[name] = int(used), int(referenced)
        return found

    def reserved(self, datasets: Sequence[str]) -> dict[str, tuple[int, int]]:
        found = {}
        columns = "name,refreservation,usedbydataset,available"
        for chunk in _chunks(datasets):
            for line in self._run("list", "-Hp", "-o", columns, *chunk).splitlines():
                name, *figures = line.split("\t")
                kept, used, free = (int(each) if each.isdecimal() else 0 for each in figures)
                if kept:  # the unused reservation is available to the dataset, not to a snapshot
                    found[name] = min(used, kept), free - max(0, kept - used)
        return found

    def create_filesystem(self, dataset: str, properties: Mapping[str, str]) -> None:
        above = dataset.rpartition("/")[0]
        if above not in {known.name for known in self.datasets()}:
            self._run("create", "-p", above)
        self._run("create", *_options(properties), dataset)

    def destroy_dataset(self, dataset: str) -> None:
        with self._explained([dataset]):
            self._run("destroy", dataset)

    def rollback(self, snapshot: str) -> None:
        self._run("rollback", snapshot)

    def listing(self, datasets: Sequence[str]) -> DatasetListing:
        if not datasets:
            return DatasetListing((), {}, {})
        kinds = ("-d", "1", "-t", "snapshot,bookmark")
        found = dict(self._listed(Listing((*_BIRTH, "clones"), _OWN), *kinds, names=datasets))
        snapshots = {name: values for name, values in found.items() if "@" in name}
        return DatasetListing(
            tuple(sorted((_snapshot(*each) for each in snapshots.items()), key=_age)),
            {
                name: Bookmark(int(values["guid"]), int(values["createtxg"]))
                for name, values in found.items()
                if name not in snapshots
            },
            {
                name: tuple(values["clones"].split(","))
                for name, values in snapshots.items()
                if values.get("clones")
            },
        )

    def bookmark(self, snapshot: str, name: str) -> None:
        self._run("bookmark", snapshot, f"{snapshot.partition('@')[0]}#{name}")

    def bookmarks(self, dataset: str) -> dict[str, Bookmark]:
        columns = "name,guid,createtxg"
        listing = ("list", "-Hp", "-d", "1", "-t", "bookmark", "-o", columns, dataset)
        lines = (line.split("\t") for line in self._run(*listing).splitlines())
        return {name: Bookmark(int(guid), int(txg)) for name, guid, txg in lines}

    def destroy_bookmark(self, name: str) -> None:
        self._run("destroy", name)

    def clones(self, snapshots: Sequence[str]) -> dict[str, list[str]]:
        return {name: value.split(",") for name, value in self._values("clones", snapshots)}

    def send_increment(
        self,
        origin: str,
        snapshot: str,
        path: Path,
        on_written: Callable[[int], None] = lambda _bytes: None,
        *,
        raw: bool,
    ) -> int:
        words = ["send", *_send_flags(raw=raw), origin, snapshot]
        with LoggedCommand("zfs", *words) as command, open(path, "wb", opener=_private) as stream:
            with subprocess.Popen(
                [self._zfs, *words],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.PIPE,
                process_group=0,
            ) as process:
                errors = _wait(process, lambda: on_written(os.fstat(stream.fileno()).st_size))
            command.exited(process.returncode)
            os.fsync(stream.fileno())
        if process.returncode != 0:
            path.unlink()
            raise PoolError(f"zfs send {snapshot}", errors.decode("utf-8", "replace"))
        return path.stat().st_size

    def increment_size(self, origin: str, snapshot: str, *, raw: bool) -> int:
        report = self._run("send", "-nP", *_send_flags(raw=raw), origin, snapshot)
        sizes = [line.split("\t")[1] for line in report.splitlines() if line.startswith("size\t")]
        return int(sizes[-1])

    def mounted_snapshot(self, snapshot: str) -> AbstractContextManager[Path]:
        return mounted_snapshot(snapshot)

    def written_since(self, snapshot: str) -> int:
        dataset, _, name = snapshot.partition("@")
        answer = self._run("get", "-Hp", "-o", "value", f"written@{name}", dataset).strip()
        if not answer.isdecimal():  # of a missing snapshot "-", without an error
            reason = f"ZFS gives no number for {dataset}; does the snapshot still exist?"
            raise PoolError(f"zfs get written@{name}", reason)
        return int(answer)

    def is_volume_modified(self, snapshot: str) -> bool:
        dataset, _, name = snapshot.partition("@")
        self.sync([dataset])  # ZFS counts a write only when it is in the pool
        if self.written_since(snapshot) == 0:
            return False
        words = ["send", "-w", "-i", f"@{name}", dataset]
        until = time.monotonic() + _VOLUME_OPEN_SECONDS
        while True:
            kind, errors = self._start_of_stream(words, second_record)
            if kind is not None:
                return kind != END
            if time.monotonic() > until:
                raise PoolError(f"zfs send {dataset}", errors)
            time.sleep(0.2)

    def _start_of_stream(
        self, words: Sequence[str], read: Callable[[IO[bytes]], _T | None]
    ) -> tuple[_T | None, str]:
        """What is read of the start of a stream of ``zfs send``, and what ZFS says on its end."""
        with LoggedCommand("zfs", *words) as command:
            with subprocess.Popen(
                [self._zfs, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
            ) as process:
                assert process.stdout is not None
                assert process.stderr is not None
                found = read(process.stdout)
                process.kill()  # it may have terabytes to say
                errors = process.stderr.read().decode("utf-8", "replace")
            command.exited(0 if found is not None else process.returncode)
        return found, errors

    def receive(self, dataset: str, path: Path) -> None:
        words = ["receive", "-F", dataset]
        with LoggedCommand("zfs", *words) as command, path.open("rb") as stream:
            done = subprocess.run(
                [self._zfs, *words],
                stdin=stream,
                capture_output=True,
                check=False,
                process_group=0,
            )
            command.exited(done.returncode)
        if done.returncode != 0:
            raise PoolError(f"zfs receive {dataset}", done.stderr.decode("utf-8", "replace"))

    def available(self, dataset: str) -> int:
        return int(self._run("get", "-Hp", "-o", "value", "available", dataset))

    def user_properties(self, snapshots: Sequence[str]) -> dict[str, dict[str, str]]:
        sources = ("local", "received")
        found: dict[str, dict[str, str]] = {}
        for chunk in _chunks(snapshots):
            columns = ("-s", ",".join(sources), "-t", "snapshot", "-o", "property")
            names = {*self._run("get", "-Hp", *columns, "all", *chunk).splitlines()}
            keys = sorted(key for key in names if ":" in key)
            for start in range(0, len(keys), _MAX_KEYS):
                listing = Listing((), keys[start : start + _MAX_KEYS])
                listed = self._listed(listing, "-t", "snapshot", names=chunk, sources=sources)
                for name, values in listed:
                    if values:
                        found.setdefault(name, {}).update(values)
        return found


def _wait(process: subprocess.Popen[bytes], tick: Callable[[], None]) -> bytes:
    """Wait for a process and call ``tick`` several times a second; its standard error."""
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=_TICK_SECONDS)[1]
            tick()
    except BaseException:
        process.kill()
        raise


def _pin(holds: str, clones: str) -> str:
    """Why ``zfs destroy`` would refuse, by ``userrefs`` and ``clones`` of zfsprops(7); or empty."""
    if holds not in ("", "-", "0"):
        return "held"
    return f"cloned as {clones}" if clones not in ("", "-") else ""


def _send_flags(*, raw: bool) -> list[str]:
    """Send compressed blocks as they are, and encrypted ones raw: no clear text leaves."""
    return [*(["-w"] if raw else ["-L", "-c", "-e"]), "-I"]


def _options(properties: Mapping[str, str]) -> list[str]:
    return [word for key, value in properties.items() for word in ("-o", f"{key}={value}")]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _chunks(names: Sequence[str]) -> list[list[str]]:
    chunks: list[list[str]] = []
    size = _ARG_BYTES
    for name in names:
        if size + len(name) > _ARG_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(name)
        size += len(name) + 1
    return chunks


def _age(snapshot: PoolSnapshot) -> int:
    return snapshot.createtxg


def _snapshot(full_name: str, values: Mapping[str, str]) -> PoolSnapshot:
    dataset, name = full_name.split("@", 1)
    return PoolSnapshot(
        dataset=dataset,
        name=name,
        guid=int(values["guid"]),
        createtxg=int(values["createtxg"]),
        created=moment_at(int(values["creation"])),
        properties={key: values[PREFIX + key] for key in PROPERTIES if PREFIX + key in values},
    )
