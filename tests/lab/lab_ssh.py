"""The lab as its own other machine: an sshd on its loopback that lets root in."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOME = Path("/root/.ssh")
_PLACE = Path("/run/lab-sshd")
_PORT = 2222
"""Where systemd is init, Debian's own sshd has the usual one."""


def _run(*words: str) -> str:
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return done.stdout


@contextmanager
def sshd_here() -> Iterator[str]:
    """Root can log in to the host it yields, by a key and without a question."""
    _HOME.mkdir(mode=0o700, exist_ok=True)
    _PLACE.mkdir(mode=0o700, exist_ok=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    for key in (_HOME / "id_ed25519", _PLACE / "host"):
        if not key.exists():
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    public = (_HOME / "id_ed25519.pub").read_text()
    (_HOME / "authorized_keys").write_text(public)
    kind, host_key, *_ = (_PLACE / "host.pub").read_text().split()
    (_HOME / "known_hosts").write_text(f"[localhost]:{_PORT} {kind} {host_key}\n")
    (_HOME / "config").write_text(f"Host localhost\n    Port {_PORT}\n")
    options = {
        "ListenAddress": f"127.0.0.1:{_PORT}",
        "HostKey": str(_PLACE / "host"),
        "PermitRootLogin": "prohibit-password",
        "PidFile": "none",
        "UsePAM": "no",
    }
    words = [word for pair in options.items() for word in ("-o", "=".join(pair))]
    log = (_PLACE / "log").open("ab")
    server = subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", *words], stderr=log)
    try:
        _answers(server)
        yield "root@localhost"
    finally:
        # Its sessions outlast it, if what uses them was killed.
        subprocess.run(["pkill", "-P", str(server.pid)], check=False)
        server.terminate()
        server.wait()
        log.close()


def _answers(server: subprocess.Popen[bytes]) -> None:
    """Wait until it does: ssh itself tries again, once a second."""
    words = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectionAttempts=60", "root@localhost", "true"]
    try:
        _run(*words)
    except subprocess.CalledProcessError as error:
        said = (_PLACE / "log").read_text()
        raise AssertionError(f"{error.stderr}{said} (sshd: {server.poll()})") from error


RECEIVING_USER = "snaporch-copies"
RECEIVING_HOST = f"{RECEIVING_USER}@localhost"
PERMISSIONS = "create,mount,receive:append,userprop"


def receive_as_user(dataset: str, bundles: Path) -> None:
    """Let root's key append copies, and nothing else, as a user without rights.

    Args:
        dataset: below it are the copies; see :func:`permit_copies`.
        bundles: an empty directory.
    """
    if subprocess.run(["id", RECEIVING_USER], capture_output=True, check=False).returncode != 0:
        # Without PAM, sshd refuses a locked account.
        _run("useradd", "--create-home", "--shell", "/bin/sh", "--password", "*", RECEIVING_USER)
    home = Path("/home", RECEIVING_USER, ".ssh")
    home.mkdir(mode=0o700, exist_ok=True)
    command = f"snaporch receive --dataset {dataset} --bundles {bundles}"
    key = (_HOME / "id_ed25519.pub").read_text()
    (home / "authorized_keys").write_text(f'restrict,command="{command}" {key}')
    for path in (home, home / "authorized_keys"):
        shutil.chown(path, RECEIVING_USER, RECEIVING_USER)
    shutil.chown(bundles, RECEIVING_USER, RECEIVING_USER)
    for path in bundles.parents:
        path.chmod(path.stat().st_mode | 0o111)


def permit_copies(dataset: str, permissions: str = PERMISSIONS) -> None:
    """Create the dataset of the copies, unless it exists, and let the user append below it."""
    if subprocess.run(["zfs", "list", dataset], capture_output=True, check=False).returncode != 0:
        _run("zfs", "create", "-p", dataset)
    _run("zfs", "set", "readonly=on", "mountpoint=none", "volmode=none", dataset)
    _run("zfs", "allow", "-u", RECEIVING_USER, permissions, dataset)


def hand_over(directory: Path) -> None:
    """Give all below a directory to the directory's owner."""
    owner = directory.stat()
    for path in directory.rglob("*"):
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
