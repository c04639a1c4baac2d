"""Take a screenshot of a guest."""

from __future__ import annotations

from typing import Any

import libvirt

from snaporch.hypervisor.interface import HypervisorError, Screenshot

_SUFFIXES = {"image/png": "png", "image/x-portable-pixmap": "ppm"}
_NO_SCREEN = (libvirt.VIR_ERR_OPERATION_INVALID, libvirt.VIR_ERR_NO_SUPPORT)
"""libvirt's answers for a running domain without a screen, or from a driver without screenshots."""
_LIMIT = 256 << 20
"""Bytes; a guest chooses the size of its screen. It is that of two screens of 8K."""


def take_screenshot(connection: Any, handle: Any) -> Screenshot | None:
    """The first screen of a running domain; ``None`` if it has none.

    Raises:
        HypervisorError: the image is too large.
        libvirt.libvirtError: the domain has ended, or libvirt cannot take the screenshot.
    """
    data = bytearray()

    def take(_stream: Any, block: bytes, _opaque: Any) -> None:
        data.extend(block)
        if len(data) > _LIMIT:
            raise HypervisorError(handle.name(), f"has a screenshot of over {_LIMIT >> 20} MiB")

    stream = connection.newStream(0)
    try:
        kind = handle.screenshot(stream, 0)
    except libvirt.libvirtError as error:
        if error.get_error_code() in _NO_SCREEN and handle.isActive():
            return None
        raise
    stream.recvAll(take, None)
    stream.finish()
    return Screenshot(bytes(data), _SUFFIXES.get(kind, "image"))
