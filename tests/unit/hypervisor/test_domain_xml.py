from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fakes.domain_xml import DiskSpec, domain_xml
from hypothesis import given
from hypothesis import strategies as st

from snaporch.errors import RefusedError
from snaporch.hypervisor import domain_xml as xml
from snaporch.hypervisor.interface import CaptureRequest, OverlayDisk
from snaporch.model import Owner, TpmState

# In the shape of libvirt's formatdomain page.
GUEST = """
<domain type='kvm' id='7' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>web</name>
  <uuid>7f1c0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d</uuid>
  <metadata><app:x xmlns:app='http://example.org/app'>kept</app:x></metadata>
  <os firmware='efi'>
    <type arch='x86_64' machine='pc-q35-9.2'>hvm</type>
    <loader readonly='yes' secure='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE_4M.fd</loader>
    <nvram template='/usr/share/OVMF/OVMF_VARS_4M.fd'>/var/lib/libvirt/nvram/web_VARS.fd</nvram>
  </os>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <disk type='file' snapshot='external'>
      <driver name='qemu' type='qcow2' cache='none' io='native' discard='unmap'/>
      <source file='/tank/web/root.qcow2' index='3'/>
      <backingStore type='file' index='4'>
        <format type='raw'/>
        <source file='/tank/web/golden.img'/>
        <backingStore/>
      </backingStore>
      <target dev='vda' bus='virtio'/>
    </disk>
    <disk type='block' device='disk'>
      <driver name='qemu' type='raw'/>
      <source dev='/dev/zvol/tank/web-data'/>
      <mirror type='block' job='active-commit' ready='yes'/>
      <target dev='vdb' bus='virtio'/>
    </disk>
    <disk type='volume' device='disk'>
      <driver name='qemu' type='raw'/>
      <source pool='guests' volume='web-logs.img'/>
      <target dev='vdc' bus='virtio'/>
    </disk>
    <disk type='network' device='disk'>
      <driver name='qemu' type='raw'/>
      <source protocol='rbd' name='pool/image'><host name='mon1'/></source>
      <mirror type='file' file='/x'/>
      <target dev='vdd' bus='virtio'/>
    </disk>
    <disk type='file' device='cdrom'>
      <target dev='sda' bus='sata' tray='open'/>
      <readonly/>
    </disk>
    <disk type='file' device='floppy'>
      <target dev='fda'/>
    </disk>
    <disk type='block' device='lun'>
      <source dev='/dev/sdx'/>
      <target dev='sdb' bus='scsi'/>
      <shareable/>
    </disk>
    <disk type='file'>
      <driver type='raw' cache='unsafe'/>
      <source file='/tmp/scratch.img'/>
      <target dev='vde' bus='virtio'/>
      <transient/>
    </disk>
    <tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>
  </devices>
  <seclabel type='dynamic' model='apparmor' relabel='yes'><label>libvirt-7f1c</label></seclabel>
  <seclabel type='dynamic' model='dac' relabel='yes'>
    <label>+64055:+109</label><imagelabel>+64055:+109</imagelabel>
  </seclabel>
</domain>
"""


def small(body, **attributes):
    opening = " ".join(["<domain", *(f"{k}='{v}'" for k, v in attributes.items())])
    return xml.parse(f"{opening}><uuid>u-1</uuid>{body}</domain>")


# -- reading ------------------------------------------------------------------------------------


def test_every_kind_of_disk_is_read():
    found = [(d.target, d.kind, d.device, d.source, d.format) for d in xml.disks(xml.parse(GUEST))]
    assert found == [
        ("vda", "file", "disk", "/tank/web/root.qcow2", "qcow2"),
        ("vdb", "block", "disk", "/dev/zvol/tank/web-data", "raw"),
        ("vdc", "volume", "disk", None, "raw"),
        ("vdd", "network", "disk", None, "raw"),
        ("sda", "file", "cdrom", None, "raw"),
        ("fda", "file", "floppy", None, "raw"),
        ("sdb", "block", "lun", "/dev/sdx", "raw"),
        ("vde", "file", "disk", "/tmp/scratch.img", "raw"),
    ]


def test_flags_of_disks_are_read():
    found = {disk.target: disk for disk in xml.disks(xml.parse(GUEST))}
    assert found["vda"].cache == "none"
    assert found["sda"].readonly
    assert not found["vda"].readonly
    assert found["vde"].transient
    assert found["vde"].cache == "unsafe"


def test_a_volume_is_a_pool_and_a_name():
    assert xml.volume_references(xml.parse(GUEST)) == {"vdc": ("guests", "web-logs.img")}


def test_block_jobs_are_seen_with_kind_and_readiness():
    assert xml.mirrors(xml.parse(GUEST)) == {
        "vdb": ("active-commit", True),
        "vdd": ("copy", False),
    }


def test_only_the_image_directly_below_is_read():
    root = xml.parse(GUEST)
    assert xml.backing_source(root, "vda") == "/tank/web/golden.img"
    assert xml.backing_source(root, "vdb") is None
    assert xml.backing_source(root, "nope") is None


@pytest.mark.parametrize(
    ("system", "path"),
    [
        ("<nvram>/var/lib/x_VARS.fd</nvram>", "/var/lib/x_VARS.fd"),
        ("<nvram template='/t'>\n  /var/lib/x_VARS.fd\n </nvram>", "/var/lib/x_VARS.fd"),
        ("<nvram type='file'><source file='/srv/x.fd'/></nvram>", "/srv/x.fd"),
        ("<nvram type='block'><source dev='/dev/zvol/x'/></nvram>", None),
        ("<varstore template='/t' path='/srv/x.json'/>", "/srv/x.json"),
        ("<nvram type='network'><source protocol='iscsi'/></nvram>", None),
        ("<nvram/>", None),
        ("", None),
    ],
)
def test_the_variable_store_in_every_spelling(system, path):
    assert xml.nvram(small(f"<os><type>hvm</type>{system}</os>")) == path


@pytest.mark.parametrize(
    ("backend", "path"),
    [
        ("<backend type='emulator' version='2.0'/>", "/var/lib/libvirt/swtpm/u-1/tpm2"),
        ("<backend type='emulator'/>", "/var/lib/libvirt/swtpm/u-1/tpm2"),
        ("<backend type='emulator' version='1.2'/>", "/var/lib/libvirt/swtpm/u-1/tpm1.2"),
        (
            "<backend type='emulator' version='2.0'><source type='dir' path='/srv/tpm'/></backend>",
            "/srv/tpm",
        ),
        ("<backend type='passthrough'><device path='/dev/tpm0'/></backend>", None),
    ],
)
def test_where_the_state_of_a_tpm_lies(backend, path):
    state = xml.tpm_state(small(f"<devices><tpm>{backend}</tpm></devices>"))
    assert state == (TpmState(path) if path else None)


def test_the_state_of_a_tpm_may_be_one_file():
    backend = "<backend type='emulator'><source type='file' path='/srv/s'/></backend>"
    state = xml.tpm_state(small(f"<devices><tpm>{backend}</tpm></devices>"))
    assert state == TpmState("/srv/s", is_file=True)
    assert state.holds(Path("/srv/s"))
    assert not state.holds(Path("/srv/other"))


@pytest.mark.parametrize(
    ("system", "backend", "reason"),
    [
        ("<nvram type='block'><source dev='/dev/zvol/x'/></nvram>", "", "type='block'"),
        ("<nvram><source dev='/dev/zvol/x'/></nvram>", "", "not in a regular file"),
        ("<nvram type='network'><source protocol='iscsi'/></nvram>", "", "type='network'"),
        ("<nvram type='volume'><source pool='p' volume='v'/></nvram>", "", "type='volume'"),
        ("<nvram>/x</nvram><varstore path='/y'/>", "", "both"),
        ("<varstore template='/t'/>", "", "does not say where"),
        ("<loader type='pflash'>/srv/own.fd</loader>", "", "writable"),
        ("", "<backend type='external'/>", "type='external'"),
        ("", "<backend type='passthrough'/>", "type='passthrough'"),
        ("", "<backend type='emulator'><source type='new' path='/x'/></backend>", "type='new'"),
        ("<loader type='pflash' readonly='yes'>/c.fd</loader><nvram>/x</nvram>", "", None),
        ("<loader type='pflash'>/c.fd</loader><nvram>/x</nvram>", "", None),
        ("<loader type='pflash' stateless='yes'>/c.fd</loader>", "", None),
        ("<loader type='rom'>/c.fd</loader><varstore path='/x'/>", "", None),
        ("", "<backend type='emulator'><source type='dir' path='/x'/></backend>", None),
        ("", "", None),
    ],
)
def test_uncapturable_state_is_reported_with_a_remedy(system, backend, reason):
    devices = f"<devices><tpm>{backend}</tpm></devices>" if backend else ""
    problem = xml.uncapturable_reason(small(f"<os><type>hvm</type>{system}</os>{devices}"))
    if reason is None:
        assert problem is None
    else:
        assert reason in problem[0]
        assert problem[1]


def test_without_a_tpm_there_is_no_state():
    assert xml.tpm_state(small("<devices/>")) is None


@pytest.mark.parametrize(
    ("label", "owner"),
    [
        ("+64055:+109", Owner(64055, 109)),
        ("0:0", Owner(0, 0)),
        ("libvirt-qemu:kvm", None),
        ("\u00b2:\u00b2", None),
        ("", None),
        ("5", None),
    ],
)
def test_the_emulators_owner_is_in_the_dac_label(label, owner):
    seclabel = f"<seclabel model='dac'><label>{label}</label></seclabel>"
    other = "<seclabel model='selinux'><label>1:2</label></seclabel>"
    assert xml.emulator_owner(small(other + seclabel)) == owner


def test_without_a_label_there_is_no_owner():
    assert xml.emulator_owner(small("")) is None


# -- hostile input ------------------------------------------------------------------------------

LAUGHS = (
    "<!DOCTYPE domain [<!ENTITY a 'ha'>"
    + "".join(f"<!ENTITY {b} '{f'&{a};' * 10}'>" for a, b in zip("abcdefgh", "bcdefghi"))  # noqa: B905
    + "]><domain><name>&i;</name></domain>"
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no xml",
        "<domain>",
        "<domain/><domain/>",
        "<!DOCTYPE domain><domain/>",
        "<!DOCTYPE domain SYSTEM 'http://example.org/x.dtd'><domain/>",
        "<!DOCTYPE d [<!ENTITY x SYSTEM 'file:///etc/passwd'>]><domain>&x;</domain>",
        "<!DOCTYPE d [<!ENTITY % x SYSTEM 'file:///etc/passwd'> %x;]><domain/>",
        LAUGHS,
        "<domain>&undefined;</domain>",
        "<domain>\0</domain>",
        "<network/>",
        "<x:domain xmlns:x='http://example.org'/>",
    ],
)
def test_harmful_or_invalid_documents_are_refused(text):
    with pytest.raises(RefusedError, match="domain XML"):
        xml.parse(text)


def test_a_disk_without_anything_is_read_all_the_same():
    (disk,) = xml.disks(small("<devices><disk/></devices>"))
    assert (disk.target, disk.source, disk.kind, disk.device) == ("", None, "file", "disk")


# -- writing ------------------------------------------------------------------------------------

NAMES = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff"), min_size=1
)
VDA = OverlayDisk("vda", "/tank/web/root.qcow2", "file", "qcow2", "/overlays/r/vda.qcow2")
VDB = OverlayDisk("vdb", "/dev/zvol/tank/web-data", "block", "raw", "/overlays/r/vdb.qcow2")


def request(*disks, manual=(), left_out=(), ram="/run/snaporch/r.ram"):
    return CaptureRequest("u", disks, manual, left_out, ram)


def test_a_snapshot_names_every_disk():
    made = xml.snapshot_xml(request(VDA, VDB, manual=("vdx",), left_out=("sda",)))
    root = ElementTree.fromstring(made)
    memory = root.find("memory")
    assert (memory.get("snapshot"), memory.get("file")) == ("external", "/run/snaporch/r.ram")
    assert [(d.get("name"), d.get("snapshot")) for d in root.findall("disks/disk")] == [
        ("vda", "external"),
        ("vdb", "external"),
        ("vdx", "manual"),
        ("sda", "no"),
    ]
    overlays = [d for d in root.findall("disks/disk") if d.get("snapshot") == "external"]
    assert [d.find("source").get("file") for d in overlays] == [VDA.overlay, VDB.overlay]
    assert [d.find("driver").get("type") for d in overlays] == ["qcow2", "qcow2"]
    assert [d.get("type") for d in overlays] == ["file", "file"]


@given(NAMES, NAMES, NAMES)
def test_odd_paths_arrive_in_a_snapshot_as_they_are(overlay, ram, target):
    disk = OverlayDisk("vda", "/base", "file", "raw", overlay)
    root = ElementTree.fromstring(xml.snapshot_xml(request(disk, left_out=(target,), ram=ram)))
    assert root.find("memory").get("file") == ram
    assert root.find("disks/disk/source").get("file") == overlay
    assert root.findall("disks/disk")[1].get("name") == target


def on_overlay(guest, disk):
    """The definition as libvirt changes it when it switches a disk."""
    root = xml.parse(guest)
    element = xml.disk_element(root, disk.target)
    old = element.find("source")
    store = ElementTree.SubElement(element, "backingStore", type=disk.base_kind)
    ElementTree.SubElement(store, "source", dict(old.attrib))
    element.set("type", "file")
    old.attrib.clear()
    old.set("file", disk.overlay)
    element.find("driver").set("type", "qcow2")
    return ElementTree.tostring(root, encoding="unicode")


def plain_guest():
    return domain_xml("web", "u", [DiskSpec("vda", VDA.base, format="qcow2")])


@pytest.mark.parametrize(
    ("disk", "spec"),
    [
        (VDA, DiskSpec("vda", VDA.base, format="qcow2", cache="none")),
        (VDB, DiskSpec("vdb", VDB.base, kind="block")),
    ],
)
def test_bases_are_restored_unchanged(disk, spec):
    before = domain_xml("web", "u", [spec, DiskSpec("vdz", "/other.img")])
    switched = on_overlay(before, disk)
    assert xml.disks(xml.parse(switched))[0].source == disk.overlay
    rebased = xml.with_bases(switched, [disk])
    assert ElementTree.canonicalize(rebased) == ElementTree.canonicalize(before)


@given(NAMES, NAMES)
def test_odd_base_paths_survive_the_round_trip(base, overlay):
    disk = OverlayDisk("vda", base, "file", "raw", overlay + "x" + base)
    before = domain_xml("web", "u", [DiskSpec("vda", base)])
    rebased = xml.with_bases(on_overlay(before, disk), [disk])
    assert ElementTree.canonicalize(rebased) == ElementTree.canonicalize(before)


def test_a_definition_without_overlays_is_left_alone():
    assert xml.with_bases(plain_guest(), [VDA, VDB]) is None
    assert xml.with_bases(plain_guest(), []) is None


def test_a_disk_on_a_foreign_overlay_is_left_alone():
    foreign = OverlayDisk("vda", VDA.base, "file", "qcow2", "/somewhere/else.qcow2")
    assert xml.with_bases(on_overlay(plain_guest(), foreign), [VDA]) is None


def test_namespaces_and_metadata_survive():
    rebased = xml.with_bases(GUEST, [OverlayDisk("vda", "/b", "file", "raw", VDA.base)])
    root = xml.parse(rebased)
    assert root.find("metadata/{http://example.org/app}x").text == "kept"
    assert xml.disks(root)[0].source == "/b"
    assert xml.disks(root)[0].cache == "none"


def test_a_disk_that_cannot_be_pointed_anywhere_is_an_error():
    guest = (
        "<domain><devices><disk><source file='/o'/><target dev='vda'/></disk></devices></domain>"
    )
    with pytest.raises(RefusedError, match="no source or driver"):
        xml.with_bases(guest, [OverlayDisk("vda", "/b", "file", "raw", "/o")])


CELLS = "<cpu><numa><cell id='0' memory='1024'/><cell id='1' memory='3072'/></numa></cpu>"


@pytest.mark.parametrize(
    ("pages", "cells", "found"),
    [
        ("<hugepages/>", "", {0: 4 << 20}),
        ("<hugepages><page size='2048' unit='KiB'/></hugepages>", CELLS, {2048: 4 << 20}),
        ("<hugepages><page size='2048' nodeset='1'/></hugepages>", CELLS, {2048: 3 << 20}),
        ("<hugepages><page size='2048' nodeset='0'/></hugepages>", "", {2048: 4 << 20}),
        (
            "<hugepages><page size='64'/><page size='2048' nodeset='0-1'/></hugepages>",
            CELLS,
            {2048: 4 << 20},
        ),
        (
            "<hugepages><page size='64'/><page size='2048' nodeset='0'/></hugepages>",
            CELLS,
            {2048: 1 << 20, 64: 3 << 20},
        ),
        ("<nosharepages/>", CELLS, {}),
    ],
)
def test_memory_on_huge_pages(pages, cells, found):
    text = f"<domain><memory>4096</memory>{cells}<memoryBacking>{pages}</memoryBacking></domain>"
    assert xml.huge_memory(xml.parse(text)) == found


@pytest.mark.parametrize(
    "nodes", ["0-9999999999", "4096", "99999999999-99999999999", "0-4095,0-4095", "x"]
)
def test_node_sets_that_no_host_has_are_refused(nodes):
    pages = f"<hugepages><page size='2048' nodeset='{nodes}'/></hugepages>"
    root = xml.parse(f"<domain><memoryBacking>{pages}</memoryBacking></domain>")
    with pytest.raises(ValueError, match=nodes):
        xml.huge_memory(root)


LUKS = """<disk type='block' device='disk'><driver name='qemu' type='raw' discard='unmap'>
  <metadata_cache><max_size unit='bytes'>4096</max_size></metadata_cache></driver>
  <source dev='/dev/zvol/tank/web-data'><slices><slice type='storage' offset='4096' size='8192'/>
  </slices><encryption format='luks'><secret type='passphrase' uuid='s'/></encryption></source>
  <backingStore/><target dev='vdb' bus='virtio'/><encryption format='luks'/></disk>"""


def test_all_that_describes_an_image_is_restored():
    before = f"<domain><devices>{LUKS}</devices></domain>"
    kept = replace(VDB, xml=xml.disk_xml(before, "vdb"))
    switched = (
        "<domain><devices><disk type='file' device='disk'><driver name='qemu' type='qcow2'/>"
        f"<source file='{VDB.overlay}' index='3'/><backingStore type='block'><source dev='x'/>"
        "</backingStore><target dev='vdb' bus='virtio'/><boot order='2'/></disk></devices></domain>"
    )
    root = xml.parse(xml.with_bases(switched, [kept]))
    element, original = xml.disk_element(root, "vdb"), xml.disk_element(xml.parse(before), "vdb")
    assert element.get("type") == "block"
    assert element.find("boot").get("order") == "2"
    for name in ("driver", "source", "backingStore", "encryption"):
        (found,) = element.findall(name)
        assert ElementTree.tostring(found) == ElementTree.tostring(original.find(name))


def test_a_description_of_another_image_is_not_restored():
    other = xml.disk_xml(
        "<domain><devices><disk type='file'><source file='/other'/>"
        "<target dev='vda'/></disk></devices></domain>",
        "vda",
    )
    kept = OverlayDisk("vda", VDA.base, "file", "qcow2", VDA.overlay, xml=other)
    rebased = xml.with_bases(on_overlay(plain_guest(), kept), [kept])
    assert xml.disks(xml.parse(rebased))[0].source == VDA.base
