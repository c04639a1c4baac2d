"""``snaporch show``: prints the description of a snapshot that :mod:`snaporch.show` makes."""

from __future__ import annotations

import typer

from snaporch.cli.options import ConfigOption, JsonOption, SnapshotArgument


def show_command(
    context: typer.Context,
    snapshot: SnapshotArgument,
    json: JsonOption = False,
    config: ConfigOption = None,
) -> int:
    """Show a snapshot, and how to restore it without snaporch.

    The commands need nothing but zfs and virsh.
    """
    from snaporch.cli.session import session
    from snaporch.output.show import print_description
    from snaporch.output.terminal import print_json
    from snaporch.restore.source import find_records
    from snaporch.show import describe

    with session(context, config, quiet=True, read_only=True) as opened:
        shown = describe(opened, find_records(opened, snapshot)[-1])
        if json:
            print_json(shown.as_json())
        else:
            print_description(shown)
    return 0
