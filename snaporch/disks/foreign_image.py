"""Which other files an emulator opens with an image that came from another host.

The image may be forged: its header may name any file or device of this host, whose content the
guest would get. What an archive may have is decided by :mod:`snaporch.archive.unpack`, what a copy
may have by :mod:`snaporch.restore.foreign_images`.
"""

from __future__ import annotations

from snaporch.hypervisor.qcow2 import SELF_CONTAINED, HeaderError, is_qcow2, read_qcow2
from snaporch.zfs_names import quoted


def named_by(descriptor: int, form: str) -> list[tuple[str, str]]:
    """The names in the header of an image, each with the format of that file.

    Args:
        descriptor: of the open image; at most a few KiB are read.
        form: the format that the definition has for it; empty if it is not known.

    Returns: names as they are in the header, the same one twice if it is the backing file and the
        data file; of a backing file without a format, an empty format.

    Raises:
        HeaderError: it is damaged, or its format may name files in a way that is not read here.
        OSError: it cannot be read.
    """
    if form in SELF_CONTAINED or (not form and not is_qcow2(descriptor)):
        return []
    if form not in ("", "qcow2"):
        raise HeaderError(f"has the format {quoted(form)}, which may name other files")
    header = read_qcow2(descriptor)
    if header.data_file == "":
        raise HeaderError("has its data in a file that its header does not name")
    found = [] if header.backing is None else [(header.backing, header.backing_format or "")]
    return found if header.data_file is None else [*found, (header.data_file, "raw")]
