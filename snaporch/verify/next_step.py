"""The next step after a failed verification: repeat it, or put back what is damaged."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence

from snaporch.model import BundleState, Level, SnapshotRecord, VerifyStep
from snaporch.restore.source import PUT_BACK

_COLD = ("snaporch", "restore", "--cold")
_AGAIN = {
    VerifyStep.CHECKSUMS: [],
    VerifyStep.DISKS: ["--disks"],
    VerifyStep.CLONE: [],
    VerifyStep.COMMAND: [],
    VerifyStep.SCRIPT: ["--script", "PATH"],
}
"""The options that have a verification repeat a step."""


def repeat_command(
    names: Sequence[str], failed_steps: Collection[VerifyStep], more: Sequence[str] = ()
) -> str:
    """Return the command that repeats the failed steps, for a message.

    Args:
        names: ``DOMAIN@SNAPSHOT``, of each snapshot.
        more: further options.
    """
    options = [word for step in VerifyStep if step in failed_steps for word in _AGAIN[step]]
    return shlex.join(["snaporch", "verify", *more, *options, *names])


def put_back_step(name: str) -> str:
    """Return the step that helps if a bundle is not whole: to repeat the verification does not.

    Args:
        name: ``DOMAIN@SNAPSHOT``.
    """
    return f"{PUT_BACK}; or restore only its disks: {shlex.join([*_COLD, name])}"


def next_step(failed: Sequence[SnapshotRecord], steps: Collection[VerifyStep]) -> str:
    """Return what is wrong with snapshots that failed their verification, and the step that helps.

    Args:
        failed: at least one; all have the same state and level of damage.
        steps: the steps in which all of them failed.
    """
    names, first = [each.full_name for each in failed], failed[0]
    if first.level is Level.TORN:
        delete = shlex.join(["snaporch", "delete", *names])
        return f"its disks are of two instants; to delete it: {delete}"
    again = f"to repeat it: {repeat_command(names, steps)}"
    if first.state is BundleState.COMPLETE:
        return again
    return f"the stored data is {first.state}; {put_back_step(first.full_name)}; then {again}"
