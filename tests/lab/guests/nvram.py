"""Reads the UEFI probe's variable from an NVRAM file, without the guest."""

import struct
import uuid
from pathlib import Path

_NAME = "SnaporchProbe\0".encode("utf-16-le")
_VENDOR = uuid.UUID("5c3f1e52-2a8b-4b0e-9d1f-736e61706f72").bytes_le
# AUTHENTICATED_VARIABLE_HEADER in EDK II: 0x55aa, state, ..., vendor GUID.
_HEADER = struct.Struct("<HBxIQ16sIII16s")
_ADDED = 0x3F
_BEING_REPLACED = 0x3E
# The variable store of OVMF_VARS_4M.fd; what follows are scratch copies.
_STORE = 0x40000


def probe_value(nvram: Path) -> int | None:
    """What the guest would print as NVRAM at its next power-on.

    None if the variable is not in the file. Power-on number in the upper 16
    bits, the count at which it was set in the lower 16.
    """
    store = nvram.read_bytes()[:_STORE]
    found: dict[int, int] = {}
    place = store.find(_VENDOR + _NAME)
    while place >= 0:
        header = place + len(_VENDOR) - _HEADER.size
        start, state, *_ = _HEADER.unpack_from(store, header)
        if start == 0x55AA and state in (_ADDED, _BEING_REPLACED):
            (value,) = struct.unpack_from("<I", store, place + len(_VENDOR + _NAME))
            found[state] = int(value)
        place = store.find(_VENDOR + _NAME, place + 1)
    return found.get(_ADDED, found.get(_BEING_REPLACED))
