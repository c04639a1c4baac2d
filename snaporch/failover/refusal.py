"""Whether a guest can be failed over, or its failover go on: pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import NamedTuple

from snaporch.fence import Fence
from snaporch.hypervisor import StartHookProblem
from snaporch.model import DomainState, Level


class FailoverFacts(NamedTuple):
    """What decides whether a guest can be failed over."""

    state: DomainState
    uuid: str
    replica: str
    """Its name in the configuration."""
    is_persistent: bool
    """libvirt has its definition also when it is off."""
    has_saved_ram: bool
    """libvirt has saved its RAM (``virsh managedsave``)."""
    is_half_restored: bool
    """A restore or undo of it was interrupted."""
    group: str | None
    """Its consistency group."""
    members: tuple[str, ...]
    """The names of that group's guests."""
    left_out: tuple[str, ...]
    """Its writable disks that no snapshot has."""
    shared_with: tuple[str, ...]
    """Other guests with disks in its datasets."""
    engine: str
    """Of the replica."""
    hook_problem: StartHookProblem | None
    """Why libvirt would start it in spite of a fence."""


def refusal(facts: FailoverFacts) -> tuple[str, str] | None:
    """Why the guest cannot be failed over, and what to do; None if it can.

    Its snapshot itself may be refused besides that: see :mod:`snaporch.snapshot.plan`.
    """
    if facts.engine != "zfs":
        reason = f"the replica is a repository of {facts.engine}, and no host starts from one"
        return reason, "name a replica on a pool: --to NAME"
    if facts.hook_problem is not None:
        reason = f"libvirt would start it again: {facts.hook_problem.reason}"
        return reason, f"run: {facts.hook_problem.step}"
    if facts.group is not None:
        reason = f"is in the group {facts.group}, and a failover moves one guest"
        each = "; ".join(_command(name, facts.replica) for name in facts.members)
        return reason, f"take its guests out of [group.{facts.group}], then: {each}"
    if facts.is_half_restored:
        return "a restore of it was interrupted", f"run: snaporch recover {facts.uuid}"
    if facts.has_saved_ram:
        reason = "libvirt has saved its RAM, which no snapshot has"
        start, discard = f"virsh start {facts.uuid}", f"virsh managedsave-remove {facts.uuid}"
        return reason, f"to keep it: {start}; to discard it: {discard}"
    if facts.state not in (DomainState.RUNNING, DomainState.OFF):
        reason = f"is {facts.state}, and only a guest that runs or is off is failed over"
        return reason, "resume it, or shut it down"
    if not facts.is_persistent:
        return "is not defined: libvirt forgets it when it ends", "define it: virsh define FILE"
    if facts.left_out:
        reason = f"no snapshot has all of its disks: {'; '.join(facts.left_out)}"
        return reason, "move them to ZFS, or detach them"
    if facts.shared_with:
        reason = (
            f"shares a dataset with {', '.join(facts.shared_with)}, and no rebuild takes it apart"
        )
        return reason, "give each guest a dataset of its own"
    return None


def changed_state(state: DomainState, last: Level) -> tuple[str, str] | None:
    """Why the guest is not the one that the admin was asked about; None if it is.

    Args:
        state: the guest's, before its last snapshot was waited for.
        last: the level of that snapshot.
    """
    if (last is Level.RAM) == (state is DomainState.RUNNING):
        return None
    return "was started or stopped meanwhile", "run this command again"


def way_to_end(uuid: str, state: DomainState, *, is_recovered: bool) -> str:
    """What to do with a guest whose QEMU has not ended, although it is fenced.

    Args:
        uuid: its UUID.
        state: its state.
        is_recovered: no run of it is left that ``recover`` would end.
    """
    if not is_recovered:
        return f"run: snaporch recover {uuid}"
    keep = shlex.join(["snaporch", "fence", "--remove", uuid])
    if state is not DomainState.RUNNING:
        keep = f"{keep} && {shlex.join(['virsh', 'resume', uuid])}"
    end = shlex.join(["virsh", "destroy", uuid])
    return f"to end it: {end}; then run this command again; to keep it here: {keep}"


def _command(name: str, replica: str) -> str:
    return shlex.join(["snaporch", "failover", name, "--to", replica])


def other_move(fence: Fence, replica: str) -> tuple[str, str] | None:
    """Why the failover that made a fence cannot go on, and what to do; None if it can.

    Args:
        fence: the guest's.
        replica: to which the guest is to go.
    """
    if not fence.run:
        return f"{fence.reason}; not by a failover", fence.step
    if fence.delivered:
        reason = f"was failed over to {fence.replica} on {fence.delivered[:16]}Z; it may run there"
        return reason, "see docs/how-to/failover.md"
    if fence.replica not in ("", replica):
        renamed = f"if that replica was renamed, have it named {fence.replica} again before"
        return f"is being failed over to {fence.replica}", f"{fence.rerun}; {renamed}"
    return None


def late_writes(uuid: str, written: Mapping[str, int]) -> tuple[str, str]:
    """Why a last snapshot is not copied, and what to do: to keep what it lacks, or to discard it.

    Args:
        uuid: of the guest.
        written: by its ZFS snapshots, the bytes that were written to their datasets since then.
    """
    where = ", ".join(f"{name.partition('@')[0]} ({size} bytes)" for name, size in written.items())
    causes = "its guest was resumed, or another program wrote"
    remove = shlex.join(["snaporch", "fence", "--remove", uuid])
    keep = f"to keep that: {remove}; virsh start {uuid}; then fail over again"
    back = "; ".join(shlex.join(["zfs", "rollback", name]) for name in written)
    reason = f"{where} was written to after it: {causes}; the replica got nothing"
    return reason, f"{keep}; to discard it: {back}; then run this command again"
