"""The script beside a safety copy that undoes its restore; it needs ``zfs`` and ``virsh`` only."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from snaporch.model import Domain

TPM_PREFIX = "tpm."
"""What the names of files of TPM state have before them in a safety copy."""

_HEAD = """#!/bin/sh
# Undoes a restore by snaporch: brings the disks back to what they were before it.
# The guest must be off. What was written since the restore is lost.
# Cut short, it can be run again.
set -eu
cd "$(dirname "$0")"
"""


def undo_script(
    directory: Path,
    domain: Domain | None,
    targets: Sequence[str],
    streams: Sequence[tuple[str, str]],
    marks: Sequence[str],
    *,
    journal: Path,
    lock: Path,
) -> str:
    """The text of ``undo.sh`` for a safety copy that is complete but for it.

    Args:
        targets: full names of the snapshots that are rolled back to.
        streams: dataset and file of every incremental stream, in their order.
        marks: commands that mark the newer snapshots as snaporch's again.
        journal: of the restore; forgotten when the disks are back, if it was left unfinished.
        lock: of the domain, so that no snaporch works on it meanwhile.
    """
    lines = [
        f"mkdir -p -m 700 {shlex.quote(str(lock.parent))}",
        f"exec 9>>{shlex.quote(str(lock))}",
        'flock -n 9 || { echo "snaporch is at work on the guest" >&2; exit 6; }',
    ]
    if domain is not None:
        lines += [
            f"state=$(LC_ALL=C virsh domstate {domain.uuid} 2>/dev/null || true)",
            'case "$state" in "" | "shut off" | crashed) ;; *)',
            '    echo "the guest is $state; shut it off first" >&2; exit 1 ;;',
            "esac",
        ]
    if (directory / "barred.xml").exists():
        lines += ["# so that nobody starts it half way", "virsh define barred.xml"]
    lines += [f"zfs rollback -r {shlex.quote(target)}" for target in targets]
    lines += [f"zfs receive -F {shlex.quote(dataset)} < {name}" for dataset, name in streams]
    lines += marks
    if domain is not None:
        lines += _files(directory, domain)
    lines.append(f"rm -f {shlex.quote(str(journal))}")
    if (directory / "domain.xml").exists():
        lines.append("virsh define domain.xml")
    if (directory / "running.save").exists():
        lines += ["# the guest goes on as it was", 'virsh restore "$PWD/running.save"']
    if (directory / "managed.save").exists():
        lines.append('echo "its managed save image: virsh restore $PWD/managed.save"')
    return _HEAD + "\n".join(lines) + "\n"


def _files(directory: Path, domain: Domain) -> list[str]:
    lines = []
    if domain.nvram is not None and (directory / "nvram.fd").exists():
        lines.append(f"cp -p nvram.fd {shlex.quote(domain.nvram)}")
    kept = sorted(path.name for path in directory.glob(f"{TPM_PREFIX}*"))
    if domain.tpm_state is not None and kept:
        lines.append(f"mkdir -p {shlex.quote(domain.tpm_state)}")
        for name in kept:
            place = Path(domain.tpm_state) / name.removeprefix(TPM_PREFIX)
            lines.append(shlex.join(["cp", "-p", name, str(place)]))
    return lines
