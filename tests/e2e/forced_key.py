"""The lab as a machine at the other end of ssh, and the use of a key that has one command there."""

import base64
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab_ssh import sshd_here
from outcome import Outcome
from pages import blocks
from support import PATIENCE_SECONDS, must


def block(page: str, first: str) -> str:
    """A command block of a page, by the beginning of its first line."""
    (text,) = [each.text for each in blocks(page) if each.first.startswith(first)]
    return text


@contextmanager
def backup_machine(place: Path) -> Iterator[str]:
    """A pool ``backup`` in an empty directory, and an sshd; the host that lets root in."""
    with (place / "vdev").open("wb") as stream:
        stream.truncate(3 << 30)
    must("zpool", "create", "-O", "mountpoint=none", "backup", str(place / "vdev"))
    with sshd_here() as host:
        yield host
    must("zpool", "destroy", "backup")


class ForcedKey:
    """A key with a forced command that is used for anything.

    Args:
        host: for ssh.
        protocol: the first words of the requests that the command accepts.
    """

    def __init__(self, host: str, protocol: str) -> None:
        self._host = host
        self._protocol = protocol

    def use(self, command: str, *options: str, stream: bytes = b"") -> Outcome:
        """Use the key for a command of ssh; an empty one asks for a shell."""
        more = [command] if command else []
        words = ["ssh", "-o", "BatchMode=yes", *options, self._host, *more]
        done = subprocess.run(
            words, input=stream, capture_output=True, check=False, timeout=PATIENCE_SECONDS
        )
        return Outcome(
            done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode()
        )

    def ask(self, verb: str, values: object = None, stream: bytes = b"") -> Outcome:
        """Use the key for a request; the values may be anything."""
        text = base64.urlsafe_b64encode(json.dumps(values).encode()).decode()
        words = [self._protocol, verb, *([] if values is None else [text])]
        return self.use(" ".join(words), stream=stream)
