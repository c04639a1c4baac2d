"""Give a clone's devices backends of their own, or none.

The guest sees only the device, not its backend on the host. Neither is a backend part of the image
of its RAM.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from xml.etree.ElementTree import Element, SubElement

_CHARACTER_DEVICES = ("serial", "parallel", "console", "channel", "redirdev", "smartcard")
_OWN_BACKENDS = ("pty", "null", "stdio", "vc", "spicevmc", "spiceport", "qemu-vdagent", "dbus")
_NAMED = ("spiceport", "dbus")
"""These have a name, which programs use that connect to the clone's own display."""
_SCREENS = ("vnc", "spice", "egl-headless", "dbus")
"""The other types are windows on the host's screen, or have a fixed port."""
_SOUND = ("none", "spice", "dbus")
"""The other types use the host's sound, or files."""
_RANDOM = ("/dev/urandom", "/dev/random")


def character_devices(root: Element, files: str) -> None:
    """Give serial ports, consoles, channels and the like backends of the clone's own.

    A file is replaced by one in the directory ``files``. A backend that only one guest can have (a
    socket, port or device) is replaced by the null backend.
    """
    logs: dict[str, str] = {}
    for tag in _CHARACTER_DEVICES:
        for element in root.findall(f"devices/{tag}"):
            if tag != "smartcard" or element.get("mode") == "passthrough":
                _character_device(element, files, logs)


def _character_device(element: Element, files: str, logs: dict[str, str]) -> None:
    kind = element.get("type", "pty")
    source = element.find("source")
    for name in ("log", "source", "protocol"):
        for old in element.findall(name):
            element.remove(old)
    element.attrib.pop("tty", None)
    if kind == "file" and source is not None:
        original = source.get("path", "")  # a console repeats the file of its serial device
        number = f"{len(logs)}." if logs and original not in logs else ""
        # no name that another file of the clone has, such as that of its UEFI variables
        own = f"{files}/log-{number}{PurePosixPath(original).name}"
        append = {key: value for key, value in source.items() if key == "append"}
        SubElement(element, "source", append, path=logs.setdefault(original, own))
    elif kind in _NAMED and source is not None:
        SubElement(element, "source", channel=source.get("channel", ""))
    elif kind not in _OWN_BACKENDS and not (kind == "unix" and element.tag == "channel"):
        element.set("type", "null")  # libvirt creates the socket of a channel


def displays(root: Element) -> None:
    """Replace displays by such as only this clone has, at libvirt's default addresses."""
    devices = root.find("devices")
    for element in root.findall("devices/graphics"):
        if element.get("type") not in _SCREENS:
            if element.find("gl[@enable='yes']") is None:
                assert devices is not None
                devices.remove(element)
                continue
            element.clear()
            element.set("type", "egl-headless")
        for name in ("port", "tlsPort", "websocket", "socket", "listen", "address"):
            element.attrib.pop(name, None)
        if element.get("type") in ("vnc", "spice"):
            element.set("autoport", "yes")
        for listen in element.findall("listen"):
            if listen.get("type") in ("none", "socket"):
                listen.attrib.pop("socket", None)
            else:
                element.remove(listen)
    for element in root.iter():
        if element.tag in ("gl", "acceleration"):
            element.attrib.pop("rendernode", None)


def other_backends(root: Element) -> None:
    """Replace sound by silence, random numbers by the emulator's own, and remove input devices."""
    for element in root.findall("devices/audio"):
        if element.get("type") not in _SOUND:
            number = element.get("id", "1")
            element.clear()
            element.attrib.update(id=number, type="none")
    for rng in root.findall("devices/rng"):
        for backend in rng.findall("backend"):
            if backend.get("model") != "random" or (backend.text or "").strip() not in _RANDOM:
                backend.clear()
                backend.set("model", "builtin")
    for devices in root.findall("devices"):
        for element in devices.findall("input[@type='evdev']"):
            devices.remove(element)  # not a device of the guest: it feeds the others
