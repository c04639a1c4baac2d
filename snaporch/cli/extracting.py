"""Copying disks one after the other, behind ``snaporch extract``."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator
from pathlib import Path

from snaporch.bundle.manifest import Role
from snaporch.cli.cloning import sweep_first
from snaporch.context import Context
from snaporch.extract.extract import choose_disks, extract
from snaporch.output.format import size
from snaporch.output.terminal import print_result
from snaporch.restore.output_file import ExtractedFile
from snaporch.restore.ram_from_pages import extract_ram
from snaporch.restore.source import Source, reading, records_called, whole_source


def extract_all(
    context: Context, text: str, destination: Path, *, disk: str | None, ram: bool, json: bool
) -> int:
    """Copy the disks asked for, or the RAM."""
    sweep_first(context)
    roles = (Role.RAM,) if ram else ()
    source = whole_source(context, records_called(context, text)[-1], roles=roles)
    done = []
    with reading(context, source.record):
        for extracted in _extract(context, source, destination, disk, ram=ram):
            done.append(extracted)
            if not json:
                print_result(
                    f"{extracted.path}  {extracted.target} of {source.thing}, {extracted.format}, "
                    f"{size(extracted.bytes)}, {size(extracted.stored_bytes)} on disk"
                )
    if json:
        documents = [extracted.as_json() for extracted in done]
        print_result(json_format.dumps(documents, indent=2, ensure_ascii=False))
    return 0


def _extract(
    context: Context, source: Source, destination: Path, disk: str | None, *, ram: bool
) -> Iterator[ExtractedFile]:
    if ram:
        yield extract_ram(context, source, destination)
        return
    for entry, path in choose_disks(source, disk, destination):
        yield extract(context, source, entry, path)
