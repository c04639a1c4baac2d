"""Give a snapshot's disks to the appliance, each below a throw-away overlay.

The datasets are cloned, and the clones are removed again. A file system that was in use when the
snapshot was taken replays its journal when it is mounted: that is written into the overlays. Every
image below an overlay is spelled out, so that QEMU follows no name inside an image.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from snaporch.clone.clone import clone_dataset
from snaporch.clone.find_clones import Purpose, directory_of, new_clone
from snaporch.clone.images import Images
from snaporch.context import Context
from snaporch.disks.qemu_img import qemu_img
from snaporch.errors import RefusedError, RunFailedError
from snaporch.extract.appliance import make_private
from snaporch.hypervisor.clone_xml import CloneDisk
from snaporch.model import Owner
from snaporch.restore.source import Source, check_whole_disks

_MAX_BACKING_NAME = 1023
"""Bytes of the name of a backing file in a qcow2 header."""
_PASSABLE = 0o111


@contextmanager
def throw_away_disks(
    context: Context, source: Source, owner: Owner | None
) -> Iterator[tuple[Path, list[Path]]]:
    """Make an overlay over a clone of each disk of a snapshot; all are removed after the block.

    Args:
        owner: the appliance's user; None for this process's.

    Yields:
        A directory of the appliance's user, and the overlays, in the order of ``source.disks``.

    Raises:
        RefusedError: a disk is a part of a volume, or its backing chain is too long.
        LeadsOutError: an image is not in the snapshot.
        SnaporchError: a clone or an overlay cannot be made.
    """
    if not source.disks:
        raise RefusedError(source.thing, "has no disks")
    check_whole_disks(context.resolver, source.thing, source.disks)
    with new_clone(context, f"{source.record.domain}-files", Purpose.EXTRACT, source.thing) as uuid:
        made = {
            name: clone_dataset(context, source, f"files-{uuid[:8]}", Purpose.EXTRACT, uuid, name)
            for name in sorted({disk.dataset for disk in source.disks if disk.dataset})
        }
        images = Images(context, source, made)
        places = [images.place_of(disk) for disk in source.disks]
        home = directory_of(context, uuid)
        directory = home / "appliance"
        try:
            make_private(directory, owner)
            for place in places:
                _give_to(place, [each.root for each in made.values()], owner)
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}"
            raise RunFailedError(source.thing, f"cannot be opened ({reason})") from error
        yield directory, make_overlays(source.thing, places, directory, owner)


def make_overlays(
    thing: str, places: Sequence[CloneDisk], directory: Path, owner: Owner | None
) -> list[Path]:
    """Make an overlay over each disk.

    Args:
        thing: the subject of errors.
        places: the disks, with their backing chains.
        directory: where the overlays are made; it belongs to ``owner``.
        owner: the user of the overlays; None for this process's.

    Raises:
        RefusedError: a backing chain is too long.
        OverlayError: qemu-img failed.
    """
    made = []
    for number, place in enumerate(places):
        base = f"json:{json.dumps(block_node(place), separators=(',', ':'))}"
        if len(os.fsencode(base)) > _MAX_BACKING_NAME:
            step = "copy its disks with `snaporch extract`, and open those"
            raise RefusedError(thing, "the chain of its backing files is too long", step)
        overlay = directory / f"{number}.qcow2"
        words = ("create", "-q", "-f", "qcow2", "-F", place.format, "-b", base, str(overlay))
        qemu_img(*words, owner=owner)
        made.append(overlay)
    return made


def block_node(place: CloneDisk) -> dict[str, Any]:
    """A disk with all images below it, as QEMU's block layer describes it."""
    node: dict[str, Any] = {"driver": place.format, "file": _file_node(place)}
    if place.format == "qcow2":
        node["backing"] = block_node(place.below) if place.below is not None else None
    if place.data is not None:
        node["data-file"] = {"driver": "raw", "file": _file_node(place.data)}
    return node


def _file_node(place: CloneDisk) -> dict[str, Any]:
    driver = "host_device" if place.kind == "block" else "file"
    return {"driver": driver, "filename": place.path}


def _give_to(place: CloneDisk, roots: Sequence[Path], owner: Owner | None) -> None:
    """Give the images of a clone to the appliance's user, with the way to them.

    Images outside of the clone, such as a template, stay as they are.
    """
    if owner is None:
        return
    for each in (place, *place.chain):
        for image in filter(None, (each, each.data)):
            path = Path(image.path)
            root = next((root for root in roots if path.is_relative_to(root)), None)
            if root is None:
                continue
            os.chown(path, owner.uid, owner.gid, follow_symlinks=False)
            for parent in path.parents:
                if parent.is_relative_to(root):
                    parent.chmod(parent.stat().st_mode & 0o7777 | _PASSABLE)
