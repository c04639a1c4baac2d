"""Two hosts that the lab is in turn: only one has its pools, its state and its guests here."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cut_line import Line, line_to_sshd
from lab_ssh import RECEIVING_HOST, permit_copies, receive_as_user, sshd_here
from support import must, run

POOLS = ("tank", "flash")
STATE = Path("/var/lib/snaporch")
_CONFIG = """
[policy.hourly]
every = "1h"
domains = ["plain"]
replicate = ["offsite"]

[replica.offsite]
host = "{host}"
dataset = "backup/offsite"
bundles = "{place}/offsite"

[replica.home]
host = "{host}"
dataset = "backup/home"
bundles = "{place}/home"
"""
_CLOSED = """
[replica.{name}]
host = "{host}"
dataset = "backup/{name}"
bundles = "{bundles}"
append_only = true
encrypt_to = ["{recipient}"]
"""


class Hosts:
    """The host that the lab is now, and the other one; the pool ``backup`` is there for both."""

    def __init__(self, place: Path, line: Line) -> None:
        self._place = place
        self.line = line
        self.here, self.there = "first", "second"
        for name in ("second", "backup"):
            (place / name).mkdir()
        for pool in POOLS:
            _make_file(place / "second" / pool)
        _make_file(place / "backup" / "backup")
        must("zpool", "create", "-O", "mountpoint=none", "backup", str(place / "backup/backup"))

    def change(self) -> None:
        """Become the other host; the guests of this one must be off."""
        self._put_away()
        self.here, self.there = self.there, self.here
        self._bring()

    def reset(self) -> None:
        """Become the first host, whatever runs here; the second one is empty again."""
        if self.here == "second":
            for name in must("virsh", "list", "--name").split():
                must("virsh", "destroy", name)
            self.change()
        shutil.rmtree(self._place / "second-state", ignore_errors=True)
        for pool in POOLS:
            _make_file(self._place / "second" / pool)

    def add_closed(self, name: str, recipient: str) -> None:
        """Configure a replica that only appends, and whose bundles are encrypted to a key.

        Only the one that was added last can be copied to: it has the forced command of the key.
        """
        bundles = self._place / name
        bundles.mkdir()
        values = {"name": name, "host": RECEIVING_HOST, "bundles": bundles, "recipient": recipient}
        with Path(os.environ["SNAPORCH_CONFIG"]).open("a") as stream:
            stream.write(_CLOSED.format(**values))
        receive_as_user(f"backup/{name}", bundles)
        permit_copies(f"backup/{name}")

    def _put_away(self) -> None:
        away = self._place / f"{self.here}-state"
        away.mkdir()
        for name in must("virsh", "list", "--all", "--name").split():
            (away / f"{name}.xml").write_text(must("virsh", "dumpxml", "--inactive", name))
            must("virsh", "undefine", "--nvram", name)
        shutil.copytree(STATE, away / "snaporch")
        for path in STATE.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for pool in POOLS:
            must("zpool", "export", pool)

    def _bring(self) -> None:
        away = self._place / f"{self.here}-state"
        devices = "/dev/lab" if self.here == "first" else str(self._place / "second")
        for pool in POOLS:
            if away.exists():
                must("zpool", "import", "-d", devices, pool)
            else:
                must("zpool", "create", pool, f"{devices}/{pool}")
        run("udevadm", "settle")
        if away.exists():
            shutil.copytree(away / "snaporch", STATE, dirs_exist_ok=True)
            for path in away.glob("*.xml"):
                must("virsh", "define", str(path))
            shutil.rmtree(away)


def _make_file(path: Path) -> None:
    with path.open("wb") as stream:
        os.truncate(stream.fileno(), 1 << 30)


@contextmanager
def two_hosts(place: Path) -> Iterator[Hosts]:
    """Two hosts with files in an empty directory; commands use one configuration for both."""
    config = place / "snaporch.toml"
    for name in ("offsite", "home"):
        (place / name).mkdir()
    with sshd_here() as host, line_to_sshd() as line, pytest.MonkeyPatch.context() as patch:
        config.write_text(_CONFIG.format(host=host, place=place))
        patch.setenv("SNAPORCH_CONFIG", str(config))
        yield Hosts(place, line)
    must("zpool", "destroy", "backup")
