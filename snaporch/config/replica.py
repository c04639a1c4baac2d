"""Options of ``[replica.NAME]``; part of the schema."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, model_validator

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


_RECIPIENT = re.compile(
    r"age1[02-9ac-hj-np-z]{58}|ssh-ed25519 [A-Za-z0-9+/]{68}( [A-Za-z0-9_.@:+-]{1,200})?"
)
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


def is_recipient(text: str) -> bool:
    """Whether a text has the form of a public key that bundles can be encrypted for."""
    return _RECIPIENT.fullmatch(text) is not None


def _recipient(text: str) -> str:
    if not is_recipient(text):
        raise ValueError(
            "must be a public key: age1… as age-keygen prints it, or ssh-ed25519 …; never the "
            "private key"
        )
    return text


Dataset = Annotated[str, AfterValidator(_dataset)]
Directory = Annotated[Path, AfterValidator(_directory)]

Recipient = Annotated[str, AfterValidator(_recipient)]


class Replica(BaseModel):
    """Where snapshots and bundles are copied to."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

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

    @model_validator(mode="after")
    def _has_host(self) -> Replica:
        if self.append_only and not self.host:
            raise ValueError("append_only needs host: a pool of this machine is root's")
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


def are_nested(one: Path, other: Path) -> bool:
    """Whether two directories are the same, or one is inside the other."""
    return one.is_relative_to(other) or other.is_relative_to(one)
