"""Whether UEFI variables and TPM state can be put back where the definition has them.

Whether a snapshot can save them is checked by :mod:`snaporch.snapshot.firmware_blockers`.
"""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

from snaporch.bundle.manifest import Part, Role
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.hypervisor import domain_xml
from snaporch.restore.disk_checks import is_read_only

_LEAVE = "restore with --disks-only, which leaves it as it is"


def unfit_files(
    context: Context, thing: str, uuid: str, parts: list[Part], xmls: list[str]
) -> dict[str, RefusedError]:
    """Return for each NVRAM and TPM part that cannot be put back the reason why.

    The definition has another path, the path is not a regular file, the file system is read-only,
    or another domain uses the path.

    Args:
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
        except RefusedError as error:
            found[part.name] = error
    return found


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
