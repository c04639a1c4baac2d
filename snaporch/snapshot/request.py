"""What the caller of a snapshot asks for, whatever the domain or group is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from snaporch.catalog.note import check_note
from snaporch.config import Config
from snaporch.errors import NotFoundError, UsageError
from snaporch.snapshot.snapshot_name import check_snapshot_name


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Options of a snapshot; ``None`` where the configuration decides.

    Raises:
        UsageError: the name is no snapshot name, or the note is no note.
    """

    name: str | None = None
    """Name of the snapshot; ``None`` for ``snaporch_<UTC time>_<policy, or manual>``."""
    level: str | None = None
    policy: str | None = None
    """The policy for which it is taken: it is marked on the ZFS snapshots and ends the name."""
    wait: int | None = None
    """Seconds to wait for another run on the same domain."""
    rate: int | None = None
    """Limit in MiB of RAM per second; 0 for none."""
    if_changed: bool = False
    """Take no snapshot of a guest that is off and unchanged since the policy's last snapshot."""

    note: str = ""
    """The admin's note; empty for none."""

    def __post_init__(self) -> None:
        if self.name is not None:
            check_snapshot_name(self.name)
        check_note(self.note)


AS_CONFIGURED = SnapshotRequest()


def apply_policy(config: Config, request: SnapshotRequest) -> SnapshotRequest:
    """Check the options of a command line against each other, and take the level of the policy.

    Raises:
        UsageError: the options contradict each other.
        NotFoundError: the configuration has no such policy.
    """
    if request.policy is None:
        if request.if_changed:
            reason = "needs --policy: the guest is compared with the policy's last snapshot"
            raise UsageError("--if-changed", reason)
        return request
    if request.name is not None:
        raise UsageError("--policy", "names its snapshots itself", "leave out --name")
    if request.policy not in config.policy:
        known = ", ".join(sorted(config.policy))
        existing = f"there are {known}" if known else "there is none"
        raise NotFoundError(request.policy, f"no such policy in the configuration; {existing}")
    level = config.policy[request.policy].level
    return replace(request, level=request.level or (None if level == "auto" else level))
