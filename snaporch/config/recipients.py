"""Public keys of ``age`` that bundles can be encrypted for: their form, and their checksum."""

from __future__ import annotations

import re
from base64 import b64decode

_AGE = re.compile(r"age1([02-9ac-hj-np-z]{58})")
_SSH = re.compile(r"ssh-ed25519 ([A-Za-z0-9+/]{68})( [A-Za-z0-9_.@:+-]{1,200})?")
_SSH_BEGIN = b"\0\0\0\x0bssh-ed25519\0\0\0\x20"
_BECH32 = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
_GENERATOR = (0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)
_PREFIX = (3, 3, 3, 0, 1, 7, 5)
"""``age`` in the checksum: the three high bits of each character, 0, and the five low ones."""


def is_recipient(text: str) -> bool:
    """Whether a text is a public key: its form, and the checksum of ``age1…``, are right."""
    if match := _AGE.fullmatch(text):
        return _has_checksum(match[1])
    ssh = _SSH.fullmatch(text)
    return ssh is not None and b64decode(ssh[1]).startswith(_SSH_BEGIN)


def check_recipient(text: str) -> str:
    """Return a public key.

    Raises:
        ValueError: the text is none, or has a mistake in it.
    """
    if _AGE.fullmatch(text) and not is_recipient(text):
        raise ValueError("must be a public key of age-keygen, with the right checksum")
    if not is_recipient(text):
        raise ValueError(
            "must be a public key: age1… as age-keygen prints it, or ssh-ed25519 …; never the "
            "private key"
        )
    return text


def _has_checksum(data: str) -> bool:
    """Whether the last six characters are the checksum of the others (bech32, BIP 173)."""
    checksum = 1
    for value in (*_PREFIX, *map(_BECH32.index, data)):
        top, checksum = checksum >> 25, (checksum & 0x1FFFFFF) << 5 ^ value
        for bit, generator in enumerate(_GENERATOR):
            checksum ^= generator if top >> bit & 1 else 0
    return checksum == 1
