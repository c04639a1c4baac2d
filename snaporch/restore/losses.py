"""Describe what a restore discards, for the user who has to agree to it.

Whether a restore is refused for them is decided by :mod:`snaporch.restore.newer_snapshot_checks`
and :mod:`snaporch.restore.shared_dataset_checks`.
"""

from __future__ import annotations

import difflib
import re
from contextlib import suppress

from snaporch.bundle.manifest import Role
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.restore.newer_snapshot_checks import needs_consent
from snaporch.restore.other_files import named
from snaporch.restore.plan_model import RestorePlan
from snaporch.restore.safety_catalog import bookmarks_since

_PASSWORD = re.compile(r"""(passwd=['"])[^'"]*""")
_MOST_LINES = 20
"""The number of changed lines of a definition that are shown."""


def losses(context: Context, plan: RestorePlan) -> list[str]:
    """Return a line for each thing that the restore discards or leaves different."""
    lines = []
    if plan.domain is not None and plan.domain.active:
        lines.append(f"the state of the running guest {plan.domain.name}, which will be stopped")
    if plan.domain is not None and plan.domain.managed_save:
        lines.append("its managed save image: the RAM it had when libvirt saved it")
    if plan.manifest is not None:
        lines += [
            f"the disk {disk.target} is not in the snapshot and stays as it is: "
            f"{disk.left_out_reason}"
            for disk in plan.manifest.disks
            if disk.is_apart and plan.ram
        ]
    lines += [f"its {name} stays as it is: {why.reason}" for name, why in plan.unfit.items()]
    lines += [f"its {part.name} as it is now" for part in plan.parts if part.source is not None]
    lines += _changes_of_definition(plan)
    for snapshot in plan.snapshots:
        written = context.pool.written_since(snapshot.full_name)
        lines.append(
            f"what was written to {snapshot.dataset} since the snapshot ({written >> 10} KiB)"
        )
    if plan.also_roll_back:  # otherwise other files were refused; an error here refuses nothing
        with suppress(RefusedError):
            others = plan.others(context).items()
            lines += [f"in {name}: {named(files)}" for name, files in others]
    lines += [f"{name}, which is newer" for name in needs_consent(plan)]
    lines += [
        f"{name}, where later copies begin: the next copy may be a full one"
        for name in sorted(plan.bases)
    ]
    there = context.pool.listing([snapshot.dataset for snapshot in plan.snapshots])
    for snapshot in plan.snapshots:
        _, lost = bookmarks_since(there, snapshot.full_name)
        lines += [f"{name} for good: its snapshot does not exist any more" for name in lost]
    return lines


def _changes_of_definition(plan: RestorePlan) -> list[str]:
    lines = changed_lines_of_definition(plan)
    if not lines:
        return []
    more = [f"    and {len(lines) - _MOST_LINES} lines more"] if len(lines) > _MOST_LINES else []
    shown = [f"    {line}" for line in lines[:_MOST_LINES]]
    return ["its definition as it is now (virsh dumpxml --inactive):", *shown, *more]


def changed_lines_of_definition(plan: RestorePlan) -> list[str]:
    """Return the present lines (``- ``) and the lines that replace them (``+ ``).

    Metadata is included, as it may have a policy; passwords are masked.
    """
    now = plan.domain.inactive_xml if plan.domain else None
    then = plan.text(Role.INACTIVE_XML)
    if now is None or then is None or now == then:
        return []
    before, after = (_PASSWORD.sub(r"\1***", text).splitlines() for text in (now, then))
    changes = difflib.unified_diff(before, after, n=0, lineterm="")
    lines = [line for line in list(changes)[2:] if not line.startswith("@@")]
    return [f"{line[0]} {line[1:].strip()}" for line in lines]
