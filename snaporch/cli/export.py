"""``snaporch export``: writes a guest into one file, by :mod:`snaporch.archive.export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, QuietOption, SnapshotArgument
from snaporch.errors import ExitCode

if TYPE_CHECKING:
    from snaporch.archive.export import Exported
    from snaporch.context import Context
    from snaporch.restore.source import Source

_STDOUT = Path("-")


def export_command(
    context: typer.Context,
    snapshot: SnapshotArgument,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE|-",
            help="The archive to write, a directory, or - for standard output "
            "[default: DOMAIN@SNAPSHOT.tar.zst].",
            show_default=False,
        ),
    ] = None,
    no_ram: Annotated[bool, typer.Option("--no-ram", help="Leave the RAM out.")] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Write a whole guest into one file.

    It has the definition, UEFI variables, TPM state, disks and RAM of a snapshot, and tar with zstd
    opens it. `snaporch import` makes a guest of it on any libvirt host. The guest runs on.
    """
    from snaporch.archive.export import check_export, left_out
    from snaporch.bundle.manifest import Role
    from snaporch.cli.session import session
    from snaporch.clone.find_clones import remove_leftovers
    from snaporch.output.format import size
    from snaporch.output.terminal import print_json, print_result
    from snaporch.restore.source import complete_source, find_records

    if file == _STDOUT and json:
        raise typer.BadParameter("standard output has the archive, and cannot have --json too")
    with session(context, config, quiet=quiet or json) as opened:
        remove_leftovers(opened)
        record = find_records(opened, snapshot)[-1]
        roles = [role for role in Role if not (no_ram and role is Role.RAM)]
        source = complete_source(opened, record, roles)
        check_export(opened, source)
        absent = left_out(source)
        for target, reason in absent.items():
            opened.progress.note(source.thing, f"the archive has no disk {target}: {reason}")
        done = _export(opened, source, file, with_ram=not no_ram)
        line = (
            f"{done.path}  {source.thing}, {'with' if done.with_ram else 'without'} RAM, "
            f"{size(done.bytes)} of {size(done.data_bytes)}"
        )
        if done.path == "-":
            opened.progress.step(source.thing, f"exported: {line}")
        elif json:
            print_json(done.as_json())
        else:
            print_result(line)
    return ExitCode.WARNINGS if absent else ExitCode.OK


def _export(context: Context, source: Source, file: Path | None, *, with_ram: bool) -> Exported:
    from snaporch.archive.archive_file import destination, new_archive, standard_output
    from snaporch.archive.export import export

    if file == _STDOUT:
        with standard_output() as stream:
            return export(context, source, "-", stream, with_ram=with_ram)
    path = destination(source.thing, file)
    with new_archive(path) as stream:
        return export(context, source, str(path), stream, with_ram=with_ram)
