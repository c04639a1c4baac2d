"""Blockers, found in XML as libvirt writes it."""

from dataclasses import replace
from types import SimpleNamespace

import libvirt
import pytest

from snaporch.hypervisor import domain_xml
from snaporch.hypervisor.definition_blockers import find_domain_blockers
from snaporch.model import Domain, DomainState, Strategy

OVERLAY = {Strategy.OVERLAY}
RAM = {Strategy.OVERLAY, Strategy.MANUAL}
QUIESCED = {Strategy.QUIESCED}
CAREFUL = RAM | {Strategy.QUIESCED, Strategy.PAUSED}
AGENT = """<channel type='unix'>
  <target type='virtio' name='org.qemu.guest_agent.0' state='{}'/></channel>"""
CONNECTED = AGENT.format("connected")


def guest(devices="", more="", state=DomainState.RUNNING, agent=CONNECTED):
    xml = f"<domain type='kvm'>{more}<devices>{devices}{agent}</devices></domain>"
    return Domain(
        name="web",
        uuid="u",
        state=state,
        disks=tuple(domain_xml.disks(domain_xml.parse(xml))),
        live_xml=xml,
        inactive_xml=None,
        nvram=None,
        tpm_state=None,
        machine="pc",
        managed_save=False,
        emulator_owner=None,
        boot="b",
    )


def handle(*checkpoints):
    made = [SimpleNamespace(getName=lambda name=name: name) for name in checkpoints]
    return SimpleNamespace(listAllCheckpoints=lambda flags: made)


def blockers(domain, *checkpoints):
    return find_domain_blockers(handle(*checkpoints), domain)


def only(found, strategies, *words):
    (blocker,) = found
    assert set(blocker.strategies) == strategies
    for word in words:
        assert word in blocker.reason
    assert blocker.step


def disk(target="vda", driver="", inside="", **attributes):
    text = "".join(f" {key}='{value}'" for key, value in ({"type": "file"} | attributes).items())
    return (
        f"<disk{text}><driver name='qemu' type='raw'{driver}/><source file='/x'/>"
        f"<target dev='{target}'/>{inside}</disk>"
    )


def test_a_plain_guest_has_none():
    assert blockers(guest(disk())) == []


def test_a_guest_that_is_off_has_none():
    assert blockers(replace(guest("<hostdev mode='subsystem'/>"), live_xml=None)) == []


HOSTDEV = """<hostdev mode='subsystem' type='{}' managed='yes'>
  <source><address domain='0x0000' bus='0x06' slot='0x12' function='0x5'/></source></hostdev>"""
MDEV = (
    "<hostdev mode='subsystem' type='mdev' model='vfio-pci'><source><address uuid='u'/></source>"
    "</hostdev>"
)


@pytest.mark.parametrize(
    ("device", "word"),
    [
        (HOSTDEV.format("pci"), "pci"),
        (HOSTDEV.format("usb"), "usb"),
        (MDEV, "mdev"),
        ("<hostdev mode='capabilities' type='misc'/>", "misc"),
        ("<hostdev/>", "host device"),
        (
            "<interface type='hostdev'><source><address type='pci'/></source></interface>",
            "interface",
        ),
        (
            "<filesystem type='mount'><driver type='virtiofs' queue='8'/></filesystem>",
            "virtiofs",
        ),
        ("<filesystem type='mount'><source dir='/srv'/><target dir='srv'/></filesystem>", "9p"),
        (
            "<filesystem type='mount'><driver type='path'/><source dir='/srv'/></filesystem>",
            "shared directory",
        ),
        ("<shmem name='x'><model type='ivshmem-plain'/></shmem>", "shared memory"),
        ("<shmem name='x' role='peer'/>", "shared memory"),
    ],
)
def test_devices_that_cannot_be_saved_with_ram(device, word):
    only(blockers(guest(disk() + device)), RAM, word)


@pytest.mark.parametrize(
    "device",
    [
        "<interface type='network'><model type='virtio'/></interface>",
        "<shmem name='x' role='master'/>",
    ],
)
def test_ordinary_devices_do_not_matter(device):
    assert blockers(guest(disk() + device)) == []


@pytest.mark.parametrize(
    ("spoilt", "strategies", "word"),
    [
        (disk(device="lun", type="block"), OVERLAY, "vda is a lun"),
        (disk(inside="<shareable/>"), OVERLAY, "vda is shareable"),
        (disk(inside="<transient/>"), RAM, "vda is transient"),
        (disk(driver=" cache='unsafe'"), CAREFUL, "vda has cache='unsafe'"),
        (
            disk(inside="<mirror type='file' job='copy' ready='yes'><source file='/y'/></mirror>"),
            RAM,
            "a block job (copy) runs on vda",
        ),
        (
            disk(inside="<mirror type='file' job='active-commit'/>"),
            RAM,
            "a block job (active-commit) runs on vda",
        ),
    ],
)
def test_disks_that_block_strategies(spoilt, strategies, word):
    only(blockers(guest(spoilt + disk("vdb"))), strategies, word)


@pytest.mark.parametrize("mode", ["none", "writeback", "writethrough", "directsync"])
def test_cache_modes_that_flush_are_fine(mode):
    assert blockers(guest(disk(driver=f" cache='{mode}'"))) == []


TIMER = "<clock offset='utc'><timer name='tsc' {}/></clock>"


@pytest.mark.parametrize(
    ("policy", "clock", "free"),
    [
        ("require", "", False),
        ("force", "", False),
        ("disable", "", True),
        ("optional", "", True),
        ("forbid", "", True),
        ("require", TIMER.format("present='yes'"), False),
        ("require", TIMER.format("frequency='2500000000'"), True),
        ("require", TIMER.replace("tsc", "hpet").format("frequency='1'"), False),
    ],
)
def test_a_cpu_with_invtsc_needs_a_frequency(policy, clock, free):
    cpu = f"<cpu mode='host-passthrough'><feature policy='{policy}' name='invtsc'/></cpu>"
    found = blockers(guest(disk(), more=cpu + clock))
    if free:
        assert found == []
    else:
        only(found, RAM, "invtsc")


@pytest.mark.parametrize(
    "agent",
    [
        "",
        AGENT.format("disconnected"),
        AGENT.replace(" state='{}'", ""),
        CONNECTED.replace("org.qemu.guest_agent.0", "com.redhat.spice.0"),
    ],
)
def test_without_a_connected_agent_nothing_is_quiesced(agent):
    only(blockers(guest(disk(), agent=agent)), QUIESCED, "no guest agent is connected")


def test_an_agent_among_other_channels_is_found():
    spice = CONNECTED.replace("org.qemu.guest_agent.0", "com.redhat.spice.0")
    assert blockers(guest(disk() + spice)) == []


@pytest.mark.parametrize(
    ("state", "strategies"),
    [
        (DomainState.STOPPING, [CAREFUL | {Strategy.CRASH}]),
        (DomainState.CRASHED, [CAREFUL]),
        (DomainState.SUSPENDED, [RAM | QUIESCED]),
        (DomainState.PAUSED, [QUIESCED, OVERLAY]),
        (DomainState.RUNNING, []),
    ],
)
def test_states_that_block_strategies(state, strategies):
    assert [set(b.strategies) for b in blockers(guest(disk(), state=state))] == strategies


def test_checkpoints_break_a_commit():
    only(blockers(guest(disk()), "monday", "tuesday"), OVERLAY, "monday, tuesday")


def test_a_driver_without_checkpoints_has_none():
    def unsupported(flags):
        raise libvirt.libvirtError("this function is not supported")

    assert (
        find_domain_blockers(SimpleNamespace(listAllCheckpoints=unsupported), guest(disk())) == []
    )


def test_all_blockers_are_reported_at_once():
    spoilt = disk(device="lun", driver=" cache='unsafe'", inside="<transient/>")
    found = blockers(guest(spoilt + HOSTDEV.format("pci"), agent=""), "monday")
    assert len(found) == 6


def test_no_reason_has_a_line_break():
    found = blockers(guest(HOSTDEV.format("pci") + disk(inside="<transient/>"), agent=""))
    assert all(b.reason.isprintable() and b.step.isprintable() for b in found)


@pytest.mark.parametrize(
    ("value", "free"), [("-drive", False), ("-enable-fips", False), ("", True)]
)
def test_arguments_past_libvirt_are_in_no_snapshot(value, free):
    space = "http://libvirt.org/schemas/domain/qemu/1.0"
    argument = f"<q:arg value='{value}'/>" if value else ""
    domain = guest(more=f"<q:commandline xmlns:q='{space}'>{argument}</q:commandline>")
    if free:
        assert blockers(domain) == []
    else:
        only(blockers(domain), RAM, value, "no snapshot")


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        ("<source file='/x'><encryption format='luks'/></source>", "is encrypted"),
        ("<encryption format='luks'/>", "is encrypted"),
        ("<source file='/x'><slices/></source>", "is a slice"),
        (
            "<backingStore><source><encryption format='luks'/></source></backingStore>",
            "is encrypted",
        ),
    ],
)
def test_an_image_that_only_libvirt_can_read_gets_no_overlay(inside, words):
    xml = f"<disk type='file' device='disk'>{inside}<target dev='vda'/></disk>"
    only(blockers(guest(xml)), OVERLAY, words, "only libvirt could commit")
