"""Changes of a guest between the plan and the freeze, found in libvirt's XML."""

from dataclasses import replace

import pytest
from fakes.domain_xml import DiskSpec, domain_xml

from snaporch.hypervisor import OverlayDisk
from snaporch.hypervisor.domain_xml import disk_xml
from snaporch.model import Domain, DomainState
from snaporch.snapshot.plan_still_valid import find_change

UUID = "12345678-0000-0000-0000-000000000001"
BASE, TOOL, OURS = "/tank/web/vda.img", "/tank/web/vda.tool", "/overlays/run/vda.qcow2"
GOLDEN = "<backingStore type='file'><format type='raw'/><source file='/golden.img'/></backingStore>"


def xml(*more, top=BASE, form="raw"):
    return domain_xml("web", UUID, [DiskSpec("vda", top, format=form), *more])


def domain(live, inactive=None, boot="host:1"):
    return Domain(
        name="web",
        uuid=UUID,
        state=DomainState.RUNNING,
        disks=(),
        live_xml=live,
        inactive_xml=live if inactive is None else inactive,
        nvram=None,
        tpm_state=None,
        machine="q35",
        managed_save=False,
        emulator_owner=None,
        boot=boot,
    )


def inside(text, tag, more):
    """XML with ``more`` before the first ``</tag>``."""
    assert f"</{tag}>" in text
    return text.replace(f"</{tag}>", f"{more}</{tag}>", 1)


def over(path, below):
    """A backing chain as in libvirt's live XML, the active image first."""
    return (
        f"<backingStore type='file' index='3'><format type='raw'/><source file='{path}'/>"
        f"{below}</backingStore>"
    )


PLANNED = domain(xml())
OVERLAY = OverlayDisk("vda", BASE, "file", "raw", OURS, xml=disk_xml(xml(), "vda"))
ON_OURS = inside(xml(top=OURS, form="qcow2"), "disk", over(BASE, "<backingStore/>"))
AGENT = "<channel><target name='org.qemu.guest_agent.0' state='connected'/></channel>"
NIC = "<interface type='user'><alias name='net0'/></interface>"

SAME = {
    "nothing": PLANNED,
    "an index of a source": domain(xml().replace("<source ", "<source index='7' "), xml()),
    "an agent that has come": domain(inside(xml(), "devices", AGENT), xml()),
    "what a tool noted": domain(xml(), inside(xml(), "domain", "<title>x</title>")),
    "layout": domain(xml(), xml().replace("><", ">\n  <")),
    "a CD": domain(xml(DiskSpec("sda", "/iso/b.iso", device="cdrom")), xml()),
    "our overlays": domain(ON_OURS, xml(top=OURS, form="qcow2")),
    "our overlays, back on the bases": domain(xml(), xml()),
}


@pytest.mark.parametrize("now", SAME.values(), ids=SAME)
def test_changes_that_do_not_matter(now):
    assert find_change(PLANNED, now, (OVERLAY,)) == ""


CHANGED = {
    "a snapshot of a tool": (domain(xml(top=TOOL, form="qcow2")), f"vda is on {TOOL}, and was on"),
    "one over ours": (
        domain(inside(xml(top=TOOL, form="qcow2"), "disk", over(OURS, over(BASE, "")))),
        f"vda is on {TOOL} over {OURS} over {BASE}, and",
    ),
    "a chain": (domain(inside(xml(), "disk", GOLDEN)), f"vda is on {BASE} over /golden.img, and"),
    "what lies beneath ours": (
        domain(inside(xml(top=OURS, form="qcow2"), "disk", over(TOOL, ""))),
        f"vda is on {TOOL}, and",
    ),
    "a format": (domain(xml(form="qcow2")), "its disk vda is on"),
    "a disk more": (domain(xml(DiskSpec("vdb", "/b.img"))), "the disk vdb was attached"),
    "a network disk more": (
        domain(xml(DiskSpec("vdb", None, kind="network"))),
        "the disk vdb was attached",
    ),
    "a disk less": (domain(domain_xml("web", UUID)), "its disk vda was detached"),
    "a device": (domain(inside(xml(), "devices", NIC), xml()), "detached meanwhile (net0)"),
    "the definition": (domain(xml(), xml(DiskSpec("vdb", "/b.img"))), "its definition was changed"),
    "the definition while on ours": (
        domain(ON_OURS, inside(xml(top=OURS, form="qcow2"), "devices", NIC)),
        "its definition was changed",
    ),
    "undefined": (replace(PLANNED, inactive_xml=None), "its definition was changed"),
    "started again": (replace(PLANNED, boot="host:2"), "it was started or stopped"),
    "gone": (None, "it does not exist any more"),
}


@pytest.mark.parametrize(("now", "described"), CHANGED.values(), ids=CHANGED)
def test_changes_that_matter_are_described(now, described):
    assert described in find_change(PLANNED, now, (OVERLAY,))


def test_changes_of_a_guest_that_is_off():
    off = replace(PLANNED, live_xml=None, boot="")
    assert find_change(off, off, ()) == ""
    assert "definition" in find_change(off, replace(off, inactive_xml=xml(top=TOOL)), ())
    assert "started" in find_change(off, PLANNED, ())


REST = """<target dev='vda' bus='virtio'/>
      <boot order='1'/>
      {}<address type='pci' domain='0x0000' bus='0x00' slot='0x02' function='0x0'/>
    </disk></devices></domain>"""
ALIAS = "<alias name='virtio-disk0'/>\n      "
RECORDED_LIVE = """<domain><devices><disk type='file' device='disk'>
      <driver name='qemu' type='raw'/>
      <source file='/tank/web/vda.img' index='1'/>
      <backingStore/>
      """ + REST.format(ALIAS)
RECORDED_INACTIVE = """<domain><devices><disk type='file' device='disk'>
      <driver name='qemu' type='raw'/>
      <source file='/tank/web/vda.img'/>
      """ + REST.format("")
RECORDED_LIVE_ON_OURS = """<domain><devices><disk type='file' device='disk'>
      <driver name='qemu' type='qcow2'/>
      <source file='/overlays/run/vda.qcow2' index='5'/>
      <backingStore type='file' index='1'>
        <format type='raw'/>
        <source file='/tank/web/vda.img'/>
        <backingStore/>
      </backingStore>
      """ + REST.format(ALIAS)
RECORDED_INACTIVE_ON_OURS = """<domain><devices><disk type='file' device='disk'>
      <driver name='qemu' type='qcow2'/>
      <source file='/overlays/run/vda.qcow2'/>
      <backingStore type='file'>
        <format type='raw'/>
        <source file='/tank/web/vda.img'/>
      </backingStore>
      """ + REST.format("")


def test_the_xml_that_libvirt_11_3_makes_for_overlays_is_no_change():
    planned = domain(RECORDED_LIVE, RECORDED_INACTIVE)
    overlay = OverlayDisk("vda", BASE, "file", "raw", OURS, xml=disk_xml(RECORDED_INACTIVE, "vda"))
    now = domain(RECORDED_LIVE_ON_OURS, RECORDED_INACTIVE_ON_OURS)
    assert find_change(planned, now, (overlay,)) == ""
    assert "vda is on" in find_change(planned, now, ())
