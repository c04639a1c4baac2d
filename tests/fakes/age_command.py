"""A command ``age`` that hides nothing: it writes what it was given behind a header.

As with the real one, encrypting twice gives different bytes, only an identity of a recipient
decrypts, and a changed byte is an error at the end of its 64 KiB.
"""

import hashlib
import os
import stat
import sys
from pathlib import Path

_BLOCK = 1 << 16
IDENTITY = "AGE-SECRET-KEY-FAKE-"
_BECH32 = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
_GENERATOR = (0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)
_MAGIC = b"fake age\n"


def install(directory):
    """Put the command into a directory, for ``PATH``."""
    path = Path(directory) / "age"
    path.write_text(f"#!{sys.executable} -I\n{Path(__file__).read_text()}\nmain(sys.argv[1:])\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return directory


def recipient(number):
    """The public key of an identity: eight characters of bech32, and a checksum."""
    data = "q" * 44 + "".join("qpzry9x8"[int(each)] for each in f"{number:08o}")
    check = 1
    for value in (3, 3, 3, 0, 1, 7, 5, *map(_BECH32.index, data), *[0] * 6):
        top, check = check >> 25, (check & 0x1FFFFFF) << 5 ^ value
        for bit, generator in enumerate(_GENERATOR):
            check ^= generator if top >> bit & 1 else 0
    return f"age1{data}" + "".join(_BECH32[(check ^ 1) >> 5 * (5 - n) & 31] for n in range(6))


def write_identity(path, number):
    """Write an identity as ``age-keygen`` does; return its recipient."""
    path.write_text(f"# public key: {recipient(number)}\n{IDENTITY}{number}\n")
    return recipient(number)


def fail(reason):
    sys.stderr.write(f"age: error: {reason}\nage: report unexpected or unhelpful errors at …\n")
    sys.exit(1)


def encrypt(recipients):
    if any("b" in each.removeprefix("age1") for each in recipients):
        fail(f"malformed recipient {recipients[0]!r}")
    salt = os.urandom(16)
    sys.stdout.buffer.write(_MAGIC + "\n".join(recipients).encode() + b"\n\n" + salt)
    while block := sys.stdin.buffer.read(_BLOCK):
        sys.stdout.buffer.write(block + hashlib.sha256(salt + block).digest()[:16])


def decrypt(file):
    lines = Path(file).read_text().splitlines()
    numbers = [line.removeprefix(IDENTITY) for line in lines if line.startswith(IDENTITY)]
    source = sys.stdin.buffer
    if source.readline() != _MAGIC:
        fail("failed to read header: parsing age header: unexpected intro")
    recipients = []
    while (line := source.readline().strip()) != b"":
        recipients.append(line.decode())
    if not {recipient(int(each)) for each in numbers} & {*recipients}:
        fail("no identity matched any of the recipients")
    salt = source.read(16)
    while found := source.read(_BLOCK + 16):
        block, tag = found[:-16], found[-16:]
        if hashlib.sha256(salt + block).digest()[:16] != tag:
            fail("failed to decrypt and authenticate payload chunk")
        sys.stdout.buffer.write(block)


def main(words):
    """Do what the words ask for."""
    if words[0] == "--encrypt":
        encrypt([each for word, each in zip(words[1::2], words[2::2], strict=True) if word == "-r"])
    else:
        decrypt(words[words.index("--identity") + 1])
