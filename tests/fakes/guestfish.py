"""The command ``guestfish``, without an appliance: the commands that snaporch sends it.

The guest's only file system is a directory of the test.
"""

import sys
from pathlib import Path

_PROGRAM = """\
#!{python}
import os, re, sys, time

TREE = {tree!r}

def words(line):
    found = re.findall(r'"((?:[^"\\\\\\\\]|\\\\\\\\x..)*)"|(\\\\S+)', line)
    return [
        re.sub(rb"\\\\\\\\x(..)", lambda m: bytes((int(m[1], 16),)), (quoted or plain).encode())
        for quoted, plain in found
    ]

def inside(path):
    return TREE.encode() + path

def say(data):
    sys.stdout.buffer.write(data + b"\\\\n")

def lstatns(path):
    found = os.lstat(inside(path))
    for name in ("dev", "ino", "mode", "nlink", "uid", "gid", "size"):
        say(b"st_%s: %d" % (name.encode(), getattr(found, "st_" + name)))
    say(b"st_mtime_sec: %d" % (found.st_mtime_ns // 10**9))
    say(b"st_mtime_nsec: %d" % (found.st_mtime_ns % 10**9))

def ls0(path, to):
    names = os.listdir(inside(path))
    with open(to, "wb") as stream:
        stream.write(b"".join(name + b"\\\\0" for name in names))

def download(path, to):
    with open(inside(path), "rb") as reading, open(to, "wb") as stream:
        stream.write(reading.read())

def realpath(path):
    found = os.path.realpath(inside(path), strict=True)
    say(found[len(os.path.realpath(TREE)):] or b"/")

def flood():
    while True:
        say(b"x" * 100000)

def hang():
    if os.fork() == 0:
        time.sleep(1000)
    time.sleep(1000)

COMMANDS = {{
    "add-drive": lambda *_: None,
    "run": lambda: None,
    "echo": say,
    "list-filesystems": lambda: say(b"/dev/sda1: ext4"),
    "inspect-os": lambda: None,
    "mount-ro": lambda *_: None,
    "lstatns": lstatns,
    "ls0": ls0,
    "download": download,
    "readlink": lambda path: say(os.readlink(inside(path))),
    "realpath": realpath,
    "flood": flood,
    "hang": hang,
}}

for line in sys.stdin:
    may_fail, line = line.startswith("-"), line.removeprefix("-")
    name, *arguments = words(line)
    try:
        COMMANDS[name.decode()](*arguments)
    except OSError as error:
        reason = f"libguestfs: error: {{name.decode()}}: {{error.strerror}}"
        print(reason, file=sys.stderr, flush=True)
        if not may_fail:
            sys.exit(1)
    sys.stdout.flush()
"""


def put_in(directory: Path, tree: Path) -> Path:
    """Make the command in a directory; the guest's files are those below ``tree``."""
    path = directory / "guestfish"
    text = _PROGRAM.format(python=sys.executable, tree=str(tree)).replace("\\\\", "\\")
    path.write_text(text)
    path.chmod(0o755)
    return path
