"""A snaporch run with a stand-in for ZFS: ``without_zfs.py CONFIG DOMAIN SNAPSHOT DISKS``.

libvirt, QEMU, pipe, compressor, journal and guardian are the real ones. Where there is no ZFS, a
snapshot in memory is taken in its place, which takes no time; what the real one takes has to be
added from the lab. libvirt may be too old to read zstd, because nothing is restored here.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fakes.pool import FakePool

from snaporch.config import load_config
from snaporch.context import Context
from snaporch.hypervisor.libvirt_driver import LibvirtHypervisor
from snaporch.model import Dataset, DatasetKind
from snaporch.output.terminal import TerminalProgress
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs.resolver import Mount, NotOnZfsError, Resolver

DATASET = Dataset("bench/guest", DatasetKind.FILESYSTEM)


class ReadsZstd(LibvirtHypervisor):
    """The real libvirt, which claims to restore zstd images."""

    def reads_zstd(self) -> bool:
        """Claim that libvirt reads zstd."""
        return True


def main() -> None:
    settings, domain, snapshot, disks = sys.argv[1:]
    path = Path(settings)

    class StandIn(Resolver):
        def resolve(self, place: str, mounts: list[Mount] | None = None) -> Dataset:
            if not place.startswith(f"{disks}/"):
                raise NotOnZfsError(place, "not in the stand-in for ZFS")
            return DATASET

    config = load_config(path)
    hypervisor = ReadsZstd(config.libvirt_uri)
    context = Context(
        config,
        hypervisor,
        FakePool(DATASET.name),
        TerminalProgress(quiet=True),
        config_path=path,
        resolver=StandIn(),
    )
    with context.interrupt.watching():
        record = take_snapshot(context, hypervisor.domain(domain), SnapshotRequest(snapshot))
    print(json.dumps(record.as_json()))


if __name__ == "__main__":
    main()
