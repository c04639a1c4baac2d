"""QEMU arguments in ``<qemu:commandline>``: libvirt passes them on and knows nothing of them.

A drive that is named there is no disk of the domain: it is in no snapshot, and a clone would use
the original's. So only what is known to name no file, device or network is let through.
"""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element

_QEMU = "{http://libvirt.org/schemas/domain/qemu/1.0}"
_OPTIONS = frozenset({"cpu", "global", "icount", "machine", "msg", "overcommit", "rtc", "set"})
_DEVICE = "device"
_NAMES = re.compile(r"/|\b(drive|file|filename|path|host|netdev|chardev|mem-path|memdev|fd)=")
"""What in the value of an option names something outside of the emulator."""


def unknown_argument(root: Element) -> str | None:
    """The first argument that may name a file, a device or a network; ``None`` without one."""
    option = ""
    for element in root.findall(f"{_QEMU}commandline/{_QEMU}arg"):
        value = element.get("value", "")
        if value.startswith("-") and not option:
            option = value.lstrip("-")
            if option not in _OPTIONS and option != _DEVICE:
                return value
            continue
        if not option or _NAMES.search(value):
            return f"-{option} {value}" if option else value
        option = ""
    return None
