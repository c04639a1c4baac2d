"""A snaporch run with a stand-in for ZFS: ``without_zfs.py CONFIG DOMAIN SNAPSHOT DISKS [GROUP]``.

libvirt, QEMU, pipe, compressor, journal and guardian are the real ones. Where there is no ZFS, a
snapshot in memory is taken in its place, which takes no time; what the real one takes has to be
added from the lab. libvirt may be too old to read zstd, because nothing is restored here.

GROUP is a control group of version 1 with the guest's vCPU in it, if the run may slow that down.
"""

import json
import sys
from collections.abc import Mapping
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


_ALL = 100


class Stand(LibvirtHypervisor):
    """The real libvirt, which claims to restore zstd images; quotas by control groups version 1."""

    groups: tuple[str, ...] = ()
    least_percent = _ALL
    """The least CPU time that the guest had."""

    def reads_zstd(self) -> bool:
        """Claim that libvirt reads zstd."""
        return True

    def vcpu_quotas(self, uuid: str) -> dict[str, str]:
        """The quotas, as ``cpu.max`` has them."""
        found = {}
        for group in self.groups:
            quota = Path(group, "cpu.cfs_quota_us").read_text().strip()
            period = Path(group, "cpu.cfs_period_us").read_text().strip()
            found[group] = f"{'max' if quota == '-1' else quota} {period}"
        return found

    def set_vcpu_quotas(self, quotas: Mapping[str, str]) -> None:
        """Set them: first none, since a period too short for the quota is refused."""
        for group, text in quotas.items():
            quota, period = text.split()
            Path(group, "cpu.cfs_quota_us").write_text("-1")
            Path(group, "cpu.cfs_period_us").write_text(period)
            if quota != "max":
                Path(group, "cpu.cfs_quota_us").write_text(quota)
                self.least_percent = min(self.least_percent, _ALL * int(quota) // int(period))


def main() -> None:
    settings, domain, snapshot, disks, *groups = sys.argv[1:]
    path = Path(settings)

    class StandIn(Resolver):
        def resolve(self, place: str, mounts: list[Mount] | None = None) -> Dataset:
            if not place.startswith(f"{disks}/"):
                raise NotOnZfsError(place, "not in the stand-in for ZFS")
            return DATASET

    config = load_config(path)
    hypervisor = Stand(config.libvirt_uri)
    hypervisor.groups = tuple(groups)
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
    print(json.dumps(record.as_json() | {"cpu_percent": hypervisor.least_percent}))


if __name__ == "__main__":
    main()
