"""The door that a killed holder of a window left behind: a socket nobody listens at."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from snaporch.default_paths import WINDOW


@contextmanager
def address(path: Path) -> Iterator[str]:
    """``path`` as a socket address, which may be no longer than 107 bytes (unix(7))."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


@contextmanager
def only_visitor(door: Path, *, wait: bool) -> Iterator[bool]:
    """Whether nobody else is about to have a holder started, nor will be meanwhile."""
    lock = os.open(f"{door}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(lock)


def connect(door: Path) -> socket.socket | None:
    """A connection to the holder of a window; ``None`` when there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with address(door) as name:
            connection.connect(name)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return connection


def remove_if_dead(runtime: Path, uuid: str) -> None:
    """Remove the door of a domain if nobody is behind it; whoever finds it there does so too."""
    door = runtime / f"{uuid}{WINDOW}"
    if not door.exists():
        return
    with only_visitor(door, wait=False) as alone:
        if not alone:
            return
        connection = connect(door)
        if connection is None:
            door.unlink(missing_ok=True)
        else:
            connection.close()
