import re
from xml.etree import ElementTree

import pytest
from fakes.domain_xml import DiskSpec, domain_xml

from snaporch.errors import RefusedError
from snaporch.hypervisor.clone_xml import (
    CloneDisk,
    CloneSpec,
    SharedError,
    clone_of,
    make_clone_xml,
)
from snaporch.hypervisor.domain_xml import SWTPM_STATE as SWTPM
from snaporch.hypervisor.domain_xml import (
    disk_element,
    disks,
    memory_bytes,
    nvram,
    parse,
    tpm_state,
)
from snaporch.hypervisor.foreign_xml import forbidden_file
from snaporch.model import TpmState

OLD = "7f1c0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d"
NEW = "11111111-2222-3333-4444-555555555555"
DISKS = {
    "vda": CloneDisk("/clones/1/disk0/a.img", "file"),
    "vdb": CloneDisk("/dev/zvol/t/b", "block"),
}
SPECS = [DiskSpec("vda", "/tank/web/a.img"), DiskSpec("vdb", "/tank/web/b.img")]


def identity(**changes):
    known = {
        "name": "two <&>",
        "uuid": NEW,
        "of": "web@s1",
        "disks": DISKS,
        "files": "/clones/1",
        "network": "none",
        "resumed": True,
    }
    return CloneSpec(**(known | changes))


def domain(*more, specs=SPECS, **options):
    """Domain XML with more elements: (path of the parent, XML)."""
    root = ElementTree.fromstring(domain_xml("web", OLD, specs, **options))
    for parent, text in more:
        where = root if parent == "." else root.find(parent)
        where.append(ElementTree.fromstring(text))
    return ElementTree.tostring(root, encoding="unicode")


def device(text):
    return "devices", text


def rewritten(*more, specs=SPECS, options=None, **changes):
    return parse(
        make_clone_xml(domain(*more, specs=specs, **(options or {})), identity(**changes)).xml
    )


def test_it_has_a_name_and_a_uuid_of_its_own():
    root = rewritten((".", f"<sysinfo><system><entry name='uuid'>{OLD}</entry></system></sysinfo>"))
    assert root.findtext("name") == "two <&>"
    assert root.findtext("uuid") == NEW
    assert root.findtext("sysinfo/system/entry") == NEW
    assert OLD not in ElementTree.tostring(root, encoding="unicode")


FOREIGN = {"emulators": frozenset({"/usr/bin/qemu-system-x86_64"})}


def test_of_another_hosts_guest_it_gets_no_emulator_but_libvirts():
    for path, kept in (("/usr/bin/qemu-system-x86_64", True), ("/clones/1/disk0/evil", False)):
        xml = domain()
        root = parse(xml)
        for each in root.findall("devices/emulator"):
            root.find("devices").remove(each)
        emulator = ElementTree.SubElement(root.find("devices"), "emulator")
        emulator.text = path
        made = parse(make_clone_xml(ElementTree.tostring(root, "unicode"), identity(**FOREIGN)).xml)
        assert (made.findtext("devices/emulator") == path) is kept
        assert made.find("devices/emulator") is not None or not kept


def test_of_another_hosts_guest_it_gets_no_gpu_of_this_host():
    xml = domain(
        (
            "devices",
            "<graphics type='egl-headless'><gl rendernode='/dev/dri/renderD128'/></graphics>",
        )
    )
    assert "egl-headless" in make_clone_xml(xml, identity()).xml
    made = make_clone_xml(xml, identity(**FOREIGN))
    assert "egl-headless" not in made.xml
    assert made.missing == ("<graphics type='egl-headless'>, which uses a GPU of this host",)


def test_of_another_hosts_guest_a_slice_is_refused():
    """The header of the image that QEMU opens is another than the one that is read."""
    sliced = "<slices><slice type='storage' offset='512' size='512'/></slices>"
    root = parse(domain())
    root.find("devices/disk/source").append(ElementTree.fromstring(sliced))
    xml = ElementTree.tostring(root, "unicode")
    make_clone_xml(xml, identity())
    with pytest.raises(SharedError, match="its XML has <slices>"):
        make_clone_xml(xml, identity(**FOREIGN))


def test_of_another_hosts_guest_no_medium_is_looked_for_here():
    specs = [*SPECS, DiskSpec("sda", "/etc/shadow", device="cdrom", readonly=True)]
    made = make_clone_xml(domain(specs=specs), identity(**FOREIGN))
    assert "/etc/shadow" not in made.xml
    assert made.missing == ("the medium in sda",)


@pytest.mark.parametrize(
    ("parent", "text"),
    [
        ("os", "<kernel>/root/key</kernel>"),
        ("os", "<loader readonly='yes' type='rom'>/usr/share/../../etc/shadow</loader>"),
        (
            "devices",
            "<disk device='disk'><source file='/x'/><target dev='vdz'/><readonly/></disk>",
        ),
        ("devices", "<interface type='ethernet'><rom file='/etc/shadow'/></interface>"),
        ("devices", "<interface type='ethernet'><rom file='etc/shadow'/></interface>"),
        ("os", "<kernel>etc/shadow</kernel>"),
        ("os", "<kernel>/usr/share/qemu/kernel</kernel>"),
        ("os", "<initrd>/usr/lib/dbus-1.0/dbus-daemon-launch-helper</initrd>"),
        ("os", "<dtb>dtb</dtb>"),
        ("os", "<nvram template='etc/shadow'>/x</nvram>"),
        ("os", "<loader readonly='yes' type='rom'>/usr/lib/ssl/private/key</loader>"),
        ("os", "<loader readonly='yes' type='rom'>/usr/share/OVMF-of-mine/x</loader>"),
        ("os", "<acpi><table type='slic'>etc/shadow</table></acpi>"),
        (".", "<sysinfo type='fwcfg'><entry name='opt/x' file='etc/shadow'/></sysinfo>"),
        (".", "<sysinfo type='fwcfg'><entry name='opt/x' file='/usr/share/qemu/x'/></sysinfo>"),
    ],
)
def test_of_another_hosts_guest_a_file_of_this_host_is_refused(parent, text):
    make_clone_xml(domain((parent, text)), identity())
    with pytest.raises(SharedError, match=r"its XML names |is a file of its host"):
        make_clone_xml(domain((parent, text)), identity(**FOREIGN))


def test_of_another_hosts_guest_the_firmware_of_packages_is_used():
    loader = "<loader readonly='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE.fd</loader>"
    nvram = "<nvram template='/usr/share/OVMF/OVMF_VARS.fd'>/var/lib/x.fd</nvram>"
    made = rewritten(("os", loader), ("os", nvram), **FOREIGN)
    assert made.findtext("os/loader") == "/usr/share/OVMF/OVMF_CODE.fd"
    assert made.findtext("os/nvram") == "/clones/1/nvram.fd"


def test_of_another_hosts_guest_firmware_is_no_link_out_of_its_directory(tmp_path):
    root = parse(domain(("os", "<loader readonly='yes'>/usr/share/OVMF/CODE.fd</loader>")))
    for element in root.findall("devices/disk"):
        root.find("devices").remove(element)
    places = {"/usr/share/OVMF/CODE.fd": "/etc/shadow"}
    assert forbidden_file(root, (), (), lambda path: path) is None
    assert forbidden_file(root, (), (), places.__getitem__) == "/usr/share/OVMF/CODE.fd"


def test_of_another_hosts_guest_a_device_that_is_left_out_names_no_file():
    """A directory that is shared by virtiofs is left out of a clone that boots."""
    shared = (
        "<filesystem type='mount'><driver type='virtiofs'/>"
        "<source dir='/tank/web/shared'/><target dir='x'/></filesystem>"
    )
    made = make_clone_xml(domain(("devices", shared)), identity(**FOREIGN, resumed=False))
    assert "/tank/web/shared" not in made.xml
    assert "a <filesystem> of the host" in made.missing


def test_of_another_hosts_guest_no_secret_is_used():
    xml = (
        domain()
        .replace("<target dev='vda'", "<encryption format='luks'/><target dev='vda'", 1)
        .replace('<target dev="vda"', '<encryption format="luks"/><target dev="vda"', 1)
    )
    assert "encryption" in xml
    with pytest.raises(SharedError, match="names a secret"):
        make_clone_xml(xml, identity(**FOREIGN))


def test_of_another_hosts_guest_nothing_is_passed_on_to_the_emulator():
    line = f"<c:override xmlns:c='{_QEMU}'><c:device alias='x'/></c:override>"
    make_clone_xml(domain((".", line)), identity())
    with pytest.raises(SharedError, match="<override> for the emulator"):
        make_clone_xml(domain((".", line)), identity(**FOREIGN))


def test_another_hosts_guest_gets_no_privileges():
    parts = (
        (
            "<cputune><shares>5</shares><vcpusched vcpus='0' scheduler='fifo' priority='99'/>"
            "<emulatorsched scheduler='fifo' priority='99'/></cputune>"
        ),
        (
            "<memoryBacking><locked/><allocation mode='immediate'/><source type='file'/>"
            "<nosharepages/></memoryBacking>"
        ),
        "<on_crash><x>coredump-restart</x></on_crash>",
    )
    places = [(".", part) for part in parts]
    places += [
        ("os", "<smbios mode='host'/>"),
        ("devices", "<watchdog model='itco' action='dump'/>"),
    ]
    made = rewritten(*places, **FOREIGN)
    text = ElementTree.tostring(made, "unicode")
    for word in ("sched", "locked", "allocation", 'type="file" /></memory', "dump", "smbios"):
        assert word not in text
    assert made.find("memoryBacking/source") is None
    assert made.find("memoryBacking/nosharepages") is not None
    assert made.find("cputune/shares") is None


@pytest.mark.parametrize("more", [{}, FOREIGN])
@pytest.mark.parametrize(
    ("parent", "texts"),
    [
        (".", ["<devices><hostdev mode='subsystem' type='pci'/></devices>"]),
        (".", ["<devices><disk type='network'/></devices>"]),
        (".", ["<memoryBacking/>", "<memoryBacking><locked/></memoryBacking>"]),
        (".", ["<os><kernel>/etc/shadow</kernel></os>"]),
        (".", ["<cputune/>", "<cputune/>"]),
        ("os", ["<nvram>/a</nvram>", "<nvram>/b</nvram>"]),
        ("os", ["<loader/>", "<loader>/b</loader>"]),
    ],
)
def test_what_is_there_twice_is_refused(parent, texts, more):
    with pytest.raises(SharedError, match="more than one <"):
        make_clone_xml(domain(*((parent, text) for text in texts)), identity(**more))


def test_a_disk_with_two_drivers_is_refused():
    root = parse(domain())
    disk = disk_element(root, "vda")
    ElementTree.SubElement(disk, "driver", type="raw")
    ElementTree.SubElement(disk, "driver", type="vmdk")
    with pytest.raises(SharedError, match="more than one <driver>"):
        make_clone_xml(ElementTree.tostring(root, "unicode"), identity())


@pytest.mark.parametrize("form", ["vmdk", "qcow2", None])
def test_a_disk_is_opened_in_the_format_that_was_checked(form):
    root = parse(domain())
    disk = disk_element(root, "vda")
    for each in disk.findall("driver"):
        disk.remove(each)
    if form is not None:
        ElementTree.SubElement(disk, "driver", type=form)
    made = parse(make_clone_xml(ElementTree.tostring(root, "unicode"), identity()).xml)
    assert disk_element(made, "vda").find("driver").get("type") == "raw"


def test_its_generation_is_new():
    root = rewritten((".", f"<genid>{OLD}</genid>"))
    assert root.findtext("genid") not in (OLD, None)


def test_it_is_marked_and_the_mark_is_known():
    root = rewritten()
    assert clone_of(ElementTree.tostring(root, encoding="unicode")) == "web@s1"


def test_a_copied_mark_is_ignored():
    text = ElementTree.tostring(rewritten(), encoding="unicode")
    assert clone_of(text.replace(f"<uuid>{NEW}", f"<uuid>{OLD}")) is None
    assert clone_of(domain()) is None


def test_a_clone_of_a_clone_has_one_mark():
    again = make_clone_xml(
        make_clone_xml(domain(), identity()).xml, identity(uuid=OLD, of="two@s2")
    )
    assert clone_of(again.xml) == "two@s2"
    assert again.xml.count("snaporch:clone ") == 1


def test_its_disks_are_its_own():
    chain = "<backingStore type='file'><source file='/tank/web/below'/></backingStore>"
    text = domain().replace('<target dev="vda"', f'{chain}<target dev="vda"')
    found = disks(parse(make_clone_xml(text, identity()).xml))
    assert [(disk.target, disk.source, disk.kind) for disk in found] == [
        ("vda", "/clones/1/disk0/a.img", "file"),
        ("vdb", "/dev/zvol/t/b", "block"),
    ]
    assert "/tank/web" not in make_clone_xml(text, identity()).xml


def test_a_disk_that_is_not_in_the_xml_is_refused():
    with pytest.raises(RefusedError, match="no disk vdz"):
        make_clone_xml(domain(), identity(disks={**DISKS, "vdz": CloneDisk("/x", "file")}))


def test_a_writable_disk_that_is_not_in_the_snapshot_cannot_be_shared():
    more = [*SPECS, DiskSpec("vdc", "/elsewhere/c.img")]
    with pytest.raises(RefusedError, match="vdc is not in the snapshot"):
        make_clone_xml(domain(specs=more), identity())
    cold = make_clone_xml(domain(specs=more), identity(resumed=False))
    assert [disk.target for disk in disks(parse(cold.xml))] == ["vda", "vdb"]
    assert cold.missing == ("the disk vdc, which is not in the snapshot",)


def test_media_and_read_only_disks_stay():
    more = [
        *SPECS,
        DiskSpec("sda", "/iso/x.iso", device="cdrom", readonly=True),
        DiskSpec("vdc", "/ro.img", readonly=True),
    ]
    for resumed in (True, False):
        root = rewritten(specs=more, resumed=resumed)
        assert [disk.source for disk in disks(root)][2:] == ["/iso/x.iso", "/ro.img"]
        assert root.find("devices/disk[@device='cdrom']/source").get("startupPolicy") == "optional"


@pytest.mark.parametrize(
    "text",
    [
        "<hostdev mode='subsystem' type='pci'/>",
        "<filesystem type='mount'><source dir='/srv'/></filesystem>",
        "<lease><key>x</key></lease>",
        "<shmem name='x'/>",
    ],
)
def test_backends_for_one_guest_are_removed_or_refused(text):
    with pytest.raises(RefusedError, match="of the host"):
        make_clone_xml(domain(device(text)), identity())
    cold = make_clone_xml(domain(device(text)), identity(resumed=False))
    tag = re.match(r"<(\w+)", text)[1]
    assert parse(cold.xml).find(f"devices/{tag}") is None
    assert cold.missing == (f"a <{tag}> of the host",)


@pytest.mark.parametrize("resumed", [True, False])
def test_memory_in_a_file_of_the_host_is_refused(resumed):
    text = "<memory model='nvdimm'><source><path>/nv</path></source></memory>"
    with pytest.raises(RefusedError, match="memory in a file"):
        make_clone_xml(domain(device(text)), identity(resumed=resumed))


@pytest.mark.parametrize(
    "text",
    [
        "<nvram template='/t'>/var/lib/x_VARS.fd</nvram>",
        "<nvram type='file'><source file='/var/lib/x_VARS.fd'/></nvram>",
    ],
)
def test_uefi_variables_are_its_own(text):
    assert nvram(rewritten(("os", text))) == "/clones/1/nvram.fd"


def tpm(backend, model="tpm-tis"):
    return device(f"<tpm model='{model}'>{backend}</tpm>")


def emulator(source="", more=""):
    return f"<backend type='emulator' version='2.0'{more}>{source}</backend>"


def test_a_variable_store_of_its_own():
    root = rewritten(("os", "<varstore template='/t.json' path='/var/lib/x.json'/>"))
    assert nvram(root) == "/clones/1/nvram.fd"
    assert root.find("os/varstore").get("template") == "/t.json"


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("<source type='dir' path='/srv/tpm'/>", TpmState(f"{SWTPM}/{NEW}/tpm2")),
        ("<source type='file' path='/srv/s'/>", TpmState(f"{SWTPM}/{NEW}/tpm2/state", True)),
        ("", TpmState(f"{SWTPM}/{NEW}/tpm2")),
    ],
)
def test_tpm_state_is_where_libvirt_lets_the_clone_have_its_own(source, place):
    known = "<active_pcr_banks><sha256/></active_pcr_banks><profile name='default-v1'/>"
    root = rewritten(tpm(emulator(source + known, " persistent_state='yes' debug='2'")))
    assert tpm_state(root) == place
    assert "/srv" not in ElementTree.tostring(root, encoding="unicode")


@pytest.mark.parametrize(
    ("parent", "text", "reason"),
    [
        (*tpm("<backend type='external'><source type='unix' path='/run/s'/></backend>"), "extern"),
        (*tpm("<backend type='passthrough'><device path='/dev/tpm0'/></backend>"), "passthrough"),
        (*tpm(emulator("<source type='block' path='/dev/x'/>")), "type='block'"),
        (*tpm(emulator("<source type='file'/>")), "type='file'"),
        ("os", "<nvram type='block'><source dev='/dev/zvol/x'/></nvram>", "type='block'"),
    ],
)
@pytest.mark.parametrize("resumed", [True, False])
def test_firmware_that_may_be_the_originals_is_refused(parent, text, reason, resumed):
    with pytest.raises(SharedError, match=reason) as caught:
        make_clone_xml(domain((parent, text)), identity(resumed=resumed))
    assert "snapshot it again" in caught.value.step


@pytest.mark.parametrize(
    ("parent", "text", "reason"),
    [
        (*tpm(emulator("<source type='file' path='/s' lock='no'/>")), "lock='no' in <source>"),
        (*tpm(emulator("", " state='/srv/s'")), "state='/srv/s' in <backend>"),
        (*tpm(emulator("<log file='/srv/s'/>")), "<log>"),
        ("os", "<varstore path='/x' format='/y'/>", "format='/y' in <varstore>"),
    ],
)
def test_unknown_firmware_elements_are_not_taken_over(parent, text, reason):
    with pytest.raises(SharedError, match=reason):
        make_clone_xml(domain((parent, text)), identity())


def test_a_guest_with_two_tpms_is_refused():
    with pytest.raises(SharedError, match="2 TPMs"):
        make_clone_xml(domain(tpm(emulator()), tpm(emulator(), "spapr-tpm-proxy")), identity())


def test_files_of_character_devices_are_its_own_and_stay_shared_among_them():
    serial = "<serial type='file'><source path='/log/a.log'/><target port='0'/></serial>"
    other = "<serial type='file'><source path='/other/a.log'/><target port='1'/></serial>"
    console = "<console type='file'><source path='/log/a.log'/><target type='serial'/></console>"
    root = rewritten(device(serial), device(other), device(console))
    paths = [s.get("path") for s in root.findall("devices/serial/source")]
    assert paths == ["/clones/1/log-a.log", "/clones/1/log-1.a.log"]
    assert root.find("devices/console/source").get("path") == paths[0]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("<serial type='pty' tty='/dev/pts/1'><source path='/dev/pts/1'/></serial>", "pty"),
        ("<serial type='unix'><source mode='bind' path='/run/x'/></serial>", "null"),
        (
            "<serial type='tcp'><source host='::' service='1'/><protocol type='raw'/></serial>",
            "null",
        ),
        ("<serial type='dev'><source path='/dev/ttyS0'/></serial>", "null"),
        ("<channel type='unix'><source mode='bind' path='/run/x'/></channel>", "unix"),
        ("<channel type='spicevmc'/>", "spicevmc"),
        ("<parallel type='pipe'><source path='/fifo'/></parallel>", "null"),
    ],
)
def test_character_devices_share_nothing_of_the_host(text, kind):
    tag = re.match(r"<(\w+)", text)[1]
    element = rewritten(device(text)).find(f"devices/{tag}")
    assert element.get("type") == kind
    assert [child.tag for child in element] == []
    assert element.get("tty") is None


CARD = (
    "<interface type='bridge'><mac address='52:54:00:00:00:01'/><source bridge='br0'/>"
    "<target dev='vnet0'/><model type='virtio'/><link state='up'/><filterref filter='x'/>"
    "<address type='pci' slot='3'/></interface>"
)


@pytest.mark.parametrize(("network", "link"), [("none", "down"), ("isolated", "up")])
def test_a_card_is_connected_to_nothing(network, link):
    card = rewritten(device(CARD), network=network).find("devices/interface")
    assert card.get("type") == "ethernet"
    assert [child.tag for child in card] == ["mac", "model", "address", "link"]
    assert card.find("link").get("state") == link


def test_a_card_on_a_network():
    card = rewritten(device(CARD), network="lan", resumed=False).find("devices/interface")
    assert (card.get("type"), card.find("source").attrib) == ("network", {"network": "lan"})
    assert "br0" not in ElementTree.tostring(card, encoding="unicode")


def test_a_resumed_clone_keeps_its_addresses_and_a_cold_one_gets_others():
    def address(**changes):
        return rewritten(device(CARD), **changes).find("devices/interface/mac").get("address")

    assert address() == "52:54:00:00:00:01"
    cold = {address(resumed=False) for _ in range(5)}
    assert "52:54:00:00:00:01" not in cold
    assert len(cold) > 1
    assert all(re.fullmatch(r"52:54:00(:[0-9a-f]{2}){3}", found) for found in cold)


def test_ports_of_screens_are_chosen_again():
    text = "<graphics type='vnc' port='5900' autoport='no' websocket='5700'/>"
    assert rewritten(device(text)).find("devices/graphics").attrib == {
        "type": "vnc",
        "autoport": "yes",
    }


def test_labels_that_libvirt_chose_are_chosen_again():
    root = rewritten((".", "<seclabel type='dynamic' model='dac'><label>+0:+0</label></seclabel>"))
    assert root.find("seclabel") is None


def test_a_throw_away_clone_takes_no_reserved_resources():
    more = [
        (".", "<cputune><vcpupin vcpu='0' cpuset='3'/></cputune>"),
        (".", "<numatune><memory mode='strict' nodeset='0'/></numatune>"),
        (".", "<memoryBacking><hugepages/><locked/><nosharepages/></memoryBacking>"),
        (".", "<vcpu cpuset='3'>1</vcpu>"),
    ]
    kept, thrown = rewritten(*more), rewritten(*more, throw_away=True)
    for path in ("cputune", "numatune", "memoryBacking/hugepages", "memoryBacking/locked"):
        assert kept.find(path) is not None
        assert thrown.find(path) is None
    assert thrown.find("vcpu").attrib == {}
    assert thrown.find("memoryBacking/nosharepages") is not None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<memory unit='KiB'>16384</memory>", 16 << 20),
        ("<memory unit='GiB'>2</memory>", 2 << 30),
        ("<memory>1024</memory>", 1 << 20),
        ("<maxMemory unit='KiB'>4096</maxMemory><memory unit='KiB'>1024</memory>", 4 << 20),
        ("<memory unit='TiB'>1</memory>", 1 << 40),
        ("<memory unit='t'>1</memory>", 1 << 40),
        ("<memory unit='GB'>1</memory>", 10**9),
        ("<memory unit='bytes'>4096</memory>", 4096),
        (
            (
                "<memory>1024</memory><cpu><numa><cell memory='1' unit='GiB'/>"
                "<cell memory='1' unit='GiB'/></numa></cpu>"
            ),
            2 << 30,
        ),
        ("", 0),
    ],
)
def test_the_memory_of_a_domain_is_its_maximum(text, wanted):
    assert memory_bytes(parse(f"<domain>{text}</domain>")) == wanted


@pytest.mark.parametrize(
    "text", ["<memory unit='yards'>1</memory>", "<memory>many</memory>", "<memory>-1</memory>"]
)
def test_an_amount_of_memory_that_is_none_is_refused(text):
    with pytest.raises(RefusedError, match="amount of memory"):
        memory_bytes(parse(f"<domain>{text}</domain>"))


# -- arguments for QEMU past libvirt --------------------------------------------------------------

_QEMU = "http://libvirt.org/schemas/domain/qemu/1.0"


def passed_on(*values):
    arguments = "".join(f"<q:arg value='{value}'/>" for value in values)
    return ".", f"<q:commandline xmlns:q='{_QEMU}'>{arguments}</q:commandline>"


@pytest.mark.parametrize(
    "values",
    [
        ("-drive", "file=/tank/hidden.img,if=virtio"),
        ("-netdev", "user,id=n0,hostfwd=tcp::2222-:22"),
        ("-netdev", "user,id=snaporch0,restrict=on,hostfwd=tcp::2222-:22"),
        ("-nic", "user"),
        ("-hda", "x.img"),
        ("-device", "virtio-blk-pci,drive=hidden"),
        ("-device", "vfio-pci,host=01:00.0"),
        ("-set", "drive.d0.file=/tank/x"),
        ("-machine", "pc,kernel=/boot/vmlinuz"),
        ("/tank/image.img",),
        ("-cpu", "host", "/tank/image.img"),
    ],
)
def test_arguments_that_name_something_of_the_host_are_refused(values):
    with pytest.raises(SharedError, match="on to QEMU"):
        rewritten(passed_on(*values))


def test_arguments_that_name_nothing_of_the_host_are_kept():
    root = rewritten(passed_on("-cpu", "host,-svm", "-device", "usb-kbd", "-set", "device.a.b=1"))
    assert len(root.findall(f"{{{_QEMU}}}commandline/{{{_QEMU}}}arg")) == 6


USER = "<interface type='user'><mac address='52:54:00:00:00:02'/><model type='virtio'/></interface>"
BY_PASST = USER.replace("<model", "<backend type='passt'/><model")


def arguments(root):
    return [arg.get("value") for arg in root.iter(f"{{{_QEMU}}}arg")]


@pytest.mark.parametrize("network", ["none", "isolated", "lan"])
def test_the_state_of_a_user_network_is_in_an_unusable_path(network):
    root = rewritten(device(USER), device(CARD), device(BY_PASST), device(USER), network=network)
    assert arguments(root) == [
        "-netdev", "user,id=snaporch0,restrict=on", "-netdev", "user,id=snaporch1,restrict=on",
    ]  # fmt: skip
    kinds = {card.get("type") for card in root.findall("devices/interface")}
    assert kinds == {"network" if network == "lan" else "ethernet"}


def test_a_user_network_without_state_needs_no_path():
    assert arguments(rewritten(device(USER), resumed=False)) == []
    assert arguments(rewritten(device(CARD), device(BY_PASST))) == []


def test_a_clone_of_a_clone_has_these_arguments_again():
    text = make_clone_xml(domain(device(USER), passed_on("-cpu", "host")), identity()).xml
    again = make_clone_xml(text, identity())
    assert arguments(parse(again.xml)) == [
        "-cpu", "host", "-netdev", "user,id=snaporch2,restrict=on",
    ]  # fmt: skip


def test_a_disk_is_read_as_the_original_is():
    """By its secret, from its slice; only the paths are the clone's."""
    how = "<encryption format='luks'><secret type='passphrase' uuid='s'/></encryption>"
    part = "<slices><slice type='storage' offset='4096' size='8192'/></slices>"
    text = (
        f"<disk type='file'><driver type='qcow2'/><source file='/tank/c' index='1'>{how}{part}"
        "<dataStore type='file'><source file='/tank/c.data'/></dataStore></source>"
        "<backingStore type='file'><format type='raw'/><source file='/tank/base'>"
        f"{how}</source><backingStore/></backingStore><target dev='vdc'/></disk>"
    )
    place = CloneDisk(
        "/clones/1/c",
        "file",
        "qcow2",
        below=CloneDisk("/clones/1/base", "file"),
        data=CloneDisk("/clones/1/c.data", "file"),
    )
    root = rewritten(device(text), disks=DISKS | {"vdc": place})
    top = disk_element(root, "vdc")
    below = top.find("backingStore")
    assert top.find("source/encryption/secret").get("uuid") == "s"
    assert top.find("source/slices/slice").get("offset") == "4096"
    assert top.find("source").attrib == {"file": "/clones/1/c"}
    assert top.find("source/dataStore/source").get("file") == "/clones/1/c.data"
    assert below.find("source").get("file") == "/clones/1/base"
    assert below.find("source/encryption/secret").get("uuid") == "s"
    assert "/tank/c" not in ElementTree.tostring(root, encoding="unicode")


def test_variables_of_the_emulator_are_not_taken_over():
    text = f"<q:commandline xmlns:q='{_QEMU}'><q:env name='TMPDIR' value='/x'/></q:commandline>"
    with pytest.raises(SharedError, match="env"):
        rewritten((".", text))


@pytest.mark.parametrize(
    "values",
    [
        ("-device", "usb-host,hostbus=1,hostaddr=2"),
        ("-device", "vhost-scsi-pci,wwpn=naa.5001405"),
        ("-device", "unheard-of"),
        ("-device", '{"driver":"usb-kbd"}'),
        ("-set", "chardev.charserial0.port=4444"),
        ("-set", "device.vsock0.guest-cid=4"),
        ("-global", "vhost-vsock-pci.guest-cid=4"),
    ],
)
def test_devices_and_settings_that_are_not_known_are_refused(values):
    with pytest.raises(SharedError, match="on to QEMU"):
        rewritten(passed_on(*values))


@pytest.mark.parametrize(("name", "refused"), [("drive", True), ("rotation_rate", False)])
def test_an_override_may_not_name_something_of_the_host(name, refused):
    text = (
        f"<q:override xmlns:q='{_QEMU}'><q:device alias='a'><q:frontend>"
        f"<q:property name='{name}' type='string' value='x'/>"
        "</q:frontend></q:device></q:override>"
    )
    if refused:
        with pytest.raises(SharedError, match="drive=x"):
            rewritten((".", text))
    else:
        assert rewritten((".", text)).find(f"{{{_QEMU}}}override") is not None


# -- backends of devices --------------------------------------------------------------------------


@pytest.mark.parametrize("resumed", [True, False])
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<audio id='3' type='file' path='/srv/x.wav'/>", "<audio id='3' type='none'/>"),
        (
            "<audio id='1' type='alsa'><input dev='/dev/dsp'/></audio>",
            "<audio id='1' type='none'/>",
        ),
        ("<audio id='1' type='spice'/>", "<audio id='1' type='spice'/>"),
        (
            (
                "<rng model='virtio'><backend model='egd' type='tcp'><source host='1.2.3.4'/>"
                "</backend></rng>"
            ),
            "<rng model='virtio'><backend model='builtin'/></rng>",
        ),
        (
            "<rng model='virtio'><backend model='random'>/dev/hwrng</backend></rng>",
            "<rng model='virtio'><backend model='builtin'/></rng>",
        ),
        (
            "<rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>",
            "<rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>",
        ),
        (
            (
                "<redirdev bus='usb' type='tcp'><source mode='connect' host='x' service='1'/>"
                "</redirdev>"
            ),
            "<redirdev bus='usb' type='null'/>",
        ),
        (
            (
                "<smartcard mode='passthrough' type='tcp'><source host='::' service='1'/>"
                "<protocol type='raw'/></smartcard>"
            ),
            "<smartcard mode='passthrough' type='null'/>",
        ),
        (
            "<channel type='spiceport'><source channel='org.a'/></channel>",
            "<channel type='spiceport'><source channel='org.a'/></channel>",
        ),
        (
            (
                "<serial type='file'><source path='/x/a.log' append='on'><seclabel model='dac'/>"
                "</source></serial>"
            ),
            "<serial type='file'><source append='on' path='/clones/1/log-a.log'/></serial>",
        ),
        (
            (
                "<graphics type='spice' tlsPort='1'><listen type='address' address='10.0.0.1'/>"
                "<gl enable='yes' rendernode='/dev/dri/renderD128'/></graphics>"
            ),
            "<graphics type='spice' autoport='yes'><gl enable='yes'/></graphics>",
        ),
        (
            (
                "<graphics type='sdl' display=':0' xauth='/root/.Xauthority'>"
                "<gl enable='yes'/></graphics>"
            ),
            "<graphics type='egl-headless'/>",
        ),
        (
            "<graphics type='dbus' address='unix:path=/run/x'/>",
            "<graphics type='dbus'/>",
        ),
    ],
)
def test_backends_of_devices_are_replaced(text, wanted, resumed):
    tag = re.match(r"<(\w+)", text)[1]
    element = rewritten(device(text), resumed=resumed).find(f"devices/{tag}")
    found = ElementTree.tostring(element, encoding="unicode")
    assert found == ElementTree.tostring(ElementTree.fromstring(wanted), encoding="unicode")


@pytest.mark.parametrize(
    "text",
    [
        "<graphics type='sdl' display=':0' xauth='/root/.Xauthority'/>",
        "<graphics type='rdp' port='3389' username='x'/>",
        "<input type='evdev'><source dev='/dev/input/event3' grab='all'/></input>",
    ],
)
def test_settings_the_guest_does_not_see_are_removed(text):
    tag = re.match(r"<(\w+)", text)[1]
    assert rewritten(device(text)).find(f"devices/{tag}") is None


@pytest.mark.parametrize(
    "text",
    [
        "<input type='passthrough' bus='virtio'><source evdev='/dev/input/event3'/></input>",
        "<smartcard mode='host'/>",
        "<interface type='vdpa'><source dev='/dev/vhost-vdpa-0'/></interface>",
        "<interface type='vhostuser'><source type='unix' path='/x' mode='server'/></interface>",
        "<video><driver name='vhostuser'/><model type='virtio'/></video>",
        "<crypto model='virtio' type='qemu'><backend model='lkcf'/></crypto>",
        "<pstore backend='acpi-erst'><path>/srv/erst</path></pstore>",
        "<channel type='pty'><target type='guestfwd' address='10.0.2.1' port='1'/></channel>",
        "<thing-of-next-year/>",
    ],
)
def test_a_device_that_is_not_in_the_list_is_refused_or_left_out(text):
    tag = re.match(r"<([\w-]+)", text)[1]
    with pytest.raises(SharedError, match=f"a <{tag}> of the host"):
        make_clone_xml(domain(device(text)), identity())
    cold = make_clone_xml(domain(device(text)), identity(resumed=False))
    assert parse(cold.xml).find(f"devices/{tag}") is None
    assert cold.missing == (f"a <{tag}> of the host",)


@pytest.mark.parametrize("resumed", [True, False])
@pytest.mark.parametrize(
    ("parent", "text", "match"),
    [
        (".", "<launchSecurity type='sev'/>", "launchSecurity"),
        (".", "<thing-of-next-year/>", "thing-of-next-year"),
        ("os", "<loader type='pflash'>/var/lib/x.fd</loader>", "may write to /var/lib/x.fd"),
        ("devices", "<memory model='sgx-epc'/>", "sgx-epc"),
        (
            "devices",
            "<tpm><backend type='passthrough'><device path='/dev/tpm0'/></backend></tpm>",
            "passthrough",
        ),
    ],
)
def test_foreign_devices_that_a_guest_needs_are_refused(parent, text, match, resumed):
    with pytest.raises(SharedError, match=match):
        make_clone_xml(domain((parent, text)), identity(resumed=resumed))


@pytest.mark.parametrize("resumed", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        "<disk type='file' device='floppy'><source file='/srv/a.img'/><target dev='fda'/></disk>",
        (
            "<disk type='block' device='cdrom'><source dev='/dev/sr0'/><target dev='fda'/>"
            "<readonly/></disk>"
        ),
        (
            "<disk type='network' device='cdrom'><source protocol='https' name='x'/>"
            "<target dev='fda'/><readonly/></disk>"
        ),
    ],
)
def test_a_drive_loses_a_medium_that_is_not_a_file_that_is_only_read(text, resumed):
    made = make_clone_xml(domain(device(text)), identity(resumed=resumed))
    element = parse(made.xml).findall("devices/disk")[-1]
    assert element.get("type") == "file"
    assert element.find("source") is None
    assert made.missing == ("the medium in fda",)


def test_groups_labels_and_metadata_of_the_host_are_removed():
    libosinfo = "http://libosinfo.org/xmlns/libvirt/domain/1.0"
    root = rewritten(
        (".", "<resource><partition>/machine/production</partition></resource>"),
        (".", "<seclabel type='static' model='selinux'><label>s0:c1,c2</label></seclabel>"),
        (".", "<blkiotune><weight>5</weight><device><path>/dev/sda</path></device></blkiotune>"),
        (
            ".",
            (
                "<metadata><a:hook xmlns:a='urn:a'>mount /srv</a:hook>"
                f"<o:libosinfo xmlns:o='{libosinfo}'/></metadata>"
            ),
        ),
    )
    assert [root.find(tag) for tag in ("resource", "seclabel", "blkiotune/device")] == [None] * 3
    assert root.findtext("blkiotune/weight") == "5"
    assert len(root.find("metadata")) == 2
    assert "urn:a" not in ElementTree.tostring(root, encoding="unicode")


def test_an_address_that_the_guest_gave_itself_is_not_taken_over():
    text = (
        "<interface type='bridge'><mac address='52:54:00:00:00:01' "
        "currentAddress='52:54:00:00:00:02'/><source bridge='br0'/></interface>"
    )
    for resumed in (True, False):
        mac = rewritten(device(text), resumed=resumed).find("devices/interface/mac")
        assert list(mac.attrib) == ["address"]
