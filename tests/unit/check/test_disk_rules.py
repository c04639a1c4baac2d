"""Advice on storage: what is advised, and what gives no advice."""

from dataclasses import replace
from pathlib import Path

import pytest

from snaporch.check.apply_rules import apply_rules
from snaporch.check.disk_facts import DiskFacts, RecordFacts
from snaporch.check.facts import HostFacts, OverlayFacts, SanoidFacts, StoreFacts
from snaporch.check.findings import Severity, exit_code
from snaporch.check.rules import disks
from snaporch.hypervisor import DiskWrites
from snaporch.zfs.parity import ParityGroup

K = 1024
FILES = RecordFacts(128 * K, is_volume=False, sector=4 * K)
VOLUME = RecordFacts(16 * K, is_volume=True, sector=4 * K)

GROUPS = (
    *(ParityGroup(parity, data) for parity in (1, 2, 3) for data in (1, 2, 3, 4, 8, 12)),
    *(ParityGroup(parity, data, is_draid=True) for parity in (1, 3) for data in (2, 6, 8, 16)),
)


def wrote(mean, requests=disks.ENOUGH_WRITES, **more):
    """A disk to which a guest has written so often, so many bytes at a time."""
    writes = DiskWrites(requests, requests * mean)
    return replace(DiskFacts("web", "vda", "tank/web", writes, cache="none"), **more)


def advice(disk, records, *more, severity=Severity.HINT):
    """The findings by their codes."""
    its = (disk, *more)
    sanoid = SanoidFacts(True, True, Path("/etc/sanoid"), None, unused=True)
    facts = HostFacts(
        version="1",
        command="snaporch",
        sanoid=sanoid,
        guests=(),
        store=StoreFacts(Path("/store")),
        overlays=OverlayFacts(Path("/overlays"), 1000, 256),
        disks=its,
        records={each.dataset: records for each in its},
    )
    found = [each for each in apply_rules(facts) if each.code != "sanoid-unused"]
    assert {each.severity for each in found} <= {severity}
    assert exit_code(found) == (0 if severity is Severity.HINT else 10)
    return {each.code: each for each in found}


def test_small_writes_on_large_records():
    found = advice(wrote(9 * K), FILES)
    assert set(found) == {"record-size"}
    assert found["record-size"].lines == ("zfs set recordsize=16K tank/web",)
    assert "have 128K, and web wrote 9K at a time" in found["record-size"].what
    assert "keep their records" in found["record-size"].fix


@pytest.mark.parametrize(
    ("mean", "size", "sector", "cluster", "wanted"),
    [
        (4 * K, 128, 4 * K, 0, "16K"),  # four sectors, for compression
        (4 * K, 128, 8 * K, 0, "32K"),
        (4 * K, 128, 512, 0, "16K"),  # smaller ones gain nothing
        (4 * K, 128, 0, 0, "16K"),  # an unknown sector counts as one of 4K
        (20 * K, 128, 4 * K, 0, "32K"),
        (20 * K, 128, 4 * K, 16 * K, "16K"),  # at most a cluster
        (20 * K, 128, 4 * K, 4 * K, "16K"),
        (100 * K, 1024, 4 * K, 64 * K, "64K"),
        (33 * K, 128, 4 * K, 0, None),  # over a quarter of the record
        (33 * K, 128, 4 * K, 16 * K, None),
        (4 * K, 16, 4 * K, 0, None),
    ],
)
def test_the_proposed_records(mean, size, sector, cluster, wanted):
    records = replace(FILES, size=size * K, sector=sector)
    found = advice(wrote(mean, cluster=cluster), records)
    lines = [line for each in found.values() for line in each.lines]
    assert lines == ([f"zfs set recordsize={wanted} tank/web"] if wanted else [])


@pytest.mark.parametrize("requests", [0, 1, disks.ENOUGH_WRITES - 1])
def test_a_guest_that_was_just_booted_gets_no_advice(requests):
    worst = wrote(4 * K, requests, cache="writeback", discards=False)
    slow = replace(VOLUME, size=64 * K, primary_cache="none", log_bias="throughput", unreserved=1)
    assert set(advice(worst, replace(slow, available=1))) == set()
    enough = replace(worst, writes=DiskWrites(disks.ENOUGH_WRITES, 4 * K * disks.ENOUGH_WRITES))
    codes = {"record-size", "primary-cache", "log-bias", "disk-cache", "disk-discard"}
    assert set(advice(enough, replace(slow, available=1))) == codes


def test_a_volume_keeps_its_size_of_records():
    found = advice(wrote(4 * K), replace(VOLUME, size=64 * K))["record-size"]
    assert "a new one of 16K" in found.fix
    assert found.lines == ()


def test_all_disks_of_a_dataset_count_together():
    """One that is hardly written to neither prevents advice nor causes it."""
    small = wrote(4 * K)
    large = replace(small, guest="db", target="vdb", writes=DiskWrites(100_000, 12_800_000 * K))
    assert advice(small, FILES, large) == {}
    idle = replace(large, writes=DiskWrites(10, 1_280 * K))
    assert "web and db wrote 4K" in advice(small, FILES, idle)["record-size"].what


@pytest.mark.parametrize(
    ("mean", "change", "is_found"),
    [
        (32 * K, {"size": 8 * K}, True),
        (32 * K, {"size": 512}, True),
        (31 * K, {"size": 8 * K}, False),
        (32 * K, {"size": 16 * K}, False),
        (32 * K, {"size": 8 * K, "compressed": False}, False),
        (32 * K, {"size": 8 * K, "sector": 512}, False),
        (32 * K, {"size": 8 * K, "sector": 0}, False),
    ],
)
def test_records_that_compression_cannot_shrink(mean, change, is_found):
    found = advice(wrote(mean), replace(FILES, **change))
    assert set(found) == ({"record-sectors"} if is_found else set())
    for each in found.values():
        assert each.lines == ("zfs set recordsize=16K tank/web",)


@pytest.mark.parametrize("groups", [(), *((each,) for each in GROUPS), GROUPS])
def test_no_advice_contradicts_itself(groups):
    """What is proposed causes no other proposal, and takes no more room."""
    for power in range(9, 24):
        for cluster in (0, 4 * K, 64 * K):
            for size in (4 * K << each for each in range(9)):
                disk = wrote((1 << power) * 3 // 2, cluster=cluster)
                found = advice(disk, replace(FILES, size=size, groups=groups))
                lines = {line for each in found.values() for line in each.lines}
                assert len(lines) <= 1
                for line in lines:
                    wanted = int(line.partition("=")[2].partition("K")[0]) * K
                    assert advice(disk, replace(FILES, size=wanted, groups=groups)) == {}
                    if groups:
                        now, then, best = (
                            max(each.allocated(n, 4 * K) / n for each in groups)
                            for n in (size, wanted, 128 * K)
                        )
                        assert then <= max(now, 1.25 * best)


@pytest.mark.parametrize(
    ("group", "size", "wanted", "said"),
    [
        (ParityGroup(1, 2), 8, "16K", "8K take 2.0 times their size with parity, and records of"),
        (ParityGroup(2, 8), 8, "16K", "16K take 1.5 times theirs"),
        (ParityGroup(2, 8, is_draid=True), 16, "32K", "16K take 2.5 times"),
        (ParityGroup(1, 2), 16, None, ""),
        (ParityGroup(2, 4), 128, None, ""),
    ],
)
def test_records_of_which_parity_takes_much(group, size, wanted, said):
    """Also of a guest that is off: it is about space."""
    found = advice(wrote(0, 0), replace(VOLUME, size=size * K, groups=(group,)))
    assert set(found) == ({"record-parity"} if wanted else set())
    for each in found.values():
        assert said in each.what
        assert f"a new one of {wanted}" in each.fix
    files = advice(wrote(0, 0), replace(FILES, size=size * K, groups=(group,)))
    lines = [line for each in files.values() for line in each.lines]
    assert lines == ([f"zfs set recordsize={wanted} tank/web"] if wanted else [])


@pytest.mark.parametrize(
    ("group", "wanted"),
    [
        (ParityGroup(2, 4), "16K"),
        (ParityGroup(2, 4, is_draid=True), "16K"),
        (ParityGroup(2, 8, is_draid=True), "32K"),
        (ParityGroup(1, 16, is_draid=True), None),
    ],
)
def test_records_are_not_proposed_so_small_that_parity_takes_much(group, wanted):
    found = advice(wrote(4 * K), replace(FILES, size=64 * K, groups=(group,)))
    lines = [line for each in found.values() for line in each.lines]
    assert lines == ([f"zfs set recordsize={wanted} tank/web"] if wanted else [])


def test_flushes_that_are_ignored():
    """Also of a guest that is off: a power failure takes the last seconds of a running one."""
    records = replace(FILES, sync="disabled")
    found = advice(wrote(0, 0), records, severity=Severity.WARNING)["ignored-flushes"]
    assert found.lines == ("zfs set sync=standard tank/web",)
    assert "disks of web" in found.what
    assert advice(wrote(0, 0), replace(FILES, sync="always")) == {}


@pytest.mark.parametrize(
    ("cached", "mean", "is_found"),
    [
        ("metadata", 4 * K, True),
        ("none", 4 * K, True),
        ("all", 4 * K, False),
        ("metadata", 16 * K, False),
    ],
)
def test_records_that_are_read_for_each_write(cached, mean, is_found):
    found = advice(wrote(mean), replace(VOLUME, primary_cache=cached))
    assert {code: each.lines for code, each in found.items()} == (
        {"primary-cache": ("zfs set primarycache=all tank/web",)} if is_found else {}
    )


@pytest.mark.parametrize(
    ("bias", "mean", "is_found"),
    [("throughput", 4 * K, True), ("throughput", 32 * K, False), ("latency", 4 * K, False)],
)
def test_small_writes_that_are_flushed_as_records(bias, mean, is_found):
    found = advice(wrote(mean), replace(VOLUME, log_bias=bias))
    assert {code: each.lines for code, each in found.items()} == (
        {"log-bias": ("zfs set logbias=latency tank/web",)} if is_found else {}
    )


@pytest.mark.parametrize(
    ("cache", "records", "said"),
    [
        ("writethrough", FILES, None),  # a guest may rely on it, and send no flush
        ("directsync", VOLUME, None),
        ("writeback", VOLUME, "page cache"),
        ("writeback", FILES, None),
        ("none", VOLUME, None),
        ("unsafe", VOLUME, None),  # another rule reports that no snapshot can be taken
    ],
)
def test_cache_modes(cache, records, said):
    found = advice(wrote(64 * K, cache=cache), records)
    assert set(found) == ({"disk-cache"} if said else set())
    assert said is None or said in found["disk-cache"].why


@pytest.mark.parametrize(
    ("change", "records", "is_found"),
    [
        ({"discards": False}, FILES, True),
        ({"discards": True}, FILES, False),
        ({"discards": False, "format": "qcow2"}, FILES, False),
        ({"discards": False}, VOLUME, False),
        ({"discards": False}, replace(VOLUME, unreserved=1, available=1), True),
    ],
)
def test_discard(change, records, is_found):
    found = advice(wrote(64 * K, **change), records)
    assert set(found) == ({"disk-discard"} if is_found else set())


def test_volumes_that_can_grow_by_more_than_the_pool_has():
    """Also of a guest that is off."""
    thin = replace(VOLUME, unreserved=10 << 30, available=(10 << 30) - 1)
    found = advice(wrote(0, 0), thin)
    assert set(found) == {"thin-volumes"}
    assert found["thin-volumes"].subject == "tank"
    # a reservation takes its room from the images, the store and the other volumes
    assert found["thin-volumes"].lines == ()
    assert "reservation" not in found["thin-volumes"].fix
    assert advice(wrote(0, 0), replace(thin, available=10 << 30)) == {}
    assert advice(wrote(0, 0), replace(thin, unreserved=0, available=0)) == {}


def test_names_are_quoted_in_commands():
    disk = wrote(4 * K, dataset="tank/my vm", guest="my web", discards=False)
    found = advice(disk, FILES)
    assert found["record-size"].lines == ("zfs set recordsize=16K 'tank/my vm'",)
    assert "virsh edit 'my web'" in found["disk-discard"].fix
