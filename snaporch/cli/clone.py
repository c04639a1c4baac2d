"""``snaporch clone``: makes, lists and deletes clones by :mod:`snaporch.clone.clone`."""

from __future__ import annotations

import json as json_format
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from snaporch.cli.options import Command, ConfigOption, JsonOption, NetworkOption, QuietOption

if TYPE_CHECKING:
    from snaporch.clone.clone import Clone
    from snaporch.context import Context


class CloneCommand(Command):
    """``clone``, whose usage shows both of its forms."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the arguments of both forms."""
        del ctx
        return ["[OPTIONS]", "DOMAIN@SNAPSHOT NEW | --delete CLONE"]


def clone_command(
    context: typer.Context,
    snapshot: Annotated[
        str,
        typer.Argument(
            metavar="DOMAIN@SNAPSHOT",
            help="A snapshot, as `snaporch list` shows it; with --delete, the clone.",
            show_default=False,
        ),
    ],
    new: Annotated[
        str | None,
        typer.Argument(metavar="NEW", help="The clone's name.", show_default=False),
    ] = None,
    running: Annotated[bool, typer.Option("--running", help="Resume the clone from RAM.")] = False,
    network: NetworkOption = "none",
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the clone: its domain, datasets and files.")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Make a second guest from a snapshot, or delete one.

    Its disks are ZFS clones. It gets a new name, a new UUID and, unless it is resumed from RAM, new
    MAC addresses. It is made at low priority.
    """
    if delete != (new is None) or (delete and running):
        raise typer.BadParameter("expected DOMAIN@SNAPSHOT NEW, or --delete CLONE")
    if new is not None:
        context.obj.lower_priority("clone")
    from snaporch.cli.session import session  # starting Python is a part of the work

    with session(context, config, quiet=quiet or json) as opened:
        if new is None:
            _delete(opened, snapshot, json=json)
        else:
            _clone(opened, snapshot, new, running=running, network=network, json=json)
    return 0


def _clone(
    context: Context, text: str, name: str, *, running: bool, network: str, json: bool
) -> None:
    from snaporch.bundle.manifest import Role
    from snaporch.clone.clone import CloneRequest, check_clone, check_parts, clone
    from snaporch.clone.find_clones import remove_leftovers
    from snaporch.output.terminal import print_result
    from snaporch.restore.source import complete_source, find_records

    remove_leftovers(context)
    roles = [role for role in Role if running or role is not Role.RAM]
    source = complete_source(context, find_records(context, text)[-1], roles)
    request = CloneRequest(name, resumed=running, network=network)
    check_clone(context, source, request)
    check_parts(context, source, ram=running)
    made = clone(context, source, request)
    for missing in made.missing:
        context.progress.note(name, f"does not have {missing}")
    origins = ", ".join(source.member(dataset).full_name for dataset in made.datasets)
    context.progress.step(name, f"keeps {origins} from being destroyed while it exists")
    if running and made.has_cards:
        context.progress.step(
            name, f"has the addresses of {source.record.domain} in its RAM; network: {network}"
        )
    print_result(_json(made.as_json()) if json else _line(made))


def _line(made: Clone) -> str:
    action = (
        "resumed from RAM" if made.resumed else f"defined; virsh start {shlex.quote(made.name)}"
    )
    return f"{made.name}  clone of {made.of}, {action}"


def _delete(context: Context, name: str, *, json: bool) -> None:
    from snaporch.clone.delete import delete_clone
    from snaporch.output.terminal import print_result

    deleted = delete_clone(context, name)
    line = f"{deleted.name}  deleted: {'; '.join(deleted.done) or 'its files'}"
    print_result(_json(deleted.as_json()) if json else line)


def _json(document: dict[str, object]) -> str:
    return json_format.dumps(document, indent=2, ensure_ascii=False)
