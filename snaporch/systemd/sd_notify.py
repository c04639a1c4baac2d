"""Service notifications to systemd: sd_notify(3) without its library."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify(*lines: str, seconds: float = 1.0) -> None:
    """Send ``NAME=value`` lines to the service manager, if ``NOTIFY_SOCKET`` is set.

    Args:
        seconds: the time limit; sending blocks if the receiver does not read (unix(7)).
    """
    place = os.environ.get("NOTIFY_SOCKET", "")
    if not place.startswith(("/", "@")):
        return
    address = "\0" + place[1:] if place.startswith("@") else place
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stream:
        stream.settimeout(seconds)
        stream.sendto("\n".join(lines).encode(), address)


def watchdog_seconds() -> float | None:
    """Seconds within which systemd expects ``WATCHDOG=1``; ``None`` without a watchdog."""
    length, whose = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not length.isdecimal() or int(length) == 0 or whose not in ("", str(os.getpid())):
        return None
    return int(length) / 1_000_000
