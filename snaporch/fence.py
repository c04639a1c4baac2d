"""The fences of guests: a guest with a fence does not start on this host.

A fence is a file that has the UUID of its guest as its name. libvirt's hook
(``hooks/libvirt-qemu``) refuses each start of such a guest. That a fence exists is the decision
that its guest has ended here: recovery never resumes it, and ends it if it is still paused.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from snaporch.default_paths import FENCES
from snaporch.errors import RefusedError
from snaporch.model import UUID_FORM, PoolSnapshot
from snaporch.private_files import (
    private_directory,
    replace_private,
    store_errors,
    sync_directory,
)

_LIMIT = 1 << 16


@dataclass(frozen=True, slots=True)
class Fence:
    """The fence of one guest."""

    uuid: str
    domain: str
    """The guest's name when it was fenced; its UUID if the file is damaged."""
    at: str = ""
    """When, as ISO 8601 in UTC; empty if the file is damaged."""
    run: str = ""
    """The run of the guest's last snapshot here; empty for a fence that was made by hand."""
    snapshot: str = ""
    """The name of that snapshot."""
    replica: str = ""
    """The name of the replica to which the failover moves the guest."""
    guids: str = ""
    """By hand: the GUIDs of the newest snapshots of its datasets then, with commas."""
    delivered: str = ""
    """When that replica had all of it, as ISO 8601 in UTC: from then on the guest may run there."""

    @property
    def made(self) -> datetime | None:
        """When it was made; None if that is not known."""
        with suppress(ValueError):
            found = datetime.fromisoformat(self.at)
            if found.tzinfo is not None:
                return found
        return None

    @property
    def moment(self) -> datetime:
        """When it was made; the end of all time if that is not known."""
        return self.made or datetime.max.replace(tzinfo=UTC)

    def has_seen(self, snapshot: PoolSnapshot) -> bool:
        """Whether a snapshot was among the newest ones of the guest when the fence was made."""
        return snapshot.name == self.snapshot or str(snapshot.guid) in self.guids.split(",")

    @property
    def reason(self) -> str:
        """Why the guest does not start."""
        if self.run and self.replica and not self.delivered:
            return f"is fenced: its failover to {self.replica} at @{self.snapshot} has not ended"
        if self.run:
            reason = f"is fenced: it was failed over at @{self.snapshot}"
            return f"{reason} to {self.replica}{self._since}, and may run there"
        return f"is fenced{self._since}: a copy of it may run on another host"

    @property
    def _since(self) -> str:
        return f", {self.at[:16]}Z" if self.at else ""

    @property
    def rerun(self) -> str:
        """How a failover that was interrupted goes on."""
        return "run: " + shlex.join(["snaporch", "failover", self.uuid, "--to", self.replica])

    @property
    def step(self) -> str:
        """How it comes back."""
        remove = shlex.join(["snaporch", "fence", "--remove", self.uuid])
        return f"see docs/how-to/failover.md; only if no copy runs elsewhere: {remove}"


@dataclass(frozen=True, slots=True)
class Fences:
    """All fences of this host."""

    directory: Path = FENCES
    lifted: str = ""
    """The UUID of a guest whose fence the caller removes itself; it counts as having none."""

    def find(self, uuid: str) -> Fence | None:
        """The fence of a guest; None without one. A damaged file is a fence, too.

        Raises:
            UnavailableError: it is not known whether there is one.
        """
        if uuid == self.lifted:
            return None
        with store_errors(self.directory):
            try:
                os.lstat(self.directory / uuid)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return self._read(uuid)

    def all(self) -> list[Fence]:
        """All fences, by UUID; other files in the directory are none.

        Raises:
            UnavailableError: the directory cannot be read.
        """
        with store_errors(self.directory):
            names = sorted(os.listdir(self.directory)) if self.directory.is_dir() else []
        return [self._read(name) for name in names if UUID_FORM.fullmatch(name)]

    def _read(self, uuid: str) -> Fence:
        with suppress(OSError, ValueError, TypeError):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(self.directory / uuid, flags)
            with os.fdopen(descriptor, "rb") as stream:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    found = Fence(**json.loads(stream.read(_LIMIT)))
                    if found.uuid == uuid and all(
                        isinstance(v, str) for v in asdict(found).values()
                    ):
                        return found
        return Fence(uuid, uuid)

    def put(self, fence: Fence) -> None:
        """Make a fence that survives a power loss.

        Raises:
            UnavailableError: it may exist, or not.
        """
        with store_errors(self.directory):
            private_directory(self.directory)
            replace_private(self.directory / fence.uuid, json.dumps(asdict(fence)).encode())
            sync_directory(self.directory)
            sync_directory(self.directory.parent)

    def remove(self, uuid: str) -> None:
        """Remove a fence, so that its guest starts again.

        Raises:
            UnavailableError: it may exist, or not.
        """
        with store_errors(self.directory):
            if not self.directory.is_dir():
                return
            (self.directory / uuid).unlink(missing_ok=True)
            sync_directory(self.directory)

    def refuse(self, uuid: str, name: str) -> None:
        """Refuse what must not be done with a guest that has a fence.

        Raises:
            RefusedError: it has one.
        """
        if (fence := self.find(uuid)) is not None:
            raise RefusedError(name, fence.reason, fence.step)


HOST = Fences()
"""Those of this host."""
