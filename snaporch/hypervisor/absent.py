"""A machine without libvirt, which only keeps copies: it has no guests.

No import of libvirt: its Python bindings may be missing, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, cast

from snaporch.default_paths import LIBVIRT_URI
from snaporch.errors import NoSuchDomainError, UnavailableError
from snaporch.hypervisor.interface import Hypervisor
from snaporch.known_faults import Component
from snaporch.model import Domain

PLACES = (
    "/usr/sbin/libvirtd",
    "/usr/sbin/virtqemud",
    "/run/libvirt/libvirt-sock",
    "/run/libvirt/virtqemud-sock",
)
"""The daemons and sockets of libvirt; a host with guests has one of them."""
DEFINITIONS = Path("/etc/libvirt/qemu")
"""Where libvirt keeps the definitions of guests, also after it was removed."""
_REASON = "libvirt is not installed on this machine"
_STEP = "apt install libvirt-daemon-system qemu-system-x86"


def is_expected(uri: str, places: Sequence[str] = PLACES, definitions: Path = DEFINITIONS) -> bool:
    """Whether this machine has libvirt or guests, also if libvirt does not run.

    Args:
        uri: of the configuration; one that was changed names a libvirt elsewhere.
        places: files of which an installation has at least one.
        definitions: the directory of the guests' definitions.
    """
    has_guests = uri != LIBVIRT_URI or any(definitions.glob("*.xml"))
    return has_guests or any(map(os.path.lexists, places))


class NoGuests:
    """Lists no guests; everything else needs libvirt, and is refused."""

    def domains(self) -> list[Domain]:
        """There are none."""
        return []

    def find(self, _uuid: str) -> None:
        """There is none."""

    def domain(self, name: str) -> Domain:
        """See :class:`~snaporch.hypervisor.interface.Hypervisor`."""
        raise NoSuchDomainError(name, f"no such domain: {_REASON}")

    def releases(self) -> Mapping[Component, str]:
        """There is neither libvirt nor QEMU."""
        return {}

    def reads_zstd(self) -> bool:
        """It would: any libvirt that is installed now does."""
        return True

    def start_hook_problem(self) -> None:
        """There is no guest that could be started."""

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse every other operation."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnavailableError("libvirt", _REASON, _STEP)


def no_guests() -> Hypervisor:
    """The hypervisor of a machine without libvirt."""
    return cast("Hypervisor", NoGuests())
