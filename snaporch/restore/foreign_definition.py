"""What the definition of a snapshot that came from another host may not have, unless accepted.

It may be forged, and libvirt runs as root: an argument of QEMU or the script of an interface may
start a program, and a security label may give the emulator another user. Paths and devices are
shown to the admin instead. What an import refuses besides is in :mod:`snaporch.archive.import_xml`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from snaporch.catalog.records import COPY
from snaporch.errors import RefusedError
from snaporch.hypervisor.domain_xml import parse
from snaporch.hypervisor.foreign_xml import confining
from snaporch.model import PoolSnapshot


def came_from_elsewhere(members: Iterable[PoolSnapshot]) -> bool:
    """Whether snapshots came to this host from a replica or source: ``snaporch:copy`` says so."""
    return any(COPY in each.properties for each in members)


def check_foreign_definitions(
    thing: str, definitions: Sequence[str], accepted: Collection[str]
) -> None:
    """Refuse definitions of another host with arguments for QEMU, programs or security labels.

    Args:
        thing: the subject of the error.
        definitions: of the bundle.
        accepted: elements that the admin accepts, such as ``qemu:commandline``.

    Raises:
        RefusedError: with the option that accepts them.
    """
    found = sorted(set().union(*(confining(parse(xml)) for xml in definitions)) - set(accepted))
    if found:
        names = " and ".join(f"<{name}>" for name in found)
        options = " ".join(f"--accept {name}" for name in found)
        reason = f"its definition comes from another host, and has {names}"
        raise RefusedError(thing, reason, f"read it first; if that is what you want: {options}")
