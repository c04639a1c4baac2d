"""The command ``guestfish``, without an appliance: the commands that snaporch sends it.

The guest's only file system is a directory of the test.
"""

import sys
from pathlib import Path

_PROGRAM = """\
#!{python}
import os, re, resource, sys, time

TREE, ANSWERS = {tree!r}, {answers!r}

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

def pread(path, count, offset):
    with open(inside(path), "rb") as reading:
        reading.seek(int(offset))
        sys.stdout.buffer.write(reading.read(int(count)))

def realpath(path):
    found = os.path.realpath(inside(path), strict=True)
    say(found[len(os.path.realpath(TREE)):] or b"/")

def deaf():
    while True:
        say(b"x" * 100)
        time.sleep(0.01)

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
    **dict.fromkeys(("list-devices", "list-partitions", "lvs", "list-md-devices"), lambda: None),
    "vfs-type": lambda _device: say(b""),
    "inspect-os": lambda: None,
    "limits": lambda: say(str(resource.getrlimit(resource.RLIMIT_FSIZE)[0]).encode()),
    "deaf": deaf,
    "ping-daemon": lambda: os.stat(TREE) and None,
    "pread": pread,
    **dict.fromkeys(("inspect-get-type", "part-get-parttype"), lambda *_: say(b"unknown")),
    "end": lambda: sys.exit(1),
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
    request = b" ".join((name, *arguments)).decode("utf-8", "replace")
    try:
        if request in ANSWERS:
            say(ANSWERS[request].encode())
            sys.stdout.flush()
            continue
        COMMANDS[name.decode()](*arguments)
    except OSError as error:
        reason = f"libguestfs: error: {{name.decode()}}: {{error.strerror}}"
        print(reason, file=sys.stderr, flush=True)
        if not may_fail:
            sys.exit(1)
    sys.stdout.flush()
"""


def put_in(directory: Path, tree: Path, answers: dict[str, str] | None = None) -> Path:
    """Make the command in a directory; the guest's files are those below ``tree``.

    Args:
        answers: what certain commands answer instead, by the whole command.
    """
    path = directory / "guestfish"
    values = {"python": sys.executable, "tree": str(tree), "answers": answers or {}}
    text = _PROGRAM.format(**values).replace("\\\\", "\\")
    path.write_text(text)
    path.chmod(0o755)
    return path
