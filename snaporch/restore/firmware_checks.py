"""Whether UEFI variables and TPM state can be put back where the definition has them.

Whether a snapshot can save them is checked by :mod:`snaporch.snapshot.firmware_blockers`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from xml.etree.ElementTree import Element

from snaporch.bundle.firmware_files import LIMIT_BYTES, is_swtpm_file
from snaporch.bundle.manifest import Part, Role
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.hypervisor import domain_xml
from snaporch.hypervisor.qcow2 import HeaderError, check_variables
from snaporch.restore.disk_checks import is_read_only
from snaporch.zfs_names import quoted

_LEAVE = "restore with --disks-only, which leaves it as it is"


def unfit_files(
    context: Context, thing: str, uuid: str, bundle: Path, parts: list[Part], xmls: list[str]
) -> dict[str, RefusedError]:
    """Return for each NVRAM and TPM part that cannot be put back the reason why.

    The definition has another path, the path is not a regular file, the file system is read-only,
    another domain uses the path, or the file is refused by :func:`check_firmware_file`.

    Args:
        bundle: the directory of the parts.
        xmls: definitions of the guest, from the bundle and of today.

    Returns: the errors, by the name of the part.
    """
    roots = [domain_xml.parse(xml) for xml in xmls]
    stores = {domain_xml.nvram(root) for root in roots}
    states = [state for state in map(domain_xml.tpm_state, roots) if state is not None]
    found = {}
    for part in parts:
        place = Path(part.source or "")
        if part.role is Role.NVRAM:
            own = str(place) in stores
        elif part.role is Role.TPM:
            own = any(state.holds(place) for state in states)
        else:
            continue
        try:
            _check_place(context, thing, uuid, place)
            _check_own(thing, part, own=own)
            check_firmware_file(thing, part, _content(bundle / part.name), roots)
        except RefusedError as error:
            found[part.name] = error
    return found


def check_firmware_file(
    thing: str, part: Part, data: bytes, definitions: Collection[Element]
) -> None:
    """Refuse a file that no such guest could have, or by which its emulator would open another.

    An emulator opens its UEFI variables for writing, and may have written them itself.

    Args:
        thing: the subject of the error.
        part: of the bundle or archive; others than UEFI variables and TPM state are not checked.
        data: its content.
        definitions: those that the guest may have afterwards.

    Raises:
        RefusedError: with the reason.
    """
    if part.role is Role.TPM:
        name = Path(part.source or "").name
        states = filter(None, map(domain_xml.tpm_state, definitions))
        if not any(state.is_file or is_swtpm_file(name) for state in states):
            raise RefusedError(thing, f"its TPM has an unknown file: {quoted(name)}")
    if part.role is Role.NVRAM:
        if not any(map(domain_xml.nvram, definitions)):
            raise RefusedError(thing, "has UEFI variables, and its definition does not")
        formats = set().union(*map(domain_xml.nvram_formats, definitions))
        try:
            check_variables(data, formats)
        except HeaderError as error:
            raise RefusedError(thing, f"its {part.name} {error}") from error


def _content(path: Path) -> bytes:
    """The content of a part, as far as it has a sensible size; empty if it cannot be read."""
    with suppress(OSError), path.open("rb") as stream:  # `check_bundle` reads it, and refuses that
        return stream.read(LIMIT_BYTES)
    return b""


def _check_own(thing: str, part: Part, *, own: bool) -> None:
    if not own or not (part.source or "").startswith("/"):
        raise RefusedError(
            thing,
            f"its {part.role} belongs to {part.source}, which is not what its definition says",
            f"define it as it should be, or {_LEAVE}",
        )


def _check_place(context: Context, thing: str, uuid: str, place: Path) -> None:
    try:
        if not stat.S_ISREG(place.lstat().st_mode):
            raise RefusedError(
                thing,
                f"{place} is not a regular file, and would be replaced",
                f"move it away, or {_LEAVE}",
            )
    except FileNotFoundError:
        pass
    if place.parent.is_dir() and is_read_only(place.parent):
        step = f"make it writable, or {_LEAVE}"
        raise RefusedError(
            thing, f"{place.parent} is read-only, and {place.name} has to be written there", step
        )
    real = Path(os.path.realpath(place))
    for other in context.hypervisor.domains():
        if other.uuid == uuid:
            continue
        names = (other.nvram, *(disk.source for disk in other.disks))
        used = {os.path.realpath(name) for name in names if name}
        state = other.tpm_state
        if state:
            state = replace(state, path=os.path.realpath(state.path))
        if str(real) in used or (state and state.holds(real)):
            raise RefusedError(
                thing,
                f"{place} is used by the domain {other.name}",
                f"give {other.name} a file of its own, or {_LEAVE}",
            )
