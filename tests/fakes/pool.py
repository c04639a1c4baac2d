"""ZFS in memory."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from fakes.hooks import Hooks
from snaporch.model import Dataset, DatasetKind, PolicyView, PoolSnapshot, SnapshotListing
from snaporch.zfs.cli import PROPERTIES
from snaporch.zfs.interface import Bookmark, DatasetListing, InUseError, MountedError, PoolError
from snaporch.zfs.mount_users import BlockingMount
from snaporch.zfs.parity import ParityGroup

_PREFIX = "snaporch:"
_NAME = re.compile(r"[A-Za-z0-9_.: -]+")
_MAX_NAME = 255


@dataclass
class _Snapshot:
    name: str
    guid: int
    txg: int
    created: datetime
    content: bytes
    properties: dict[str, str]
    holds: set[str] = field(default_factory=set)
    readers: int = 0


_DEFAULTS = {
    DatasetKind.FILESYSTEM: {"recordsize": str(128 << 10)},
    DatasetKind.VOLUME: {"volblocksize": str(16 << 10), "volsize": str(32 << 20)},
}
"""The properties that one kind has and the other has not."""
for _values in _DEFAULTS.values():
    _values |= {"compression": "on", "primarycache": "all", "logbias": "latency"}


@dataclass
class _Dataset:
    name: str
    kind: DatasetKind
    content: bytes = b""
    origin: str | None = None
    snapshots: dict[str, _Snapshot] = field(default_factory=dict)
    bookmarks: dict[str, _Snapshot] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)
    encrypted: bool = False
    reserved: int = 0
    room: int = 0
    """For a snapshot, if anything is reserved."""
    imports: int = 0
    """Bytes that an import of the pool wrote, which are no data."""

    @property
    def is_mounted(self) -> bool:
        """Whether it is mounted when the host boots."""
        is_filesystem = self.kind is DatasetKind.FILESYSTEM
        return is_filesystem and self.properties.get("canmount", "on") == "on"


@dataclass
class Taken:
    """A dataset that a host has lost."""

    dataset: _Dataset


class FakePool:
    """A :class:`~snaporch.zfs.interface.Pool` whose datasets hold one value each."""

    def __init__(self, *datasets: str, hooks: Hooks | None = None) -> None:
        self.hooks = hooks or Hooks()
        self._txg = itertools.count(100)
        self._datasets: dict[str, _Dataset] = {}
        self.exported: set[str] = set()
        self.room = 1 << 40
        self.sector = 4096
        self.groups: tuple[ParityGroup, ...] = ()
        self.created_with: list[dict[str, str]] = []
        """The properties of each transaction of snapshots."""
        self.foreign: list[BlockingMount] = []
        self.mounted: Callable[[str, str, Path], None] = lambda _name, _origin, _where: None
        self.created: Callable[[str], None] = lambda _name: None
        self.snapshotted: Callable[[str, str], None] = lambda _name, _snapshot: None
        self.unmounted: Callable[[Path], None] = lambda _where: None
        self.snapshot_files: Callable[[str, str], Path] = lambda _name, _snapshot: Path("/nowhere")
        for name in datasets:
            self.create(name)

    # -- for tests alone ---------------------------------------------------------------------------

    def create(
        self, name: str, kind: DatasetKind = DatasetKind.FILESYSTEM, *, encrypted: bool = False
    ) -> None:
        """``zfs create``; datasets below an encrypted one are encrypted too."""
        above = self._datasets.get(name.rpartition("/")[0])
        inherited = above is not None and above.encrypted
        self._datasets[name] = _Dataset(name, kind, encrypted=encrypted or inherited)

    def reserve(self, dataset: str, amount: int, *, room: int) -> None:
        """``zfs set refreservation``, with ``room`` more bytes available."""
        self._dataset(dataset).reserved, self._dataset(dataset).room = amount, room

    def write(self, dataset: str, content: bytes) -> None:
        """Replace the content of the dataset."""
        self._dataset(dataset).content = content

    def import_again(self, pool: str) -> None:
        """``zpool export`` and ``zpool import``: ZFS writes to each volume."""
        for each in self._datasets.values():
            if each.name.startswith(f"{pool}/") and each.kind is DatasetKind.VOLUME:
                each.imports += 8192

    def read(self, dataset: str) -> bytes:
        """The content of the dataset."""
        return self._dataset(dataset).content

    def bookmark(self, snapshot: str, name: str) -> None:
        """See the protocol."""
        self.hooks.act("pool.bookmark", f"{snapshot} {name}")
        dataset, found = self._find(snapshot)
        if name in dataset.bookmarks:
            raise PoolError(f"{dataset.name}#{name}", "bookmark exists")
        dataset.bookmarks[name] = found

    def bookmarks(self, dataset: str) -> dict[str, Bookmark]:
        """See the protocol."""
        marks = self._dataset(dataset).bookmarks
        return {f"{dataset}#{name}": Bookmark(mark.guid, mark.txg) for name, mark in marks.items()}

    def inherit(self, name: str, key: str) -> None:
        """``zfs inherit`` of a snapshot's property."""
        self._find(name)[1].properties.pop(key, None)

    def rename(self, dataset: str, name: str) -> None:
        """``zfs rename``."""
        self._datasets[name] = replace(self._datasets.pop(dataset), name=name)

    def rename_snapshot(self, full: str, name: str) -> None:
        """``zfs rename`` of a snapshot."""
        dataset, found = self._find(full)
        dataset.snapshots = {
            (name if each is found else each.name): (
                replace(each, name=name) if each is found else each
            )
            for each in dataset.snapshots.values()
        }

    def replicate(self, snapshot: str, dataset: str) -> None:
        """``zfs send | zfs receive`` into a new dataset; the GUID stays the same."""
        source, found = self._find(snapshot)
        self._datasets[dataset] = _Dataset(dataset, source.kind, found.content)
        copy = replace(found, txg=next(self._txg), properties={**found.properties}, holds=set())
        self._datasets[dataset].snapshots[found.name] = copy

    def come_back(self, dataset: str) -> None:
        """Destroy a dataset and receive it again: the GUIDs stay the same, bookmarks are lost."""
        holder = self._dataset(dataset)
        holder.bookmarks.clear()
        for each in _after(holder, 0):
            holder.snapshots[each.name] = replace(each, txg=next(self._txg))

    def take_out(self, dataset: str) -> Taken:
        """Lose a dataset, which a replica has: :meth:`put_in` brings its snapshots back."""
        return Taken(self._datasets.pop(dataset))

    def copy_to(self, dataset: str, name: str, of: str) -> None:
        """Receive a copy of a dataset: its snapshots, with other txgs and a mark of it.

        Args:
            of: the value of the mark.
        """
        source = self._dataset(dataset)
        made = _Dataset(name, source.kind, source.content, encrypted=source.encrypted)
        made.properties["readonly"] = "on"
        for key, each in source.snapshots.items():
            marks = {**each.properties, "snaporch:copy": of}
            made.snapshots[key] = replace(each, txg=next(self._txg), properties=marks)
        self._datasets[name] = made

    def put_in(
        self, taken: Taken, dataset: str, name: str, base: str, options: Mapping[str, str]
    ) -> None:
        """``zfs receive -o`` of a snapshot: into a new dataset, or after the snapshot ``base``."""
        source = taken.dataset
        holder = self._datasets.get(dataset)
        newest = next(reversed(holder.snapshots), "") if holder else ""
        if newest != base or (holder and not base):
            raise PoolError(dataset, "most recent snapshot does not match incremental source")
        if holder and holder.content != holder.snapshots[base].content:
            raise PoolError(dataset, "destination has been modified since most recent snapshot")
        found = source.snapshots[name]
        if holder is None:
            holder = self._datasets[dataset] = _Dataset(dataset, source.kind)
        holder.content = found.content
        holder.properties.update(options)
        holder.snapshots[name] = replace(found, txg=next(self._txg), properties={}, holds=set())

    def names(self) -> list[str]:
        """Every snapshot's full name."""
        return [snapshot.full_name for snapshot in self.snapshots()]

    # -- the protocol ---------------------------------------------------------------------------

    def datasets(self) -> list[Dataset]:
        """See the protocol."""
        return [Dataset(each.name, each.kind) for each in self._imported().values()]

    def encrypted(self) -> frozenset[str]:
        """See the protocol."""
        return frozenset(each.name for each in self._datasets.values() if each.encrypted)

    def snapshots(self, datasets: Sequence[str] | None = None) -> list[PoolSnapshot]:
        """See the protocol."""
        self.hooks.reach("pool.snapshots")
        imported = self._imported()
        wanted = imported if datasets is None else datasets
        found = [
            (snapshot.txg, self._public(dataset, snapshot))
            for name in dict.fromkeys(wanted)
            if (dataset := imported.get(name))
            for snapshot in dataset.snapshots.values()
        ]
        return [public for _, public in sorted(found, key=lambda pair: pair[0])]

    def sync(self, datasets: Collection[str]) -> None:
        """See the protocol."""
        self.hooks.reach("pool.sync")

    def snapshot_listing(self) -> SnapshotListing:
        """See the protocol."""
        self.hooks.reach("pool.snapshot_listing")
        datasets = self._imported().values()
        if not datasets:
            raise PoolError("zfs list", "lists nothing")
        snapshots: dict[int, tuple[str, ...]] = {}
        for dataset in datasets:
            for found in dataset.snapshots.values():
                names = (*snapshots.get(found.guid, ()), f"{dataset.name}@{found.name}")
                snapshots[found.guid] = names
        return SnapshotListing(frozenset(d.name.split("/")[0] for d in datasets), snapshots)

    def policy_view(self) -> PolicyView:
        """See the protocol."""
        self.hooks.reach("pool.policy_view")
        found = self.snapshots()
        pinned = {each.full_name: "held" for each in found if self.holds(each.full_name)}
        cloned = self.clones([each.full_name for each in found])
        for name, clones in cloned.items():
            pinned.setdefault(name, f"cloned as {','.join(clones)}")
        policies = {
            name: policy for name in self._datasets if (policy := self._inherited(name, "policy"))
        }
        return PolicyView(tuple(found), pinned, policies)

    def snapshot(self, names: Sequence[str], properties: Mapping[str, str]) -> None:
        """See the protocol."""
        self.created_with.append(dict(properties))
        self.hooks.act("pool.snapshot", *names)
        self.hooks.reach(f"pool.snapshot {names[0].split('/', 1)[0]}")
        self._same_pool(names)
        if len({full.partition("@")[0] for full in names}) < len(names):
            raise PoolError(", ".join(names), "multiple snapshots of same fs not allowed")
        for full in names:
            dataset, _, name = full.partition("@")
            if name in self._dataset(dataset).snapshots:
                raise PoolError(full, "dataset already exists")
            if not _NAME.fullmatch(name) or len(full) > _MAX_NAME:
                raise PoolError(full, "invalid name")
        for needed, room in self.reserved([full.partition("@")[0] for full in names]).values():
            if needed > room:
                raise PoolError(", ".join(names), "out of space")
        txg = next(self._txg)
        for full in names:
            dataset, _, name = full.partition("@")
            holder = self._dataset(dataset)
            holder.snapshots[name] = _Snapshot(
                name=name,
                guid=hash((full, txg)) & 0xFFFFFFFFFFFF,
                txg=txg,
                created=datetime.now(UTC).replace(microsecond=0),
                content=holder.content,
                properties=dict(properties),
            )
            self.snapshotted(dataset, name)

    def destroy_snapshots(self, names: Sequence[str]) -> None:
        """See the protocol."""
        self.hooks.act("pool.destroy_snapshots", *names)
        self._same_pool(names)
        self._check_unmounted(names)
        present = [name for name in names if self._exists(name)]
        cloned = self.clones(present)
        read = [name for name in present if self._find(name)[1].readers]
        if blocked := [name for name in present if self.holds(name) or name in {*cloned, *read}]:
            raise InUseError(", ".join(blocked), "dataset is busy")
        for full in present:
            dataset, found = self._find(full)
            del dataset.snapshots[found.name]

    def reclaimable(self, names: Sequence[str]) -> int:
        """See the protocol: a snapshot has its content for itself."""
        self.hooks.reach("pool.reclaimable")
        return sum(len(self._find(name)[1].content) for name in names)

    def blocking_mounts(self, names: Collection[str] | None = None) -> list[BlockingMount]:
        """See the protocol."""
        return [each for each in self.foreign if names is None or each.name in names]

    def _check_unmounted(self, names: Sequence[str]) -> None:
        for mount in self.blocking_mounts(names):
            raise MountedError(mount.name, f"{mount.name} is mounted by {mount.program}")

    def clear_properties(self, names: Sequence[str], keys: Sequence[str]) -> None:
        """See the protocol."""
        self.hooks.act("pool.clear_properties", *names, *keys)
        for name in names:
            for key in keys:
                holder = self._find(name)[1] if "@" in name else self._dataset(name)
                holder.properties.pop(key, None)

    def set_properties(self, names: Sequence[str], properties: Mapping[str, str]) -> None:
        """See the protocol."""
        self.hooks.act("pool.set_properties", *names, *map("=".join, properties.items()))
        for name in names:
            holder = self._find(name)[1] if "@" in name else self._dataset(name)
            holder.properties.update(properties)

    def hold(self, names: Sequence[str], tag: str) -> None:
        """See the protocol."""
        self.hooks.act("pool.hold", *names, tag)
        found = [self._find(name)[1] for name in names]
        if any(tag in snapshot.holds for snapshot in found):
            raise PoolError(", ".join(names), "tag already exists on this dataset")
        for snapshot in found:
            snapshot.holds.add(tag)

    def release(self, names: Sequence[str], tag: str) -> None:
        """See the protocol."""
        self.hooks.act("pool.release", *names, tag)
        for name in names:
            self._find(name)[1].holds.discard(tag)

    def holds_of(self, names: Sequence[str]) -> dict[str, list[str]]:
        """See the protocol."""
        return {name: self.holds(name) for name in names}

    def holds(self, name: str) -> list[str]:
        """The tags of one snapshot."""
        return sorted(self._find(name)[1].holds)

    def clone(self, origin: str, dataset: str, properties: Mapping[str, str] | None = None) -> None:
        """See the protocol; ``mounted`` is called to make its files."""
        self.hooks.act("pool.clone", origin, dataset)
        source, snapshot = self._find(origin)
        if dataset in self._datasets:
            raise PoolError(dataset, "dataset already exists")
        made = _Dataset(dataset, source.kind, snapshot.content, origin)
        made.properties.update(properties or {})
        self._datasets[dataset] = made
        self.mounted(made.name, source.name, Path(made.properties.get("mountpoint", "/nowhere")))

    def create_filesystem(self, dataset: str, properties: Mapping[str, str]) -> None:
        """See the protocol; ``created`` is called to make its directory."""
        self.hooks.act("pool.create_filesystem", dataset)
        if dataset in self._datasets:
            raise PoolError(dataset, "dataset already exists")
        if dataset.split("/", 1)[0] not in self._datasets:
            raise PoolError(dataset, "no such pool")
        parts = dataset.split("/")
        for end in range(2, len(parts)):
            if "/".join(parts[:end]) not in self._datasets:
                self.create("/".join(parts[:end]))
        self.create(dataset)
        self._datasets[dataset].properties.update(properties)
        self.created(dataset)

    def local_properties(
        self, names: Sequence[str], datasets: Sequence[str] = ()
    ) -> dict[str, dict[str, str]]:
        """See the protocol."""
        self.hooks.reach("pool.local_properties")
        found = {}
        for dataset in map(self._dataset, datasets or self._datasets):
            own = {key: value for key, value in dataset.properties.items() if key in names}
            if own:
                found[dataset.name] = own
        return found

    def native_properties(
        self, names: Sequence[str], datasets: Sequence[str]
    ) -> dict[str, dict[str, str]]:
        """See the protocol."""
        self.hooks.reach("pool.native_properties")
        found = {}
        for dataset in map(self._dataset, datasets):
            values = _DEFAULTS[dataset.kind] | {"referenced": str(len(dataset.content))}
            values |= {"refreservation": str(dataset.reserved), "available": str(self.room)}
            values |= dataset.properties
            found[dataset.name] = {name: values[name] for name in names if name in values}
        return found

    def sector_bytes(self, pool: str) -> int:
        """See the protocol."""
        self.hooks.reach("pool.sector_bytes")
        return self.sector

    def parity_groups(self, pool: str) -> tuple[ParityGroup, ...]:
        """See the protocol."""
        self.hooks.reach("pool.parity_groups")
        return self.groups

    def policies(self, datasets: Sequence[str]) -> dict[str, str]:
        """See the protocol."""
        found = {name: self._inherited(self._dataset(name).name, "policy") for name in datasets}
        return {name: policy for name, policy in found.items() if policy}

    def mountpoints(self) -> dict[str, str]:
        """See the protocol."""
        found = {name: each.properties for name, each in self._datasets.items() if each.is_mounted}
        return {name: each.get("mountpoint", f"/{name}") for name, each in found.items()}

    def encryption_roots(self, datasets: Sequence[str]) -> dict[str, str]:
        """See the protocol."""
        found = {}
        for name in datasets:
            root = name if self._dataset(name).encrypted else ""
            while (above := self._datasets.get(root.rpartition("/")[0])) and above.encrypted:
                root = above.name
            if root:
                found[name] = root
        return found

    def origins(self, datasets: Sequence[str]) -> dict[str, str]:
        """See the protocol."""
        origins = {name: self._dataset(name).origin for name in datasets}
        return {name: origin for name, origin in origins.items() if origin is not None}

    def sizes(self, snapshots: Sequence[str]) -> dict[str, tuple[int, int]]:
        """See the protocol."""
        return {name: (0, len(self._find(name)[1].content)) for name in snapshots}

    def reserved(self, datasets: Sequence[str]) -> dict[str, tuple[int, int]]:
        """See the protocol."""
        found = [self._dataset(name) for name in datasets]
        return {
            each.name: (min(len(each.content), each.reserved), each.room)
            for each in found
            if each.reserved
        }

    def destroy_dataset(self, dataset: str) -> None:
        """See the protocol."""
        self.hooks.act("pool.destroy_dataset", dataset)
        self._check_unmounted([dataset])
        below = [name for name in self._datasets if name.startswith(f"{dataset}/")]
        if self._dataset(dataset).snapshots or below:
            raise PoolError(dataset, "filesystem has children")
        made = self._datasets.pop(dataset)
        self.unmounted(Path(made.properties.get("mountpoint", "/nowhere")))

    def rollback(self, snapshot: str) -> None:
        """See the protocol."""
        self.hooks.act("pool.rollback", snapshot)
        dataset, found = self._find(snapshot)
        if newer := self._newer(snapshot):
            raise PoolError(snapshot, f"more recent snapshots or bookmarks exist: {newer}")
        dataset.content = found.content

    def listing(self, datasets: Sequence[str]) -> DatasetListing:
        """See the protocol."""
        self.hooks.reach("pool.listing")
        for name in datasets:
            self._dataset(name)
        snapshots = tuple(self.snapshots(datasets))
        clones = self.clones([each.full_name for each in snapshots])
        return DatasetListing(
            snapshots,
            {name: mark for each in datasets for name, mark in self.bookmarks(each).items()},
            {name: tuple(of) for name, of in clones.items()},
        )

    def newer(self, snapshot: str) -> list[str]:
        """What the dataset of a snapshot has that is newer."""
        return self.listing([snapshot.partition("@")[0]]).newer(snapshot)

    def _newer(self, snapshot: str) -> list[str]:
        dataset, found = self._find(snapshot)
        snapshots = [f"{dataset.name}@{s.name}" for s in _after(dataset, found.txg)]
        marks = dataset.bookmarks.items()
        return snapshots + [
            f"{dataset.name}#{name}" for name, mark in marks if mark.txg > found.txg
        ]

    def destroy_bookmark(self, name: str) -> None:
        """See the protocol."""
        self.hooks.act("pool.destroy_bookmark", name)
        dataset, _, bookmark = name.partition("#")
        if self._dataset(dataset).bookmarks.pop(bookmark, None) is None:
            raise PoolError(name, "bookmark does not exist")

    def clones(self, snapshots: Sequence[str]) -> dict[str, list[str]]:
        """See the protocol."""
        found: dict[str, list[str]] = {}
        for dataset in self._datasets.values():
            if dataset.origin in snapshots and dataset.origin is not None:
                found.setdefault(dataset.origin, []).append(dataset.name)
        return found

    def send_increment(
        self,
        origin: str,
        snapshot: str,
        path: Path,
        on_written: Callable[[int], None] = lambda _bytes: None,
        *,
        raw: bool,
    ) -> int:
        """See the protocol: the changes between both, as JSON."""
        self.hooks.act("pool.send_increment", origin, snapshot, *(["raw"] if raw else []))
        dataset, first = self._find(origin)
        _, last = self._find(snapshot)
        between = [s for s in _after(dataset, first.txg) if s.txg <= last.txg]
        if not between:
            raise PoolError(snapshot, f"not later than {origin}")
        sent = [{"name": s.name, "guid": s.guid, "content": s.content.hex()} for s in between]
        path.write_text(json.dumps({"origin": first.guid, "snapshots": sent}))
        path.chmod(0o600)
        on_written(path.stat().st_size)
        return path.stat().st_size

    def increment_size(self, origin: str, snapshot: str, *, raw: bool) -> int:
        """See the protocol."""
        self.hooks.reach("pool.increment_size")
        dataset, first = self._find(origin)
        self._find(snapshot)
        return sum(len(s.content) for s in _after(dataset, first.txg))

    @contextmanager
    def mounted_snapshot(self, snapshot: str) -> Iterator[Path]:
        """See the protocol; ``snapshot_files`` returns the directory of its files."""
        self.hooks.reach("pool.mounted_snapshot")
        dataset, found = self._find(snapshot)
        if dataset.kind is not DatasetKind.FILESYSTEM:
            raise PoolError(snapshot, "cannot be mounted")
        found.readers += 1
        root = self.snapshot_files(dataset.name, found.name)
        try:
            if not root.is_dir():
                yield root
                return
            descriptor = os.open(root, os.O_PATH)  # as the real one: a link
            try:
                yield Path(f"/proc/self/fd/{descriptor}")
            finally:
                os.close(descriptor)
        finally:
            found.readers -= 1

    def written_since(self, snapshot: str) -> int:
        """See the protocol."""
        self.hooks.reach("pool.written_since")
        dataset, found = self._find(snapshot)
        return (0 if dataset.content == found.content else len(dataset.content)) + dataset.imports

    def is_volume_modified(self, snapshot: str) -> bool:
        """See the protocol."""
        self.hooks.reach("pool.is_volume_modified")
        dataset, found = self._find(snapshot)
        return dataset.content != found.content

    def receive(self, dataset: str, path: Path) -> None:
        """See the protocol; properties do not travel."""
        self.hooks.act("pool.receive", dataset, path.name)
        sent, holder = json.loads(path.read_text()), self._dataset(dataset)
        newest = max(holder.snapshots.values(), key=lambda each: each.txg, default=None)
        if newest is None or newest.guid != sent["origin"]:
            raise PoolError(dataset, "most recent snapshot does not match incremental source")
        for each in sent["snapshots"]:
            holder.content = bytes.fromhex(each["content"])
            taken = _Snapshot(
                name=each["name"],
                guid=each["guid"],
                txg=next(self._txg),
                created=datetime.now(UTC).replace(microsecond=0),
                content=holder.content,
                properties={},
            )
            holder.snapshots[taken.name] = taken
            self.hooks.reach("pool.received")

    def available(self, dataset: str) -> int:
        """See the protocol."""
        self._dataset(dataset)
        return self.room

    def user_properties(self, snapshots: Sequence[str]) -> dict[str, dict[str, str]]:
        """See the protocol."""
        self.hooks.reach("pool.user_properties")
        found = {name: dict(self._find(name)[1].properties) for name in snapshots}
        return {name: own for name, own in found.items() if own}

    def age(self, full: str, created: datetime) -> None:
        """Change a snapshot's time of creation."""
        self._find(full)[1].created = created

    # -- internals -------------------------------------------------------------------------------

    def _imported(self) -> dict[str, _Dataset]:
        return {n: d for n, d in self._datasets.items() if n.split("/")[0] not in self.exported}

    def _dataset(self, name: str) -> _Dataset:
        if name not in self._datasets:
            raise PoolError(name, "dataset does not exist")
        return self._datasets[name]

    def _inherited(self, dataset: str, key: str) -> str:
        while dataset:
            known = self._datasets.get(dataset)
            if known and (value := known.properties.get(_PREFIX + key)):
                return value
            dataset = dataset.rpartition("/")[0]
        return ""

    def _exists(self, full: str) -> bool:
        dataset, _, name = full.partition("@")
        return dataset in self._datasets and name in self._datasets[dataset].snapshots

    def _find(self, full: str) -> tuple[_Dataset, _Snapshot]:
        if not self._exists(full):
            raise PoolError(full, "no such snapshot")
        dataset, _, name = full.partition("@")
        return self._datasets[dataset], self._datasets[dataset].snapshots[name]

    def _same_pool(self, names: Sequence[str]) -> None:
        if len({name.split("@")[0].split("/")[0] for name in names}) > 1:
            raise PoolError(", ".join(names), "more than one pool")

    def _public(self, dataset: _Dataset, snapshot: _Snapshot) -> PoolSnapshot:
        own = {
            key.removeprefix(_PREFIX): value
            for key, value in (dataset.properties | snapshot.properties).items()
            if key.removeprefix(_PREFIX) in PROPERTIES and key.startswith(_PREFIX)
        }
        return PoolSnapshot(
            dataset.name, snapshot.name, snapshot.guid, snapshot.txg, snapshot.created, own
        )

    def remake(self, full: str) -> None:
        """Destroy a snapshot and take another with the same name; its GUID differs."""
        dataset, found = self._find(full)
        dataset.snapshots[found.name] = replace(found, guid=found.guid + 1, txg=next(self._txg))


def _after(dataset: _Dataset, txg: int) -> list[_Snapshot]:
    return [snapshot for snapshot in dataset.snapshots.values() if snapshot.txg > txg]
