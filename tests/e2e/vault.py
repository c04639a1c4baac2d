"""A guest with one disk, and its replica: a pool and a directory of the lab itself, over ssh."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from lab_ssh import sshd_here
from support import must, snaporch

CONFIG = """
[policy.hourly]
every = "1h"
domains = ["{domain}"]
replicate = ["{name}"]
keep = {{ last = 9 }}

[replica.{name}]
host = "{host}"
dataset = "vault/kvm"
bundles = "{bundles}"
rate = {rate}
"""


class Vault:
    """A guest with one disk, and its replica."""

    def __init__(self, domain: str, place: Path, host: str) -> None:
        self.domain = domain
        self.dataset = f"tank/{domain}"
        self.copy = f"vault/kvm/tank:{domain}"
        self.bundles = place / "bundles"
        self.vdev = place / "vdev"
        self._place, self._host = place, host

    def configure(self, name: str = "vault", rate: int = 0) -> None:
        """Write the configuration."""
        values = {"name": name, "rate": rate, "host": self._host, "bundles": self.bundles}
        self.config.write_text(CONFIG.format(domain=self.domain, **values))

    @property
    def config(self) -> Path:
        """The configuration file."""
        return self._place / "snaporch.toml"

    def take(self) -> str:
        """Take a snapshot of the policy; returns its name."""
        outcome = snaporch("snapshot", self.domain, "--policy", "hourly", "--json")
        assert outcome.status == 0, outcome.err
        return outcome.json["snapshot"]

    def replicate(self, *options: str) -> dict:
        """Replicate, and return the JSON object."""
        outcome = snaporch("replicate", self.domain, "--json", *options)
        assert outcome.status == 0, outcome.err
        (document,) = outcome.json
        return document

    def records(self) -> dict[str, dict]:
        """What ``list`` shows, by the snapshots' names."""
        return {each["snapshot"]: each for each in snaporch("list", self.domain, "--json").json}

    def replicated(self) -> dict[str, list[str]]:
        """The replicas that have each snapshot, as ``list`` shows them."""
        return {name: each["replicated"] for name, each in self.records().items()}

    def copied(self, snapshot: str) -> tuple[Path, Path]:
        """The bundle of a snapshot here, and on the replica."""
        path = Path(self.records()[snapshot]["bundle"])
        return path, self.bundles / path.parent.name / path.name


@contextmanager
def vault(domain: str, place: Path) -> Iterator[tuple[Guest, Vault]]:
    """A running guest ``domain`` with a disk on ``tank/domain``, and its replica."""
    with (place / "vdev").open("wb") as stream:
        stream.truncate(2 << 30)
    (place / "bundles").mkdir()
    must("zpool", "create", "-O", "mountpoint=none", "vault", str(place / "vdev"))
    with sshd_here() as host, pytest.MonkeyPatch.context() as patch:
        made = Vault(domain, place, host)
        patch.setenv("SNAPORCH_CONFIG", str(made.config))
        made.configure()
        guest = Guest.create(domain, disks=[Disk("file", made.dataset)])
        yield guest, made
        guest.remove()
    must("zpool", "destroy", "vault")


def guids(dataset: str) -> dict[str, str]:
    """The GUIDs of the snapshots of a dataset, by name, oldest first."""
    words = ("zfs", "list", "-Hp", "-d", "1", "-t", "snapshot", "-o", "name,guid", dataset)
    lines = (line.split("\t") for line in must(*words).splitlines())
    return {name.partition("@")[2]: guid for name, guid in lines}


def same_bytes(here: Path, there: Path) -> bool:
    """Whether the replica has every file of a bundle, byte by byte."""
    if not there.is_dir():
        return False
    found = {path.name: path.read_bytes() for path in there.iterdir() if path.name != "copy.json"}
    return found == {path.name: path.read_bytes() for path in here.iterdir()}


def flip(path: Path) -> None:
    """Change eight bytes in the middle of a file."""
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        old = stream.read(8)
        stream.seek(-len(old), os.SEEK_CUR)
        stream.write(bytes(byte ^ 0xFF for byte in old))
