"""Machine type, CPU, memory and huge pages that the guest needs."""

import re
from dataclasses import replace

import pytest

from snaporch.errors import RefusedError
from snaporch.hypervisor import HostObject
from snaporch.model import DomainState
from snaporch.restore.host_requirements import available_memory
from snaporch.restore.plan import make_restore_plan
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot

from .plans import plan, refusal

NOTHING = "MemAvailable:       1024 kB\n"


@pytest.fixture
def memory(world):
    """Sets the host's memory figures."""

    def set_figures(meminfo, arcstats=None):
        proc = world.resolver.host.proc
        (proc / "meminfo").write_text(meminfo)
        if arcstats is not None:
            (proc / "spl/kstat/zfs").mkdir(parents=True)
            (proc / "spl/kstat/zfs/arcstats").write_text(arcstats)

    return set_figures


def test_an_unsupported_machine_type_is_refused(story, world):
    world.hypervisor.machines = {"pc"}
    world.hypervisor.guests.clear()
    said = refusal(world)
    assert "this host cannot run it: the machine 'pc-q35-9.2' is not supported" in said
    assert "--cold" in said
    assert "--cold" not in refusal(world, cold=True)
    assert plan(world, disks_only=True)


def test_an_incompatible_cpu_is_refused(story, world):
    world.hypervisor.cpu_incompatibility = "the CPU is incompatible: avx512f"
    world.hypervisor.guests.clear()
    assert "avx512f" in refusal(world)


def test_a_guest_with_the_hosts_cpu_is_not_resumed_on_another_cpu(world, make_story):
    """Resuming would fail after the rollback, although the guest, booted here, runs now."""
    guest = world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    own = guest.live_xml.replace("</os>", "</os><cpu mode='host-passthrough'/>")
    world.add_guest = lambda **_: replace(guest, live_xml=own)
    world.guest().live = world.guest().inactive = own
    make_story()
    assert plan(world).ram
    world.hypervisor.cpu = "<cpu><model>Opteron_G5</model></cpu>"
    said = refusal(world)
    assert "this host cannot run it" in said
    assert "boot it from its disks with --cold" in said
    assert plan(world, cold=True).boot
    assert plan(world, disks_only=True)


def test_a_guest_with_a_named_cpu_model_runs_on_any_host(story, world):
    world.hypervisor.cpu = "<cpu><model>Opteron_G5</model></cpu>"
    assert plan(world).ram


def test_a_guest_that_runs_now_fits_whatever_the_cpu_comparison_says(story, world):
    world.hypervisor.cpu_incompatibility = "the CPU is incompatible: avx512f"
    assert plan(world).ram
    world.guest().live = world.guest().live.replace("pc-q35-9.2", "pc")
    assert "avx512f" in refusal(world)


def test_too_little_memory_is_refused(story, world, memory):
    memory(NOTHING)
    world.hypervisor.guests.clear()
    assert "needs 16 MiB of memory, 1 MiB are available; stop other guests" in refusal(
        world, cold=True
    )
    assert plan(world, disks_only=True)


def test_a_resumed_guest_needs_the_memory_of_its_image(story, world, memory):
    """20 000 bytes, and not the 16 MiB of its definition."""
    memory(NOTHING)
    world.hypervisor.guests.clear()
    assert plan(world).ram


def test_the_memory_of_the_guest_that_is_stopped_counts(story, world, memory):
    memory(NOTHING)
    world.guest().ram = bytes(16 << 20)
    assert plan(world, cold=True).boot


def test_memory_that_zfs_would_free_counts(memory, world):
    memory(NOTHING, "size  4  5368709120\nc_min 4  1073741824\nname type data\n")
    assert available_memory(world.resolver.host) == (4 << 30) + (1 << 20)


def test_without_an_arc_the_kernels_figure_counts(memory, world):
    memory(NOTHING)
    assert available_memory(world.resolver.host) == 1 << 20


# -- huge pages -------------------------------------------------------------------------------


@pytest.fixture
def huge(world, memory):
    """The guest is on huge pages, and the host has so many of them free."""
    memory(NOTHING + "Hugepagesize:       2048 kB\n")

    def set_figures(backing, free, reserved=0, surplus=(0, 0), size=2048):
        place = world.resolver.host.sys / "kernel/mm/hugepages" / f"hugepages-{size}kB"
        place.mkdir(parents=True, exist_ok=True)
        figures = ("free_hugepages", "resv_hugepages", "surplus_hugepages")
        for name, value in zip(figures, (free, reserved, surplus[0]), strict=True):
            (place / name).write_text(f"{value}\n")
        (place / "nr_overcommit_hugepages").write_text(f"{surplus[1]}\n")
        guest = world.guest()
        for name in ("live", "inactive"):
            text = re.sub("<memoryBacking>.*</memoryBacking>", "", getattr(guest, name))
            text = text.replace("<os>", f"<memoryBacking>{backing}</memoryBacking><os>")
            setattr(guest, name, text)
        take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("huge"))
        return make_restore_plan(world.context, "web", "huge", cold=True, discard_newer=True)

    return set_figures


TWO_MIB = "<hugepages><page size='2048' unit='KiB'/></hugepages>"


@pytest.mark.parametrize("backing", ["<hugepages/>", TWO_MIB])
@pytest.mark.parametrize("resumed", [True, False])
def test_memory_of_huge_pages_is_counted_in_huge_pages(story, world, huge, backing, resumed):
    """The kernel does not count them as available; the host has 1 MiB besides."""
    world.guest().state = DomainState.RUNNING
    huge(backing, 8)
    world.hypervisor.guests.clear()
    how = {"cold": not resumed}
    assert make_restore_plan(world.context, "web", "huge", **how)
    free = "kernel/mm/hugepages/hugepages-2048kB/free_hugepages"
    (world.resolver.host.sys / free).write_text("7")
    with pytest.raises(RefusedError, match="needs 8 huge pages of 2048 KiB, 7 are available"):
        make_restore_plan(world.context, "web", "huge", **how)


def test_huge_pages_of_the_guest_that_is_stopped_count(story, world, huge):
    assert huge(TWO_MIB, 0)


def test_huge_pages_that_are_promised_to_others_do_not_count(story, world, huge):
    huge(TWO_MIB, 9, reserved=2)
    world.hypervisor.guests.clear()
    with pytest.raises(RefusedError, match="8 huge pages of 2048 KiB, 7 are available"):
        make_restore_plan(world.context, "web", "huge", cold=True)


def test_huge_pages_that_the_kernel_makes_when_asked_count(story, world, huge):
    huge(TWO_MIB, 0, surplus=(2, 10))
    world.hypervisor.guests.clear()
    assert make_restore_plan(world.context, "web", "huge", cold=True)


def test_memory_outside_huge_pages_is_counted_as_usual(story, world, huge):
    """One node of two."""
    half = TWO_MIB.replace("/>", " nodeset='0'/>", 1)
    cells = "<cpu><numa><cell id='0' memory='8192'/><cell id='1' memory='8192'/></numa></cpu>"
    guest = world.guest()
    guest.live, guest.inactive = (
        text.replace("<os>", f"{cells}<os>") for text in (guest.live, guest.inactive)
    )
    huge(half, 4)
    world.hypervisor.guests.clear()
    with pytest.raises(RefusedError, match="needs 8 MiB of memory, 1 MiB are available"):
        make_restore_plan(world.context, "web", "huge", cold=True)


CARD = "<interface type='network'><source network='lan'/></interface>"
DISKS = {"vda": "tank/web", "vdb": "flash/web"}
VOLUME = "<disk type='volume' device='cdrom'><source pool='vms' volume='x.iso'{}/></disk>"


def add_guest_with(world, device):
    """Add a guest with one more device, of which a story can be made."""
    guest = world.add_guest(disks=DISKS)
    own = guest.live_xml.replace("</devices>", f"{device}</devices>")
    world.add_guest = lambda **_: replace(guest, live_xml=own, inactive_xml=own)
    world.guest().live = world.guest().inactive = own


@pytest.mark.parametrize(
    ("device", "kind", "verb"),
    [(CARD, "network 'lan'", "net"), (VOLUME.format(""), "storage pool 'vms'", "pool")],
)
@pytest.mark.parametrize("options", [{}, {"cold": True}])
def test_a_network_or_pool_that_libvirt_cannot_use_is_refused(
    world, make_story, device, kind, verb, options
):
    """libvirt would refuse the start when the disks are rolled back."""
    add_guest_with(world, device)
    hypervisor = world.hypervisor
    objects = hypervisor.network_objects if verb == "net" else hypervisor.pool_objects
    (name,) = {"lan", "vms"} & {kind.split("'")[1]}
    make_story()
    said = refusal(world, **options)
    assert f"needs the libvirt {kind}, which this host does not have" in said
    assert plan(world, disks_only=True)
    objects[name] = HostObject(name, f"<{verb}/>", True, active=False)
    said = refusal(world, **options)
    assert f"needs the libvirt {kind}, which is not active" in said
    assert said.endswith(f"start it: virsh {verb}-start {name}")
    objects[name] = replace(objects[name], active=True)
    assert plan(world, **options)


def test_a_disk_that_libvirt_may_leave_out_needs_no_pool(world, make_story):
    add_guest_with(world, VOLUME.format(" startupPolicy='optional'"))
    make_story()
    assert plan(world)


def test_a_disk_that_only_a_boot_requires_needs_its_pool_then(world, make_story):
    """See startupPolicy in libvirt's formatdomain: requisite."""
    add_guest_with(world, VOLUME.format(" startupPolicy='requisite'"))
    make_story()
    assert plan(world)
    assert "needs the libvirt storage pool 'vms'" in refusal(world, cold=True)
