"""``snaporch mount``: shows a guest's files in a directory of the host, by the appliance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, QuietOption, SnapshotArgument


def mount_command(
    context: typer.Context,
    snapshot: SnapshotArgument,
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="An empty directory.", show_default=False),
    ],
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="Only this file system, such as /dev/sda1.",
            show_default=False,
        ),
    ] = None,
    follow_links: Annotated[
        bool,
        typer.Option("--follow-links", help="Follow links, which may lead to files of this host."),
    ] = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Mount a guest's snapshot read-only, until Ctrl-C or umount.

    libguestfs opens the disks in a VM of its own. The guest is not touched. Only root can open
    the files.
    """
    import shlex
    from contextlib import suppress

    from snaporch.cli.files import mount_guest
    from snaporch.cli.session import session
    from snaporch.clone.find_clones import remove_leftovers
    from snaporch.errors import InterruptedRunError
    from snaporch.extract.appliance import check_can_run
    from snaporch.extract.guest_files import opened_files
    from snaporch.extract.mount_point import check_mount_point, mounted
    from snaporch.extract.mounted_files import MountedFiles
    from snaporch.extract.tolerant_files import TolerantFiles
    from snaporch.output.terminal import print_result
    from snaporch.restore.host_requirements import available_memory
    from snaporch.restore.source import complete_source, find_records, reading_lock

    with session(context, config, quiet=quiet) as opened:
        check_mount_point(directory)
        remove_leftovers(opened)
        source = complete_source(opened, find_records(opened, snapshot)[-1], roles=())
        check_can_run(source.thing, available_memory(opened.resolver.host))
        with reading_lock(opened, source.record), opened_files(opened, source) as files:
            status = mount_guest(files, opened, source, device)
            shown = MountedFiles(TolerantFiles(files.appliance), files.find(b"/")[1])
            with mounted(source.thing, directory, follow_links=follow_links) as mount:
                end = f"umount {shlex.quote(str(directory))}"
                print_result(f"{directory}  {source.thing}, until Ctrl-C or {end}")
                with suppress(InterruptedRunError):
                    mount.serve(shown.answer, files.appliance.check)
    return status
