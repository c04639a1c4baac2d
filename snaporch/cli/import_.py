"""``snaporch import``: makes a guest of an archive, by :mod:`snaporch.archive.import_guest`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from snaporch.cli.options import ConfigOption, JsonOption, NetworkOption, QuietOption

if TYPE_CHECKING:
    from snaporch.archive.import_guest import Imported

_STDIN = Path("-")
_STATES = {
    "resumed": "resumed from RAM",
    "paused": "resumed from RAM and paused, as it was",
    "booted": "booted from its disks",
    "defined": "defined, not started",
}


def import_command(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|-",
            help="An archive of `snaporch export`; - for standard input.",
            show_default=False,
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NEW",
            help="Another name; the guest gets another UUID, and other MAC addresses if it boots.",
            show_default=False,
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            metavar="PARENT",
            help="Make a dataset for the guest in this one.",
            show_default=False,
        ),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory",
            metavar="DIR",
            help="Make a directory for the guest in this one [default: /var/lib/libvirt/images].",
            show_default=False,
        ),
    ] = None,
    network: NetworkOption = "none",
    cold: Annotated[
        bool, typer.Option("--cold", help="Boot from the disks, also if there is RAM.")
    ] = False,
    no_start: Annotated[
        bool, typer.Option("--no-start", help="Define the guest, and do not start it.")
    ] = False,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            "--accept",
            metavar="PATH",
            help="A file of this host that the definition may name, such as a kernel.",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Make a guest of an exported archive.

    All of the archive is checked before libvirt gets the guest. The host needs no ZFS. The guest is
    resumed from RAM if this host can; else it boots.
    """
    from snaporch.archive.import_guest import ImportRequest, import_guest
    from snaporch.cli.session import session
    from snaporch.output.terminal import print_json, print_result

    if dataset is not None and directory is not None:
        raise typer.BadParameter("--dataset and --directory are two places for one guest")
    request = ImportRequest(
        directory=(directory or Path("/var/lib/libvirt/images")).absolute(),
        parent=dataset,
        name=name,
        network=network,
        cold=cold,
        starts=not no_start,
        accepted=tuple(accept or ()),
    )
    with (
        session(context, config, quiet=quiet or json, zfs=dataset is not None) as opened,
        _opened(file) as stream,
    ):
        thing = "standard input" if file == _STDIN else str(file)
        made = import_guest(opened, stream, thing, request)
        for missing in made.missing:
            opened.progress.note(made.name, f"does not have {missing}")
        if made.cold_reason:
            opened.progress.note(made.name, f"was not resumed from RAM: {made.cold_reason}")
    if json:
        print_json(made.as_json())
    else:
        print_result(_line(made))
    return 0


def _line(made: Imported) -> str:
    from snaporch.errors import one_line

    place = f"{made.directory}, {_STATES[made.state]}"
    return one_line(f"{made.name}  imported from {made.of} into {place}")


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """Open the archive.

    Raises:
        NotFoundError: it cannot be opened.
        UsageError: standard input is a terminal.
    """
    from snaporch.errors import NotFoundError, UsageError

    if file == _STDIN:
        if sys.stdin.isatty():
            raise UsageError("standard input", "is a terminal, and no archive", "pipe it")
        yield sys.stdin.buffer
        return
    try:
        stream = file.open("rb")
    except OSError as error:
        raise NotFoundError(str(file), error.strerror or "cannot be opened") from error
    with stream:
        yield stream
