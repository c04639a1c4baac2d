"""``snaporch note``: sets the note of a snapshot by :mod:`snaporch.catalog.note`."""

from __future__ import annotations

from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, SnapshotArgument


def note_command(
    context: typer.Context,
    snapshot: SnapshotArgument,
    text: Annotated[
        str,
        typer.Argument(
            metavar="TEXT", help="One line; an empty text removes the note.", show_default=False
        ),
    ],
    json: JsonOption = False,
    config: ConfigOption = None,
) -> int:
    """Write a note on a snapshot, which `list` and `show` print.

    The note is the property `snaporch:note` of its ZFS snapshots, and is replicated with them.
    """
    from snaporch.catalog.note import set_note
    from snaporch.catalog.records import snapshots_of_record
    from snaporch.cli.session import session
    from snaporch.errors import one_line
    from snaporch.output.terminal import print_json, print_result
    from snaporch.restore.select import choose_records

    with session(context, config, quiet=True) as opened:
        everything = opened.pool.snapshots()
        records = choose_records(opened, everything, [snapshot], group=False)
        for record in records:
            members = snapshots_of_record(opened.store, everything, record)
            set_note(opened.pool, [member.full_name for member in members], text)
        if json:
            changed = choose_records(opened, opened.pool.snapshots(), [snapshot], group=False)
            print_json([record.as_json() for record in changed])
        else:
            said = f"note: {text}" if text else "no note"
            print_result(one_line(f"{records[-1].full_name}  {said}"))
    return 0
