"""``snaporch extract``: copies a disk out of a snapshot by :mod:`snaporch.extract.extract`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snaporch.cli.options import (
    ConfigOption,
    JsonOption,
    QuietOption,
    SnapshotArgument,
)
from snaporch.errors import ExitCode


def extract_command(
    context: typer.Context,
    snapshot: SnapshotArgument,
    destination: Annotated[
        Path,
        typer.Argument(
            metavar="DEST", help="The image to write, or a directory.", show_default=False
        ),
    ],
    disk: Annotated[
        str | None,
        typer.Option(
            "--disk", metavar="TARGET", help="Only this disk, such as vda.", show_default=False
        ),
    ] = None,
    ram: Annotated[
        bool, typer.Option("--ram", help="Copy the RAM instead, as an image for `virsh restore`.")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Copy disks or the RAM out of a snapshot.

    Disks become sparse images. The guest is not touched. A disk that is not in the snapshot is
    named in a note.
    """
    from snaporch.bundle.manifest import Role
    from snaporch.cli.session import session
    from snaporch.clone.find_clones import remove_leftovers
    from snaporch.extract.extract import choose_disks, extract
    from snaporch.extract.unseen_parts import left_out_disks
    from snaporch.output.format import size
    from snaporch.output.terminal import print_json, print_result
    from snaporch.restore.ram_from_pages import extract_ram
    from snaporch.restore.source import complete_source, find_records, reading_lock

    if ram and disk is not None:
        raise typer.BadParameter("--ram copies no disk")
    documents, absent = [], []
    with session(context, config, quiet=quiet or json) as opened:
        remove_leftovers(opened)
        record = find_records(opened, snapshot)[-1]
        source = complete_source(opened, record, roles=(Role.RAM,) if ram else ())
        with reading_lock(opened, source.record):
            if ram:
                files = iter([extract_ram(opened, source, destination)])
            else:
                chosen = choose_disks(opened.resolver, source, disk, destination)
                absent = left_out_disks(source.manifest.disks) if disk is None else []
                for text in absent:
                    opened.progress.note(source.thing, text)
                files = (extract(opened, source, entry, path) for entry, path in chosen)
            for each in files:
                documents.append(each.as_json())
                if not json:
                    print_result(
                        f"{each.path}  {each.target} of {source.thing}, {each.format}, "
                        f"{size(each.bytes)}, {size(each.stored_bytes)} on disk"
                    )
    if json:
        print_json(documents)
    return ExitCode.WARNINGS if absent else ExitCode.OK
