"""The command that repeats a failed verification."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence

from snaporch.model import VerifyStep

_AGAIN = {
    VerifyStep.CHECKSUMS: [],
    VerifyStep.DISKS: ["--disks"],
    VerifyStep.CLONE: [],
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
