"""Every option of ``snaporch.toml``; ``docs/reference/configuration.md`` is generated from it."""

from __future__ import annotations

from datetime import timedelta
from itertools import combinations, product
from pathlib import Path
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    Strict,
    StringConstraints,
    model_validator,
)

from snaporch.config.copies import Copies
from snaporch.config.duration import Duration, Seconds
from snaporch.config.monitoring import MetricsOptions, NotifyOptions, StatusOptions
from snaporch.config.policy import Group, Policy, PolicyName
from snaporch.config.replica import AnyReplica, Replica, ResticReplica, are_nested
from snaporch.config.source import Source
from snaporch.default_paths import BUNDLES, LIBVIRT_URI, RUNTIME
from snaporch.zfs_names import is_dataset

_LEVELS = range(-7, 20)


def _dataset(text: str) -> str:
    if text and (not is_dataset(text) or " " in text):
        raise ValueError("must be a dataset such as 'tank/ram', without blanks")
    return text


def _absolute(path: Path) -> Path:
    if not path.is_absolute() or ".." in path.parts:
        raise ValueError("must be an absolute path without '..'")
    return path


def _level(value: object) -> int | str:
    if value == "auto" or (type(value) is int and value in _LEVELS):
        return value
    raise ValueError("must be 'auto' or an integer from -7 to 19")


def _zone(name: str) -> str:
    if name != "local":
        try:
            ZoneInfo(name)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError("must be 'local' or a time zone such as 'Europe/Berlin'") from error
    return name


def _argument(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("must be an argument, not empty and without NUL")
    return text


Argument = Annotated[str, AfterValidator(_argument)]
AbsolutePath = Annotated[Path, Strict(strict=False), AfterValidator(_absolute)]
Target = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]+$")]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Paths(_Section):
    """Directories of snaporch."""

    overlays: AbsolutePath = Field(
        default=Path("/var/lib/snaporch/overlays"),
        description="Directory for disk overlays, which hold a guest's writes for the seconds of a "
        "run. Must not lie in a dataset that is snapshotted with a guest, and needs room for what "
        "guests write meanwhile.",
    )
    overlay_reserve_mib: int = Field(
        default=256,
        ge=1,
        le=1 << 30,
        description="Free space in MiB that the overlay file system must have before a guest is "
        "switched to overlays.",
    )
    overlay_max_mib: int = Field(
        default=0,
        ge=0,
        le=1 << 30,
        description="Size in MiB that a guest's overlays may reach together before they are "
        "committed at once, whatever the run is doing; 0 for no limit.",
    )
    overlay_floor_mib: int = Field(
        default=64,
        ge=0,
        le=1 << 30,
        description="Free space in MiB on the overlay file system below which overlays are "
        "committed at once. A guest whose overlay cannot grow is paused by QEMU.",
    )
    bundles: AbsolutePath = Field(
        default=BUNDLES,
        description="The bundle store: compressed RAM, NVRAM, TPM state and XML of each snapshot. "
        "One without bundles and without its file `.snaporch-store` is taken for one that is not "
        "mounted if there are snapshots with bundles.",
    )
    journal: AbsolutePath = Field(
        default=Path("/var/lib/snaporch/journal"),
        description="Journals of runs under way; must survive a reboot.",
    )
    clones: AbsolutePath = Field(
        default=Path("/var/lib/snaporch/clones"),
        description="What clones have beside their disks (UEFI variables, logs), and where their "
        "file systems are mounted. Needs room for a RAM image while a clone is resumed.",
    )
    schedule: AbsolutePath = Field(
        default=Path("/var/lib/snaporch/schedule"),
        description="Records of `run-due` and the daemon, such as failed attempts.",
    )
    runtime: AbsolutePath = Field(
        default=RUNTIME,
        description="The pipes through which RAM is streamed, sockets, and the scheduler's lock; "
        "need not survive a reboot. Locks of domains are in `/run/snaporch`, whatever this says.",
    )


class PruneOptions(_Section):
    """How long trash and safety copies are kept."""

    trash_keep: Annotated[timedelta, Duration()] = Field(
        default=timedelta(days=3),
        description="How long a bundle stays in the trash of the bundle store when the last of "
        "its ZFS snapshots is gone; `0s` to delete it at once.",
    )
    safety_keep: Annotated[timedelta, Duration()] = Field(
        default=timedelta(days=7),
        description="How long the safety copy of a restore stays, by which the restore can be "
        "undone; `0s` to delete it at the next `snaporch prune`.",
    )


class RamPagesOptions(_Section):
    """Where RAM goes with `ram_store = "pages"`."""

    dataset: Annotated[str, AfterValidator(_dataset)] = Field(
        default="",
        description="File system below which each domain has one for its RAM, named after its "
        "UUID; snaporch makes them. Not one of a guest's.",
    )
    record_kib: Literal[4, 8, 16, 32, 64, 128] = Field(
        default=16,
        description="Record size in KiB of those made from now on: smaller ones follow changes "
        "more closely and compress less.",
    )
    compression: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+$")] = Field(
        default="zstd", description="ZFS's compression of those made from now on."
    )


class DomainSettings(_Section):
    """How a domain is snapshotted."""

    level: Literal["auto", "ram", "quiesced", "paused", "crash", "off"] = Field(
        default="auto",
        description="Level of a snapshot of a running guest. `ram`: RAM and all "
        "disks at one instant; `quiesced`: file systems frozen by the guest's agent; `paused`: the "
        "guest paused meanwhile; `crash`: the ZFS snapshot alone; `off`: only while it is shut "
        "off. `auto` is `ram`. A guest that is shut off gets a plain snapshot whatever this says.",
    )
    on_unavailable: Literal["fail", "quiesced", "paused", "crash"] = Field(
        default="fail",
        description="What to do when the level is not available: `fail`, or take this lower level "
        "instead. A note names the lower level, and it is recorded on the snapshot.",
    )
    ram_strategy: Literal["auto", "overlay", "manual"] = Field(
        default="auto",
        description="How disks are frozen for a `ram` snapshot. `overlay`: writes go to "
        "overlays that are committed back, and the guest pauses for the switch only. `manual`: the "
        "guest stays paused until the ZFS snapshots are there; no overlay, nothing to commit. "
        "`auto` is `manual`; in sanoid's hooks it is `overlay`, except where another program "
        "snapshots the guest's datasets.",
    )
    quiesce_mountpoints: tuple[AbsolutePath, ...] = Field(
        default=(),
        strict=False,
        description="Mount points inside the guest that `quiesced` freezes; all when empty.",
    )
    quiesce_budget: Annotated[timedelta, Duration("100ms", "10m")] = Field(
        default=timedelta(seconds=10),
        description="Longest time that file systems may have been frozen before the snapshot "
        "counts as `crash`; Windows thaws by itself after 10 s.",
    )
    agent_timeout: Annotated[int, Seconds("1s", "10m")] = Field(
        default=10, description="How long to wait for an answer of the guest agent."
    )
    verify_command: tuple[Argument, ...] = Field(
        default=(),
        strict=False,
        description="Program and arguments that `snaporch verify` runs in each clone of the guest, "
        'by the guest\'s agent and as its user: `["/usr/local/sbin/postgresql-check"]`. An exit '
        "status other than 0 fails the verification.",
    )
    verify_command_timeout: Annotated[int, Seconds("1s", "7d")] = Field(
        default=600, description="Longest time for `verify_command`."
    )
    ram_time_budget: Annotated[int, Seconds("0s", "1d")] = Field(
        default=600,
        description="Longest time for saving RAM; `0s` for no limit.",
    )
    ram_budget_mib: int = Field(
        default=0,
        ge=0,
        le=1 << 30,
        description="Most RAM in MiB to save before the guest counts as dirtying it too fast; 0 "
        "for no limit.",
    )
    on_ram_budget: Literal["abort", "suspend"] = Field(
        default="suspend",
        description="When a budget is used up: `abort` the run, or `suspend` the guest until its "
        "RAM is saved, which ends without RAM after `freeze_deadline`.",
    )
    vcpu_floor: int = Field(
        default=10,
        ge=10,
        le=100,
        description="Least share, in percent, of its CPU time that a guest keeps while it dirties "
        "RAM faster than it is saved: before a budget is used up, its vCPUs are slowed down "
        "in steps, until its RAM is saved. `100` never slows it down.",
    )
    commit_patience: Annotated[int, Seconds("1s", "1d")] = Field(
        default=60,
        description="How long a commit may chase a guest that writes faster before the guest is "
        "suspended to let it catch up: for 5 s at most, then for 10 s, 20 s and so on, each "
        "followed by as long a rest.",
    )
    freeze_deadline: Annotated[int, Seconds("1s", "1d")] = Field(
        default=60,
        description="Time after which a guardian process releases a guest that a run holds "
        "still and does not release itself: frozen, paused for its snapshots or the end of its "
        "RAM, suspended by `on_ram_budget` or for its commit.",
    )
    hook_deadline: Annotated[int, Seconds("1s", "1d")] = Field(
        default=90,
        description="Longest time for which a guest is held for sanoid's snapshots, "
        "between sanoid's pre and post hooks; a guest on overlays writes to them meanwhile, and "
        "they grow. The time counts from when all guests of a call are frozen. Before that a guest "
        "is held for the same time again at most, and the pre hook refuses guests that would take "
        "longer. After the deadline the guest is released, and snapshots that sanoid takes later "
        "count as `crash`. Guests that are paused or frozen meanwhile are released after "
        "`freeze_deadline` if that is less. The pre hook also waits this long for another run on "
        "the domain.",
    )
    exclude_disks: tuple[Target, ...] = Field(
        default=(),
        strict=False,
        description='Disks to leave out, by target name: `["vdb"]`. A restore does not touch them: '
        "one that lies in the dataset of another disk is rolled back with it only with "
        "`--also-roll-back`.",
    )
    ram_capture: Literal["auto", "stream", "file"] = Field(
        default="auto",
        description="How RAM travels: `stream` compresses it on the fly through a pipe: the "
        "pause does not grow with the guest's memory; `file` lets libvirt write it raw into the "
        "bundle store first; `auto` streams, and repeats with a file if streaming fails.",
    )
    ram_store: Literal["image", "pages"] = Field(
        default="image",
        description="How RAM is kept. `image`: compressed in the bundle, ready to be restored by "
        "`virsh`. `pages`: in a dataset of its own where it costs what changed since the snapshot "
        "before; needs `ram_pages.dataset`.",
    )
    compression: Literal["auto", "zstd", "gzip", "none"] = Field(
        default="auto",
        description="Compression of the RAM image, undone by libvirt itself on restore. `auto` is "
        "zstd with libvirt 10.4 or later, gzip (pigz) with an older one.",
    )
    compression_level: Annotated[int | str, PlainValidator(_level)] = Field(
        default="auto",
        description="The compressor's level, -7 to 19: the higher, the smaller and the slower. "
        "zstd takes all of them (those below 1 are its `--fast`; -7 is about as fast as lz4). gzip "
        "takes 1 to 9; of any other level it uses the nearest of these. With `auto` gzip uses 1. "
        "zstd begins with 1, and goes up or down between -7 and 5 from one snapshot of the guest "
        "to the next: down if the compressor was too slow for the guest, up if the bundle store "
        "was.",
    )
    compression_threads: int = Field(
        default=0, ge=0, le=256, description="Compressor threads; 0 for one per core."
    )
    ram_rate: int = Field(
        default=0,
        ge=0,
        le=1 << 20,
        description="Most RAM in MiB a second (before compression) that is saved while the guest "
        "runs; 0 for no limit. Ends when the guest is paused, and is never so low that "
        'RAM could not be saved in half of `ram_time_budget`. With `ram_capture = "file"` '
        "only compressing is slowed down. `--rate` overrides it.",
    )
    downtime_limit: Annotated[timedelta, Duration("0s", "10s")] = Field(
        default=timedelta(milliseconds=100),
        description="Time that the last of RAM may take, with the guest stopped; QEMU saves "
        "it live until the rest is so little. A guest that dirties RAM too fast for it is "
        "stopped for a larger rest when 1.25 times its RAM has been saved. That rest is taken "
        "without compressing it. `0s` to leave that as it is.",
    )
    wait: Annotated[int, Seconds("0s", "1d")] = Field(
        default=0,
        description="How long to wait for another run on the same domain; `--wait` overrides it.",
    )
    policies: tuple[PolicyName, ...] = Field(
        default=(),
        strict=False,
        description="Its policies, by name. In a domain's own section they are the domain's only "
        "ones, and metadata, ZFS properties and `domains` are not asked; an empty list means none. "
        "In `[defaults]` they are for domains to which no other place gives policies.",
    )

    @property
    def fixed_level(self) -> int | None:
        """The configured compression level; ``None`` if snaporch chooses it."""
        return self.compression_level if isinstance(self.compression_level, int) else None


class Schedule(_Section):
    """How policies are carried out."""

    timezone: Annotated[str, AfterValidator(_zone)] = Field(
        default="local",
        description="Time zone of `cron`, and of the days, weeks and months of retention: "
        "`local`, or a name such as `Europe/Berlin`.",
    )
    jobs: int = Field(default=1, ge=1, le=64, description="Most snapshots taken at once.")
    jobs_per_pool: int = Field(
        default=1, ge=1, le=64, description="Most snapshots taken at once in one pool."
    )
    ram_in_flight_mib: int = Field(
        default=0,
        ge=0,
        le=1 << 30,
        description="Most RAM in MiB of all guests whose RAM is saved at once; a guest that has "
        "more is taken alone. 0 for no limit.",
    )
    refresh: Annotated[timedelta, Duration("1s")] = Field(
        default=timedelta(minutes=5),
        description="How often the daemon checks domains, policies and snapshots.",
    )
    retry: Annotated[timedelta, Duration("1m")] = Field(
        default=timedelta(minutes=10), description="How long after a failed run it is retried."
    )


class Config(_Section):
    """The whole file."""

    libvirt_uri: Annotated[str, StringConstraints(min_length=1, pattern=r"^[\x21-\x7e]+$")] = Field(
        default=LIBVIRT_URI, description="The libvirt connection. Must be of this host."
    )
    sanoid_hook_jobs: int = Field(
        default=4,
        ge=1,
        le=256,
        description="How many guests sanoid's pre hook freezes at the same time. Guests that stay "
        "paused until all are frozen are not limited: they are frozen together.",
    )
    paths: Paths = Field(default=Paths(), description="Directories of snaporch.")
    prune: PruneOptions = Field(
        default=PruneOptions(), description="How long trash and safety copies are kept."
    )
    ram_pages: RamPagesOptions = Field(
        default=RamPagesOptions(), description='Where RAM goes with `ram_store = "pages"`.'
    )
    defaults: DomainSettings = Field(
        default=DomainSettings(), description="Settings of every domain."
    )
    domain: dict[str, dict[str, Any]] = Field(
        default={},
        description='Settings of one domain: `[domain."web 1"]`, by name or UUID.',
    )
    schedule: Schedule = Field(default=Schedule(), description="How policies are carried out.")
    policy: dict[PolicyName, Policy] = Field(
        default={}, description="Policies, by name: `[policy.hourly]`."
    )
    status: StatusOptions = Field(
        default=StatusOptions(), description="When `snaporch status` reports a problem."
    )
    metrics: MetricsOptions = Field(default=MetricsOptions(), description="Metrics for Prometheus.")
    notify: NotifyOptions = Field(
        default=NotifyOptions(), description="Notifications about the results of scheduled work."
    )

    group: dict[PolicyName, Group] = Field(
        default={}, description="Consistency groups, by name: `[group.NAME]`."
    )

    replica: dict[PolicyName, AnyReplica] = Field(
        default={}, description="Where snapshots are copied to, by name: `[replica.offsite]`."
    )

    source: dict[PolicyName, Source] = Field(
        default={},
        description="Hosts whose guests this machine copies, by name: `[source.vm1]`.",
    )

    copies: dict[PolicyName, Copies] = Field(
        default={},
        description="Copies on this machine of which `snaporch prune` deletes old ones, by name: "
        "`[copies.vm1]`.",
    )

    @property
    def pruned_copies(self) -> dict[str, Copies]:
        """All copies that have retention on this machine, by the name of their section."""
        pulled = {name: found for name, each in self.source.items() if (found := each.copies)}
        return {**self.copies, **pulled}

    @property
    def zfs_replicas(self) -> dict[str, Replica]:
        """The replicas that are pools, by name."""
        return {name: each for name, each in self.replica.items() if isinstance(each, Replica)}

    @property
    def only_keeps_copies(self) -> bool:
        """Whether this machine has copies of other hosts, and no policy for guests of its own."""
        return bool(self.copies or self.source) and not self.policy

    @property
    def copies_here(self) -> dict[str, Replica]:
        """The copies in pools of this machine: pulled, received, or replicated by itself."""
        here = {name: each for name, each in self.zfs_replicas.items() if not each.host}
        received = {name: each.as_replica() for name, each in self.copies.items()}
        pulled = {name: each.as_replica() for name, each in self.source.items()}
        return {**here, **received, **pulled}

    @model_validator(mode="after")
    def _replicas_exist(self) -> Config:
        for name, policy in self.policy.items():
            for wanted in policy.replicate:
                if wanted not in self.replica:
                    raise ValueError(
                        f"policy.{name}.replicate names {wanted!r}, and there is no such replica"
                    )
        for name in self.replica:
            if name.startswith("pull-"):  # its bookmarks would be those of `snaporch send`
                raise ValueError(f"replica.{name}: no name of a replica begins with pull-")
        for name, replica in self.zfs_replicas.items():
            if not replica.host and are_nested(replica.bundles, self.paths.bundles):
                raise ValueError(
                    f"replica.{name}.bundles is this host's own bundle store, or one is inside "
                    "the other"
                )
        return self

    @model_validator(mode="after")
    def _sources_have_places(self) -> Config:
        for name, source in self.source.items():
            if name in self.replica:
                raise ValueError(f"source.{name} and replica.{name} have the same name")
            if are_nested(Path(source.bundles), self.paths.bundles):
                raise ValueError(
                    f"source.{name}.bundles is this host's own bundle store, or one is inside "
                    "the other"
                )
        copies = [(f"replica.{name}", replica) for name, replica in self.zfs_replicas.items()]
        copies += [(f"source.{name}", source.as_replica()) for name, source in self.source.items()]
        for (name, one), (other, two) in combinations(copies, 2):
            if shared := one.shared_with(two):
                raise ValueError(f"{name} and {other} have the same {shared}")
        repositories = [
            (f"replica.{name}", each)
            for name, each in self.replica.items()
            if isinstance(each, ResticReplica)
        ]
        for (name, here), (other, there) in combinations(repositories, 2):
            if shared := here.shared_with(there):
                raise ValueError(f"{name} and {other} have the same {shared}")
        return self

    @model_validator(mode="after")
    def _copies_have_places(self) -> Config:
        for name, copies in self.copies.items():
            if are_nested(Path(copies.bundles), self.paths.bundles):
                raise ValueError(
                    f"copies.{name}.bundles is this host's own bundle store, or one is inside "
                    "the other: leave paths.bundles as it is"
                )
            replica = self.replica.get(name)
            same = replica is None or (
                isinstance(replica, Replica)
                and not replica.host
                and replica.dataset == copies.dataset
            )
            if not same:
                raise ValueError(f"copies.{name} and replica.{name} are other copies")
            if name in self.source:
                raise ValueError(
                    f"copies.{name} and source.{name} have the same name: set source.{name}.keep"
                )
            for other, here in self.zfs_replicas.items():
                is_there = not here.host and here.dataset == copies.dataset
                if is_there and here.bundles != Path(copies.bundles):
                    raise ValueError(
                        f"copies.{name} has the dataset of replica.{other}, and other bundles"
                    )
        places = [(f"copies.{name}", each.as_replica()) for name, each in self.copies.items()]
        sources = [(f"source.{name}", each.as_replica()) for name, each in self.source.items()]
        pairs = [*combinations(places, 2), *product(places, sources)]
        for (one, first), (other, second) in pairs:
            if shared := first.shared_with(second):
                raise ValueError(f"{one} and {other} have the same {shared}")
        return self

    @model_validator(mode="after")
    def _policies_exist(self) -> Config:
        sections = [("defaults", {"policies": self.defaults.policies})]
        sections += [(f"domain.{name}", section) for name, section in self.domain.items()]
        for title, section in sections:
            named = section.get("policies", ())
            for name in named if isinstance(named, (list, tuple)) else ():
                if name not in self.policy:
                    raise ValueError(
                        f"{title}.policies names {name!r}, and there is no such policy"
                    )
        return self

    @model_validator(mode="after")
    def _pages_have_a_place(self) -> Config:
        sections = [("defaults", {"ram_store": self.defaults.ram_store})]
        sections += [(f"domain.{name}", section) for name, section in self.domain.items()]
        for title, section in sections:
            if section.get("ram_store") == "pages" and not self.ram_pages.dataset:
                raise ValueError(f"{title}.ram_store is 'pages', and ram_pages.dataset is not set")
        return self

    def domain_section(self, name: str, uuid: str) -> dict[str, Any]:
        """The domain's own section, by its name or its UUID; empty if it has none."""
        return self.domain.get(name) or self.domain.get(uuid) or {}

    def settings(self, name: str, uuid: str) -> DomainSettings:
        """The settings of a domain: the defaults, overridden by the domain's section."""
        own = DomainSettings.model_validate(self.domain_section(name, uuid))
        return self.defaults.model_copy(
            update={option: getattr(own, option) for option in own.model_fields_set}
        )
