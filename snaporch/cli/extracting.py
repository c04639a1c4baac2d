"""Copying disks one after the other, behind ``snaporch extract``."""

from __future__ import annotations

import json as json_format
from pathlib import Path

from snaporch.cli.cloning import sweep_first
from snaporch.report.terminal import print_result
from snaporch.report.units import size
from snaporch.restore.extract import choose_disks, extract
from snaporch.restore.source import records_called, whole_source
from snaporch.run.context import Context


def extract_all(
    context: Context, text: str, destination: Path, *, disk: str | None, json: bool
) -> int:
    """Copy the disks asked for."""
    sweep_first(context)
    source = whole_source(context, records_called(context, text)[-1], roles=())
    done = []
    for entry, path in choose_disks(source, disk, destination):
        extracted = extract(context, source, entry, path)
        done.append(extracted)
        if not json:
            print_result(
                f"{extracted.path}  {entry.target} of {source.thing}, {extracted.format}, "
                f"{size(extracted.bytes)}, {size(extracted.stored_bytes)} on disk"
            )
    if json:
        documents = [extracted.as_json() for extracted in done]
        print_result(json_format.dumps(documents, indent=2, ensure_ascii=False))
    return 0
