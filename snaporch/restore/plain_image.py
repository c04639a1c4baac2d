"""Decompress the RAM image of a running guest before it is stopped.

libvirt starts the decompressor only when the guest is gone, and the guest is away for as long as it
takes. A plain image is loaded as fast as QEMU can. It is made only where it is read from memory
again and takes little of the store's room. Otherwise the guest is resumed from the image as stored.
"""

from __future__ import annotations

from pathlib import Path

from snaporch.bundle.manifest import Part
from snaporch.bundle.page_image import decompress_image
from snaporch.bundle.qemu_stream import StreamError
from snaporch.bundle.save_image import SaveImageError, read_header
from snaporch.bundle.store import BundleStore
from snaporch.context import Context
from snaporch.errors import RefusedError, RunFailedError, UnavailableError
from snaporch.known_faults import needs_pipe
from snaporch.reserve import RoomWatch, free_room
from snaporch.restore.host_requirements import available_memory

_OF_MEMORY = 2
"""A plain image takes at most one in two of the available bytes, so that it stays in memory."""
_OF_ROOM = 4
"""And one in four of the store's, after the safety copy has its own."""
_ANOTHER_SIZE = "it has another size than in the manifest"


def is_worth_it(size: int, *, memory: int, room: int) -> bool:
    """Whether a plain image pays.

    Args:
        size: of the plain image, in bytes.
        memory: that is available on the host, in bytes.
        room: that may be written in the store, in bytes.
    """
    return size * _OF_MEMORY <= memory and size * _OF_ROOM <= room


def resumes_plain(context: Context, part: Part, needed: int) -> bool:
    """Whether a guest that runs should be resumed from a plain image.

    Args:
        part: the RAM in its bundle.
        needed: bytes that the restore will write to the store besides.

    Raises:
        HypervisorError: libvirt does not report its version.
    """
    if not part.payload_bytes:
        return False
    memory = available_memory(context.resolver.host)
    if not is_worth_it(part.payload_bytes, memory=memory, room=_room(context.store) - needed):
        return False
    return not needs_pipe(context.hypervisor.releases())  # QEMU 11 may refuse a plain file


def _room(store: BundleStore) -> int:
    """The bytes that may be written to a store; 0 if it is not there, or not mounted."""
    try:
        return free_room(store.root) if store.is_known() else 0
    except (UnavailableError, OSError):
        return 0


def make_plain(context: Context, thing: str, image: Path, part: Part, target: Path) -> bool:
    """Write a plain copy of a compressed RAM image.

    Args:
        thing: the subject of progress.
        image: as stored.
        part: the RAM in the manifest. The copy is given up when it is larger than this has it, as
            that of an image which libvirt compressed is.
        target: the file to create; does not exist if this fails.

    Returns: whether it was written. If not, a note has the reason, except for an image that is
        plain already.

    Raises:
        InterruptedRunError: a signal came.
        RefusedError: the image is damaged: libvirt could not load it either.
    """
    expected, known = part.payload_bytes or 0, 0
    watch = RoomWatch(target.parent)

    def tick(done: int) -> None:
        nonlocal known
        context.interrupt.check(thing)
        if done > expected:
            raise StreamError(_ANOTHER_SIZE)
        watch.wrote(done - known)
        known = done
        context.progress.amount(thing, done, expected)

    try:
        if not read_header(image).compression:
            return False
        context.progress.step(thing, "decompressing the RAM image")
        if decompress_image(image, target, tick) == expected:
            return True
        why = _ANOTHER_SIZE
    except SaveImageError as error:
        reason = f"its RAM image is damaged ({error}); nothing was touched"
        raise RefusedError(thing, reason, "boot from the disks with --cold") from error
    except (StreamError, RunFailedError, OSError) as error:
        why = str(error)
    target.unlink(missing_ok=True)
    context.progress.note(thing, f"its RAM image was not decompressed before the stop: {why}")
    return False
