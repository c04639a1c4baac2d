"""The socket of the process that holds a guest for sanoid; removed if that process was killed."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from snaporch.default_paths import HOLD_SOCKET_SUFFIX


@contextmanager
def address(path: Path) -> Iterator[str]:
    """``path`` as a socket address, which may be at most 107 bytes long (unix(7))."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


@contextmanager
def starter_lock(path: Path, *, wait: bool) -> Iterator[bool]:
    """Take the lock that a hook holds while it starts the holding process; yields whether it could.

    Args:
        path: the socket's path.
        wait: wait for the lock.
    """
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(lock)


def connect(path: Path) -> socket.socket | None:
    """Connect to the process that holds the guest; ``None`` when no process listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with address(path) as name:
            connection.connect(name)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return connection


def remove_if_dead(runtime: Path, uuid: str) -> None:
    """Remove a domain's socket if no process listens on it; hooks that find it do so, too."""
    path = runtime / f"{uuid}{HOLD_SOCKET_SUFFIX}"
    if not path.exists():
        return
    with starter_lock(path, wait=False) as alone:
        if not alone:
            return
        connection = connect(path)
        if connection is None:
            path.unlink(missing_ok=True)
        else:
            connection.close()
