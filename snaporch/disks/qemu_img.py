"""Runs qemu-img as the emulator's user, with no access but to the files that it is given.

Which images those are, and that each was checked, is decided by :mod:`snaporch.disks.image_layers`.
qemu-img runs without a time limit: a commit takes as long as its data.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from snaporch.command_log import LoggedCommand
from snaporch.errors import SnaporchError
from snaporch.model import Owner

_CONFINED = ("--clear-groups", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all")


class OverlayError(SnaporchError):
    """An overlay cannot be made, read or committed."""


def qemu_img(
    *arguments: str,
    owner: Owner | None,
    descriptors: Sequence[int] = (),
    good: Sequence[int] = (0,),
) -> tuple[int, str]:
    """Run qemu-img as ``owner``, with no access but to the given files.

    Args:
        owner: the emulator's user and group; ``None`` to run it as this process's user.
        descriptors: the open files that qemu-img gets.
        good: exit codes that are no failure.

    Returns: the exit code and the output.

    Raises:
        OverlayError: qemu-img is not installed, or failed.
    """
    confine: list[str] = []
    # a process that is not root has nothing to drop; without a DAC label libvirt's QEMU is root too
    if owner is not None and os.geteuid() == 0:
        confine = ["setpriv", "--reuid", str(owner.uid), "--regid", str(owner.gid), *_CONFINED]
    with LoggedCommand("qemu-img", *arguments) as log:
        done = _run([*confine, "qemu-img", *arguments], descriptors)
        log.exited(done.returncode)
    if done.returncode not in good:
        reason = done.stderr.strip() or "failed"
        raise OverlayError(f"qemu-img {arguments[0]}", reason)
    return done.returncode, done.stdout


def _run(command: Sequence[str], descriptors: Sequence[int]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            process_group=0,  # a terminal's Ctrl-C must not end qemu-img
            pass_fds=descriptors,
            cwd="/",
            text=True,
            errors="replace",
        )
    except FileNotFoundError as error:
        reason, step = "is not installed", "apt install qemu-utils util-linux"
        raise OverlayError(str(error.filename or "qemu-img"), reason, step) from error
