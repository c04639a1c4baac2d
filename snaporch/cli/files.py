"""``snaporch files``: lists and copies a guest's files by :mod:`snaporch.extract.guest_files`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, QuietOption, SnapshotArgument
from snaporch.errors import ExitCode

if TYPE_CHECKING:
    from snaporch.context import Context
    from snaporch.extract.copy_guest_files import Copied
    from snaporch.extract.guest_files import GuestFiles
    from snaporch.restore.source import Source


def files_command(
    context: typer.Context,
    snapshot: SnapshotArgument,
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH...]",
            help="Files or directories, as the guest names them. Without one, the file systems.",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", metavar="DIR", help="Copy them into this directory.", show_default=False
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="Only this file system, such as /dev/sda1; PATH begins at its root.",
            show_default=False,
        ),
    ] = None,
    keep_owner: Annotated[
        bool,
        typer.Option("--keep-owner", help="Give copies the guest's user and group numbers."),
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """List or copy files of a guest's snapshot.

    libguestfs opens the disks in a VM of its own, read-only. The guest is not touched.
    """
    from snaporch.cli.session import session
    from snaporch.clone.find_clones import remove_leftovers
    from snaporch.extract.appliance import check_can_run
    from snaporch.extract.copy_guest_files import destination
    from snaporch.restore.host_requirements import available_memory
    from snaporch.restore.source import complete_source, find_records, reading_lock

    wanted = [_guest_path(path) for path in paths or ()]
    if to is not None and not wanted:
        raise typer.BadParameter("--to needs a PATH")
    if keep_owner and to is None:
        raise typer.BadParameter("--keep-owner needs --to")
    if device is not None and not wanted:
        raise typer.BadParameter("--device needs a PATH")
    targets = [destination(path, to) for path in wanted] if to is not None else None
    if targets is not None and len(set(targets)) != len(targets):
        raise typer.BadParameter("two of the PATHs have the same last name")
    with session(context, config, quiet=quiet or json) as opened:
        remove_leftovers(opened)
        record = find_records(opened, snapshot)[-1]
        source = complete_source(opened, record, roles=())
        check_can_run(source.thing, available_memory(opened.resolver.host))
        with reading_lock(opened, source.record):
            if not wanted:
                return _file_systems(opened, source, json=json)
            if targets is None:
                return _list(opened, source, wanted, device, json=json)
            pairs = list(zip(wanted, targets, strict=True))
            return _copy(opened, source, pairs, device, keep_owner=keep_owner, json=json)


def _guest_path(text: str) -> bytes:
    import os

    path = os.fsencode(text)
    if not path.startswith(b"/"):
        raise typer.BadParameter(f"{text!r} is not absolute; a PATH begins with /")
    return path


def _file_systems(context: Context, source: Source, *, json: bool) -> int:
    from snaporch.extract.guest_files import opened_files
    from snaporch.extract.guestfish_text import disk_of
    from snaporch.extract.unseen_parts import left_out_disks
    from snaporch.output.files import print_file_systems
    from snaporch.output.terminal import print_json

    targets = [disk.target for disk in source.disks]
    with opened_files(context, source) as files:
        found = files.file_systems()
        points = {device: point for point, device in files.system_places(choose=False)}
    if json:
        print_json(
            [
                {
                    "device": each.device,
                    "type": each.kind,
                    "disk": disk_of(each.device, targets),
                    "mounted_at": points.get(each.device),
                }
                for each in found
            ]
        )
    else:
        print_file_systems(found, targets, points)
    return _note(context, source, left_out_disks(source.manifest.disks))


def mount_guest(files: GuestFiles, context: Context, source: Source, device: str | None) -> int:
    """Mount the guest's file systems; the exit code, since a part of its tree may be missing."""
    from snaporch.extract.guest_files import choose_places
    from snaporch.extract.unseen_parts import (
        left_out_disks,
        missing_of_windows,
        missing_points,
        not_mounted,
    )
    from snaporch.extract.windows_parts import windows_parts

    found = files.file_systems()
    system = files.system_places() if device is None else []
    wanted = choose_places(source.thing, found, system, device)
    places = files.mount(wanted)
    if device is not None:
        return ExitCode.OK
    failed = [
        f"{name} could not be mounted at {point}"
        for point, name in wanted
        if (point, name) not in places
    ]
    empty = [
        f"its fstab mounts something at {point}, which is not shown"
        for point in missing_points(files.fstab(), wanted)
    ]
    devices = [each.device for each in found]
    windows = windows_parts(files.appliance, wanted[0][1], devices)
    nowhere = [*not_mounted(found, wanted, windows), *missing_of_windows(windows)]
    unseen = [*left_out_disks(source.manifest.disks), *failed, *empty, *nowhere]
    return _note(context, source, unseen)


def _note(context: Context, source: Source, unseen: list[str]) -> int:
    """Say what is not shown; the exit code."""
    for each in unseen:
        context.progress.note(source.thing, each)
    return ExitCode.WARNINGS if unseen else ExitCode.OK


def _list(
    context: Context, source: Source, paths: list[bytes], device: str | None, *, json: bool
) -> int:
    from snaporch.extract.guest_files import opened_files
    from snaporch.output.files import entry_as_json, print_entries
    from snaporch.output.terminal import print_json

    listings = []
    with opened_files(context, source) as files:
        status = mount_guest(files, context, source, device)
        for path in paths:
            real, entry = files.find(path)
            listings.append((path, files.listing(real, entry)))
    if json:
        print_json([entry_as_json(path, each) for path, inside in listings for each in inside])
    else:
        print_entries(listings)
    return status


def _copy(
    context: Context,
    source: Source,
    pairs: list[tuple[bytes, Path]],
    device: str | None,
    *,
    keep_owner: bool,
    json: bool,
) -> int:
    from snaporch.extract.copy_guest_files import Copy
    from snaporch.extract.guest_files import opened_files, shown
    from snaporch.output.format import size
    from snaporch.output.terminal import print_json, print_result
    from snaporch.reserve import RoomWatch

    done: list[Copied] = []
    with opened_files(context, source) as files:
        status = mount_guest(files, context, source, device)
        copy = Copy(
            source.thing,
            files,
            lambda: context.interrupt.check(source.thing),
            RoomWatch(pairs[0][1].parent),
            keep_owner=keep_owner,
        )
        for path, target in pairs:
            context.progress.step(source.thing, f"copying {shown(path)}")
            real, entry = files.find(path)
            done.append(copy.run(real, entry, target))
            for each in done[-1].left_out:
                context.progress.note(source.thing, f"{each} is no file, and was left out")
            if not json:
                last = done[-1]
                files_text = f"{last.files} file{'' if last.files == 1 else 's'}"
                print_result(f"{last.path}  {files_text}, {size(last.bytes)}")
    if json:
        print_json([each.as_json() for each in done])
    return ExitCode.WARNINGS if any(each.left_out for each in done) else status
