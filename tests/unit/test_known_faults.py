"""The versions that have each fault, and the table in docs/reference/hosts.md."""

from pathlib import Path

import pytest

from snaporch.known_faults import (
    FAULTS,
    Component,
    Fault,
    FaultCondition,
    known_faults,
    needs_pipe,
    parse_release,
)
from snaporch.known_faults import risks_overlays as risky
from snaporch.model import Disk

TOP = Path(__file__).parents[2]
QEMU, ZFS, LIBVIRT = Component.QEMU, Component.OPENZFS, Component.LIBVIRT


def disk(*, discards):
    return Disk("vda", "/x", "file", "disk", "raw", readonly=False, discards=discards)


@pytest.mark.parametrize(
    ("component", "version", "codes"),
    [
        (QEMU, "7.2.22", {"qcow2-discard"}),
        (QEMU, "10.0.10", {"qcow2-discard"}),
        (QEMU, "10.0.11", set()),
        (QEMU, "10.0.13", set()),  # the lab's
        (QEMU, "10.1.5", {"qcow2-discard"}),
        (QEMU, "11.0.1", {"qcow2-discard"}),
        (QEMU, "11.0.2", set()),
        (QEMU, "11.1.0", set()),
        (ZFS, "2.1.5", {"automount-deadlock"}),
        (ZFS, "2.2.6", {"clone-read", "automount-deadlock"}),
        (ZFS, "2.2.7", {"clone-read", "automount-deadlock", "volume-flush"}),
        (ZFS, "2.2.8", {"clone-read", "automount-deadlock"}),
        (ZFS, "2.2.11", {"clone-read", "automount-deadlock"}),
        (ZFS, "2.3.1", {"clone-read", "automount-deadlock", "volume-flush"}),
        (ZFS, "2.3.2", {"clone-read", "automount-deadlock"}),
        (ZFS, "2.3.6", {"clone-read", "automount-deadlock"}),
        (ZFS, "2.3.7", {"automount-deadlock"}),
        (ZFS, "2.3.9-0+deb13u1", {"automount-deadlock"}),  # the lab's
        (ZFS, "2.4.0", {"clone-read", "automount-deadlock"}),
        (ZFS, "2.4.1", {"clone-read", "automount-deadlock"}),
        (ZFS, "2.4.2", set()),
        (LIBVIRT, "11.1.0", {"saved-guests", "apparmor-commit"}),
        (LIBVIRT, "11.2.0", {"saved-guests", "apparmor-commit", "sparse-images"}),
        (LIBVIRT, "11.3.0", {"saved-guests", "apparmor-commit", "sparse-images"}),  # the lab's
        (LIBVIRT, "12.0.0", {"saved-guests", "apparmor-commit", "sparse-images"}),
        (LIBVIRT, "12.1.0", {"sparse-images"}),
        (LIBVIRT, "12.8.0", {"sparse-images"}),
        (LIBVIRT, "what?", set()),
    ],
)
def test_versions_just_below_at_and_above(component, version, codes):
    assert {fault.code for fault in known_faults(component, version)} == codes


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("10.0.11", (10, 0, 11)),
        ("2.3.9-0+deb13u1\n", (2, 3, 9)),
        ("10.0.13+ds", (10, 0, 13)),
        ("2.3.2-2~bpo12+1", (2, 3, 2)),
        ("zfs-2.4.2", (2, 4, 2)),
        ("2.4", (2, 4, 0)),
        ("2.4.0-rc1", (2, 4, 0)),
        ("2.3.99-100_gabcdef", (2, 3, 99)),
        ("1.2.3.4", None),
        ("", None),
        ("unknown", None),
        ("-1.2.3", None),
        ("2", None),
        ("99999.1.1", None),
        ("version 2.3.1", None),
    ],
)
def test_prefixes_and_suffixes_of_distributions(text, release):
    assert parse_release(text) == release


@pytest.mark.parametrize(
    ("library", "emulator", "pipe"),
    [
        ("11.3.0", "10.2.0", False),
        ("11.3.0", "11.0.0", True),
        ("12.0.0", "11.1.0", True),
        ("12.1.0", "11.1.0", False),
        ("", "11.1.0", False),
        ("11.3.0", "", False),
    ],
)
def test_ram_is_given_to_qemu_through_a_pipe_where_libvirt_would_give_it_a_file(
    library, emulator, pipe
):
    assert needs_pipe({LIBVIRT: library, QEMU: emulator}) is pipe


def test_overlays_are_avoided_for_disks_that_discard_only():
    assert risky("10.0.10", [disk(discards=False), disk(discards=True)])
    assert not risky("10.0.10", [disk(discards=False)])
    assert not risky("10.0.11", [disk(discards=True)])
    assert risky("of some kind", [disk(discards=True)])


def test_series_are_in_order():
    for fault in FAULTS:
        assert list(fault.fixed) == sorted(fault.fixed)
        assert all((fault.since or (0, 0, 0)) < fix for fix in fault.fixed)
        assert fault.sources
    assert len({fault.code for fault in FAULTS}) == len(FAULTS)
    assert {fault.need for fault in FAULTS} == set(FaultCondition)


def dotted(release):
    return ".".join(map(str, release))


def row(fault: Fault):
    since = f"{dotted(fault.since)} on" if fault.since else "all before"
    fixed = " and ".join(map(dotted, fault.fixed)) or "none known"
    cells = (f"`{fault.code}`", fault.component, since, fixed, fault.need)
    return f"| {' | '.join((*cells, fault.what, fault.meanwhile, fault.fix))} |"


def test_the_page_has_the_table():
    page = (TOP / "docs/reference/hosts.md").read_text()
    section = page.partition("\n## Known faults\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows == [row(fault) for fault in FAULTS]
    for fault in FAULTS:
        for source in fault.sources:
            assert source in section
