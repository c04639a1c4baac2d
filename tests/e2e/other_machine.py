"""The lab as its own other machine, over ssh, with copies of two guests that may be lost here."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from lab_ssh import sshd_here
from support import must, snaporch

ROOT = "backup/kvm"
"""Below it are the copies for the replica ``offsite``."""
DISKS = {
    "plain": [Disk("file", "tank/plain"), Disk("zvol", "flash/plain")],
    "paged": [Disk("file", "tank/paged")],
}
"""The disks of each guest, by its name; of ``paged``, RAM is stored in pages."""
_CONFIG = """
[ram_pages]
dataset = "tank/ram"

[domain.paged]
ram_store = "pages"

[policy.hourly]
every = "1h"
domains = ["plain", "paged"]
replicate = ["offsite"]
keep = {{ last = 2 }}

[replica.slow]
host = "{host}"
dataset = "backup/slow"
bundles = "{bundles}-slow"
rate = 4

[replica.offsite]
host = "{host}"
dataset = "{root}"
bundles = "{bundles}"
"""
_UUIDS: dict[str, str] = {}


@dataclass(frozen=True)
class OtherMachine:
    """A machine with the pool ``backup``, and what this host knows of it."""

    bundles: Path
    """Its directory of bundles for ``offsite``."""
    config: Path
    """This host's configuration, which ends in the options of the replica ``offsite``."""


@contextmanager
def other_machine(place: Path) -> Iterator[OtherMachine]:
    """The other machine, with its files in an empty directory; commands use its configuration."""
    bundles, config, vdev = place / "bundles", place / "snaporch.toml", place / "vdev"
    with vdev.open("wb") as stream:
        stream.truncate(2 << 30)
    must("zpool", "create", "-O", "mountpoint=none", "backup", str(vdev))
    bundles.mkdir()
    Path(f"{bundles}-slow").mkdir()
    with sshd_here() as host, pytest.MonkeyPatch.context() as patch:
        config.write_text(_CONFIG.format(host=host, root=ROOT, bundles=bundles))
        patch.setenv("SNAPORCH_CONFIG", str(config))
        yield OtherMachine(bundles, config)
    must("zpool", "destroy", "backup")


def create(name: str) -> Guest:
    """A new guest, one of :data:`DISKS`; its UUID is known even when it is lost."""
    made = Guest.create(name, disks=DISKS[name])
    _UUIDS[name] = must("virsh", "domuuid", name).strip()
    return made


def uuid_of(guest: Guest) -> str:
    """The UUID that a guest got by :func:`create`."""
    return _UUIDS[guest.name]


def datasets(guest: Guest) -> list[str]:
    """The datasets of a guest here: of its disks, and of its RAM in pages."""
    pages = [f"tank/ram/{uuid_of(guest)}"] if guest.name == "paged" else []
    return [*(disk.where for disk in DISKS[guest.name]), *pages]


def copy(dataset: str, root: str = ROOT) -> str:
    """The name of a dataset's copy on the other machine."""
    return f"{root}/{dataset.replace('/', ':')}"


def take(guest: Guest) -> dict:
    """A snapshot for the policy, as ``--json`` has it; the guest has counted on since then."""
    outcome = snaporch("snapshot", guest.name, "--policy", "hourly", "--json")
    assert outcome.status == 0, outcome.err
    guest.wait_count(beyond=guest.snapshot_count(outcome.json["snapshot"]) + 5)
    return outcome.json


def listed(guest: Guest) -> dict[str, dict]:
    """What ``list`` shows, by the snapshots' names."""
    return {each["snapshot"]: each for each in snaporch("list", guest.name, "--json").json}
