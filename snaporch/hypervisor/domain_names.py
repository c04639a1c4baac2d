"""The names of domains for the completion of a command line, without a domain's XML."""

from __future__ import annotations

import libvirt


def domain_names(uri: str) -> list[str]:
    """The names of all domains.

    The connection is read-only: libvirt never asks for a password to open it.

    Raises:
        libvirt.libvirtError: libvirt does not answer at ``uri``.
    """
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    connection = libvirt.openReadOnly(uri)
    return [each.name() for each in connection.listAllDomains(0)]
