"""Telling systemd how it goes: sd_notify(3) without its library."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

_SECONDS = 1.0
"""A listener that reads nothing must not hold us up: datagrams to it wait for room (unix(7))."""


def notify(*lines: str) -> None:
    """Send ``NAME=value`` lines to whoever started us, if it wants to know."""
    place = os.environ.get("NOTIFY_SOCKET", "")
    if not place.startswith(("/", "@")):
        return
    address = "\0" + place[1:] if place.startswith("@") else place
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stream:
        stream.settimeout(_SECONDS)
        stream.sendto("\n".join(lines).encode(), address)


def watchdog_seconds() -> float | None:
    """How often systemd wants to hear ``WATCHDOG=1``; ``None`` when it does not."""
    length, whose = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not length.isdecimal() or int(length) == 0 or whose not in ("", str(os.getpid())):
        return None
    return int(length) / 1_000_000
