"""Making and removing a clone, and telling of it, behind ``snaporch clone``."""

from __future__ import annotations

import json as json_format

from snaporch.bundle.manifest import Role
from snaporch.clone.clone import Clone, CloneRequest, check_clone, check_parts, clone
from snaporch.clone.delete import delete_clone
from snaporch.clone.registry import sweep
from snaporch.context import Context
from snaporch.output.terminal import print_result
from snaporch.restore.source import records_called, whole_source


def clone_one(
    context: Context, text: str, new: str, *, running: bool, network: str, json: bool
) -> int:
    """Clone one snapshot; 0 when it was done."""
    sweep_first(context)
    roles = [role for role in Role if running or role is not Role.RAM]
    source = whole_source(context, records_called(context, text)[-1], roles)
    wish = CloneRequest(new, resumed=running, network=network)
    check_clone(context, source, wish)
    check_parts(context, source, ram=running)
    made = clone(context, source, wish)
    for missing in made.missing:
        context.progress.note(new, f"does without {missing}")
    origins = ", ".join(source.member(dataset).full_name for dataset in made.datasets)
    context.progress.step(new, f"keeps {origins} from being destroyed while it exists")
    if running:
        context.progress.step(
            new, f"has the addresses of {source.record.domain} in its RAM; network: {network}"
        )
    print_result(_json(made.as_json()) if json else _line(made))
    return 0


def sweep_first(context: Context) -> None:
    """Remove what a killed one left, before another is made."""
    for done in sweep(context):
        context.progress.note("snaporch", done)


def delete_one(context: Context, name: str, *, json: bool) -> int:
    """Remove one clone; 0 when it was done."""
    deleted = delete_clone(context, name)
    if json:
        print_result(_json(deleted.as_json()))
    else:
        print_result(f"{deleted.name}  deleted: {'; '.join(deleted.done) or 'its files'}")
    return 0


def _line(made: Clone) -> str:
    what = "resumed from RAM" if made.resumed else f"defined; virsh start {made.name}"
    return f"{made.name}  clone of {made.of}, {what}"


def _json(document: dict[str, object]) -> str:
    return json_format.dumps(document, indent=2, ensure_ascii=False)
