"""Making a LUKS container without qemu-img, whose benchmark never ends in User-Mode Linux.

LUKS1 as in its specification (on-disk format 1.2.3), with one key slot and few iterations.
"""

import ctypes
import ctypes.util
import hashlib
import os
import struct
from pathlib import Path

_SECTOR = 512
_KEY_BYTES = 32
_STRIPES = 4000
_ITERATIONS = 1000
_SLOT_SECTORS = 256
_FIRST_SLOT = 8
PAYLOAD_SECTORS = 4096
_ENABLED, _DISABLED = 0x00AC71F3, 0x0000DEAD


def make_container(path: Path, passphrase: bytes, size: int) -> None:
    """A container for a disk of ``size`` bytes; what the disk holds is not written."""
    key, salts = os.urandom(_KEY_BYTES), [os.urandom(32) for _ in range(2)]
    digest = hashlib.pbkdf2_hmac("sha256", key, salts[0], _ITERATIONS, 20)
    header = struct.pack(">6sH32s32s32sII", b"LUKS\xba\xbe", 1, b"aes", b"cbc-plain64", b"sha256",
                         PAYLOAD_SECTORS, _KEY_BYTES)  # fmt: skip
    header += digest + salts[0] + struct.pack(">I", _ITERATIONS)
    header += b"5a1d5a1d-0000-4000-8000-000000000001".ljust(40, b"\0")
    for slot in range(8):
        state, salt = (_DISABLED, bytes(32)) if slot else (_ENABLED, salts[1])
        place = _FIRST_SLOT + slot * _SLOT_SECTORS
        header += struct.pack(">II32sII", state, 0 if slot else _ITERATIONS, salt, place, _STRIPES)
    material = _encrypt(
        _split(key), hashlib.pbkdf2_hmac("sha256", passphrase, salts[1], _ITERATIONS, _KEY_BYTES)
    )
    with path.open("r+b") as image:
        image.truncate(0)
        image.truncate(PAYLOAD_SECTORS * _SECTOR + size)
        image.write(header)
        image.seek(_FIRST_SLOT * _SECTOR)
        image.write(material)


def _split(key: bytes) -> bytes:
    """The key, in stripes all of which are needed to get it back; all but the last are zeros."""
    state = bytes(_KEY_BYTES)
    for _ in range(_STRIPES - 1):
        state = hashlib.sha256(bytes(4) + state).digest()
    last = bytes(a ^ b for a, b in zip(state, key, strict=True))
    return bytes(_KEY_BYTES * (_STRIPES - 1)) + last


def _encrypt(data: bytes, key: bytes) -> bytes:
    """AES-256-CBC sector by sector, by OpenSSL's library, which Python has loaded for hashlib."""
    library = ctypes.CDLL(ctypes.util.find_library("crypto") or "libcrypto.so.3")
    library.EVP_CIPHER_CTX_new.restype = library.EVP_aes_256_cbc.restype = ctypes.c_void_p
    cipher = ctypes.c_void_p(library.EVP_aes_256_cbc())
    context = ctypes.c_void_p(library.EVP_CIPHER_CTX_new())
    done = b""
    for number in range(len(data) // _SECTOR):
        sector = data[number * _SECTOR : (number + 1) * _SECTOR]
        out, length = ctypes.create_string_buffer(_SECTOR + 32), ctypes.c_int()
        vector = struct.pack("<QQ", number, 0)
        assert library.EVP_EncryptInit_ex(context, cipher, None, key, vector) == 1
        library.EVP_CIPHER_CTX_set_padding(context, 0)
        assert library.EVP_EncryptUpdate(context, out, ctypes.byref(length), sector, _SECTOR) == 1
        done += out.raw[: length.value]
    library.EVP_CIPHER_CTX_free(context)
    return done
