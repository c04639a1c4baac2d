"""Options of ``[replica.NAME]``; part of the schema."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Strict,
    Tag,
    model_validator,
)

from snaporch.config.policy import Keep
from snaporch.config.recipients import check_recipient
from snaporch.config.transfer_window import ALWAYS, Paced, WindowOption
from snaporch.zfs_names import is_dataset


def rebuild_step(replicas: Collection[str], domain: str) -> str:
    """The command that brings a lost domain back from a replica; empty without replicas.

    Args:
        replicas: the names of those in the configuration.
        domain: a name or UUID.
    """
    if not replicas:
        return ""
    words = ["snaporch", "rebuild", domain, "--from", min(replicas)]
    others = f" (or from {', '.join(sorted(replicas)[1:])})" if len(replicas) > 1 else ""
    return f"if this host has lost it: {shlex.join(words)}{others}"


_HOST = re.compile(r"([A-Za-z0-9_.][A-Za-z0-9_.-]*@)?[A-Za-z0-9_.][A-Za-z0-9_.-]*")


def host_name(text: str) -> str:
    """Check the name of a host for ssh; empty for this machine.

    Raises:
        ValueError: ssh could take it for something else.
    """
    if text and not _HOST.fullmatch(text):
        raise ValueError("must be a host as ssh knows it, such as 'root@nas', or empty")
    return text


def _dataset(text: str) -> str:
    if not is_dataset(text) or " " in text:  # a shell on the other machine would split at a blank
        raise ValueError("must be a dataset such as 'backup/kvm', without blanks")
    return text


def _directory(path: Path) -> Path:
    # rsync on the other machine would interpret a tilde or a blank.
    if not re.fullmatch(r"(/[A-Za-z0-9_.:@+-]+)+", str(path)) or ".." in path.parts:
        raise ValueError("must be an absolute path of letters, digits and _.:@+-, without '..'")
    return path


Dataset = Annotated[str, AfterValidator(_dataset)]
Directory = Annotated[Path, AfterValidator(_directory)]

Recipient = Annotated[str, AfterValidator(check_recipient)]


class Replica(BaseModel, Paced):
    """Where snapshots and bundles are copied to: a pool of another machine, or of this one."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    engine: Literal["zfs"] = Field(
        default="zfs",
        description="How copies are stored: `zfs` in a pool, `restic` as the next section says.",
    )
    host: Annotated[str, AfterValidator(host_name)] = Field(
        default="",
        description="The other machine, as ssh knows it (`root@nas`, or a name from its "
        "configuration, where ports and keys belong); empty for a pool of this one.",
    )
    dataset: Dataset = Field(
        description="Dataset on the replica below which each dataset has its copy, under its whole "
        "name: `backup/kvm/tank:vm:web`. It is made if it is missing; its pool must be there. Each "
        "machine that replicates, and each replica, needs one of its own.",
    )
    bundles: Annotated[Directory, Strict(strict=False)] = Field(
        description="Directory on the replica for bundles, which must exist; no other replica's, "
        "nor inside it.",
    )
    append_only: bool = Field(
        default=False,
        description="The other machine accepts new copies by `snaporch receive`, needs no root for "
        "it, and never lets this one change or delete them: see docs/how-to/replication.md.",
    )
    encrypt_to: tuple[Recipient, ...] = Field(
        default=(),
        max_length=16,
        strict=False,
        description="Public keys of `age` (`age1…`, or the line of an `ssh-ed25519` key): bundles "
        "are encrypted for them before they leave this host. Each of the private keys decrypts; "
        "keep them on other machines. Needs `age` on this host: see docs/how-to/replication.md.",
    )
    rate: int = Field(
        default=0,
        ge=0,
        le=1 << 20,
        description="Most MiB a second that are sent; 0 for no limit. Needs `mbuffer` on this "
        "host.",
    )

    window: WindowOption = Field(
        default=ALWAYS,
        description="When a replication starts by itself: `22:00-06:00`, or a list of such, by the "
        "clock on the wall of this machine. One that is under way at the end stops, and continues "
        "in the next window where it stopped. By hand there is no window. Always if it is not set.",
    )
    rate_outside: int | None = Field(
        default=None,
        ge=1,
        le=1 << 20,
        description="Most MiB a second outside of `window`: then a replication starts and "
        "continues there, too. Needs `mbuffer` on this host; without it, this counts as not set.",
    )

    @model_validator(mode="after")
    def _has_host(self) -> Replica:
        if self.append_only and not self.host:
            raise ValueError("append_only needs host: a pool of this machine is root's")
        self.check_rates()
        return self

    def shared_with(self, other: Replica) -> str:
        """What two replicas would both write to; empty if nothing.

        One host can have several names for ssh, which cannot be compared; its user does not count.
        """
        if self.host.rpartition("@")[2] != other.host.rpartition("@")[2]:
            return ""
        if self.dataset == other.dataset:
            return "dataset"
        if are_nested(self.bundles, other.bundles):
            return "bundles, or one has them inside the other's"
        return ""


def _repository(text: str) -> str:
    if not text.isprintable() or text.startswith("-"):
        raise ValueError(
            "must be a repository as restic knows it, such as 's3:https://HOST/BUCKET'"
        )
    if re.match(r"[a-z0-9]+:(https?://)?[^/@]*:[^/@]*@", text):
        raise ValueError("must not have a password: put RESTIC_REPOSITORY into environment_file")
    if ":" not in text and not text.startswith("/"):
        raise ValueError("must begin with 's3:', 'rest:', 'sftp:' or another of restic's, or '/'")
    return text


def _absolute(path: Path) -> Path:
    if not path.is_absolute() or ".." in path.parts:
        raise ValueError("must be an absolute path, without '..'")
    return path


class ResticReplica(BaseModel, Paced):
    """Where snapshots and bundles are copied to: a repository of restic, such as object storage."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    append_only: ClassVar[bool] = False
    encrypt_to: ClassVar[tuple[str, ...]] = ()
    """None: restic encrypts everything itself."""

    engine: Literal["restic"] = Field(description="`restic`.")
    repository: Annotated[str, AfterValidator(_repository)] = Field(
        default="",
        description="The repository as restic knows it: `s3:https://HOST/BUCKET/PATH`, "
        "`rest:https://HOST/PATH/`, `sftp:USER@HOST:/PATH` or a directory. Each host needs one of "
        "its own. It must exist: `restic init`. Empty if `environment_file` sets "
        "`RESTIC_REPOSITORY`, which may contain a password.",
    )
    password_file: Annotated[Path, Strict(strict=False), AfterValidator(_absolute)] = Field(
        description="File with the repository's password; only root may read it. Without the "
        "password no copy can be read: keep it elsewhere, too.",
    )
    environment_file: Annotated[str, AfterValidator(lambda text: str(_absolute(Path(text))))] = (
        Field(
            default="",
            description="File with lines such as `AWS_ACCESS_KEY_ID=…` for restic; only root may "
            "read it. Empty for none.",
        )
    )
    chain: int = Field(
        default=30,
        ge=0,
        le=1000,
        description="How many increments follow a full copy of a dataset; then another full copy "
        "begins a new chain. A restore reads a whole chain up to its snapshot.",
    )
    keep: Keep | None = Field(
        default=None,
        description="How many copies of each guest `snaporch prune` keeps; the options are those "
        "of `[policy.NAME.keep]`. All snapshots count together. A chain is deleted as a whole, "
        "when no rule keeps any of its snapshots, and never the newest one of a dataset. Without "
        "it nothing is deleted. Needs a key that may delete.",
    )
    rate: int = Field(
        default=0, ge=0, le=1 << 20, description="Most MiB a second that are sent; 0 for no limit."
    )
    window: WindowOption = Field(
        default=ALWAYS,
        description="When a replication starts by itself, as in the section before. A stream that "
        "is under way at the end is sent again in the next window; what restic has stored of it "
        "is not.",
    )
    rate_outside: int | None = Field(
        default=None,
        ge=1,
        le=1 << 20,
        description="Most MiB a second outside of `window`: then a replication starts and "
        "continues there, too. What begins in one keeps its rate.",
    )

    @model_validator(mode="after")
    def _has_repository(self) -> ResticReplica:
        if not self.repository and not self.environment_file:
            raise ValueError("names neither repository, nor environment_file that could set it")
        self.check_rates()
        return self

    def shared_with(self, other: ResticReplica) -> str:
        """What two replicas would both write to; empty if nothing, or if that is not known."""
        return "repository" if self.repository and self.repository == other.repository else ""


ENGINE = "engine "
"""With this begins the step in pydantic's ``loc`` that is no key of the file."""


def _engine(section: object) -> str:
    engine = section.get("engine") if isinstance(section, dict) else getattr(section, "engine", "")
    return f"{ENGINE}restic" if engine == "restic" else f"{ENGINE}zfs"


AnyReplica = Annotated[
    Annotated[Replica, Tag(f"{ENGINE}zfs")] | Annotated[ResticReplica, Tag(f"{ENGINE}restic")],
    Discriminator(_engine),
]


def are_nested(one: Path, other: Path) -> bool:
    """Whether two directories are the same, or one is inside the other."""
    return one.is_relative_to(other) or other.is_relative_to(one)
