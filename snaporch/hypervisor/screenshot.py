"""Take a screenshot of a guest."""

from __future__ import annotations

from typing import Any

import libvirt

from snaporch.hypervisor.interface import Screenshot

_SUFFIXES = {"image/png": "png", "image/x-portable-pixmap": "ppm"}


def take_screenshot(connection: Any, handle: Any) -> Screenshot | None:
    """The first screen of a running domain; ``None`` if it has none."""
    data = bytearray()
    try:
        stream = connection.newStream(0)
        kind = handle.screenshot(stream, 0)
        stream.recvAll(lambda _stream, block, _opaque: data.extend(block), None)
        stream.finish()
    except libvirt.libvirtError:
        return None
    return Screenshot(bytes(data), _SUFFIXES.get(kind, "image"))
